"""Every kernel that an engine may need: a list of modules, each exporting ENTRIES, and the shapes they are made for.

An entry is a shape of a family: how to make its kernel, for which chips, the op that says what it means, and its floor.
Two widths are made: `v41`, the real one (three chips), and `small` (sm_90a only), which serves the tiny test checkpoint
and the built-in toy alike: what differs between checkpoints of a width is a launch argument. A kernel whose code does
not depend on a width has no width in its name.
Rows come in tiles: a step of R rows takes the smallest tile of its width that holds R (`tile_of`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dsuf.kernels.lang import Kernel
from dsuf.kernels.ptx.op import ALL_CHIPS, HOPPER
from dsuf.spec import Spec

MODULES = (
    "engram", "project", "experts", "route", "mixes", "latents", "queries", "compress", "attend", "index", "select",
    "ceiling", "rows_q8", "state", "moves", "fill", "pack_device", "inject", "rows", "sample", "markov",
    "chunk_attend", "chunk_index", "chunk_select", "chunk_seam", "chunk_rows", "chunk_route", "accept", "taps",
    "logprobs", "reduce", "product_rows", "dense", "plan", "grouped",
)  # fmt: skip
ROW_TILES = {"v41": (8, 16, 24, 48), "small": (8, 48)}
RANKS = (2, 4)  # that attention's heads may be split over
CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Entry:
    """One shape of a kernel; the floors are what a launch with all rows in use cannot avoid."""

    name: str
    make: Callable[..., Kernel]
    shape: Mapping[str, Any]
    chips: tuple[str, ...]
    reference: Callable[..., Any]
    floor_bytes: int
    floor_operations: int

    def kernel(self, chip: str) -> Kernel:
        """Expand it for a chip."""
        extra = {"chip": chip} if "chip" in inspect.signature(self.make).parameters else {}
        return self.make(**self.shape, **extra)


@dataclass(frozen=True)
class Width:
    """A checkpoint's dimensions, the chips its kernels are built for, and the row tiles."""

    label: str
    spec: Spec
    chips: tuple[str, ...]
    row_tiles: tuple[int, ...]

    @property
    def heads(self) -> dict[str, int]:
        """Heads of attention kernels by what their names end in: all, and those of a rank."""
        every = self.spec.num_attention_heads
        return {"": every} | {f"/h{every // ranks}": every // ranks for ranks in RANKS if every % ranks == 0}


@cache
def widths() -> tuple[Width, ...]:
    """What the catalogue is made for."""
    real = Spec.load(CONFIGS / "v41-flash.json")
    tiny = Spec.load(CONFIGS / "tiny.json")
    return (Width("v41", real, ALL_CHIPS, ROW_TILES["v41"]), Width("small", tiny, HOPPER, ROW_TILES["small"]))


def tile_of(label: str, rows: int) -> int:
    """The row tile that a step of so many rows runs on: the smallest of its width that holds them."""
    return next(tile for tile in ROW_TILES[label] if tile >= rows)


@cache
def entries() -> tuple[Entry, ...]:
    """All entries of all modules. Raises ValueError if two have one name."""
    found: list[Entry] = []
    for name in MODULES:
        module = importlib.import_module(f"dsuf.kernels.{name}")
        found += [entry for width in widths() for entry in module.entries(width)]
    names = [entry.name for entry in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two catalogue entries are called {', '.join(twice)}")
    return tuple(found)


def entry(name: str) -> Entry:
    """The entry of a name. Raises KeyError."""
    return next(e for e in entries() if e.name == name)
