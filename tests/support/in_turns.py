"""Several ranks on one device: what each queues is kept, then queued in turns, the pushes of all before any join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dsuf.engine.gpu.engram_tables import join_shares
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.ranks import ALONE, Ranks
from dsuf.engine.options import EngineOptions
from dsuf.kernels.latents import MOST_ROWS

Call = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]


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

    def __init__(self, folder: Path, device: Any, count: int, **options: Any) -> None:
        self.device, self.seats = device, [Seat(device) for _ in range(count)]
        self.ranks = Ranks(self.seats)
        given = {"prefill": "exact", "max_context": 256, "max_sequences": 2, "cache_tokens": 512, "prefill_chunk": 48}
        chosen, told = EngineOptions(folder, **{**given, **options}), lambda what, share: None
        self.machines = [
            Machine.load(chosen, None, seat, told, graphs=False, rank=self.ranks.rank(i) if count > 1 else ALONE)
            for i, seat in enumerate(self.seats)
        ]
        if count > 1:
            join_shares([machine.model.weights for machine in self.machines])
            self.ranks.prepare(self.machines[0].spec, max(MOST_ROWS, chosen.prefill_chunk))
        self.play()
        self.slots = [machine.pages.open() for machine in self.machines]
        for machine, slot in zip(self.machines, self.slots, strict=True):
            machine.pages.reserve(slot, 200)

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
