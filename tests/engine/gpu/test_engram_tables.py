"""Placement of Engram's tables, and host memory that a kernel reads and a restart finds again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dsuf.engine.gpu import engram_tables
from dsuf.engine.gpu.engram_tables import HostTables
from dsuf.engine.gpu.weights import Weights
from dsuf.kernels.catalogue import CONFIGS
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.fingerprint import fingerprint
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

REAL, SMALL = (Spec.load(CONFIGS / name) for name in ("v41-flash.json", "h200x1.json"))
GB = 10**9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "ckpt"
    write_checkpoint(load_config("tiny"), folder)
    with Checkpoint.open(folder) as checkpoint:
        yield checkpoint


class TestPlacement:
    def test_bytes_are_the_published_ones(self):
        assert engram_tables.table_bytes(REAL) == 202_758_032_400

    @pytest.mark.parametrize(
        ("spec", "free", "ranks", "placement"),
        [
            (SMALL, 30 * GB, 1, "device"),
            (REAL, 30 * GB, 1, "host"),
            (REAL, 30 * GB, 8, "device-sharded"),
            (REAL, 20 * GB, 8, "host"),
        ],
    )
    def test_the_fastest_that_fits(self, spec, free, ranks, placement):
        assert engram_tables.choose(spec, free, ranks) == placement

    def test_the_forecast_counts_huge_pages(self, tmp_path):
        meminfo = tmp_path / "meminfo"
        meminfo.write_text("MemAvailable: 268435456 kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n")
        small = engram_tables.forecast(REAL, meminfo)
        assert small.page_bytes == 4096 and 10 < small.register_s < 12
        meminfo.write_text("MemAvailable: 1000 kB\nHugePages_Free: 131072\nHugepagesize: 2048 kB\n")
        huge = engram_tables.forecast(REAL, meminfo)
        assert huge.page_bytes == 2 << 20 and huge.register_s < small.register_s
        assert huge.touch_s < small.touch_s / 3


class TestHostTables:
    def test_rows_are_where_the_kernel_looks_and_a_restart_finds_them(self, tiny):
        device = SimtDevice()
        weights = Weights.allocate(device, tiny.spec, tiny.class_map(), positions=1024)
        tables = HostTables(device, tiny.spec)
        assert tables.load(tiny, b"this one") is False
        tables.place(weights)
        for layer in tiny.spec.engram_layer_ids:
            held = weights.layers[layer]
            for address, name in ((held.engram_table, "weight"), (held.engram_table_scales, "scale")):
                raw = tiny.raw(f"layers.{layer}.engram.embed.{name}")
                assert np.array_equal(device.download(address, raw.nbytes), raw.reshape(-1).view(np.uint8))
        kept = os.dup(tables.fd)
        tables.close()
        again = HostTables(SimtDevice(), tiny.spec, kept)
        assert again.load(None, b"this one") is True
        assert HostTables(SimtDevice(), tiny.spec, os.dup(kept)).load(tiny, b"another") is False
        again.close()

    def test_they_are_filled_beside_the_other_weights(self, tiny):
        device = SimtDevice()
        weights = Weights.allocate(device, tiny.spec, tiny.class_map(), positions=1024)
        done = engram_tables.place([weights], tiny, "host")
        assert not [part for part in weights.loaded if part.kind == "engram tables"]
        weights.load(tiny)
        assert done.result(10) is False
        raw = tiny.raw("layers.4.engram.embed.weight")
        assert np.array_equal(device.download(weights.layers[4].engram_table, raw.nbytes), raw.reshape(-1))
        assert "weights, engram tables" not in device.held()

    def test_the_next_engine_finds_what_the_one_before_left(self, tiny):
        before = HostTables(SimtDevice(), tiny.spec)
        before.load(tiny, fingerprint(tiny))
        weights = Weights.allocate(SimtDevice(), tiny.spec, tiny.class_map(), positions=1024)
        done = engram_tables.place([weights], tiny, "host", before.path)
        assert done.result(10) is True
        raw = tiny.raw("layers.1.engram.embed.weight")
        assert np.array_equal(weights.device.download(weights.layers[1].engram_table, raw.nbytes), raw.reshape(-1))

    @pytest.mark.parametrize("left", ["of another size", "gone"])
    def test_memory_that_cannot_be_used_is_made_anew(self, tiny, left):
        fd = os.memfd_create("wrong")
        os.ftruncate(fd, 4096)
        path = Path(f"/proc/{os.getpid()}/fd/{fd}")
        if left == "gone":
            os.close(fd)
        weights = Weights.allocate(SimtDevice(), tiny.spec, tiny.class_map(), positions=1024)
        assert engram_tables.place([weights], tiny, "host", path).result(10) is False
