"""Random operands in storage formats, comparison that names the first wrong element, and running a kernel on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dsuf import formats
from dsuf.kernels.lang import Kernel
from dsuf.kernels.simt.memory import GlobalMemory
from dsuf.kernels.simt.run import run
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal values as bf16 bits."""
    return formats.float32_to_bf16(rng.standard_normal(shape).astype(np.float32))


def fp8_weight(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, k] and 32x32 scales."""
    return formats.quantise_fp8_blocks((rng.standard_normal((n, k)) * 0.1).astype(np.float32))


def fp4_weight(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random packed codes [n, k/2], every one of the 16, and scales over four binades."""
    return rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(118, 122, (n, k // 32), np.uint8)


def q8_rows(x: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [rows, k] -> codes [tile, k], scales [tile, stride], unused rows poisoned, and the values float64 [rows, k]."""
    rows, k = x.shape
    codes, scales = np.full((tile, k), 0x7F, np.uint8), np.full((tile, scale_stride(k)), 0xFF, np.uint8)
    codes[:rows], scales[:rows, : k // 32] = qdq.q8_encode(x)
    return codes, scales, qdq.q8_decode(codes[:rows], scales[:rows, : k // 32]).astype(np.float64)


@lru_cache(maxsize=64)
def made(make: Callable[..., Kernel], **shape: Any) -> Kernel:
    """make(**shape), once for all tests: expanding a kernel often takes longer than interpreting it."""
    return make(**shape)


Argument = np.ndarray | int


GUARD = 4096  # bytes on both sides of an array that belong to nobody
ALIGNED = 256  # as a GPU's allocations are


def guarded(arrays: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(array, copy between guards) of each; those that lie within another have a part of its copy, so have none."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    end = 0
    for array in sorted(arrays, key=lambda a: (a.ctypes.data, -a.nbytes)):
        assert array.flags.c_contiguous, "a kernel buffer must be contiguous; copy it first"
        if array.nbytes and array.ctypes.data < end:
            continue
        end = array.ctypes.data + array.nbytes
        room = np.empty(array.nbytes + 2 * GUARD + ALIGNED, np.uint8)
        first = GUARD + -(room.ctypes.data + GUARD) % ALIGNED
        found.append((array, room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)))
        found[-1][1][...] = array
    return found


def on_interpreter(kernel: Kernel, arguments: Sequence[Argument], grid: tuple[int, int] | None) -> None:
    """Run on the CPU. Arrays stand between guards: an access beyond one must not land in its neighbour."""
    memory = GlobalMemory()
    copies = guarded([a for a in arguments if isinstance(a, np.ndarray)])
    for _, copy in copies:
        memory.add(copy)
    places = [(array.ctypes.data, max(array.nbytes, 1), copy.ctypes.data) for array, copy in copies]
    passed = [moved(places, a.ctypes.data if isinstance(a, np.ndarray) else a) for a in arguments]
    run(kernel, memory, passed, grid=grid)
    for array, copy in copies:
        if array.flags.writeable:
            array[...] = copy


def moved(places: list[tuple[int, int, int]], value: int | float) -> int | float:
    """An address inside one of the arrays (first, bytes, first of its copy) becomes the copy's; all else stays."""
    for first, size, copy in places:
        if first <= value < first + size:
            return copy + (value - first)
    return value


runners: list[Callable[[Kernel, Sequence[Argument], tuple[int, int] | None], None]] = [on_interpreter]


def execute(kernel: Kernel, arguments: Sequence[Argument], grid: tuple[int, int] | None = None) -> None:
    """Run a kernel on arrays, which it reads and writes in place: on the interpreter, or on a GPU (conftest.py)."""
    for runner in runners:
        runner(kernel, arguments, grid)


def values(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to float64."""
    return formats.bf16_to_float32(bits).astype(np.float64)


def assert_near(actual: np.ndarray, expected: np.ndarray, relative: float, absolute: float = 0.0) -> None:
    """Every element within relative * |expected| + absolute; the message names the first that is not."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    wrong = ~(np.abs(actual - expected) <= relative * np.abs(expected) + absolute)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} wrong; first at {first}: {actual[first]} instead of {expected[first]}"
        )


BF16_STEP = 2.0**-8  # half a step of bf16 is 2^-9 of the value; two roundings and float32 sums stay under 2^-8
