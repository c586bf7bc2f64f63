"""Building and caching cubins without a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from dsuf.errors import CheckFailed
from dsuf.kernels import build as building
from dsuf.kernels.build import build, key_of
from dsuf.kernels.lang import Kernel, float32, int64, kernel, regs, s64, unroll
from dsuf.kernels.ptx.convert import fma
from dsuf.kernels.ptx.memory import ldg_f32, stg_f32
from dsuf.kernels.ptx.sync import sync_threads, thread_index


def make(scale: float) -> Kernel:
    @kernel(threads=64)
    def scaled(x: s64, y: s64) -> None:
        i = int64(thread_index()) * 4
        stg_f32(y + i, ldg_f32(x + i) * scale)

    return scaled


def test_second_build_comes_from_disk_and_is_the_same(tmp_path):
    first, second = build(make(2.0), "sm_90a", tmp_path), build(make(2.0), "sm_90a", tmp_path)
    assert first.cubin == second.cubin and first.facts.entry == second.facts.entry
    assert first.fresh and not second.fresh and first.facts == second.facts and first.grid == second.grid
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700
    assert key_of(make(2.0), "sm_90a") != key_of(make(3.0), "sm_90a") != key_of(make(3.0), "sm_103a")


def test_one_code_with_two_geometries_is_kept_twice(tmp_path):
    small, large = make(2.0), replace(make(2.0), shared=4096, grid=(3, 2))
    assert [build(one, "sm_90a", tmp_path).shared for one in (small, large, small, large)] == [0, 4096, 0, 4096]
    assert build(large, "sm_90a", tmp_path).grid == (3, 2)


@pytest.mark.parametrize("damage", [b"", b"not what it was", None])
def test_a_damaged_cache_entry_is_built_again(tmp_path, damage: bytes | None):
    first = build(make(2.0), "sm_90a", tmp_path)
    file = tmp_path / "kernels" / "sm_90a" / key_of(make(2.0), "sm_90a")
    file.write_bytes(file.read_bytes()[:-7] if damage is None else damage)
    again = build(make(2.0), "sm_90a", tmp_path)
    assert again.fresh and again.facts.registers == first.facts.registers
    assert build(make(2.0), "sm_90a", tmp_path).cubin == again.cubin
    assert [f.name for f in file.parent.iterdir()] == [file.name]  # no temporary files are left


def test_spills_are_an_error(tmp_path):
    @kernel(threads=1024)
    def greedy(x: s64, y: s64) -> None:
        a = regs(200)
        for i in unroll(200):
            a[i] = ldg_f32(x + i * 4)
        sync_threads()
        s = float32(0)
        for i in unroll(200):
            s = fma(a[i], a[199 - i], s)
        for i in unroll(200):
            stg_f32(y + i * 4, a[i] + s)

    with pytest.raises(CheckFailed, match="spills"):
        build(greedy, "sm_90a", tmp_path)


def test_a_linker_line_about_lost_performance_is_an_error():
    facts = building._facts("entry function 'k'\nUsed 9 registers\nPotential Performance Loss: 'setmaxnreg' ignored", 1)
    assert facts.registers == 9 and facts.problems == ["Potential Performance Loss: 'setmaxnreg' ignored"]


def test_launch_and_catalogue_import_without_numba_in_a_tenth_of_a_second():
    code = (
        "import sys, time; t = time.perf_counter(); import dsuf.kernels.launch; d = time.perf_counter() - t;"
        "print(d, any(m.split('.')[0] in ('numba', 'llvmlite', 'cuda') for m in sys.modules))"
    )
    command = [sys.executable, "-c", code]
    seen = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert {row[1] for row in seen} == {"False"} and min(float(row[0]) for row in seen) < 0.1
