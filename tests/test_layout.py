"""Byte layout of pages and snapshots against the sizes of the reference and a plain enumeration."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import numpy as np
import pytest

from dsuf.layout import PAGE_TOKENS, PageLayout, SnapshotLayout, SourceLayout, pages_for, resume_step
from dsuf.spec import Spec


def spec_of(name: str) -> Spec:
    return Spec.from_config(json.loads(resources.files("dsuf").joinpath(f"configs/{name}.json").read_text()))


def test_a_page_of_the_real_config_has_113920_bytes_890_a_token():
    layout = PageLayout.of(spec_of("v41-flash"))
    assert layout.page_bytes == 113_920 == 445 * 256 == 890 * PAGE_TOKENS
    shapes = [
        (s.codes.rows, s.codes.width, s.scales.width, s.key_codes.width, s.key_scales.width) for s in layout.sources
    ]
    assert shapes == [(64, 256, 32, 64, 4)] * 3 + [(128, 256, 32, 64, 4)]
    assert [s.layer for s in layout.sources] == [2, 8, 14, 20]


def test_a_window_row_of_the_real_config_has_528_bytes():
    layout = SnapshotLayout.of(spec_of("v41-flash"))
    assert layout.row_bytes == 528 and layout.windows_bytes == 43 * 128 * 528
    assert layout.windows_bytes < layout.snapshot_bytes <= layout.windows_bytes + 32


@pytest.mark.parametrize("name", ["v41-flash", "tiny"])
def test_planes_of_a_page_neither_overlap_nor_leave_the_page(name):
    layout = PageLayout.of(spec_of(name))
    planes = [p for s in layout.sources for p in (s.codes, s.scales, s.key_codes, s.key_scales)]
    assert planes[0].offset == 0
    assert all(before.end == after.offset for before, after in itertools.pairwise(planes))
    assert planes[-1].end <= layout.page_bytes < planes[-1].end + 256


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 8, 24, 128, 200])
def test_an_entry_lies_in_the_page_of_its_last_token(ratio):
    rows = -(-PAGE_TOKENS // ratio)
    source = SourceLayout(0, ratio, rows, None, None, None, None)
    seen = set()
    for entry in range(1000):
        page = source.page_of(entry)
        row = entry - source.first_entry(page)
        assert page == (entry * ratio + ratio - 1) // 128
        assert 0 <= row < rows and (page, row) not in seen
        seen.add((page, row))
    np.testing.assert_array_equal(source.page_of(np.arange(1000)), [source.page_of(e) for e in range(1000)])


def test_pages_cover_whole_and_partial_blocks():
    assert [pages_for(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]


def test_resume_points_of_the_real_config_are_even():
    assert resume_step(spec_of("v41-flash")) == 2
