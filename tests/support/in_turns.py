"""Several ranks on one device: what each queues is kept, then queued in turns, the pushes of all before any join."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsuf.engine.gpu import launches, machines
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.ranks import Ranks
from dsuf.engine.options import EngineOptions
from dsuf.model.synthetic import write_checkpoint
from tests.engine.gpu.small import small_config

Call = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]


CONTEXT, SEQUENCES, ROWS = 256, 2, 200  # tokens of a sequence, sequences, rows of a chunk


@contextlib.contextmanager
def four_groups() -> Iterator[None]:
    """Let the small kernels take four groups of heads, which four ranks can share. The number of groups is an argument
    of theirs; that of a width says how much shared memory they may need, and four of one head need no more.
    """
    kept = launches.FIXED
    launches.FIXED = tuple(name for name in kept if name != "o_groups")
    try:
        yield
    finally:
        launches.FIXED = kept


def written(folder: Path) -> Path:
    """A checkpoint with four groups on disk."""
    write_checkpoint(small_config(o_groups=4), folder)
    return folder


class Seat:
    """The device as one rank sees it: what it queues is kept until somebody waits, as far as all ranks have come."""

    def __init__(self, device: Any, table: Table) -> None:
        self._device, self._table = device, table
        self.stretches: list[list[Call]] = [[]]  # what comes before, between and after joins
        self.pushes = self.joins = 0
        self._captured: list[Call] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def queue(self, do: Callable[..., None], args: tuple[Any, ...], how: dict[str, Any]) -> None:
        """Keep a call, or record it."""
        if self._captured is not None:
            self._captured.append((do, args, how))
            return
        if do == self._device.launch and args[0].startswith("reduce.join"):
            self.stretches.append([])
            self.joins += 1
        self.pushes += do == self._device.launch and args[0].startswith("reduce.push")
        self.stretches[-1].append((do, args, how))

    def launch(self, name: str, *args: float, **how: Any) -> None:
        if name.startswith("reduce.join") and self._captured is None:
            self._table.early += any(seat.pushes <= self.joins for seat in self._table.seats)
        self.queue(self._device.launch, (name, *args), how)

    def copy_async(self, target: int, source: int, nbytes: int) -> None:
        self.queue(self._device.copy_async, (target, source, nbytes), {})

    def copy_many(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        self.queue(self._device.copy_many, (targets.copy(), sources.copy(), sizes.copy()), {})

    def zero(self, address: int, nbytes: int) -> None:
        self.queue(self._device.zero, (address, nbytes), {})

    def upload(self, address: int, array: np.ndarray) -> None:
        self.queue(self._device.upload, (address, np.array(array)), {})

    def download(self, address: int, nbytes: int) -> np.ndarray:
        self.synchronize()
        return self._device.download(address, nbytes)

    @contextlib.contextmanager
    def capture(self) -> Iterator[SeatGraph]:
        self._captured = []
        try:
            yield SeatGraph(self, self._captured)
        finally:
            self._captured = None

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        """Side streams too are one queue here."""
        yield

    def record(self, *, timing: bool = False) -> SeatEvent:
        event = SeatEvent(self)
        self.queue(event.reach, (), {})
        return event

    def wait(self, event: SeatEvent) -> None:
        pass

    def synchronize(self) -> None:
        self.record().wait()

    def play(self) -> None:
        """Let the device do what all ranks have come to."""
        self._table.play()


class SeatGraph:
    """Calls as they were captured."""

    def __init__(self, seat: Seat, calls: list[Call]) -> None:
        self._seat, self._calls = seat, calls

    @property
    def launches(self) -> int:
        return len(self._calls)

    def launch(self) -> None:
        for call in self._calls:
            self._seat.queue(*call)


class SeatEvent:
    """A point in a seat's queue."""

    def __init__(self, seat: Seat) -> None:
        self._seat, self._reached, self._at = seat, False, 0.0

    def reach(self) -> None:
        self._reached, self._at = True, time.perf_counter()

    def since(self, earlier: SeatEvent) -> float:
        return self._at - earlier._at

    def done(self) -> bool:
        self._seat.play()
        return self._reached

    def wait(self) -> None:
        self._seat.play()
        assert self._reached, "the host waits for a rank that waits for what another has not queued yet"


class Table:
    """The seats of all ranks on one device. `early`: joins outside of graphs that came before one of their pushes."""

    early = 0

    def __init__(self, device: Any, count: int) -> None:
        self.device, self.seats = device, [Seat(device, self) for _ in range(count)]

    def play(self) -> None:
        """Do what is queued, up to the join that not every rank has come to: who is further waits there."""
        common = min(len(seat.stretches) for seat in self.seats)
        taken = [seat.stretches[:common] for seat in self.seats]
        for seat in self.seats:
            seat.stretches = [[], *seat.stretches[common:]]
        for of_ranks in zip(*taken, strict=True):
            for stretch in of_ranks:
                for call, args, how in stretch:
                    call(*args, **how)
        self.device.synchronize()


class Together(Table):
    """Machines of all ranks of a checkpoint on one device; with `count` 1 the one that is alone."""

    def __init__(self, folder: Path, device: Any, count: int) -> None:
        super().__init__(device, count)
        self.ranks = Ranks(self.seats)
        room = {"max_context": CONTEXT, "max_sequences": SEQUENCES, "cache_tokens": 512}
        options, told = EngineOptions(folder, prefill="exact", prefill_chunk=ROWS, **room), lambda what, share: None
        self.machines = machines.load(options, None, self.ranks, told, graphs=False)
        self.play()
        self.slots = [machine.pages.open() for machine in self.machines]
        for machine, slot in zip(self.machines, self.slots, strict=True):
            machine.pages.reserve(slot, CONTEXT)

    def play(self) -> None:
        """Everything; all ranks have come equally far."""
        assert len({len(seat.stretches) for seat in self.seats}) == 1, "ranks differ in their number of joins"
        super().play()
        self.ranks.check()

    def each(self, do: Callable[[Machine, int], Any]) -> list[Any]:
        """do(machine, slot) of every rank, then play."""
        found = [do(machine, slot) for machine, slot in zip(self.machines, self.slots, strict=True)]
        self.play()
        return found
