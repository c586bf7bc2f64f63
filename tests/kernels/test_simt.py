"""The CPU interpreter catches one planted fault of each kind, and agrees with numpy where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsuf.kernels.lang import SHARED_LIMIT, float32, int32, int64, kernel, s64, uint32
from dsuf.kernels.ptx.copy import bulk_load, mbarrier_expect, mbarrier_init, mbarrier_wait
from dsuf.kernels.ptx.memory import (
    atom_add,
    ld_acquire,
    ldg_f32,
    ldg_u32x4,
    lds_f32,
    lds_u32x4,
    red_release,
    shared_base,
    stg_f32,
    stg_u32,
    stg_u32x4,
    sts_f32,
)
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.sync import block_index, shuffle_xor_f32, sync_threads, sync_warp, thread_index
from dsuf.kernels.simt.errors import Deadlock, Divergence, KernelFault, Misaligned, OutOfBounds, Race, Unwritten
from dsuf.kernels.simt.memory import GlobalMemory
from dsuf.kernels.simt.run import run
from dsuf.kernels.simt.together import run_together
from tests.kernels.helpers import execute


def exchange(barrier: str):
    """Each thread stores x and reads its neighbour's, with or without the barrier it needs."""
    block, warp = barrier == "block", barrier == "warp"

    @kernel(threads=64, grid=(3,), shared=256)
    def body(x: s64, y: s64, distance: s64) -> None:
        tid = thread_index()
        i = int64(block_index()) * 64 + tid
        sts_f32(uint32(shared_base() + 4 * tid), ldg_f32(x + i * 4))
        if block:
            sync_threads()
        if warp:
            sync_warp()
        stg_f32(y + i * 4, lds_f32(uint32(shared_base() + 4 * (tid ^ distance))))

    return body


def test_neighbours_exchange_through_shared_memory():
    x = np.random.default_rng(0).standard_normal(192).astype(np.float32)
    y, memory = np.zeros_like(x), GlobalMemory()
    where = memory.add(y, initial=False)
    run(exchange("block"), memory, [memory.add(x), where, 33])
    assert np.array_equal(y, x.reshape(3, 64)[:, np.arange(64) ^ 33].reshape(-1))
    assert memory.unwritten(where) == 0
    run(exchange("warp"), memory, [memory.add(x), where, 5])  # inside a warp sync_warp is enough
    assert np.array_equal(y, x.reshape(3, 64)[:, np.arange(64) ^ 5].reshape(-1))


@pytest.mark.parametrize(("barrier", "distance"), [("none", 1), ("warp", 33), ("none", 32)])
def test_a_missing_barrier_is_a_race(barrier: str, distance: int):
    memory = GlobalMemory()
    args = [memory.add(np.zeros(192, np.float32)), memory.add(np.zeros(192, np.float32)), distance]
    with pytest.raises(Race, match="without a barrier"):
        run(exchange(barrier), memory, args)


def test_overwriting_what_another_thread_still_reads_is_a_race():
    @kernel(threads=64, shared=256)
    def body(y: s64) -> None:
        tid = thread_index()
        sts_f32(uint32(shared_base() + 4 * tid), float32(1))
        sync_threads()
        v = lds_f32(uint32(shared_base() + 4 * (tid ^ 32)))
        sts_f32(uint32(shared_base() + 4 * tid), v)

    with pytest.raises(Race, match="has read"):
        run(body, GlobalMemory(), [0])


def test_lanes_that_write_different_values_to_one_place_are_a_race():
    @kernel(threads=32)
    def body(y: s64) -> None:
        stg_u32(y, uint32(thread_index()))

    memory = GlobalMemory()
    with pytest.raises(Race, match="different values"):
        run(body, memory, [memory.add(np.zeros(1, np.uint32))])


def copier(shift: int):
    @kernel(threads=32)
    def body(x: s64, y: s64) -> None:
        i = int64(thread_index()) * 16
        stg_u32x4(y + i, ldg_u32x4(x + i + shift))

    return body


def test_accesses_outside_a_buffer_misaligned_or_unwritten_are_faults():
    def go(shift: int, *, initial: bool = True, size: int = 128):
        memory = GlobalMemory()
        source, target = (memory.add(np.zeros(size, np.uint32), initial=i) for i in (initial, True))
        run(copier(shift), memory, [source, target])

    go(0)
    with pytest.raises(OutOfBounds):
        go(16)
    with pytest.raises(Misaligned):
        go(4, size=132)
    with pytest.raises(Unwritten):
        go(0, initial=False)


def test_an_access_beyond_an_array_does_not_land_in_its_neighbour():
    both = np.zeros(256, np.uint32)
    execute(copier(0), [both[:128], both[128:]])
    with pytest.raises(OutOfBounds):
        execute(copier(16), [both[:128], both[128:]])
    assert both.any() == 0


def test_shared_memory_has_bounds_and_must_be_written_first():
    @kernel(threads=32, shared=512)
    def body(y: s64, shift: s64) -> None:
        stg_u32x4(y, lds_u32x4(uint32(shared_base() + shift)))

    memory = GlobalMemory()
    y = memory.add(np.zeros(4, np.uint32))
    with pytest.raises(OutOfBounds):
        run(body, memory, [y, 512])
    with pytest.raises(Unwritten):
        run(body, memory, [y, 0])


