"""Engines whose backend has several ranks in turns on one device, and what of them is compared with one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dsuf.engine.engine import Engine
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Sequence, Trace
from dsuf.layout import pages_for
from tests.support.in_turns import Table

CLOSE = 0.5  # logits between the best two tokens of a row that may change places where sums are rounded otherwise


def engine_in_turns(folder: Path, device: Any, count: int, *, graphs: bool = True, **options: Any) -> Engine:
    """`count` ranks that a device runs by turns."""
    chosen, table = EngineOptions(folder, **options), Table(device, count)
    backend = GpuBackend(chosen, None, table.seats, graphs=graphs)
    backend.load(lambda what, share: None)
    engine = Engine(backend, chosen)
    engine.table = table
    return engine


def stop_and_resume(engine: Engine, sequence: Sequence, position: int) -> None:
    """Take a sequence out at a position and put it back; what it then has are the same bytes."""
    saved = taken(engine, sequence, position)
    engine.backend.release(sequence)
    engine.backend.restore(sequence, position, *saved)
    assert taken(engine, sequence, position) == saved


def taken(engine: Engine, sequence: Sequence, position: int) -> tuple[list[bytearray], list[bytearray]]:
    """Pages and snapshot at a position."""
    pages = [bytearray(engine.limits.page_bytes) for _ in range(pages_for(position))]
    state = [bytearray(engine.limits.snapshot_bytes)]
    number = engine.backend.snapshot(sequence, position, dict(enumerate(pages)), state)
    for _ in range(1000):
        if engine.backend.copied() >= number:
            return pages, state
    raise AssertionError(f"copy {number} does not end")


def assert_same_text(got: list[int], want: list[int], trace: Trace) -> None:
    """Up to a token whose row, of the trace of `want`, could not decide between the best two."""
    for i, (mine, other) in enumerate(zip(got, want, strict=True)):
        if mine != other:
            best, second = np.sort(trace.logits[i])[:-3:-1]
            assert best - second < CLOSE, f"token {i} is {mine}, one rank says {other}"
            return
