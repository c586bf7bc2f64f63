"""The whole catalogue compiled for its chips: no spill, no stack, and the instructions that should be there.

Compiling takes minutes and disassembling the wheel nvidia-cuda-nvdisasm: part of `pytest -m system`.
"""

from __future__ import annotations

import collections
import re
import resource
import subprocess
import time
from pathlib import Path

import pytest

from dsuf.cli.machine import cpu_cores
from dsuf.kernels import build_all
from dsuf.kernels.build import Built
from dsuf.kernels.lang import SHARED_LIMIT
from dsuf.kernels.ptx.op import ALL_CHIPS, BLACKWELL

pytestmark = pytest.mark.system

MOST_PROCESSOR_SECONDS = 2 * 11 * 60  # 11 minutes of CI on two cores, for three chips
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", re.MULTILINE)
DENSE = ("dense.fp8", "dense.bf16", "grouped.gate_up", "grouped.down")  # products of many rows
CHUNKS = ("chunk.attend", "chunk.scores")
FP4 = ("experts.",)
BULK = ("project.", "queries/", "experts.")  # weights that arrive by asynchronous copies
LEAN = (*BULK, "attend/", "seam/")  # most of a decode step


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, str], Built], list, Path, float]:
    """Every (entry, chip), the rows of the table, the cache, and the processor seconds it took from nothing."""
    cache, rows = tmp_path_factory.mktemp("cubins"), []
    before = processor_seconds()
    found = build_all.build_catalogue(build_all.selected(ALL_CHIPS), cache, cpu_cores(), rows.append)
    return found, rows, cache, processor_seconds() - before


def processor_seconds() -> float:
    """Of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def instructions(one: Built, folder: Path) -> collections.Counter[str]:
    """How often each machine instruction occurs."""
    from cuda import pathfinder

    file = folder / "one.cubin"
    file.write_bytes(one.cubin)
    tool = pathfinder.find_nvidia_binary_utility("nvdisasm")
    assert tool, "nvdisasm is missing: pip install nvidia-cuda-nvdisasm"
    text = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return collections.Counter(INSTRUCTION.findall(text))


def test_every_entry_compiles_for_its_chips_without_spills_or_stack(built):
    found, rows, _, seconds = built
    print(f"{len(rows)} kernels in {seconds:.0f} processor seconds")
    assert not [(row.name, row.chip, row.problem) for row in rows if row.problem]
    assert found.keys() == set(build_all.selected(ALL_CHIPS))
    assert all(0 < row.registers <= 255 and row.spills == 0 and row.shared <= SHARED_LIMIT for row in rows)
    assert seconds < MOST_PROCESSOR_SECONDS


def test_the_second_run_is_instant(built):
    found, _, cache, _ = built
    rows: list[build_all.Row] = []
    begin = time.perf_counter()
    again = build_all.build_catalogue(build_all.selected(ALL_CHIPS), cache, 1, rows.append)
    assert time.perf_counter() - begin < 2 and again.keys() == found.keys() and all(row.cached for row in rows)


def with_prefix(built, prefixes: tuple[str, ...], chips: tuple[str, ...]) -> list[Built]:
    chosen = [one for (name, chip), one in sorted(built[0].items()) if name.startswith(prefixes) and chip in chips]
    assert chosen
    return chosen


def test_products_of_many_rows_use_the_chips_large_tensor_core_instructions(built, tmp_path: Path):
    for one in with_prefix(built, DENSE + CHUNKS, ("sm_90a",)):
        assert any(name.startswith("HGMMA") for name in instructions(one, tmp_path)), one.name
    for one in with_prefix(built, DENSE, BLACKWELL):
        assert any(name.startswith("UTC") and "MMA" in name for name in instructions(one, tmp_path)), one.name
    for one in with_prefix(built, CHUNKS, BLACKWELL):
        found = instructions(one, tmp_path)
        assert any(name.startswith("HMMA.16816") for name in found), one.name
        assert any(name.startswith("LDSM") for name in found), one.name


def test_fp4_weights_are_converted_by_hardware_where_the_chip_can(built, tmp_path: Path):
    for one in with_prefix(built, FP4, BLACKWELL):
        assert any("E2M1" in name for name in instructions(one, tmp_path)), one.name


def test_decode_weights_arrive_by_bulk_copies_and_feed_the_tensor_cores(built, tmp_path: Path):
    for one in with_prefix(built, BULK, ("sm_90a", "sm_103a")):
        found = instructions(one, tmp_path)
        assert any(name.startswith("UBLKCP") for name in found), one.name
        assert any(name.startswith("HMMA") for name in found), one.name


def test_a_decode_step_divides_32_bits_and_waits_for_no_stores(built, tmp_path: Path):
    for one in with_prefix(built, LEAN, ("sm_90a",)):
        slow = [name for name in instructions(one, tmp_path) if name.startswith("CALL") or name.endswith("GPU")]
        assert not slow, (one.name, slow)
