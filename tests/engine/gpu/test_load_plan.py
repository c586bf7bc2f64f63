"""The plan of loading: bytes read are those of the files, and every rank's device gets its share."""

from __future__ import annotations

import pytest

from dsuf.engine.gpu.load_plan import phases, stored
from dsuf.engine.gpu.weight_plan import plan
from dsuf.kernels.catalogue import CONFIGS
from dsuf.spec import Spec

REAL = Spec.load(CONFIGS / "v41-flash.json")
VISION = 970_536_960


def test_the_released_checkpoint_is_read_whole_but_for_vision():
    assert sum(stored(part) for part in plan(REAL)) == 510_286_023_000 - VISION
    assert sum(phase.stored for phase in phases(REAL, 1, "host")) == 510_286_023_000 - VISION


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_share_experts_and_tables_evenly(ranks: int):
    by_name = {phase.name: phase for phase in phases(REAL, ranks, "device-sharded")}
    for name in ("routed experts", "Engram tables"):
        phase = by_name[name]
        assert sum(phase.device) == phase.stored and max(phase.device) - min(phase.device) < 4096


def test_tables_in_the_host_take_no_device_memory_and_time_to_lock():
    host, device = (phases(REAL, 4, placement)[-1] for placement in ("host", "device-sharded"))
    assert host.device == (0, 0, 0, 0) and host.host == 202_758_032_400
    assert host.seconds > device.seconds + 5
    assert "202.8 GB page-locked in the host" in host.line()
