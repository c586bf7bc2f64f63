"""Synthetic checkpoints: the given bytes for seed 0, seeds, chunks, sparse files, and all-or-nothing writing."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.errors import ConfigError, DsufError, EnvironmentProblem, UsageError
from dsuf.model import synthetic
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import builtin_configs, load_config, uniform, write_checkpoint
from tests.model.micro import micro_config

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/tiny.json").read_text())["weights"]
FILE = "model-00001-of-00001.safetensors"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    write_checkpoint(load_config("tiny"), folder)
    return folder


def test_tiny_tensors_have_the_golden_digests(tiny):
    with Checkpoint.open(tiny) as checkpoint:
        assert len(checkpoint.names()) == GOLDEN["tensors"]
        found = {name: sha256(checkpoint.raw(name).tobytes())[:16] for name in GOLDEN["sha256_by_name"]}
        assert found == GOLDEN["sha256_by_name"]
        everything = hashlib.sha256()
        for name in sorted(checkpoint.names()):
            everything.update(checkpoint.raw(name).tobytes())
        assert everything.hexdigest() == GOLDEN["sha256_all"]


def test_tiny_files_are_those_of_the_reference_script(tiny):
    digests = {name: sha256(content) for name, content in contents(tiny).items()}
    assert digests == {  # of the folder that the reference's make_tiny.py writes
        "config.json": "264abd8e71a265c097d4d4ba460a29fe5617e5d61a9e2773323bb488fd4b638e",
        "engram_token_map.json": "6e1d0f85d25b0a7f5fc6985d969e29961709710643a62233186df17f6db4bd88",
        "model.safetensors.index.json": "be68a0453e3d39e291b135c5a7a2fcdde3cd1ace2a057f660bfc05780c6ddac3",
        FILE: "a9874a53c9083634a34684fd39d596a59910ffb82ecf8f3eb0b8a11df6bd6302",
    }


def splitmix64(state: int) -> int:
    """The published generator's output for one state, in Python integers."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5])
def test_values_follow_splitmix64_of_name_seed_and_position(seed):
    start = zlib.crc32(b"layers.0.attn.attn_sink") + seed * 2**32
    expected = [(splitmix64(start + (k + 1) * 0x9E3779B97F4A7C15) >> 40) / 2**23 - 1 for k in range(1000, 1010)]
    assert uniform("layers.0.attn.attn_sink", 1000, 10, seed).tolist() == expected


def test_seed_reaches_the_tensors(tmp_path):
    write_checkpoint(micro_config(), tmp_path / "a", seed=3)
    with Checkpoint.open(tmp_path / "a") as checkpoint:
        sink = checkpoint.raw("layers.0.attn.attn_sink")
        expected = np.float32(math.sqrt(3)) * uniform("layers.0.attn.attn_sink", 0, 2, 3)
        np.testing.assert_array_equal(sink, expected)


def test_chunks_do_not_change_a_byte(tmp_path, monkeypatch):
    write_checkpoint(micro_config(), tmp_path / "whole")
    monkeypatch.setattr(synthetic, "CHUNK_VALUES", 1024)
    write_checkpoint(micro_config(), tmp_path / "chunks")
    assert contents(tmp_path / "whole") == contents(tmp_path / "chunks")


def test_shards_hold_the_same_tensors_as_one_file(tmp_path, monkeypatch):
    config = load_config("v41-flash") | {
        k: v for k, v in micro_config().items() if k in ("text_config", "image_token_id")
    }
    config["vision_config"] |= {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32}
    write_checkpoint(config, tmp_path / "one")
    monkeypatch.setattr(synthetic, "SHARD_ABOVE_BYTES", 0)
    write_checkpoint(config, tmp_path / "many")
    with Checkpoint.open(tmp_path / "one") as one, Checkpoint.open(tmp_path / "many") as many:
        assert all((one.raw(name) == many.raw(name)).all() for name in one.names())
    # vision, embed, three layers, head and norm, one drafter stage, Engram of layer 0
    assert len(list((tmp_path / "many").glob("model-*-of-00008.safetensors"))) == 8


