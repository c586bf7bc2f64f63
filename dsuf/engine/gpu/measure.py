"""Decode steps over sequences that stand at a made-up context, for benchmarks: what a step takes, and which kernels.

    run = StepRun(backend, config_spec, batch=1, context=32768, draft=True, verify=5)
    run.steps(20)                              seconds a step, through enqueue and poll
    run.record(64); run.inject(0.82)           drafts of a recorded greedy continuation
    run.profile()                              microseconds and calls of a step by kernel

Pages and windows hold random bytes that are valid values; the result says `context: synthetic`. A profile times one
kernel's launches of a step at a time, in a graph of their own: each as it runs among others, on operands of the step
before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.step_graph import Bucket, Entry, bucket_of
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Sequence
from dsuf.kernels.compress import PAIR_RING
from dsuf.kernels.engram import HISTORY
from dsuf.layout import pages_for

PATTERNS = 64  # different random pages
E4M3_SCALES = (0x20, 0x38)  # range of bytes: small positive numbers
UE8M0_SCALES = (118, 123)
REPEATS = 20
MOVING = ("rows.verify", "accept")  # these move the sequences on


class StepRun:
    """`batch` sequences of `context` tokens on a loaded backend, ready to decode."""

    def __init__(
        self, backend: GpuBackend, *, batch: int, context: int, budget: int, draft: bool, verify: int | None
    ) -> None:
        self.backend, self.machine = backend, backend.machine
        self.batch, self.context = batch, context
        rng = np.random.default_rng(1)
        vocabulary = self.machine.spec.vocab_size
        self.sequences = []
        for number in range(batch):
            ids = rng.integers(3, vocabulary - 1, context).tolist()
            request = Request(f"run-{number}", ids, budget, Sampling(temperature=0), ignore_eos=True)
            sequence = Sequence(request, budget, draft, verify, None)
            slot, seed = backend.adopt(sequence), int(rng.integers(1 << 30))
            for machine in backend.machines:
                fill(machine, slot, context, np.random.default_rng(seed))
            self.sequences.append(sequence)
        self._injected: list[int] = []  # of each rank
        self._rings = [(machine.device, *ring) for machine in backend.machines for ring in _scratch(machine)]

    def steps(self, count: int) -> list[float]:
        """Seconds of each of `count` steps as the host sees results come."""
        before, times = self._records(), []
        last = time.perf_counter()
        while len(times) < count:
            self.backend.enqueue(self.sequences)
            self.backend.poll()
            if (now := self._records()) > before:
                at = time.perf_counter()
                times += [(at - last) / (now - before)] * (now - before)
                before, last = now, at
        return times[:count]

    def graph_time(self, count: int, *, dependent: bool = True) -> float:
        """Seconds of a step where the device alone decides: graphs back to back between two events. `dependent` False:
        kernels that do not start before their predecessor has ended, in graphs of their own.
        """
        steps, device, bucket = self.machine.steps, self.machine.device, self._bucket()
        kept, graphs = device.dependent, self.backend.all_steps
        if dependent:
            return self._device_time(lambda: (graphs.draft(bucket, self._entries()), graphs.verify(bucket)), count)
        device.dependent = False
        with device.capture() as graph:
            steps.walk(bucket, device.launch)
        device.dependent = kept
        return self._device_time(lambda: self._again(graph.launch), count)

    def launched_time(self, count: int) -> float:
        """The same with a launch a kernel instead of graphs."""
        steps, bucket = self.machine.steps, self._bucket()
        return self._device_time(lambda: self._again(lambda: steps.walk(bucket, self.machine.device.launch)), count)

    def _again(self, step: Callable[[], None]) -> None:
        step()
        self.machine.steps.queued += 1

    def _device_time(self, step: Callable[[], Any], count: int) -> float:
        device = self.machine.device
        self.backend.finish()
        self._keep_rings()
        step()
        first = device.record(timing=True)
        for _ in range(count):
            step()
        last = device.record(timing=True)
        last.wait()
        self._put_rings_back()
        self.backend.forget_steps()
        return last.since(first) / count

    def _entries(self) -> list[Entry]:
        return [self.backend.entry(sequence) for sequence in self.sequences]

    def record(self, count: int) -> np.ndarray:
        """int32 [batch, count]: the greedy continuation without drafts, from where the sequences stand; they go back
        to there.
        """
        starts = [len(sequence.emitted) for sequence in self.sequences]
        self._keep_rings()
        for sequence in self.sequences:
            self.backend.set_drafting(sequence, draft=False)
        while any(len(s.emitted) < start + count for s, start in zip(self.sequences, starts, strict=True)):
            self.backend.enqueue(self.sequences)
            self.backend.poll()
        self.backend.finish()
        out = np.array([s.emitted[at : at + count] for s, at in zip(self.sequences, starts, strict=True)], np.int32)
        self._put_rings_back()
        for sequence, start in zip(self.sequences, starts, strict=True):
            del sequence.emitted[start:]
            self.backend.set_drafting(sequence, draft=True)
        return out

    def inject(self, recorded: np.ndarray, keep: float, seed: int = 0) -> None:
        """Offer a recording as drafts in all later steps, each kept with probability `keep`."""
        machines, count = self.backend.machines, recorded.shape[1]
        table = np.zeros((self.machine.slots, count), np.int32)
        for sequence, tokens in zip(self.sequences, recorded, strict=True):
            table[self.backend.slot_of(sequence)] = tokens
        if not self._injected:
            self._injected = [machine.device.allocate(table.nbytes, "workspace") for machine in machines]
        first, kept = self.sequences[0].last_position + 1, int(keep * (2**32 - 1))
        for machine, at in zip(machines, self._injected, strict=True):
            machine.device.upload(at, table)
            machine.steps.inject((at, count, first, count, seed, kept, self.machine.spec.vocab_size))

    def profile(self) -> dict[str, tuple[int, float]]:
        """Kernel -> (launches a step, microseconds a step)."""
        self.backend.finish()
        found: dict[str, tuple[int, float]] = {}
        for half in ("draft", "verify") if self._bucket().groups else ("verify",):
            for name, (count, us) in self._profile_half(half).items():
                before = found.get(name, (0, 0.0))
                found[name] = (before[0] + count, before[1] + us)
        return found

    def _profile_half(self, half: str) -> dict[str, tuple[int, float]]:
        """Each on the operands that its half leaves: a plan of the backbone's experts is none of the drafter's."""
        device, steps, bucket, found = self.machine.device, self.machine.steps, self._bucket(), {}
        seen = list(_launches(steps, bucket, half))
        for name, count in Counter(name for name, *_ in seen).items():
            if name in MOVING:
                continue
            self._device_time(lambda: self._again(lambda: steps.walk(bucket, device.launch)), 1)
            if half == "draft":
                steps.walk(bucket, device.launch, ("draft",))
            with device.capture() as graph:
                for other, args, options in seen:
                    if other == name:
                        device.launch(other, *args, **options)
            graph.launch()
            first = device.record(timing=True)
            for _ in range(REPEATS):
                graph.launch()
            last = device.record(timing=True)
            last.wait()
            found[name] = (count, last.since(first) / REPEATS * 1e6)
        return found

    def _keep_rings(self) -> None:
        for device, address, size, place in self._rings:
            device.copy_async(place, address, size)

    def _put_rings_back(self) -> None:
        for device, address, size, place in self._rings:
            device.copy_async(address, place, size)

    def _bucket(self) -> Bucket:
        return bucket_of(self._entries(), self.machine.spec.dspark_block_size)

    def _records(self) -> int:
        return self.backend.collected


def fill(machine: Machine, slot: int, context: int, rng: np.random.Generator) -> None:
    """Random valid values in a slot's pages and windows, for a context of so many tokens; zeros in what else it has, so
    that all ranks have the same.
    """
    pages, device = machine.pages, machine.device
    held = pages.pages_of(slot)
    patterns = device.allocate(PATTERNS * pages.page_bytes, "workspace")
    device.upload(patterns, np.concatenate([_page(pages.layout, rng) for _ in range(PATTERNS)]))
    for number, page in enumerate(held[: pages_for(context)]):
        source = patterns + number % PATTERNS * pages.page_bytes
        device.copy_async(pages.pool + page * pages.page_bytes, source, pages.page_bytes)
    rows, width = pages.window_pitch // pages.row_bytes, machine.spec.head_dim
    window = np.zeros((rows, pages.row_bytes), np.uint8)
    window[:, :width] = _codes(rng, (rows, width))
    window[:, width : width + width // 32] = rng.integers(*UE8M0_SCALES, (rows, width // 32))
    device.upload(pages.windows + slot * pages.window_pitch, window)
    device.zero(pages.history + 4 * HISTORY * slot, 4 * HISTORY)
    pair = PAIR_RING * 8 * machine.spec.head_dim
    for address in pages.pairs.values():
        device.zero(address + pair * slot, pair)


def _scratch(machine: Machine) -> list[tuple[int, int, int]]:
    """(address, bytes, place for a copy) of all rings: a run of more tokens than they spare cannot go back."""
    pages, device = machine.pages, machine.device
    slots, head = pages.slots, machine.spec.head_dim
    rings = [(pages.windows, slots * pages.window_pitch), (pages.history, 4 * HISTORY * slots)]
    rings += [(address, slots * PAIR_RING * 8 * head) for address in pages.pairs.values()]
    return [(address, size, device.allocate(size, "bench")) for address, size in rings]


def _launches(steps: Any, bucket: Bucket, half: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every launch of a half of a step."""
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def launch(name: str, *args: Any, **options: Any) -> None:
        seen.append((name, args, options))

    steps.walk(bucket, launch, (half,))
    return iter(seen)


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random e4m3 codes, none of which is a NaN."""
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)


def _page(layout: Any, rng: np.random.Generator) -> np.ndarray:
    """uint8 [page_bytes] of random entries and keys."""
    page = rng.integers(0, 256, layout.page_bytes, np.uint8)
    for source in layout.sources:
        for plane, bounds in ((source.scales, E4M3_SCALES), (source.key_scales, UE8M0_SCALES)):
            page[plane.offset : plane.end] = rng.integers(*bounds, plane.end - plane.offset)
    return page
