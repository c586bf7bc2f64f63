"""The catalogue's size and names, and building it with its index."""

from __future__ import annotations

import json

from dsuf.kernels import build_all, catalogue
from dsuf.kernels.lang import SHARED_LIMIT
from dsuf.kernels.ptx.op import ALL_CHIPS
from tests.support.simt_device import expanded


def test_no_chip_has_more_than_110_entries_and_names_are_unique():
    entries = catalogue.entries()
    assert len({e.name for e in entries}) == len(entries)
    for chip in ALL_CHIPS:
        assert 0 < sum(chip in e.chips for e in entries) <= 110, chip


def test_every_entry_expands_fits_a_block_and_states_its_floor():
    for entry in catalogue.entries():
        if entry.name.startswith("project") and entry.shape["rows"] in (16, 24):
            continue  # the same code as for 8 and 48 rows, and layout_for refuses what does not fit
        kernel = expanded(entry.name)
        assert kernel.shared <= SHARED_LIMIT, (entry.name, kernel.shared)
        assert kernel.threads <= 1024 and kernel.grid[0] > 0
        assert entry.floor_operations >= 0 and callable(entry.reference)


def test_second_build_reads_the_index_and_a_changed_source_does_not_use_it(tmp_path, monkeypatch):
    work = build_all.selected(["sm_90a"], ["latents/small"])
    rows: list[build_all.Row] = []
    first = build_all.build_catalogue(work, tmp_path, 1, rows.append)
    assert [r.cached for r in rows] == [False] and first.keys() == set(work)
    rows.clear()
    monkeypatch.setattr(build_all, "_build_missing", lambda *args: iter(()))
    assert build_all.build_catalogue(work, tmp_path, 1, rows.append).keys() == set(work)
    assert [r.cached for r in rows] == [True]
    index = json.loads((tmp_path / "kernels/sm_90a/index.json").read_text())
    assert list(index["keys"]) == [work[0][0]]
    monkeypatch.setattr(build_all, "source_state", lambda: "another")
    assert not build_all.build_catalogue(work, tmp_path, 1, rows.append)
