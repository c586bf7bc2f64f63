"""Floors and families of prefill on a GPU, against the operation counts of the reference document."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsuf.cli.bench import gpu_prefill
from dsuf.engine.gpu import measure_prefill
from dsuf.engine.options import EngineOptions
from dsuf.model.synthetic import load_config
from dsuf.spec import Spec
from tests.engine.gpu.small import small_config
from tests.support.simt_device import SimtDevice

CEILINGS = {"read_gb_per_s": 1e9, "bf16_gflops": 1e6}  # memory for nothing, 1 PFLOP/s: 1 GFLOP a microsecond


@pytest.mark.parametrize(("length", "index_gflop"), [(8192, 0.05), (32768, 0.20), (131072, 0.81), (1 << 20, 6.4)])
def test_attention_and_index_are_counted_by_the_token(length: int, index_gflop: float):
    config = load_config("h200x1")
    found = gpu_prefill.floor(Spec.from_config(config), config, length, CEILINGS)
    assert found["attention_us"] / length == pytest.approx(1.54, rel=0.01)
    assert found["indexer_us"] / length == pytest.approx(index_gflop, rel=0.05)
    linear = found["experts_us"] + found["dense products_us"]
    tail = 128 * 15.15 + 2 * 0.66  # decoder layers of the last window, the head once
    assert linear == pytest.approx(length * 15.79 + tail, rel=0.02)


def test_kernels_are_grouped_and_held_against_their_floor():
    kernels = {
        "grouped.gate_up": (20, 50.0),
        "dense.fp8": (120, 30.0),
        "chunk.attend/v41": (20, 15.0),
        "fill": (1, 5.0),
    }
    found = gpu_prefill.by_family(kernels, {"experts_us": 25.0, "attention_us": 10.0})
    assert found["experts"] == {"us": 50.0, "share": 0.5, "floor_us": 25.0, "time_over_floor": 2.0}
    assert found["other"] == {"us": 5.0, "share": 0.05}
    assert list(found)[:3] == ["experts", "dense products", "attention"]


def test_a_prompt_is_measured_on_a_device_that_engine_and_kernels_share(monkeypatch):
    monkeypatch.setattr("dsuf.engine.gpu.open.open_devices", lambda engine, spec: [SimtDevice()])
    monkeypatch.setattr(gpu_prefill, "read_ceiling", lambda device: 4600.0 if device.kernels else None)
    monkeypatch.setattr(measure_prefill, "ROWS", 64)
    monkeypatch.setattr(measure_prefill, "OUTPUTS", 128)
    monkeypatch.setattr(gpu_prefill, "CHUNK", 64)
    engine = gpu_prefill.options_for(EngineOptions(Path(), gpus=(0,)), (66,))
    found = gpu_prefill.measure(small_config(), engine, (66,), 1, 0, profile=False)
    assert found.samples[0]["prefill_66_s"] > 0
    assert found.floors[66]["us"] > 0
    assert found.memory["used"] <= found.memory["planned"]
