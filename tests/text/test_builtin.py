"""Built-in checkpoints: `noise` is made once, whole, and again when its recipe changed; other names are paths."""

from __future__ import annotations

import hashlib
import multiprocessing
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from dsuf.errors import CheckpointError, EnvironmentProblem
from dsuf.model.checkpoint import Checkpoint
from dsuf.text import builtin
from dsuf.text.builtin import resolve
from dsuf.text.tokenizer import load_tokenizer
from tests.model.micro import micro_config


@pytest.fixture
def quick(monkeypatch):
    """Make `noise` of the smallest config, without a tokenizer's classes; count how often."""
    made = []

    def write(config, folder, progress):
        made.append(folder)
        builtin.write_checkpoint(micro_config(), folder, progress=progress)

    monkeypatch.setattr(builtin, "_write_noise", write)
    return made


def test_noise_is_a_sound_checkpoint_with_the_tokenizer_of_v41(tmp_path):
    folder = resolve("noise", cache_dir=tmp_path / "new/cache")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 120e6
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.generation == {"max_new_tokens": 512}
        tokenizer = load_tokenizer(checkpoint.tokenizer_path, checkpoint.spec)
        assert tokenizer.get_vocab_size() == checkpoint.spec.vocab_size == 129_280
        assert checkpoint.class_map()[[223, 671, 128803]].tolist() == [174, 237, 98615]  # reference document 6.1
        kinds = {layer.kind for layer in checkpoint.spec.layers}
        assert kinds == {"window", "full", "reuse", "reindex"}


def test_noise_is_made_once(tmp_path, quick):
    assert resolve("noise", cache_dir=tmp_path) == resolve("noise", cache_dir=tmp_path)
    assert len(quick) == 1


def test_noise_of_another_recipe_is_another_folder(tmp_path, quick, monkeypatch):
    first = resolve("noise", cache_dir=tmp_path)
    monkeypatch.setattr(builtin, "NOISE_GENERATION", {"max_new_tokens": 7})
    assert resolve("noise", cache_dir=tmp_path) != first
    assert len(quick) == 2


def test_an_interrupt_leaves_only_the_lock(tmp_path, quick):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("noise", cache_dir=tmp_path, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["noise.lock"]


def test_what_a_killed_process_left_is_removed(tmp_path, quick):
    (tmp_path / ".noise-0123.4567.partial").mkdir()
    resolve("noise", cache_dir=tmp_path)
    assert not list(tmp_path.glob(".noise*"))


def resolve_in_child(cache_dir: Path, results) -> None:
    results.put(resolve("noise", cache_dir=cache_dir).name)


def test_two_processes_make_it_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=resolve_in_child, args=(tmp_path, results)) for _ in range(2)]
    for child in children:
        child.start()
    names = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "noise.lock"]) and len(names) == 1


def test_a_cache_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="DSUF_CACHE"):
        resolve("noise", cache_dir=tmp_path / "file" / "cache")


def test_toy_is_unpacked_once_from_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin.resources, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint 'toy'"):
        resolve("toy", cache_dir=tmp_path / "cache")
    (tmp_path / "toy").mkdir()
    with zipfile.ZipFile(tmp_path / "toy/toy.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/.toy-0123.partial").mkdir()
    folder = resolve("toy", cache_dir=tmp_path / "cache")
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, "toy.lock"])
    before = folder.stat().st_mtime_ns
    assert resolve("toy", cache_dir=tmp_path / "cache") == folder and folder.stat().st_mtime_ns == before


def test_anything_else_is_a_path(tmp_path):
    assert resolve(str(tmp_path), cache_dir=tmp_path) == tmp_path
    assert resolve("./noise", cache_dir=tmp_path) == Path("noise")


def test_the_digest_of_the_packed_toy_stands_in_its_readme():
    folder = resources.files("dsuf").joinpath("toy")
    assert (
        hashlib.sha256(folder.joinpath("toy.zip").read_bytes()).hexdigest() in folder.joinpath("README.md").read_text()
    )
