"""`dsuf synth`: what it writes, what it refuses with which exit status, and that an end leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from dsuf.cli.app import run_command
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import load_config
from dsuf.text.prompt import ChatText
from tests.model.micro import micro_config

DSUF = [sys.executable, "-c", "from dsuf.cli.app import main; main()"]


def test_writes_a_checkpoint_of_a_built_in_config(tmp_path, capsys):
    assert run_command(["synth", "tiny", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 1,797 tensors, 0.007 GB\n"
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.config == load_config("tiny")
        assert checkpoint.holes_seed is None and checkpoint.tokenizer_path is None


def test_takes_a_path_and_a_seed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(micro_config()))
    assert run_command(["synth", str(tmp_path), str(tmp_path / "a")]) == 0
    assert run_command(["synth", str(tmp_path / "config.json"), str(tmp_path / "b"), "--seed", "5"]) == 0
    with Checkpoint.open(tmp_path / "a") as a, Checkpoint.open(tmp_path / "b") as b:
        assert (a.raw("embed.weight") != b.raw("embed.weight")).any()


def test_sparse_writes_headers_over_holes(tmp_path, capsys):
    assert run_command(["synth", "h200x1", str(tmp_path / "out"), "--sparse"]) == 0
    assert "32,651 tensors, 110.548 GB of holes" in capsys.readouterr().out
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "out").iterdir()) < 30e6
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.holes_seed == 0
        ChatText.open(checkpoint.tokenizer_path, checkpoint.spec, context_limit=4096)
        assert checkpoint.class_map().max() == checkpoint.spec.engram_compressed_vocab_size - 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["absent", "OUT"], 2, "built-in names"),
        (["tiny", "OUT", "--seed", "-1"], 2, "seed is -1"),
        (["tiny", "OUT", "--seed", "x"], 2, "--seed"),
        (["tiny"], 2, "Missing argument"),
        (["tiny", "USED"], 2, "not empty"),
        (["tiny", "USED/file/x"], 3, "cannot be written"),
        (["BAD", "OUT"], 2, "text_config"),
    ],
)
def test_refusals(tmp_path, capsys, arguments, status, message):
    (tmp_path / "USED").mkdir()
    (tmp_path / "USED/file").write_text("")
    (tmp_path / "BAD").write_text("[]")
    in_place = [str(tmp_path / word) if word.split("/")[0] in ("OUT", "USED", "BAD") else word for word in arguments]
    assert run_command(["synth", *in_place]) == status
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BAD", "USED"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    config = micro_config(vocab_size=2_000_000)  # seconds of work
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "made/out"
    child = subprocess.Popen([*DSUF, "synth", str(tmp_path), str(out)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("made/.out.*.partial/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(number)
    _, error = child.communicate(timeout=20)
    assert child.returncode == 128 + number and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
