"""The ledger: what fits on one H200, what is refused and with which advice, and that the forecast is what is taken."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.engine.gpu import engram_tables, memory
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.weights import Weights
from dsuf.errors import DeviceError
from dsuf.kernels.catalogue import CONFIGS
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

REAL, H200X1, TINY = (Spec.load(CONFIGS / f"{name}.json") for name in ("v41-flash", "h200x1", "tiny"))
H200 = 150_754_820_096  # bytes that the driver shows
FREE = H200 - 600_000_000


def planned(spec=H200X1, free=FREE, **changes):
    options = {"max_context": None, "max_sequences": 8} | changes
    return memory.plan_memory(spec, free, H200, **options)


class TestWhatFits:
    def test_one_h200_holds_h200x1_with_a_million_tokens_and_more(self):
        ledger = planned()
        assert ledger.max_context == 1_048_576 and ledger.engram == "device"
        assert ledger.pages * 128 >= 8 * 1_048_576
        weights = sum(count for kind, count in ledger.entries.items() if kind.startswith("weights"))
        assert abs(weights / 111_079_849_984 - 1) < 1e-4  # what an H200 had less after they were allocated
        assert ledger.planned < FREE

    def test_pages_stop_at_what_the_sequences_can_use(self):
        assert planned(max_context=4096, max_sequences=2).pages == 2 * 33
        assert planned(max_context=4096, cache_tokens=4096 + 128).pages == 33

    def test_the_real_checkpoint_needs_more_gpus_than_one(self):
        with pytest.raises(DeviceError, match=r"this checkpoint needs 3\d\d\.\d+ GB.*experts 288\.8.*Use more GPUs"):
            planned(REAL)

    def test_the_real_checkpoint_on_four_gpus_shares_its_tables_or_keeps_them_in_the_host(self):
        assert planned(REAL, ranks=4).engram == planned(REAL, ranks=8).engram == "device-sharded"
        assert planned(REAL, ranks=4, free=100 * 10**9).engram == "host"

    def test_a_context_that_does_not_fit_is_refused_with_the_largest_that_does(self):
        free = 111_500_000_000
        with pytest.raises(DeviceError, match=r"a context of 1,048,576 tokens needs.*--max-context (\d+)") as error:
            planned(free=free, max_context=1_048_576)
        most = int(str(error.value).split("--max-context ")[1].split(",")[0])
        ledger = planned(free=free, max_context=most)
        assert ledger.max_context == most and ledger.planned <= free
        with pytest.raises(DeviceError):
            planned(free=free, max_context=most + 129)
        assert planned(free=free).max_context == most

    def test_the_prefill_workspace_counts(self):
        assert planned(workspace=lambda context: 10**9).entries["workspace, prefill"] == 10**9


def test_the_table_names_every_kind_and_the_room():
    text = "\n".join(planned().lines())
    for part in (
        "weights, experts",
        "weights, engram tables",
        "windows, drafter",
        "workspace, decode",
        "graphs",
        "pages",
    ):
        assert part in text
    assert "one sequence has at most 1,048,576" in text


def test_what_is_taken_is_what_was_planned():
    ledger = memory.plan_memory(TINY, 3 << 30, 4 << 30, max_context=512, max_sequences=3)
    device = SimtDevice(memory_bytes=4 << 30)
    weights = Weights.allocate(device, TINY, np.zeros(TINY.vocab_size, np.int32), positions=512 + 12)
    engram_tables.place_on_device(weights)
    most_pages = -(-(512 + 12) // 128)
    Pages(device, TINY, slots=ledger.slots, count=ledger.pages, most_pages=most_pages)
    held = sum(device.held().values())
    planned_bytes = sum(c for kind, c in ledger.entries.items() if not kind.startswith(("workspace", "graphs")))
    buffers = len(weights.parts) + 20
    assert held <= planned_bytes + 20_000  # class map and hash constants
    assert planned_bytes <= held + 512 * buffers + (8 << 20)  # pages of 2 MiB, which the stand-in does not have
