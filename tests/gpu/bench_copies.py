"""Measures snapshots and restores on one GPU against plain copies over the same link, and steps beside them.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_copies.py .kernels OUT.json [section ...]

    link    page-locked copies, GB/s each way: what the shares in the other sections are of
    copies  snapshots and restores of 10 K, 100 K and 1 M tokens over registered memory, byte for byte: pages side by
            side or scattered, as the engine copies them or as batches of copies or one by one; the same through staging
    beside  a decode step of h200x1 alone, beside copies that never stop, in runs of several lengths or by a kernel, and
            while memory is registered

Needs numpy, ml_dtypes, cuda-core and cuda-bindings. The exit code is the number of sections that failed or found wrong
bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.copies import Copies
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.measure import StepRun
from dsuf.engine.gpu.mover import MOVED
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.staging import flat
from dsuf.engine.options import EngineOptions
from dsuf.engine.shared import NumberedPages, SharedPages
from dsuf.errors import DeviceError
from dsuf.kernels.catalogue import CONFIGS
from dsuf.kernels.launch import read_folder
from dsuf.layout import PageLayout, SnapshotLayout, pages_for
from dsuf.model.reference.snapshot import blank
from dsuf.model.synthetic import load_config
from dsuf.spec import Spec
from tests.gpu.bench_memory import MIB, Result, bandwidth, bench, seconds

CONFIG = load_config("h200x1")
SPEC = Spec.load(CONFIGS / "h200x1.json")
LENGTHS = (10_000, 100_000, 1_000_000)
REPEATS = 15
STEPS, CONTEXT = 60, 32_768
COPIED = 1_000_000  # tokens of each copy beside steps, which is longer than a step
CUTS = (256 << 10, 2 * MIB, 64 * MIB)
WAYS = (  # name, whether pages are scattered, how many at most a kernel moves, whether the others are batches
    ("side by side", False, MOVED, True), ("scattered", True, MOVED, True), ("scattered, batches", True, 0, True),
    ("scattered, one by one", True, 0, False),
)  # fmt: skip
WAIT_S = 60.0


class Arena:
    """Host memory in slots of a page, mapped as the agent's is; the first half is copied from, the second to."""

    def __init__(self, tokens: int) -> None:
        self.layout, self.state_bytes = PageLayout.of(SPEC), SnapshotLayout.of(SPEC).snapshot_bytes
        self.page, self.parts = self.layout.page_bytes, -(-self.state_bytes // self.layout.page_bytes)
        self.half = pages_for(tokens) + self.parts
        nbytes = -(-2 * self.half * self.page // (2 * MIB)) * 2 * MIB
        fd = os.memfd_create("bench")
        os.ftruncate(fd, nbytes)
        self.view = memoryview(mmap.mmap(fd, nbytes))
        os.close(fd)

    def lent(self, tokens: int, half: int, *, scattered: bool) -> tuple[SharedPages, list[memoryview]]:
        """Slots for the pages of so many tokens and for their snapshot."""
        count, first = pages_for(tokens), half * self.half
        slots = first + self.parts + np.arange(count)
        if scattered:
            np.random.default_rng(tokens).shuffle(slots)
        begin = first * self.page
        cut = begin + self.parts // 2 * self.page
        state = [self.view[begin:cut], self.view[cut : begin + self.parts * self.page]]
        return SharedPages(self.view, self.page, slots), state

    def fill(self, tokens: int, pages: SharedPages, state: list[memoryview]) -> None:
        """Random pages and state as a CPU backend would have saved them: what no reader looks at is zero."""
        rng, count, layout = np.random.default_rng(tokens), len(pages), SnapshotLayout.of(SPEC)
        patterns = rng.integers(0, 256, (50, self.page), np.uint8)
        for number in range(count):
            page = flat(pages[number])
            page[:] = patterns[number % 50]
            page[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
        for source in self.layout.sources:
            blank(page, source, tokens // source.ratio - source.first_entry(count - 1))
        raw = rng.integers(0, 256, layout.snapshot_bytes, np.uint8)
        raw[layout.windows_bytes : layout.history_offset] = 0
        raw[layout.history_offset + 4 * layout.history_ids : layout.decoder_start_offset] = 0
        raw[layout.decoder_start_offset :].view("<i8")[0] = max(0, tokens - 128)
        cut = len(state[0])
        state[0][:], state[1][: raw.size - cut] = raw[:cut].tobytes(), raw[cut:].tobytes()


def link(device: Device) -> Result:
    """Both directions, the same copies as in `bench_memory`."""
    return bandwidth(device)


def copies(device: Device) -> Result:
    """Milliseconds, and the share of a plain copy of the same bytes."""
    rates, arena = bandwidth(device), Arena(max(LENGTHS))
    pages = Pages(device, SPEC, slots=6, count=2 * pages_for(max(LENGTHS)) + 8, most_pages=8192)
    moves, out = Copies(pages), {"wrong": []}
    registered = moves.share(arena.view)
    out["register_s_per_gib"] = seconds(lambda: registered.settle(WAIT_S)) / (len(arena.view) / 2**30)
    whole = registered.end - registered.begin == len(arena.view)
    if not whole:
        out["wrong"].append("not all was registered")
    for tokens in LENGTHS:
        for name, scattered, moved, batches in WAYS:
            device._batches, moves._mover.most = batches, moved
            out[f"{tokens}, {name}"] = _there_and_back(moves, arena, tokens, rates, scattered=scattered)
            if batches and not device._batches:
                out["wrong"].append("the driver knows no batches")
    device._batches, moves._mover.most = True, MOVED
    out[f"{LENGTHS[1]}, staged"] = _staged(moves, arena, LENGTHS[1], rates)
    out["wrong"] += [name for name, one in out.items() if isinstance(one, dict) and one.pop("wrong")]
    moves.close()
    return out


def _there_and_back(moves: Copies, arena: Arena, tokens: int, rates: Result, *, scattered: bool) -> Result:
    slot = _slot(moves.pages, tokens, scattered=scattered)
    kept, state = arena.lent(tokens, 0, scattered=scattered)
    got, back = arena.lent(tokens, 1, scattered=scattered)
    arena.fill(tokens, kept, state)
    wanted, start = NumberedPages(np.arange(len(kept)), got), max(0, tokens - 128)

    def restore() -> None:
        moves.restore(slot, tokens, kept, state)
        moves.land(slot)
        landed = moves.device.record()
        while not landed.done():
            pass

    def snapshot() -> None:
        number = moves.snapshot(slot, tokens, start, wanted, back)
        while moves.progress() < number:
            pass

    out = _timed(restore, snapshot, len(kept) * arena.page + arena.state_bytes, rates)
    out["queue_us"] = statistics.median(_queued(moves, slot, tokens, start, wanted, back) for _ in range(REPEATS))
    same = all(np.array_equal(flat(mine), flat(other)) for mine, other in zip(got, kept, strict=True))
    moves.pages.release(slot)
    moves.device.synchronize()
    moves.progress()
    return out | {"wrong": not (same and _first(back, arena) == _first(state, arena))}


def _first(state: list[memoryview], arena: Arena) -> bytes:
    return b"".join(state)[: arena.state_bytes]


def _queued(moves: Copies, slot: int, tokens: int, start: int, wanted: NumberedPages, back: list[memoryview]) -> float:
    """Microseconds of the engine's thread until a snapshot is queued."""
    spent = seconds(lambda: moves.snapshot(slot, tokens, start, wanted, back))
    moves.finish(moves.pages.copies)
    return spent * 1e6


def _staged(moves: Copies, arena: Arena, tokens: int, rates: Result) -> Result:
    """The same where the machine refused to register."""
    registered, moves._registered = moves._registered, None
    try:
        return _there_and_back(moves, arena, tokens, rates, scattered=False)
    finally:
        moves._registered = registered


def _slot(pages: Pages, tokens: int, *, scattered: bool) -> int:
    """A slot with pages for so many tokens, every other one of the pool where they are scattered."""
    slot, other = pages.open(), pages.open()
    for held in range(128, tokens + 128, 128) if scattered else (tokens,):
        pages.reserve(slot, held)
        if scattered:
            pages.reserve(other, held)
    pages.release(other)
    return slot


def _timed(restore: Callable[[], None], snapshot: Callable[[], None], nbytes: int, rates: Result) -> Result:
    """The median of some, after one that is not counted, and the longest. The host looks for the end without pause."""
    out: Result = {"bytes": nbytes}
    for name, call, rate in (("restore", restore, "h2d_gb_per_s"), ("snapshot", snapshot, "d2h_gb_per_s")):
        times = [seconds(call) for _ in range(REPEATS + 1)][1:]
        out[f"{name}_ms"], out[f"{name}_longest_ms"] = statistics.median(times) * 1e3, max(times) * 1e3
        out[f"{name}_of_link"] = nbytes / statistics.median(times) / (rates[rate] * 1e9)
    return out


def beside(device: Device) -> Result:
    """Milliseconds of a step, the median and the longest of some, and how much longer the median is than alone."""
    context = CONTEXT + 20 * STEPS * 6
    options = EngineOptions(
        Path(), max_context=max(context, COPIED) + 512, max_sequences=3, gpus=(0,),
        cache_tokens=context + 2 * COPIED + 4096,
    )  # fmt: skip
    backend = GpuBackend(options, None, [device], synthetic=CONFIG)
    backend.load(lambda what, share: None)
    run = StepRun(backend, batch=1, context=CONTEXT, budget=1 << 20, draft=True, verify=None)
    moves, busy = backend._copies.first, Busy(backend, COPIED)
    run.steps(STEPS)
    alone = _steps(run)
    out: Result = {"alone": alone, "alone again": _steps(run)}
    for cut in CUTS:
        moves._cut = cut
        for name, call in (("snapshots", busy.save), ("restores", busy.load)):
            out[f"{name}, runs of {cut >> 10} KiB"] = _beside(run, backend, busy, call)
    busy.close()
    busy = Busy(backend, LENGTHS[1])
    for way, kernel in (("copies", False), ("a kernel", True)):
        moves._streams = lambda kernel=kernel: not kernel
        for name, call in (("snapshots", busy.save), ("restores", busy.load)):
            out[f"{name} of {LENGTHS[1]} tokens by {way}"] = _beside(run, backend, busy, call)
    busy.close()
    new = Arena(COPIED)
    registered = moves.share(new.view)
    out["registering"] = _steps(run) | {"registered_gib": (registered.end - registered.begin) / 2**30}
    backend.finish()
    moves.close()
    for found in out.values():
        found["longer"] = found["median_ms"] / alone["median_ms"] - 1
        found["mean_longer"] = found["mean_ms"] / alone["mean_ms"] - 1
    return out


def _beside(run: StepRun, backend: GpuBackend, busy: Busy, call: Callable[[], None]) -> Result:
    """Steps while `call` keeps copies under way, and how fast those were."""
    before, begun = busy.moves.pages.copies, time.perf_counter()
    with _between(backend, call):
        found = _steps(run)
    busy.end()
    spent = time.perf_counter() - begun
    return found | {"gb_per_s": (busy.moves.pages.copies - before) * busy.nbytes / spent / 1e9}


class Busy:
    """Two copies of so many tokens under way whenever the engine looks, of slots that no step uses."""

    def __init__(self, backend: GpuBackend, tokens: int) -> None:
        self.moves, self.arena, self.tokens = backend._copies.first, Arena(tokens), tokens
        self.moves.share(self.arena.view).settle(WAIT_S)
        self.slots = [_slot(self.moves.pages, tokens, scattered=False) for _ in range(2)]
        self.kept, self.state = self.arena.lent(tokens, 0, scattered=False)
        got, self.back = self.arena.lent(tokens, 1, scattered=False)
        self.wanted = NumberedPages(np.arange(len(got)), got)
        self.arena.fill(tokens, self.kept, self.state)
        self.nbytes = len(got) * self.arena.page + self.arena.state_bytes

    def save(self) -> None:
        """Called in every turn."""
        for _ in range(2 - len(self.moves._jobs)):
            self.moves.snapshot(self.slots[0], self.tokens, self.tokens - 128, self.wanted, self.back)

    def load(self) -> None:
        """Called in every turn."""
        for slot in self.slots:
            if self.moves.land(slot, wait=False):
                self.moves.restore(slot, self.tokens, self.kept, self.state)

    def end(self) -> None:
        """Until none is under way."""
        for slot in self.slots:
            self.moves.land(slot)
        self.moves.finish(self.moves.pages.copies)

    def close(self) -> None:
        """Give the slots back."""
        for slot in self.slots:
            self.moves.pages.release(slot)


def _steps(run: StepRun) -> Result:
    begun, times = time.perf_counter(), run.steps(STEPS)
    spent = (time.perf_counter() - begun) / STEPS
    return {"median_ms": statistics.median(times) * 1e3, "mean_ms": spent * 1e3, "longest_ms": max(times) * 1e3}


@contextmanager
def _between(backend: GpuBackend, call: Callable[[], None]) -> Iterator[None]:
    """Have `call` called in every turn."""
    poll = backend.poll

    def also(**given: Any) -> Any:
        call()
        return poll(**given)

    backend.poll = also
    try:
        yield
    finally:
        backend.poll = poll


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("sections", nargs="*")
    given = parser.parse_args()
    cubins = read_folder(given.cubins, "sm_90a")
    results, failed, gpu = {}, 0, {}
    for name in given.sections or [section.__name__ for section in SECTIONS]:
        begun = time.perf_counter()
        try:
            with Device.open(0, cubins) as device:
                gpu |= {"name": device.name, "count": 1, "sm": device.chip, "memory_bytes": device.memory()[1]}
                results[name] = {section.__name__: section for section in SECTIONS}[name](device)
            failed += bool(results[name].get("wrong"))
        except (DeviceError, OSError, AssertionError, RuntimeError, ValueError) as error:
            traceback.print_exc(limit=3)
            results[name], failed = {"error": str(error)}, failed + 1
        print(f"{time.perf_counter() - begun:6.1f} s {name}", flush=True)
        for what, one in results[name].items():
            print(f"    {what}: {json.dumps(_short(one))}", flush=True)
        given.output.write_text(
            json.dumps(bench("copies", "snapshots and restores beside steps", results, gpu), indent=1)
        )
    return failed


def _short(found: Any) -> Any:
    """With four digits."""
    if isinstance(found, dict):
        return {name: _short(one) for name, one in found.items()}
    return float(f"{found:.4g}") if isinstance(found, float) else found


SECTIONS = (link, copies, beside)

if __name__ == "__main__":
    sys.exit(main())
