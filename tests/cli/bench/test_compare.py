"""`dsuf bench compare`: the noise of the repeats decides what is a loss."""

from __future__ import annotations

import pytest

from dsuf.cli.app import run_command
from dsuf.cli.bench.compare import changes_between
from dsuf.cli.bench.result import new_result, write_result


def run_of(speeds, steps=(20.0,), kind="decode", **changes):
    samples = [{"decode_tokens_per_s": speed, "step_ms": step} for speed in speeds for step in steps]
    given = {"backend": "cpu", "model": {"name": "noise"}, "params": {}, "samples": samples}
    return new_result(kind, "", **(given | changes))


def verdicts(old, new):
    return {change.metric: change.verdict for change in changes_between(old, new)}


def test_a_loss_beyond_the_noise_is_worse_in_either_direction():
    old, new = run_of([100, 101, 99], [20.0]), run_of([90, 91, 89], [23.0])
    assert verdicts(old, new) == {"decode_tokens_per_s": "worse", "step_ms": "worse"}
    assert verdicts(new, old) == {"decode_tokens_per_s": "better", "step_ms": "better"}


def test_a_loss_inside_the_noise_of_the_repeats_is_the_same():
    old, new = run_of([100, 120, 80]), run_of([90, 110, 70])
    assert verdicts(old, new)["decode_tokens_per_s"] == "same"


def test_one_percent_is_never_a_loss_even_without_any_spread():
    assert verdicts(run_of([100.0]), run_of([99.1]))["decode_tokens_per_s"] == "same"
    assert verdicts(run_of([100.0]), run_of([98.0]))["decode_tokens_per_s"] == "worse"


@pytest.fixture
def files(tmp_path):
    def write(**runs):
        for name, run in runs.items():
            write_result(run, tmp_path / f"{name}.json", None)
        return [str(tmp_path / f"{name}.json") for name in runs]

    return write


def test_the_command_ends_with_1_on_a_loss_and_0_without(files, capsys):
    old, new = files(old=run_of([100, 101, 99]), new=run_of([50, 51, 49]))
    assert run_command(["bench", "compare", old, new]) == 1
    assert "worse beyond the noise: decode_tokens_per_s" in capsys.readouterr().err
    assert run_command(["bench", "compare", new, old]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "decode: 1 better, 0 worse, 1 the same"


def test_runs_of_two_kinds_are_not_compared(files, capsys):
    old, new = files(old=run_of([1.0]), new=run_of([1.0], kind="prefill"))
    assert run_command(["bench", "compare", old, new]) == 2
    assert "compare two of the same kind" in capsys.readouterr().err


def test_other_differences_are_named(files, capsys):
    old, new = files(old=run_of([1.0]), new=run_of([1.0], model={"name": "toy"}, params={"seed": 1}))
    assert run_command(["bench", "compare", old, new]) == 0
    said = capsys.readouterr().err
    assert "model.name differs: 'noise' and 'toy'" in said
    assert "params.seed differs: None and 1" in said
