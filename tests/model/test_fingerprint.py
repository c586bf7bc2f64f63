import json
import shutil

import pytest

from dsuf.errors import CheckpointError
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.fingerprint import fingerprint
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(micro_config(), tmp_path / "a")
    return tmp_path / "a"


def of(folder):
    with Checkpoint.open(folder) as checkpoint:
        return fingerprint(checkpoint)


def copied(folder, name):
    return shutil.copytree(folder, folder.parent / name)


def test_a_copy_is_the_same_checkpoint(folder):
    assert of(folder) == of(copied(folder, "b")) and len(of(folder)) == 32


def test_one_tensor_redrawn_makes_another_checkpoint(folder):
    other = copied(folder, "b")
    with Checkpoint.open(other) as checkpoint:
        shard, offset = checkpoint._places["head.weight"]
        path = other / shard.name
    data = bytearray(path.read_bytes())
    data[offset + 1] ^= 1
    path.write_bytes(data)
    assert of(other) != of(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "engram_token_map.json", "checkpoint.sha256"])
def test_every_file_that_changes_caches_counts(folder, name):
    other = copied(folder, "b")
    with Checkpoint.open(folder) as checkpoint:
        classes = list(range(checkpoint.spec.engram_compressed_vocab_size))[::-1]
        size = checkpoint.spec.vocab_size
    content = {"engram_token_map.json": json.dumps((classes * size)[:size]), "checkpoint.sha256": "ab" * 32}
    (other / name).write_text(content.get(name, "{}"))
    assert of(other) != of(folder)


def test_a_full_digest_stands_for_the_tensors(folder):
    (folder / "checkpoint.sha256").write_text("cd" * 32 + "  all shards\n")
    first = of(folder)
    (folder / "checkpoint.sha256").write_text("ce" * 32)
    assert of(folder) != first
    (folder / "checkpoint.sha256").write_text("nonsense")
    with pytest.raises(CheckpointError, match="64 hexadecimal"):
        of(folder)


def test_the_seed_of_a_sparse_checkpoint_stands_for_its_tensors(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(micro_config(), tmp_path / name, sparse=True, seed=seed)
    assert of(tmp_path / "a") == of(tmp_path / "b") != of(tmp_path / "c")
