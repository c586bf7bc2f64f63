"""`dsuf bench kernels`: cases on the interpreter (all at small widths, some at the real ones), its result object."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.cli.app import run_command
from dsuf.cli.bench import kernels as command
from dsuf.cli.bench.kernel_bench import Bench, Case, Measured, matching
from dsuf.cli.bench.kernel_cases import families
from dsuf.config import BenchOptions
from dsuf.errors import ConfigError, DeviceError
from dsuf.kernels.project import projections
from dsuf.model.synthetic import load_config
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

SPEC = Spec.from_config(load_config(command.CONFIG))
FAMILIES = families(tuple(projections(SPEC)))
SMALL = Spec.from_config(load_config("tiny"))
SMALL_FAMILIES = families(tuple(projections(SMALL)), tokens=256, long_tokens=256)


@pytest.mark.parametrize("name", SMALL_FAMILIES)
def test_every_case_is_right_at_small_widths(name: str):
    bench = Bench(SimtDevice(), SMALL, 32 << 20, seed=1, cold=1 << 16)
    for rows in (1, 6):
        case = SMALL_FAMILIES[name](bench, rows)
        assert (case.name, case.rows) == (name, rows)
        case.launches[0]()
        assert case.error() <= case.bound and case.nbytes > 0
        bench.reset()


def test_small_widths_have_every_family():
    assert list(SMALL_FAMILIES) == list(FAMILIES)


@pytest.mark.parametrize(
    "name", ["index_weights", "router", "embed", "engram_gather", "engram_gate", "compress_ratio2", "window_rows"]
)
def test_a_case_is_right_at_the_real_widths(name: str):
    bench = Bench(SimtDevice(), SPEC, 300 << 20, seed=1)
    case = FAMILIES[name](bench, 1)
    case.launches[0]()
    assert case.error() <= case.bound and case.nbytes > 0


@pytest.mark.parametrize(
    "name", [name for name in SMALL_FAMILIES if not name.startswith(("experts", "index_", "select"))]
)
def test_a_case_sees_what_a_kernel_left_out(name: str):
    bench = Bench(SimtDevice(), SMALL, 32 << 20, seed=1, cold=1 << 16)
    case = SMALL_FAMILIES[name](bench, 2)  # nothing is launched: the output is poison
    with np.errstate(invalid="ignore", over="ignore"):
        assert not case.error() <= case.bound


def test_a_floor_is_of_bytes_or_of_operations():
    assert Case("a", 1, [], lambda: 0.0, 1.0, 4_000_000, 989_000_000).floor(4000.0) == (1.0, "bytes")
    assert Case("a", 1, [], lambda: 0.0, 1.0, 4_000_000, 3 * 989_000_000).floor(4000.0) == (3.0, "operations")


def test_a_case_that_cannot_run_is_a_line_and_the_next_one_runs():
    bench = Bench(SimtDevice(), SMALL, 1 << 20, seed=1, cold=1 << 16)
    bench.read_gb_per_s = 4000.0

    def broken(bench: Bench, rows: int) -> Case:
        bench.empty(1 << 19)
        raise ValueError("operands of other shapes")

    def too_large(bench: Bench, rows: int) -> Case:
        bench.empty(2 << 20)
        raise AssertionError("not reached")

    for family, problem in ((broken, "ValueError: operands of other shapes"), (too_large, "needs more than the 1 MiB")):
        found = command._measured(bench, "a", family, 6, 1, None)
        assert problem in found.problem and "WRONG" in command.line(found) and not found.us
    found = command._measured(bench, "index_weights", SMALL_FAMILIES["index_weights"], 6, 2, None)
    assert found.problem == "" and len(found.us) == 2 and found.floor_us > 0


def test_a_lost_device_ends_the_bench():
    bench = Bench(SimtDevice(), SMALL, 1 << 20, seed=1)

    def lost(bench: Bench, rows: int) -> Case:
        bench.device.lost = "CUDA_ERROR_ILLEGAL_ADDRESS"
        raise DeviceError("GPU 0 failed")

    with pytest.raises(DeviceError, match="GPU 0"):
        command._measured(bench, "a", lost, 6, 1, None)


def test_names_select_by_their_beginning():
    assert matching(FAMILIES, ["wo_", "experts"]) == ["wo_a", "wo_b", "experts_gate_up", "experts_down", "experts"]
    assert matching(FAMILIES, []) == list(FAMILIES)


def test_rows_outside_a_step_are_refused():
    assert command.parse_rows("1, 6,48") == (1, 6, 48)
    for text in ("0", "49", "x", "", "1,-2"):
        with pytest.raises(ConfigError, match="--rows"):
            command.parse_rows(text)


class Played:
    """What a result says of its device."""

    name, index, chip = "a card", 0, "sm_90a"


def test_the_result_has_medians_floors_and_what_was_wrong():
    def case(name: str) -> Case:
        return Case(name, 6, [], lambda: 0.0, 1.0, 4_000_000)

    found = [Measured(case("wq_b"), (2.0, 3.0, 2.5), 1e-3, 1.0, {"torch_bf16": 5.0}),
             Measured(case("bad"), (), 1.0, 1.0, problem="error 1")]  # fmt: skip
    bench = Bench(SimtDevice(), SPEC, 1 << 20, seed=0)
    bench.read_gb_per_s = 4000.0
    result = command._result(Played(), bench, found, (6,), BenchOptions(repeat=3))
    assert result.metrics["wq_b_r6_us"] == 2.5 and result.metrics["wq_b_r6_time_over_floor"] == 2.5
    assert result.metrics["wq_b_r6_peer_torch_bf16_us"] == 5.0 and result.floor == {"wq_b_r6": 1.0}
    assert result.params["cases"]["bad_r6"]["problem"] == "error 1" and "bad_r6_us" not in result.metrics
    assert "WRONG" in command.line(found[1]) and "(bytes)   2.50x" in command.line(found[0])


def test_without_a_gpu_the_command_ends_with_3(capsys):
    assert run_command(["bench", "kernels"]) == 3
    assert "driver" in capsys.readouterr().err
