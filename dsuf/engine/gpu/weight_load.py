"""Weights from a checkpoint to the device: mapped files -> page-locked buffers -> device -> packed by kernels.

Tensors travel in pieces of whole tiles, several to a buffer. While the device packs one buffer, threads copy the next
pieces out of the mapped files, which is what takes the time: the copies run outside the interpreter lock. The result is
bit for bit that of weights.packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsuf import formats
from dsuf.engine.gpu.weight_plan import PAIR_TILES, Part
from dsuf.engine.gpu.weights import Progress, Weights, fp8_share, quantised, share
from dsuf.kernels import pack
from dsuf.kernels.gate_up import GATE_UP_CHUNK

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Event
    from dsuf.model.checkpoint import Checkpoint

BUFFER = 64 << 20
BUFFERS = 3
COPY = 4 << 20  # bytes that a thread copies at a time
MOST_THREADS = 8
ROWS = 32  # of a piece: a multiple of this shares no scale with the next
GRID = 132 * 8
SMALL = 64 << 20  # bytes of a checkpoint that is packed on the host, before the buffers would be page-locked
ALIGNMENT = 256


@dataclass(frozen=True)
class _Piece:
    """Arrays that go to a buffer, and what the device then does with their addresses there."""

    arrays: tuple[np.ndarray, ...]
    use: Callable[[tuple[int, ...]], None]
    nbytes: int  # of packed weights, for the progress

    @property
    def room(self) -> int:
        return sum(_whole(array.nbytes) for array in self.arrays)


@dataclass
class _Buffer:
    """Page-locked memory, its copy on the device, and the event after its last use."""

    host: np.ndarray
    device: int
    event: Event | None = None
    pieces: list[_Piece] = field(default_factory=list)
    used: int = 0


def load(weights: Weights, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Load all parts, whichever way is quicker."""
    if sum(part.nbytes for part in weights.loaded) <= SMALL:
        weights.load(checkpoint, progress)
    else:
        Loader(weights, checkpoint).run(progress)


