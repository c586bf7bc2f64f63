"""A small checkpoint, written once a module, and a copy of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "micro"
    write_checkpoint(micro_config(), folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "micro"))