def test_more_shared_memory_than_a_block_can_have_is_a_fault():
    @kernel(threads=32, shared=SHARED_LIMIT)
    def body(y: s64) -> None:
        sts_f32(shared_base(), float32(1))

    run(body, GlobalMemory(), [0])
    for start in (run, run_together):
        with pytest.raises(KernelFault, match="232464 bytes of shared memory"):
            start(replace(body, shared=SHARED_LIMIT + 16), GlobalMemory(), [0], grid=(1, 1))


def test_block_and_warp_operations_in_divergent_code_are_faults():
    @kernel(threads=64)
    def barrier(y: s64) -> None:
        if thread_index() < 40:
            sync_threads()

    @kernel(threads=64)
    def shuffle(y: s64) -> None:
        if thread_index() < 40:
            stg_f32(y, shuffle_xor_f32(float32(1), uint32(1)))

    for body in (barrier, shuffle):
        with pytest.raises(Divergence):
            run(body, GlobalMemory(), [0])


def fetcher(expected: int):
    @kernel(threads=64, shared=1024)
    def body(x: s64, y: s64) -> None:
        tid = thread_index()
        base = shared_base()
        if tid == 0:
            mbarrier_init(uint32(base + 512), uint32(1))
        sync_threads()
        if tid == 0:
            mbarrier_expect(uint32(base + 512), uint32(expected))
            bulk_load(base, x, uint32(256), uint32(base + 512))
        mbarrier_wait(uint32(base + 512), uint32(0))
        stg_f32(y + int64(tid) * 4, lds_f32(uint32(base + 4 * tid)))

    return body


def test_bulk_copies_arrive_before_the_barrier_opens_and_a_wrong_count_never_opens_it():
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    memory = GlobalMemory()
    args = [memory.add(x), memory.add(y)]
    run(fetcher(256), memory, args)
    assert np.array_equal(x, y)
    with pytest.raises(Deadlock):
        run(fetcher(272), memory, args)


def test_blocks_that_wait_for_each_others_flags_run_together():
    @kernel(threads=32, grid=(4,))
    def body(flag: s64, out: s64) -> None:
        if thread_index() == 0:
            red_release(flag, uint32(1))
            while ld_acquire(flag) < uint32(4):
                pass
            stg_u32(out + int64(block_index()) * 4, atom_add(flag, uint32(0)))

    memory = GlobalMemory()
    out = np.zeros(4, np.uint32)
    args = [memory.add(np.zeros(1, np.uint32)), memory.add(out)]
    run(body, memory, args)
    assert (out == 4).all()
    with pytest.raises(Deadlock):
        run(body, memory, [memory.add(np.zeros(1, np.uint32)), args[1]], grid=(3, 1))


def test_tensor_core_fragments_are_where_the_manual_says():
    @kernel(threads=32)
    def body(a: s64, b: s64, c: s64) -> None:
        lane = int32(thread_index())
        f = ldg_u32x4(a + int64(lane) * 16)
        g = ldg_u32x4(b + int64(lane) * 16)
        d = mma_bf16(f, (g[0], g[1]), (float32(0), float32(0), float32(0), float32(0)))
        for i in range(1):
            stg_f32(c + int64(lane) * 16, d[0])
            stg_f32(c + int64(lane) * 16 + 4, d[1])
            stg_f32(c + int64(lane) * 16 + 8, d[2])
            stg_f32(c + int64(lane) * 16 + 12 + 0 * i, d[3])

    rng = np.random.default_rng(1)
    left, right = rng.integers(-4, 5, (16, 16)), rng.integers(-4, 5, (16, 8))
    g, t = np.arange(32) // 4, np.arange(32) % 4

    def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        bits = [v.astype(np.float32).view(np.uint32) >> 16 for v in (low, high)]
        return bits[0] | bits[1] << 16

    a = np.stack(
        [
            pair(left[g + 8 * (r & 1), 2 * t + 8 * (r >> 1)], left[g + 8 * (r & 1), 2 * t + 1 + 8 * (r >> 1)])
            for r in range(4)
        ],
        1,
    )
    b = np.zeros((32, 4), np.uint32)
    for r in range(2):
        b[:, r] = pair(right[2 * t + 8 * r, g], right[2 * t + 1 + 8 * r, g])
    c, memory = np.zeros((32, 4), np.float32), GlobalMemory()
    run(body, memory, [memory.add(np.ascontiguousarray(a)), memory.add(b), memory.add(c, initial=False)])
    expected = left @ right
    for r in range(4):
        assert np.array_equal(c[:, r], expected[g + 8 * (r >> 1), 2 * t + (r & 1)])


def test_the_ceiling_kernel_reads_every_word_once():
    from dsuf.kernels import ceiling

    rng = np.random.default_rng(2)
    source = rng.integers(0, 1 << 32, 3 * ceiling.PIECE // 4, dtype=np.uint64).astype(np.uint32)
    reads = ceiling.THREADS * ceiling.IN_FLIGHT * 4
    lanes = source.reshape(3, ceiling.IN_FLIGHT, ceiling.THREADS, 4)
    found = np.bitwise_xor.reduce(np.bitwise_xor.reduce(np.bitwise_xor.reduce(lanes, axis=0), axis=0), axis=-1)
    lanes[2, 7, :, 3] ^= found ^ np.uint32(ceiling.NEVER)  # now each thread finds the number
    memory, out = GlobalMemory(), np.zeros(ceiling.THREADS, np.uint32)
    run(ceiling.make(), memory, [memory.add(source), 3, memory.add(out)], grid=(1, 1))
    assert (out == ceiling.NEVER).all() and reads * 3 == source.size
