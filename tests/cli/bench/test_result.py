"""The bench object: its keys, its statistics, the files for CI, thresholds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsuf.cli.bench.result import (
    bigger_is_better,
    check_thresholds,
    new_result,
    read_result,
    summarise,
    unit,
    write_result,
    write_whole,
)
from dsuf.config import BenchOptions, Threshold
from dsuf.errors import CheckFailed, ConfigError

SAMPLES = [
    {"decode_tokens_per_s": 40.0, "step_ms": 20.0, "emitted_tokens": 64},
    {"decode_tokens_per_s": 50.0, "step_ms": 18.0, "emitted_tokens": 64},
    {"decode_tokens_per_s": 42.0, "step_ms": 19.0, "emitted_tokens": 64},
]


def result(samples=SAMPLES, **changes):
    given = {"backend": "cpu", "model": {"name": "noise"}, "params": {"seed": 0}, "samples": samples}
    return new_result("decode", "a label", **(given | changes))


def test_each_quantity_has_median_min_max_and_std():
    metrics = summarise(SAMPLES)
    assert metrics["decode_tokens_per_s"] == 42.0
    assert metrics["min_decode_tokens_per_s"] == 40.0
    assert metrics["max_decode_tokens_per_s"] == 50.0
    assert metrics["std_decode_tokens_per_s"] == pytest.approx(5.2915, abs=1e-4)
    assert summarise(SAMPLES[:1])["std_step_ms"] == 0.0


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("decode_tokens_per_s", True),
        ("accept_length", True),
        ("step_ms", False),
        ("prefill_256_s", False),
        ("time_over_floor", False),
        ("prefill_256_peak_bytes", False),
        ("emitted_tokens", None),
        ("accept_histogram_0", None),
        ("std_step_ms", None),
        ("min_decode_tokens_per_s", None),
    ],
)
def test_the_unit_decides_what_is_better(name, direction):
    assert bigger_is_better(name) is direction


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokens_per_s", "tokens/s"),
        ("decode_tokens_per_s", "tokens/s"),
        ("save_gb_per_s", "GB/s"),
        ("first_token_s", "s"),
    ],
)
def test_a_metric_names_its_unit(name, expected):
    assert unit(name) == expected


def test_the_object_has_the_documented_keys_and_is_honest_about_the_machine(tmp_path):
    write_result(result(), tmp_path / "a.json", None)
    written = json.loads((tmp_path / "a.json").read_text())
    assert list(written) == [
        *("schema", "kind", "label", "date", "dsuf_version", "git_commit", "backend", "machine", "gpu", "model"),
        *("params", "ceilings", "floor", "metrics", "samples"),
    ]
    assert written["schema"] == "dsuf.bench/1"
    assert written["gpu"] is None
    assert set(written["machine"]) == {"cpu", "cores", "ram"}
    assert written["date"].endswith("+00:00")


def test_what_was_written_is_read_back(tmp_path):
    wrote = result()
    write_result(wrote, tmp_path / "a.json", None)
    assert read_result(tmp_path / "a.json") == wrote


def test_ci_files_are_split_by_direction(tmp_path):
    write_result(result(), None, tmp_path / "ci")
    bigger = json.loads((tmp_path / "ci" / "bigger.json").read_text())
    smaller = json.loads((tmp_path / "ci" / "smaller.json").read_text())
    assert [(row["name"], row["unit"], row["value"], row["range"]) for row in bigger] == [
        ("decode/decode_tokens_per_s", "tokens/s", 42.0, "40 to 50")
    ]
    assert [(row["name"], row["unit"], row["value"]) for row in smaller] == [("decode/step_ms", "ms", 19.0)]


def test_a_missed_threshold_fails_and_names_the_value():
    metrics = result().metrics
    check_thresholds(metrics, (Threshold("decode_tokens_per_s", 40, True), Threshold("step_ms", 20, False)))
    with pytest.raises(CheckFailed, match="decode_tokens_per_s is 42, below the threshold 45"):
        check_thresholds(metrics, (Threshold("decode_tokens_per_s", 45, True),))
    with pytest.raises(CheckFailed, match="step_ms is 19, above the threshold 18"):
        check_thresholds(metrics, (Threshold("step_ms", 18, False),))


def test_a_threshold_on_no_metric_is_a_usage_error():
    with pytest.raises(ConfigError, match="no metric 'speed' in this run; it has decode_tokens_per_s, step_ms"):
        check_thresholds(result().metrics, (Threshold("speed", 1, True),))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"schema": "other"}'])
def test_a_file_that_is_no_bench_object_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not a dsuf\.bench/1 object"):
        read_result(tmp_path / "a.json")


def test_an_output_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_result(result(), tmp_path / "absent" / "a.json", None)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_a_link_is_kept(tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through")
    assert os.read(reading, 100) == b"through" and pipe.is_fifo()
    os.close(reading)
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_folder_for_ci_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        write_result(result(), None, tmp_path / "file" / "ci")


def test_an_output_that_could_not_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="there is no folder"):
        BenchOptions(output=tmp_path / "absent" / "x.json")
    with pytest.raises(ConfigError, match="it is a folder"):
        BenchOptions(output=tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        BenchOptions(ci_json=tmp_path / "file")
    assert BenchOptions(output=Path("/dev/stdout"))
