"""Several ranks on one device: what each queues is kept, then queued in turns, the pushes of all before any join."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsuf.engine.gpu import launches
from dsuf.engine.gpu.engram_tables import join_shares
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.ranks import ALONE, Ranks
from dsuf.engine.options import EngineOptions
from dsuf.kernels.latents import MOST_ROWS
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
    """The device as one rank sees it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.stretches: list[list[Call]] = [[]]  # what comes before, between and after joins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, name: str, *args: float, **how: Any) -> None:
        if name.startswith("reduce.join"):
            self.stretches.append([])
        self.stretches[-1].append((self._device.launch, (name, *args), how))

    def copy_async(self, target: int, source: int, nbytes: int) -> None:
        self.stretches[-1].append((self._device.copy_async, (target, source, nbytes), {}))

    def zero(self, address: int, nbytes: int) -> None:
        self.stretches[-1].append((self._device.zero, (address, nbytes), {}))

    def upload(self, address: int, array: np.ndarray) -> None:
        self.stretches[-1].append((self._device.upload, (address, np.array(array)), {}))


class Together:
    """Machines of all ranks of a checkpoint on one device; with `count` 1 the one that is alone."""

    def __init__(self, folder: Path, device: Any, count: int) -> None:
        self.device, self.seats = device, [Seat(device) for _ in range(count)]
        self.ranks = Ranks(self.seats)
        room = {"max_context": CONTEXT, "max_sequences": SEQUENCES, "cache_tokens": 512}
        options, told = EngineOptions(folder, prefill="exact", prefill_chunk=ROWS, **room), lambda what, share: None
        self.machines = [
            Machine.load(options, None, seat, told, graphs=False, rank=self.ranks.rank(i) if count > 1 else ALONE)
            for i, seat in enumerate(self.seats)
        ]
        if count > 1:
            join_shares([machine.model.weights for machine in self.machines])
            self.ranks.prepare(self.machines[0].spec, max(MOST_ROWS, ROWS))
        self.play()
        self.slots = [machine.pages.open() for machine in self.machines]
        for machine, slot in zip(self.machines, self.slots, strict=True):
            machine.pages.reserve(slot, CONTEXT)

    def play(self) -> None:
        """Let the device do what the ranks have queued."""
        taken = [seat.stretches for seat in self.seats]
        assert len({len(stretches) for stretches in taken}) == 1, "ranks differ in their number of joins"
        for of_ranks in zip(*taken, strict=True):
            for stretch in of_ranks:
                for call, args, how in stretch:
                    call(*args, **how)
        for seat in self.seats:
            seat.stretches = [[]]
        self.device.synchronize()
        self.ranks.check()

    def each(self, do: Callable[[Machine, int], Any]) -> list[Any]:
        """do(machine, slot) of every rank, then play."""
        found = [do(machine, slot) for machine, slot in zip(self.machines, self.slots, strict=True)]
        self.play()
        return found