class Loader:
    """Loads all parts of one device's weights."""

    def __init__(self, weights: Weights, checkpoint: Checkpoint, *, buffer: int = BUFFER) -> None:
        self.weights, self.checkpoint, self.device = weights, checkpoint, weights.device
        self._size = buffer
        self._buffers = [
            _Buffer(self.device.pinned(buffer), self.device.allocate(buffer, "loading")) for _ in range(BUFFERS)
        ]

    def run(self, progress: Progress | None = None) -> None:
        """Load everything, and wait for the end."""
        total, done, turn = sum(part.nbytes for part in self.weights.loaded), 0, 0
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            current = self._buffers[0]
            for piece in self._pieces():
                if current.used + piece.room > self._size:
                    self._send(current, pool)
                    done += sum(one.nbytes for one in current.pieces)
                    if progress is not None:
                        progress(done, total)
                    turn += 1
                    current = self._buffers[turn % BUFFERS]
                    current.pieces, current.used = [], 0
                current.pieces.append(piece)
                current.used += piece.room
            self._send(current, pool)
        self.device.synchronize()
        if progress is not None:
            progress(total, total)

    def _send(self, buffer: _Buffer, pool: ThreadPoolExecutor) -> None:
        """Copy a buffer's pieces into it, then to the device, and queue what makes weights of them."""
        if buffer.event is not None:
            buffer.event.wait()
        at, copies, addresses = 0, [], []
        for piece in buffer.pieces:
            places = []
            for array in piece.arrays:
                copies += _copies(buffer.host[at : at + array.nbytes], array)
                places.append(buffer.device + at)
                at += _whole(array.nbytes)
            addresses.append(tuple(places))
        for _ in pool.map(lambda pair: np.copyto(*pair), copies):
            pass
        self.device.copy_async(buffer.device, buffer.host.ctypes.data, at)
        for piece, places in zip(buffer.pieces, addresses, strict=True):
            piece.use(places)
        buffer.event = self.device.record()

    # ---- pieces

    def _pieces(self) -> Iterator[_Piece]:
        for part in self.weights.loaded:
            yield from {
                "plain": self._plain, "qk": self._qk, "fp8": self._fp8, "bf16": self._bf16, "w13": self._w13,
                "w2": self._w2,
            }[part.layout](part, self.weights.address(part))  # fmt: skip

    def _plain(self, part: Part, at: int) -> Iterator[_Piece]:
        for name in part.tensors:
            raw = share(name, part, self.checkpoint)
            for begin in range(0, raw.size, self._size):
                yield self._plain_piece(raw[begin : begin + self._size], at)
                at += min(self._size, raw.size - begin)

    def _plain_piece(self, raw: np.ndarray, at: int) -> _Piece:
        return _Piece((raw,), lambda places: self.device.copy_async(at, places[0], raw.size), raw.size)

    def _qk(self, part: Part, at: int) -> Iterator[_Piece]:
        q, k = (formats.bf16_to_float32(self.checkpoint.raw(name)) for name in part.tensors)
        yield self._plain_piece((q * k).reshape(-1).view(np.uint8), at)

    def _fp8(self, part: Part, at: int) -> Iterator[_Piece]:
        chunk, first = pack.chunk_width(part.k), 0
        for name in part.tensors:
            codes, scales = fp8_share(name, part, self.checkpoint)
            for begin, end in self._runs(codes):
                arrays = (codes[begin:end], scales[begin // 32 : -(-end // 32)])
                arguments = (at, end - begin, part.k, chunk, first + begin // pack.ROWS)
                yield self._packing("pack.fp8", arrays, arguments, part)
            first += len(codes) // pack.ROWS

    def _bf16(self, part: Part, at: int) -> Iterator[_Piece]:
        chunk, first = pack.chunk_width(part.k, pack.BF16_CHUNK), 0
        for name in part.tensors:
            bits = share(name, part, self.checkpoint)
            for begin, end in self._runs(bits):
                arguments = (at, end - begin, part.k, chunk, first + begin // pack.ROWS)
                yield self._packing("pack.bf16", (bits[begin:end],), arguments, part)
            first += len(bits) // pack.ROWS

    def _w13(self, part: Part, at: int) -> Iterator[_Piece]:
        yield from self._experts(part, at, ("w1", "w3"), pack.chunk_width(part.k, GATE_UP_CHUNK), PAIR_TILES)

    def _w2(self, part: Part, at: int) -> Iterator[_Piece]:
        yield from self._experts(part, at, ("w2",), pack.chunk_width(part.k), 1)

    def _experts(self, part: Part, at: int, names: tuple[str, ...], chunk: int, run: int) -> Iterator[_Piece]:
        size = part.nbytes // part.experts
        for number in range(part.experts):
            for which, name in enumerate(names):
                codes, scales = quantised(f"{part.tensors[0]}.{part.first + number}.{name}", self.checkpoint)
                for begin, end in self._runs(codes):
                    arguments = (
                        at + number * size, end - begin, part.k, chunk, begin // pack.ROWS, run, len(names), which,
                    )  # fmt: skip
                    yield self._packing("pack.fp4", (codes[begin:end], scales[begin:end]), arguments, part)

    def _packing(self, kernel: str, arrays: tuple[np.ndarray, ...], arguments: tuple[int, ...], part: Part) -> _Piece:
        target, *rest = arguments
        tiles = -(-len(arrays[0]) // pack.ROWS)
        grid = (min(GRID, -(-tiles * part.k // 32 // 8)), 1)
        nbytes = part.nbytes * len(arrays[0]) // (part.n * max(part.experts, 1))

        def use(places: tuple[int, ...]) -> None:
            self.device.launch(kernel, *places, target, *rest, grid=grid)

        return _Piece(arrays, use, nbytes)

    def _runs(self, rows: np.ndarray) -> Iterator[tuple[int, int]]:
        """Row ranges of a matrix whose pieces fit a buffer, with room for scales."""
        step = max(self._size // 2 // max(rows.nbytes // len(rows), 1) // ROWS, 1) * ROWS
        return ((begin, min(begin + step, len(rows))) for begin in range(0, len(rows), step))


def _copies(target: np.ndarray, array: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(to, from) pairs of at most some megabytes."""
    rows = target.view(array.dtype).reshape(array.shape)
    step = max(1, COPY // max(array.nbytes // max(len(array), 1), 1))
    return [(rows[i : i + step], array[i : i + step]) for i in range(0, len(array), step)]


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
