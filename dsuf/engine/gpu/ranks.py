"""Several ranks: what part of the model's work each does, and sums over all of them (kernels/reduce.py).

    ranks = Ranks([device0, device1])
    ranks.rank(1).part(384)                (192, 192): the second half of the experts
    ranks.prepare(spec, rows)
    total = ranks.exchange(rows, width)
    total.push(rank, part)                 of every rank, on its own stream
    total.join(rank, out)                  out = sum over ranks, the same bits on each
    ranks.check()
    in_turns(walk(rank) for every rank)    launches of all, up to a sum of each at a time

Heads, their groups and the head's rows are cut where kernels can take the parts, experts by number; streams, caches,
indexer, router and the shared expert are whole on every rank, so that all of them choose the same, bit for bit.

The same device may stand for several ranks: then all pushes must be queued before the first join, because a join waits
on the device for what comes behind it. A join that waits in vain ends after BOUND_US and leaves a fault word.

One host thread queues the work of all ranks, and a driver may let it wait until a device is idle: when a kernel is
launched for the first time, or a thousand launches are queued. A device that waits at a join for what the host has not
queued yet would then wait in vain. So of launches one by one no join is queued before all ranks' pushes, and graphs are
made on every rank before any starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.errors import DeviceError
from dsuf.kernels import pack
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.reduce import MOST_BLOCKS, MOST_RANKS, PIECE, blocks_of, inbox_bytes
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device, Event

BOUND_US = 2_000_000  # a step is milliseconds; a rank that is this late is gone
Launch = Callable[..., None]  # (name, *arguments, grid=(x, y))
KIND = "exchange"
JOIN = "reduce.join"  # how the names of kernels begin that wait for other ranks
STEP_ROWS = (6, 12, 24, MOST_ROWS)  # that a step's exchanges are made for


@dataclass(frozen=True)
class Rank:
    """One of `count` ranks; `ranks` is its way to the others."""

    index: int = 0
    count: int = 1
    ranks: Ranks | None = field(default=None, compare=False, repr=False)

    def part(self, size: int, unit: int = 1) -> tuple[int, int]:
        """(first, how many) of `size` things, in whole units: equal parts, or all of them where there are none."""
        if size % (unit * self.count):
            return 0, size
        mine = size // self.count
        return self.index * mine, mine

    def share(self, spec: Spec) -> Spec:
        """The spec with this rank's heads and groups, if wo_b can take the groups' columns, and rows of the head."""
        if self.count == 1:
            return spec
        mine = spec.o_groups // self.count * spec.o_lora_rank
        unit = pack.FP8_CHUNK if mine >= pack.WIDE_K else pack.SMALL_CHUNK
        parts = 1 if spec.o_groups % self.count or mine % unit else self.count
        return replace(
            spec,
            num_attention_heads=spec.num_attention_heads // parts,
            o_groups=spec.o_groups // parts,
            vocab_size=self.part(spec.vocab_size, pack.ROWS)[1],
        )


ALONE = Rank()


class Turn:
    """Launches of one rank's walk: kept until the walks of the others have come as far, if there are others."""

    def __init__(self, device: Device, rank: Rank) -> None:
        self._device, self._alone = device, rank.count == 1
        self._kept: list[list[tuple[str, tuple[float, ...], dict[str, Any]]]] = [[]]  # before, between and after joins

    def launch(self, name: str, *args: float, **how: Any) -> None:
        """Device.launch, now or later."""
        if self._alone:
            self._device.launch(name, *args, **how)
            return
        if name.startswith(JOIN):
            self._kept.append([])
        self._kept[-1].append((name, args, how))

    def send(self, stretch: int) -> None:
        """Queue what is kept between two joins."""
        for name, args, how in self._kept[stretch]:
            self._device.launch(name, *args, **how)

    @property
    def stretches(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def clear(self) -> None:
        """All are sent."""
        self._kept = [[]]


def in_turns(walks: Iterable[Iterator[Turn]]) -> None:
    """Run the walks of all ranks to their ends. Each yields its turn where it wants its launches sent."""
    for turns in zip(*walks, strict=True):
        for stretch in range(turns[0].stretches):
            for turn in turns:
                turn.send(stretch)
        for turn in turns:
            turn.clear()


class Marks:
    """A point in the work of every rank: an event of each."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._events: list[Event] = [device.record() for device in ranks.devices]

    def done(self) -> bool:
        """Whether everything before it has ended everywhere. Raises DeviceError if that work failed."""
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        """Block the host until then. Raises DeviceError if that work failed, or a join gave up."""
        for event in self._events:
            event.wait()
        self._ranks.check()


class Ranks:
    """The devices of all ranks, in rank order; each sees the memory of the others."""

    def __init__(self, devices: Sequence[Device], *, bound_us: int = BOUND_US) -> None:
        if not 1 <= len(devices) <= MOST_RANKS:
            raise DeviceError(f"{len(devices)} ranks were asked for; the exchange is made for 1 to {MOST_RANKS}.")
        self.devices, self.bound_us = list(devices), bound_us
        self.several = len({device.index for device in devices}) > 1
        self.faults = [device.pinned(4).view(np.uint32) for device in self.devices]
        self._exchanges: dict[int, Exchange] = {}
        self._sums: list[str] = ["a sum"]  # by code
        if self.several:
            for device in self.devices:
                for other in self.devices:
                    if other.index != device.index:
                        device.see(other)

    def rank(self, index: int) -> Rank:
        """One of them."""
        return Rank(index, len(self.devices), self)

    def device(self, rank: int) -> Device:
        """The rank's device."""
        return self.devices[rank]

    def record(self) -> Marks:
        """After what every rank has queued by now."""
        return Marks(self)

    def synchronize(self) -> None:
        """Block until every rank has done what is queued. Raises DeviceError like `Marks.wait`."""
        for device in self.devices:
            device.synchronize()
        self.check()

    def prepare(self, spec: Spec, rows: int) -> None:
        """Take memory for everything that steps and prompt passes of up to `rows` rows exchange, before any of it."""
        self._exchanges = {room: Exchange(self, room) for room in rooms(spec, self.rank(0), rows)}

    def exchange(self, rows: int, width: int) -> Exchange:
        """For parts of so many rows of `width` bf16 elements: the smallest that holds them."""
        return next(one for room, one in self._exchanges.items() if room >= rows * width)

    def code(self, what: str) -> int:
        """The number that stands for a sum in a fault word."""
        if what not in self._sums:
            self._sums.append(what)
        return self._sums.index(what)

    def check(self) -> None:
        """Raise DeviceError if a join gave up."""
        for rank, fault in enumerate(self.faults):
            word = int(fault[0])
            if word:
                what, missing = self._sums[word >> 8], (word & 0xFF) - 1
                raise DeviceError(
                    f"rank {rank} waited {self.bound_us / 1e6:g} s for rank {missing} in {what} "
                    f"(reduce.join on GPU {self.devices[rank].index}). GPU {self.devices[missing].index} hangs or its "
                    "work was lost; the engine must be started again."
                )


class Exchange:
    """Inboxes and epochs for parts of up to `room` bf16 elements. Of the calls `launch` is the rank's own device's, or
    stands for it, and `elements` how many there are, a multiple of 8; 0: all.
    """

    def __init__(self, ranks: Ranks, room: int) -> None:
        if room % PIECE:
            raise DeviceError(f"a sum of {room} elements; expected a multiple of {PIECE}.")
        self.ranks, self.room, self.count = ranks, room, len(ranks.devices)
        self.grid = (blocks_of(room), 1)
        size = inbox_bytes(self.count, room)
        self._inboxes = [_zeroed(ranks.device(rank), size) for rank in range(self.count)]
        self._epochs = [_zeroed(ranks.device(rank), 4 * MOST_BLOCKS) for rank in range(self.count)]
        for rank in range(self.count):
            ranks.device(rank).synchronize()

    def push(self, rank: int, part: int, elements: int = 0, launch: Launch | None = None) -> None:
        """Send this rank's part to every rank."""
        self._launch(rank, launch)("reduce.push", part, *self._to_all(rank, elements), grid=self.grid)

    def push_experts(
        self, rank: int, parts: int, experts: int, own: tuple[int, int], k: int, width: int, elements: int,
        launch: Launch | None = None,
    ) -> None:  # fmt: skip
        """Send the sum over each row's slots whose expert is one of own = (first, how many)."""
        self._launch(rank, launch)(
            "reduce.push_experts", parts, experts, *own, k, width, *self._to_all(rank, elements), grid=self.grid
        )

    def join(self, rank: int, out: int, code: int = 0, elements: int = 0, launch: Launch | None = None) -> None:
        """out = sum of all ranks' parts; `code` names the sum in a fault word."""
        inbox, sizes, last = self._from_all(rank, elements, code)
        self._launch(rank, launch)("reduce.join", *inbox[:2], out, inbox[2], *sizes, *last, grid=self.grid)

    def join_rows(self, rank: int, out: int, mine: int, code: int, elements: int, launch: Launch | None = None) -> None:
        """out = rows of all ranks' parts, `mine` float32 each, beside each other."""
        inbox, sizes, last = self._from_all(rank, elements, code)
        self._launch(rank, launch)("reduce.join_rows", *inbox[:2], out, inbox[2], *sizes, mine, *last, grid=self.grid)

    def _launch(self, rank: int, launch: Launch | None) -> Launch:
        return launch or self.ranks.device(rank).launch

    def _to_all(self, rank: int, elements: int) -> tuple[int, ...]:
        nobody = (0,) * (MOST_RANKS - self.count)
        return (self._epochs[rank], rank, self.count, elements or self.room, self.room, *self._inboxes, *nobody)

    def _from_all(self, rank: int, elements: int, code: int) -> tuple[tuple[int, ...], ...]:
        """(inbox, epochs, fault word), sizes, (bound, code)."""
        ranks = self.ranks
        inbox = (self._inboxes[rank], self._epochs[rank], ranks.faults[rank].ctypes.data)
        return inbox, (self.count, elements or self.room, self.room), (ranks.bound_us, code)


def rooms(spec: Spec, rank: Rank, rows: int) -> list[int]:
    """Elements of the exchanges that steps and passes of up to `rows` rows need."""
    logits = 2 * rank.share(spec).vocab_size  # float32
    sums = [count * spec.hidden_size for count in sorted({*STEP_ROWS, max(rows, MOST_ROWS)})]
    return sorted({*sums, *(count * logits for count in STEP_ROWS)})


def exchange_bytes(spec: Spec, rank: Rank, rows: int) -> int:
    """Bytes of all of them on one device."""
    return 0 if rank.count == 1 else sum(inbox_bytes(rank.count, room) for room in rooms(spec, rank, rows))


def _zeroed(device: Device, size: int) -> int:
    address = device.allocate(size, KIND)
    device.zero(address, size)
    return address
