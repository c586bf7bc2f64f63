"""Buffers, copies and timed graphs on a GPU, for the measuring scripts of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np


class Gpu:
    """Buffers, copies and timed graphs on the current device."""

    def __init__(self) -> None:
        from cuda.core import Device

        self.device = Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.kept: list[Any] = []
        self.rng = np.random.default_rng(0)

    def empty(self, size: int) -> int:
        buffer = self.device.allocate(max(size, 256), stream=self.stream)
        self.kept.append(buffer)
        return int(buffer.handle)

    def put(self, array: np.ndarray) -> int:
        from cuda.bindings import driver

        array = np.ascontiguousarray(array)
        at = self.empty(array.nbytes)
        check(driver.cuMemcpyHtoDAsync(at, array.ctypes.data, array.nbytes, self.stream.handle))
        self.stream.sync()
        return at

    def get(self, at: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        from cuda.bindings import driver

        out = np.empty(shape, dtype)
        self.stream.sync()
        check(driver.cuMemcpyDtoH(out.ctypes.data, at, out.nbytes))
        return out

    def repeated(self, block: np.ndarray, size: int) -> int:
        """`size` bytes filled with copies of a block, each copy doubling what is there."""
        from cuda.bindings import driver

        raw = block.reshape(-1).view(np.uint8)
        at = self.empty(size)
        done = min(raw.size, size)
        check(driver.cuMemcpyHtoDAsync(at, raw.ctypes.data, done, self.stream.handle))
        while done < size:
            step = min(done, size - done)
            check(driver.cuMemcpyDtoDAsync(at + done, at, step, self.stream.handle))
            done += step
        self.stream.sync()
        return at

    def free(self) -> None:
        for buffer in self.kept:
            buffer.close(self.stream)
        self.kept.clear()

    def timed(self, launches: list[Any], replays: int = 15) -> list[float]:
        """Microseconds of a launch in each replay of a graph of all of them."""
        from cuda.core import EventOptions

        builder = self.stream.create_graph_builder()
        builder.begin_building()
        for one in launches:
            one(builder)
        graph = builder.end_building().complete()
        options = EventOptions(timing_enabled=True)
        times = []
        for i in range(replays + 3):
            before = self.stream.record(options=options)
            graph.launch(self.stream)
            after = self.stream.record(options=options)
            after.sync()
            if i >= 3:
                times.append((after - before) * 1e3 / len(launches))
        return times


def check(result: tuple) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0].name}")
