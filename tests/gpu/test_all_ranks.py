"""The whole backend over two ranks in turns on one GPU, and the toy's text.

Needs a GPU, and kernels of its chip: DSUF_KERNELS (a folder of `dsuf build --out`) or the build cache.

    pytest -m gpu tests/gpu/test_all_ranks.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsuf.engine.engine import Engine
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.open import opened
from dsuf.spec import Spec
from tests.gpu.same_text import Examples, SameText, options_of
from tests.support.rank_engine import engine_in_turns
from tests.toy.test_same_tokens import FEW, answer_of, request_of, run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device(folder: Path) -> Iterator[Device]:
    with opened(options_of(folder, (0,)), Spec.load(folder / "config.json")) as devices:
        yield devices[0]


def engine_on(device: Device, folder: Path, **options: Any) -> Engine:
    chosen = asdict(options_of(folder, (0,), **options))
    return engine_in_turns(chosen.pop("ckpt"), device, 2, **chosen)


class TestInTurns(SameText):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, device: Device, folder: Path) -> Engine:
        return engine_on(device, folder)


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
@pytest.mark.parametrize("chunk", [33, 128])
def test_chunks_of_the_prompt_change_no_token(
    device: Device, folder: Path, examples: Examples, prefill: str, chunk: int
) -> None:
    engine = engine_on(device, folder, prefill=prefill, prefill_chunk=chunk)
    assert run(engine, [request_of(examples[FEW[0]])]) == {FEW[0]: answer_of(examples[FEW[0]])}
