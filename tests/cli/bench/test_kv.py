import time
from dataclasses import replace

import msgspec
import pytest
from typer.testing import CliRunner

from dsuf.cli import kv as flags
from dsuf.cli.app import app
from dsuf.cli.bench.saving import look_ups, restored_and_computed
from dsuf.cli.session import engine_options, prepare
from dsuf.config import BenchOptions
from dsuf.engine.cpu import CpuBackend
from dsuf.errors import ConfigError
from dsuf.kv import saves
from tests.support.patience import be_patient


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    be_patient(monkeypatch)


def test_a_saved_prefix_is_faster_than_computing_it(tmp_path):
    out = tmp_path / "kv.json"
    arguments = ["bench", "kv", "--tokens", "512", "--size", "8m", "--repeat", "1", "--warmup", "1"]
    ran = CliRunner().invoke(app, [*arguments, "--output", str(out)])
    assert ran.exit_code == 0, ran.output
    result = msgspec.json.decode(out.read_bytes())
    metrics = result["metrics"]
    assert result["kind"] == "kv" and metrics["cached_512"] == 510
    assert metrics["hit_512_s"] < metrics["miss_512_s"]
    assert metrics["hit_over_miss_512"] == pytest.approx(metrics["hit_512_s"] / metrics["miss_512_s"])
    assert {"tcp_over_raw_socket", "shm_over_memcpy", "find_hit_us"} <= metrics.keys()
    assert "first token of 512 tokens" in ran.output


def test_no_prompt_finds_a_part_of_another_though_points_inside_them_are_saved():
    engine = prepare("toy", engine_options("0", "qdq64", "truncated", "on", "auto", None))
    bench = BenchOptions(repeat=2, warmup=0)
    samples, *_ = restored_and_computed("toy", replace(engine, resume_every=128), (300, 400), bench)
    assert [sample["cached_300"] for sample in samples] == [298, 298]


def test_a_prefix_is_looked_for_once_its_copies_have_ended(monkeypatch):
    ended, asked = CpuBackend.copied, iter(range(1 << 20))
    monkeypatch.setattr(CpuBackend, "copied", lambda self: ended(self) if next(asked) % 8 == 7 else 0)
    engine = prepare("toy", engine_options("0", "qdq64", "truncated", "on", "auto", None))
    samples, *_ = restored_and_computed("toy", engine, (300,), BenchOptions(repeat=2, warmup=0))
    assert [sample["cached_300"] for sample in samples] == [298, 298]


def test_a_prefix_is_looked_for_once_it_is_digested(monkeypatch):
    digests = saves._digests
    monkeypatch.setattr(saves, "_digests", lambda *args: time.sleep(0.3) or digests(*args))
    engine = prepare("toy", engine_options("0", "qdq64", "truncated", "on", "auto", None))
    samples, *_ = restored_and_computed("toy", engine, (300,), BenchOptions(repeat=1, warmup=0))
    assert [sample["cached_300"] for sample in samples] == [298]


def test_look_ups_are_timed_to_their_end():
    times = look_ups()
    assert all(20 < value < 1e6 for value in times.values())


def test_sizes_and_paths_of_the_flags():
    assert [flags.parse_bytes("--x", text) for text in ("0", "500m", "64G", "2 gib", "7")] == [
        0,
        500 << 20,
        64 << 30,
        2 << 30,
        7,
    ]
    assert flags.parse_paths("auto") == ("shm", "rdma", "tcp") and flags.parse_paths("tcp, shm") == ("tcp", "shm")
    for wrong in ("", "64x", "-1", "1.5g"):
        with pytest.raises(ConfigError):
            flags.parse_bytes("--kv-host-bytes", wrong)
    for wrong in ("", "tcp,tcp", "ib"):
        with pytest.raises(ConfigError):
            flags.parse_paths(wrong)
