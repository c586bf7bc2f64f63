"""cuMemcpyBatchAsync on arrays of addresses as they are; cuda.bindings would make an object of each address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CUDA = 13_000  # whose form of the call this is


class CopyBatch:
    """The driver's call. Raises RuntimeError where the driver is older than it."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        status, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", CUDA, 0)
        if int(status) != 0 or not address:
            raise RuntimeError("the driver knows no batches of copies")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        form = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer)
        self._call, self._result = form(int(address)), driver.CUresult
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._first = size(0)  # the copy from which on the attributes hold
        self._fixed = self._attributes.getPtr(), ctypes.addressof(self._first), 1

    def __call__(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> Any:
        """Queue copies of int64 [n] addresses and bytes, in any order among themselves; the driver's status."""
        columns = (np.ascontiguousarray(column, np.int64) for column in (targets, sources, sizes))
        to, of, many = columns
        status = self._call(_at(to), _at(of), _at(many), len(many), *self._fixed, stream)
        return self._result(status)


def _at(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
