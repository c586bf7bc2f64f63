"""`dsuf bench kernels`: cases on the interpreter at the real widths, its result object, a machine without a GPU."""

from __future__ import annotations

import pytest

from dsuf.cli.app import run_command
from dsuf.cli.bench import kernels as command
from dsuf.cli.bench.kernel_bench import Bench, Case, Measured, matching
from dsuf.cli.bench.kernel_cases import families
from dsuf.config import BenchOptions
from dsuf.errors import ConfigError
from dsuf.kernels.project import projections
from dsuf.model.synthetic import load_config
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

SPEC = Spec.from_config(load_config(command.CONFIG))
FAMILIES = families(tuple(projections(SPEC)))


@pytest.mark.parametrize("name", ["index_weights", "router", "embed", "engram_gather", "engram_gate"])
def test_a_case_is_right_at_the_real_widths(name: str):
    bench = Bench(SimtDevice(), SPEC, 300 << 20, seed=1)
    case = FAMILIES[name](bench, 1)
    case.launches[0]()
    assert case.error() <= case.bound and case.nbytes > 0


def test_a_case_sees_what_a_kernel_left_out():
    bench = Bench(SimtDevice(), SPEC, 100 << 20, seed=1)
    case = FAMILIES["index_weights"](bench, 1)  # nothing is launched: the output is poison
    assert not case.error() <= case.bound


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
    assert "WRONG" in command.line(found[1]) and "2.50x" in command.line(found[0])


def test_without_a_gpu_the_command_ends_with_3(capsys):
    assert run_command(["bench", "kernels"]) == 3
    assert "driver" in capsys.readouterr().err
