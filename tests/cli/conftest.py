"""Checkpoints that the command tests share: tiny with known weights, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsuf.model.synthetic import load_config, write_checkpoint

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tiny.json").read_text())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny checkpoint of the goldens (seed 0)."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_checkpoint(load_config("tiny"), folder)
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory):
    """The goldens' prompt as --tokens takes it."""
    path = tmp_path_factory.mktemp("prompts") / "ids.json"
    path.write_text(json.dumps(GOLDEN["prompt"]))
    return path
