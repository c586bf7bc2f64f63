"""All warps of a kernel at once: what they give apart, and an error where they wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import catalogue, pack
from dsuf.kernels.lang import kernel
from dsuf.kernels.project import Projection, launch_of
from dsuf.kernels.ptx.copy import mbarrier_arrive, mbarrier_init, mbarrier_wait
from dsuf.kernels.ptx.memory import shared_base
from dsuf.kernels.ptx.sync import sync_threads, thread_index
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


def half_barrier():
    @kernel(threads=64)
    def half() -> None:
        if thread_index() < 32:
            sync_threads()

    return half
