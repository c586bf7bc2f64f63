"""Cache page and snapshot: where every byte lies, from a spec; shared by kernels, engine, reference and tests.

A **page** holds what 128 tokens add to the compressed caches, planar inside. For each kv source in layer order:

    codes       [rows, head_dim / 2]        e2m1, even column in the low nibble
    scales      [rows, head_dim / 16]       e4m3
    key codes   [rows, index_head_dim / 2]  e2m1
    key scales  [rows, index_head_dim / 32] ue8m0

with rows = 128 / ratio. An entry lies in the page of its group's **last** token, so that a page depends on no token
after it; where the ratio does not divide 128, rows is rounded up and some pages leave the last row empty.

A **snapshot** holds what a sequence needs beside its pages to go on at a position p that every ratio divides:

    windows        [layers + drafter stages, sliding_window, head_dim + head_dim / 32]
                   row w of the middle axis is position p - sliding_window + w: e4m3 codes, then ue8m0 scales
    history        int32 [engram_max_ngram_size - 1], class ids of the last tokens, oldest first; -1 blocks an n-gram
    decoder_start  int64, first position whose decoder and drafter rows are real

At the full width a page is 113,920 B (890 B a token) and a window row 528 B. Source: reference model.md 3.8, 4.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsuf.spec import BLOCK, Spec

PAGE_TOKENS = 128
PAGE_ALIGNMENT = 256
LATENT_GROUP = 16  # columns of a compressed entry under one e4m3 scale
BLOCKED = -1  # class id of a token that ends every n-gram (an image position)


@dataclass(frozen=True)
class Plane:
    """One array [rows, width] of bytes inside a page, starting at `offset`."""

    offset: int
    rows: int
    width: int

    @property
    def end(self) -> int:
        """First byte after the plane."""
        return self.offset + self.rows * self.width


@dataclass(frozen=True)
class SourceLayout:
    """The four planes of one kv source in a page."""

    layer: int
    ratio: int
    rows: int
    codes: Plane
    scales: Plane
    key_codes: Plane
    key_scales: Plane

    def page_of(self, entry: np.ndarray | int) -> np.ndarray | int:
        """Page of a compressed entry: the one that holds the last token of its group."""
        return ((entry + 1) * self.ratio - 1) // PAGE_TOKENS

    def first_entry(self, page: np.ndarray | int) -> np.ndarray | int:
        """Lowest entry of a page; its row is the entry's number less this."""
        return page * PAGE_TOKENS // self.ratio


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of one cache page."""

    sources: tuple[SourceLayout, ...]
    page_bytes: int

    @classmethod
    def of(cls, spec: Spec) -> PageLayout:
        """Lay the planes of all kv sources one after the other."""
        sources, at = [], 0
        for role in spec.layers:
            if not role.is_kv_source:
                continue
            rows, planes = -(-PAGE_TOKENS // role.ratio), []
            for width in _entry_widths(spec):
                planes.append(Plane(at, rows, width))
                at = planes[-1].end
            sources.append(SourceLayout(role.index, role.ratio, rows, *planes))
        return cls(tuple(sources), -(-at // PAGE_ALIGNMENT) * PAGE_ALIGNMENT)


def _entry_widths(spec: Spec) -> tuple[int, int, int, int]:
    """Bytes of one entry in each of the four planes."""
    return spec.head_dim // 2, spec.head_dim // LATENT_GROUP, spec.index_head_dim // 2, spec.index_head_dim // BLOCK


def resume_step(spec: Spec) -> int:
    """Snapshots are taken at multiples of this: there no kv source has an open group."""
    return math.lcm(*(role.ratio for role in spec.layers if role.is_kv_source))


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens occupy."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class SnapshotLayout:
    """Byte layout of one snapshot; offsets from its first byte."""

    window_layers: int
    window_rows: int
    row_bytes: int
    code_bytes: int  # leading part of a row that is e4m3 codes
    history_ids: int

    @classmethod
    def of(cls, spec: Spec) -> SnapshotLayout:
        """The layout of this spec's snapshots."""
        return cls(
            window_layers=spec.num_hidden_layers + spec.num_nextn_predict_layers,
            window_rows=spec.sliding_window,
            row_bytes=spec.head_dim + spec.head_dim // BLOCK,
            code_bytes=spec.head_dim,
            history_ids=spec.engram_max_ngram_size - 1,
        )

    @property
    def windows_bytes(self) -> int:
        """Size of the window rows, which come first."""
        return self.window_layers * self.window_rows * self.row_bytes

    @property
    def history_offset(self) -> int:
        """Where the int32 class ids begin."""
        return -(-self.windows_bytes // 8) * 8

    @property
    def decoder_start_offset(self) -> int:
        """Where the int64 position begins."""
        return self.history_offset + -(-4 * self.history_ids // 8) * 8

    @property
    def snapshot_bytes(self) -> int:
        """Size of the whole snapshot."""
        return self.decoder_start_offset + 8
