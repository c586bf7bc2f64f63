"""Measuring copies is tried whole on the stand-in: every layout comes back byte for byte, and shares are told."""

from __future__ import annotations

from dsuf.kernels.catalogue import CONFIGS
from dsuf.spec import Spec
from tests.gpu import bench_copies
from tests.support.simt_device import SimtDevice


def test_snapshots_and_restores_of_every_layout_are_right(monkeypatch):
    monkeypatch.setattr(bench_copies, "SPEC", Spec.load(CONFIGS / "tiny.json"))
    monkeypatch.setattr(bench_copies, "LENGTHS", (140, 300))
    monkeypatch.setattr(bench_copies, "REPEATS", 1)
    monkeypatch.setattr(bench_copies, "bandwidth", lambda device: {"h2d_gb_per_s": 1.0, "d2h_gb_per_s": 2.0})
    device = SimtDevice()
    found = bench_copies.copies(device)
    assert found.pop("wrong") == [] and found.pop("register_s_per_gib") > 0
    assert len(found) == 2 * 4 + 1
    for one in found.values():
        assert min(one["snapshot_of_link"], one["restore_of_link"], one["queue_us"]) > 0
        seconds = one["snapshot_ms"] / 1e3
        assert abs(one["snapshot_of_link"] * seconds * 2e9 / one["bytes"] - 1) < 1e-6
