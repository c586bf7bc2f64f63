"""Synthetic checkpoints, written once a session, and one model for each numerics over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.model import ReferenceModel
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import TINY, micro_config
from tests.model.reference.configs import other_config

CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "tiny": lambda: TINY,
    "other": other_config,
    "micro": micro_config,
}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], ReferenceModel]]:
    """model_of(config, numerics)."""

    @cache
    def checkpoint(name: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp("checkpoints") / name
        write_checkpoint(CONFIGS[name](), folder)
        return Checkpoint.open(folder)

    @cache
    def load(name: str, numerics: str) -> ReferenceModel:
        return ReferenceModel.load(checkpoint(name), numerics)

    yield load
