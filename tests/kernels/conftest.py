"""Kernel tests on a GPU: the same tests, the same arrays, another place to run.

    pytest tests/kernels --collect-cubins DIR        here: also build every kernel that a test runs, without a GPU
    pytest tests/kernels --on-gpu DIR                there: launch those cubins instead of interpreting

The machine with the GPU needs numpy, ml_dtypes, pytest, cuda-core and cuda-bindings; nothing of Numba.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dsuf.kernels.lang import Kernel
from tests.kernels import helpers

CHIP = "sm_90a"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--collect-cubins", metavar="DIR", help="build every kernel that the kernel tests run")
    parser.addoption("--on-gpu", metavar="DIR", help="run the kernel tests on this machine's GPU with these cubins")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--collect-cubins", None):
        helpers.runners.append(Collector(Path(folder)))
    if folder := config.getoption("--on-gpu", None):
        helpers.runners[:] = [Gpu(Path(folder))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--on-gpu", None):
        planted = ("test_simt", "test_build", "test_lang", "test_ptx", "test_catalogue")
        items[:] = [item for item in items if not item.module.__name__.endswith(planted)]


def name_of(kernel: Kernel) -> str:
    """The same on both machines: trees are spelled alike by all versions of Python, sources are not."""
    body = "".join(ast.dump(statement) for statement in kernel.tree.body)
    rest = kernel.identity.removeprefix(kernel.text)
    return hashlib.sha256((body + rest).encode()).hexdigest()[:32]


def for_another_chip(kernel: Kernel) -> bool:
    """Whether it uses an operation that CHIP does not have."""
    return any(CHIP not in op.chips for op in kernel.ops.values())


class Collector:
    """Builds each kernel once."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, kernel: Kernel, arguments: Sequence, grid: tuple[int, int] | None) -> None:
        from dsuf.kernels.build import build

        file = self.folder / name_of(kernel)
        if not for_another_chip(kernel) and not file.with_suffix(".json").exists():
            built = build(kernel, CHIP, None)
            file.with_suffix(".cubin").write_bytes(built.cubin)
            file.with_suffix(".json").write_text(json.dumps({"entry": built.facts.entry}))


class Gpu:
    """Copies the arrays over, launches, and copies them back."""

    def __init__(self, folder: Path):
        from cuda.core import Device

        self.folder, self.device = folder, Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.launchers: dict[str, object] = {}

    def __call__(self, kernel: Kernel, arguments: Sequence, grid: tuple[int, int] | None) -> None:
        from cuda.bindings import driver

        file = self.folder / name_of(kernel)
        if for_another_chip(kernel):
            pytest.skip("for another chip")
        assert file.with_suffix(".json").exists(), f"{self.folder} holds no {kernel.name}: collect the cubins again"
        launcher = self.launcher(kernel, file)
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        buffers = [self.device.allocate(max(a.nbytes, 16), stream=self.stream) for a in arrays]
        for array, buffer in zip(arrays, buffers, strict=True):  # in the stream's order: a plain copy may land later
            check(driver.cuMemcpyHtoDAsync(int(buffer.handle), array.ctypes.data, array.nbytes, self.stream.handle))
        places = [(a.ctypes.data, a.nbytes, int(b.handle)) for a, b in zip(arrays, buffers, strict=True)]
        values = [helpers.moved(places, a.ctypes.data if isinstance(a, np.ndarray) else a) for a in arguments]
        launcher.launch(self.stream, *values, grid=grid or kernel.grid)  # kernels that differ in grid alone share code
        self.stream.sync()
        for array, buffer in zip(arrays, buffers, strict=True):
            check(driver.cuMemcpyDtoH(array.ctypes.data, int(buffer.handle), array.nbytes))
            buffer.close(self.stream)

    def launcher(self, kernel: Kernel, file: Path):
        from dsuf.kernels.launch import Cubin, Launcher

        key = f"{file.name} {kernel.shared}"  # kernels of one code may differ in what they ask for
        if key not in self.launchers:
            entry = json.loads(file.with_suffix(".json").read_text())["entry"]
            kinds = tuple(kind for _, kind in kernel.parameters)
            code = file.with_suffix(".cubin").read_bytes()
            geometry = (kernel.threads, kernel.grid, kernel.shared, kernel.cluster, kinds)
            self.launchers[key] = Launcher(Cubin(kernel.name, CHIP, entry, code, *geometry))
        return self.launchers[key]


def check(result: tuple) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0].name}")
