"""The GPU runner of these tests: kernels that share their code still get their own grid."""

from __future__ import annotations

import json
from types import SimpleNamespace

from dsuf.kernels.lang import Kernel, kernel, s64
from dsuf.kernels.ptx.memory import stg_u32
from dsuf.kernels.ptx.sync import block_index
from tests.kernels.conftest import Gpu, name_of


def made(blocks: int) -> Kernel:
    @kernel(threads=32, grid=(blocks,), name="numbers")
    def numbers(out: s64) -> None:
        stg_u32(out + block_index() * 4, 7)

    return numbers


def test_a_kernel_is_launched_with_its_own_grid(tmp_path, monkeypatch):
    few, many = made(1), made(6)
    assert name_of(few) == name_of(many)
    (tmp_path / name_of(few)).with_suffix(".json").write_text(json.dumps({"entry": "numbers"}))
    grids = []
    runner = Gpu.__new__(Gpu)
    runner.folder, runner.launchers = tmp_path, {}
    runner.stream = SimpleNamespace(sync=lambda: None)
    launcher = SimpleNamespace(launch=lambda stream, *values, grid: grids.append(grid))
    monkeypatch.setattr(runner, "launcher", lambda kernel, file: launcher, raising=False)
    for one in (few, many):
        runner(one, [0], None)
    assert grids == [(1, 1), (6, 1)]
