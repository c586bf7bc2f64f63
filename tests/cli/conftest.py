"""Checkpoints that the command tests share: tiny with known weights, made once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.text.builtin import resolve

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


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """A cache folder that holds the built-in checkpoint `noise`."""
    folder = tmp_path_factory.mktemp("cache")
    resolve("noise", cache_dir=folder)
    return folder


@pytest.fixture(scope="session")
def brief_noise(cache_dir, tmp_path_factory):
    """`noise` whose answers end after 8 tokens, so that the published request is short."""
    folder = tmp_path_factory.mktemp("checkpoints") / "brief"
    folder.mkdir()
    for file in resolve("noise", cache_dir=cache_dir).iterdir():
        if file.name != "generation_config.json":
            os.link(file, folder / file.name)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 8}))
    return folder


@pytest.fixture
def environ(cache_dir, tmp_path, monkeypatch):
    """Environment for child processes and for this one: that cache, and a runtime folder of this test."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("DSUF_CACHE", str(cache_dir))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("DSUF_API_KEY", raising=False)
    return dict(os.environ)
