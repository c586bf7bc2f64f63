"""All warps of a kernel at once: what they give apart, and an error where they wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import catalogue, pack
from dsuf.kernels.lang import int32, int64, kernel, s64, uint32
from dsuf.kernels.project import Projection, launch_of
from dsuf.kernels.ptx.copy import (
    bulk_push,
    fence_async,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    push_u32,
)
from dsuf.kernels.ptx.memory import lds_u32, shared_base, stg_u32, sts_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    cluster_address,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    sync_threads,
    sync_warp,
    thread_index,
)
from dsuf.kernels.simt.errors import Deadlock, Divergence
from dsuf.kernels.simt.memory import GlobalMemory
from dsuf.kernels.simt.run import run
from dsuf.kernels.simt.together import run_together
from tests.kernels.helpers import fp8_weight, q8_rows


class TestTogether:
    def test_warps_at_once_give_what_warps_apart_give(self):
        rng, rows, k, n = np.random.default_rng(5), 6, 128, 96
        codes, scales = fp8_weight(rng, n, k)
        how = launch_of("small", Projection(n, k, "q8"), rows)
        x, sx, _ = q8_rows(rng.standard_normal((rows, k)).astype(np.float32), 8)
        kernel = expanded_entry(how.name)
        outputs = []
        for runner in (run, run_together):
            memory, y = GlobalMemory(), np.zeros((8, n), np.uint16)
            arrays = [pack.pack_fp8(codes, scales), x, sx, y]
            runner(kernel, memory, [*(memory.add(a) for a in arrays), rows, *how.arguments], grid=(2, 1))
            outputs.append(y)
        assert np.array_equal(*outputs) and outputs[0].any()

    @pytest.mark.parametrize("runner", [run, run_together])
    def test_words_and_copies_pushed_to_another_block_arrive_there(self, runner):
        memory, out = GlobalMemory(), np.zeros((4, 32, 2), np.uint32)
        runner(pushed_round(), memory, [memory.add(out)], grid=(4, 1))
        sender = np.array([1, 0, 3, 2])[:, None]  # blocks of a cluster of two send to each other
        assert np.array_equal(out[..., 0], 1000 * sender + np.arange(32))
        assert np.array_equal(out[..., 1], 7000 * sender + np.arange(32))

    def test_a_warp_that_waits_for_another_is_told(self):
        memory = GlobalMemory()
        with pytest.raises(Deadlock):
            run_together(consumer_first(), memory, [], grid=(1, 1))

    def test_a_barrier_that_only_some_reach_is_told(self):
        with pytest.raises(Divergence):
            run_together(half_barrier(), GlobalMemory(), [], grid=(1, 1))


def expanded_entry(name):
    return next(e for e in catalogue.entries() if e.name == name).kernel("sm_90a")


def consumer_first():
    @kernel(threads=64, shared=64)
    def waits() -> None:
        bar = shared_base()
        if thread_index() == 0:
            mbarrier_init(bar, 32)
        sync_threads()
        if thread_index() < 32:
            mbarrier_wait(bar, 0)
        else:
            mbarrier_arrive(bar)

    return waits


def pushed_round():
    @kernel(threads=32, shared=512, cluster=2)
    def pushes(out: s64) -> None:
        tid, block, sm = int32(thread_index()), int32(block_index()), shared_base()
        other = uint32(1 - cluster_rank())
        bar, at = uint32(sm + 384), uint32(sm + 4 * tid)
        if tid == 0:
            mbarrier_init(bar, uint32(1))
            fence_mbarrier_init()
            mbarrier_expect(bar, uint32(256))
        cluster_arrive_relaxed()
        cluster_wait()
        push_u32(cluster_address(at, other), uint32(1000 * block + tid), cluster_address(bar, other))
        sts_u32(uint32(at + 128), uint32(7000 * block + tid))
        fence_async()
        sync_warp()
        if tid == 0:
            to = cluster_address(uint32(sm + 256), other)
            bulk_push(to, uint32(sm + 128), uint32(128), cluster_address(bar, other))
        mbarrier_wait(bar, uint32(0))
        to = out + (int64(block) * 32 + tid) * 8
        stg_u32(to, lds_u32(at))
        stg_u32(to + 4, lds_u32(uint32(at + 256)))
        cluster_arrive_relaxed()
        cluster_wait()

    return pushes


def half_barrier():
    @kernel(threads=64)
    def half() -> None:
        if thread_index() < 32:
            sync_threads()

    return half