def test_class_map_and_further_files(tmp_path):
    classes = np.arange(64, dtype=np.int32) % 7
    write_checkpoint(micro_config(), tmp_path / "a", class_map=classes, extra_files={"generation_config.json": b"{}"})
    with Checkpoint.open(tmp_path / "a") as checkpoint:
        np.testing.assert_array_equal(checkpoint.class_map(), classes)
    assert (tmp_path / "a/generation_config.json").read_bytes() == b"{}"


def test_progress_reaches_the_total(tmp_path):
    seen = []
    write_checkpoint(micro_config(), tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (225_431, 225_431)


# --- the released size, over holes -----------------------------------------------------------------------------------

OPEN_REAL = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from dsuf.model.checkpoint import Checkpoint
start = time.process_time()  # other work on the machine must not fail the test
checkpoint = Checkpoint.open(Path(sys.argv[1]))
for layer in (1, 14):
    for part in ("weight", "scale"):
        table = checkpoint.raw(f"layers.{layer}.engram.embed.{part}")
        assert table[0].sum() == table[-1].sum() == 0
# ru_maxrss would start from the size of the process that forked this one
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time() - start, int(peak_kb) / 1e3)
print(len(checkpoint.names()), checkpoint.total_bytes)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "real"
    write_checkpoint(load_config("v41-flash"), folder, sparse=True)
    return folder


def test_the_released_size_opens_in_seconds_and_little_memory(real):
    done = subprocess.run([sys.executable, "-c", OPEN_REAL, str(real)], capture_output=True, text=True, check=True)
    seconds, megabytes, tensors, total = (float(word) for word in done.stdout.split())
    assert (tensors, total) == (96_085, 510_286_023_000)
    assert seconds < 5 and megabytes < 500


def test_the_released_size_takes_little_disk_and_the_released_shards(real):
    assert sum(path.stat().st_blocks * 512 for path in real.iterdir()) < 50e6
    weight_map = json.loads((real / "model.safetensors.index.json").read_text())["weight_map"]
    shard = {name: int(file[6:11]) for name, file in weight_map.items()}
    assert max(shard.values()) == 48
    assert shard["layers.0.attn.wkv.weight"] == 3 and shard["layers.39.ffn.experts.383.w2.scale"] == 42
    assert shard["head.weight"] == shard["norm.weight"] == 43
    assert shard["mtp.0.main_proj.weight"] == 44 and shard["mtp.2.norm.weight"] == 46
    assert shard["layers.1.engram.wkv.scale"] == 47 and shard["layers.14.engram.embed.weight"] == 48
    assert shard["layers.1.attn.wkv.weight"] == 4


# --- all or nothing --------------------------------------------------------------------------------------------------


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(micro_config(), tmp_path / "a", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_target_is_filled_and_one_in_use_refused(tmp_path):
    target = tmp_path / "a"
    target.mkdir()
    write_checkpoint(micro_config(), target)
    before = contents(target)
    with pytest.raises(UsageError, match="a folder that is not empty"):
        write_checkpoint(micro_config(), target, seed=1)
    with pytest.raises(UsageError, match="is a file"):
        write_checkpoint(micro_config(), target / "config.json")
    assert contents(target) == before and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_disk_that_is_too_small_is_told_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    with pytest.raises(EnvironmentProblem, match=r"has 1\.0 GB free, the checkpoint needs 510\.3 GB"):
        write_checkpoint(load_config("v41-flash"), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_path_through_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        write_checkpoint(micro_config(), tmp_path / "file" / "a")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range(tmp_path, seed):
    with pytest.raises(ConfigError, match="expected 0 to"):
        write_checkpoint(micro_config(), tmp_path / "a", seed=seed)


# --- configs ---------------------------------------------------------------------------------------------------------


def test_configs_by_name_and_path(tmp_path):
    assert builtin_configs() == ["h200x1", "h200x2", "noise", "tiny", "v41-flash"]
    (tmp_path / "config.json").write_text(json.dumps(micro_config()))
    assert load_config(str(tmp_path)) == load_config(str(tmp_path / "config.json")) == micro_config()


def test_configs_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match="one of the built-in names h200x1"):
        load_config("absent")
    with pytest.raises(DsufError, match="text_config"):
        write_checkpoint([], tmp_path / "a")
