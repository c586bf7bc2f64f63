"""Log probabilities of a row for those who ask: the largest logit, the log of the sum, and the most likely tokens.

    top = max_i l_i;  log_sum = ln(sum_i e^(l_i - top));  log p_i = l_i - top - log_sum
    the n largest, lowest token first among equals; n = what the row's slot asks for, 0 .. 20 (negative: nothing)

Of the logits as the model gave them: no temperature, filter or mask. logits float32 [rows, V]; table, slots, counters:
slots.py; out uint32 [ring, MOST_ROWS, 64] in mapped memory, entry step mod ring: top, log_sum, 20 tokens, 20 log
probabilities. It stands before `accept`, whose flag says that it is complete. Reference: dsuf.ops.sample.top_logprobs.
Bytes: 4 V a row, from L2. A cluster holds a row in shared memory; each thread knows the best of its tokens, and the one
whose token is taken looks for its next.

    hand-off            who writes     who waits      reused
    stretch of logits   the block      the block      never
    shares              each block     the cluster    never (draw.meet)
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.draw import MOST_VOCABULARY, load_row, meet, stretch_of
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import as_float, exp2_approx, log2_approx
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    lds_f32,
    shared_base,
    stg_f32,
    stg_u32,
    sts_f32,
)
from dsuf.kernels.ptx.sync import (
    block_index,
    cluster_address,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    ld_cluster_u32,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import sum_over
from dsuf.kernels.route import ordered
from dsuf.kernels.rows import get, word
from dsuf.kernels.sample import best_of
from dsuf.kernels.slots import (
    C_STEP,
    L_LOG_SUM,
    L_LOGPROBS,
    L_TOKENS,
    L_TOP,
    LOGPROB_BYTES,
    MOST_LOGPROBS,
    MOST_ROWS,
    S_LOGPROBS,
    SLOT_BYTES,
    T_SEQUENCE,
)
from dsuf.ops.sample import top_logprobs

CLUSTER, THREADS = 8, 512
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NONE = 0x7FFFFFFF
WARP = (1, 2, 4, 8, 16)


@inline
def best_left(line: Any, low_end: Any, high_end: Any, start: Any, key: Any, token: Any) -> Any:
    """A thread's best after (key, token) in the order of keys, then tokens."""
    best = uint32(0)
    found = int32(NONE)
    for i in range(low_end, high_end):
        one = ordered(lds_f32(uint32(line + 4 * i)))
        after = one < key or (one == key and start + i > token)
        better = after and one > best
        best = uint32(one if better else best)
        found = int32(start + i if better else found)
    return best, found


def make(*, cluster: int, threads: int, most: int) -> Kernel:
    """most: largest vocabulary."""
    WARPS, MOST_STRETCH = threads // 32, -(-most // cluster)
    AT_SUM = 8 * WARPS
    AT_SHARE = AT_SUM + 4 * WARPS
    AT_ROW = AT_SHARE + 8 * (2 + MOST_LOGPROBS)

    @kernel(
        threads=threads, grid=(cluster * MOST_ROWS,), shared=AT_ROW + 4 * MOST_STRETCH, cluster=cluster,
        name=f"logprobs_{cluster}x{threads}",
    )  # fmt: skip
    def logprobs(logits: s64, table: s64, slots: s64, counters: s64, out: s64, ring: s32, vocabulary: s32) -> None:
        tid = int32(thread_index())
        rank = int32(cluster_rank())
        row = int64(block_index() // cluster)
        sm = shared_base()
        sums = uint32(sm + AT_SUM)
        share = uint32(sm + AT_SHARE)
        line = uint32(sm + AT_ROW)
        start, held, low_end, high_end = stretch_of(vocabulary, rank, tid, cluster, threads)
        slot = get(table, T_SEQUENCE, row)  # table and slots are older than the kernel before
        wanted = word(slots + int64(max(slot, 0)) * SLOT_BYTES, S_LOGPROBS)
        wait_for_previous_kernel()
        let_next_kernel_start()
        if slot >= 0 and wanted >= 0:
            from_row = logits + (row * vocabulary + start) * 4
            load_row(line, from_row, held, tid, threads)
            sync_threads()
            entry = int64(int32(ldg_u32(counters + 4 * C_STEP)) % ring)
            to = out + (entry * MOST_ROWS + row) * LOGPROB_BYTES
            key, token = best_left(line, low_end, high_end, start, uint32(0xFFFFFFFF), int32(-1))
            best, first = best_of(sm, share, key, token, tid, WARPS, cluster)
            top = as_float(uint32(best ^ (0x80000000 if best >= 0x80000000 else 0xFFFFFFFF)))
            s = 0.0
            for i in range(low_end, high_end):
                s = s + exp2_approx((lds_f32(uint32(line + 4 * i)) - top) * LOG2_E)
            s = sum_over(s, WARP)
            if tid & 31 == 0:
                sts_f32(uint32(sums + 4 * (tid >> 5)), s)
            sync_threads()
            if tid == 0:
                s = lds_f32(sums)
                for w in range(1, WARPS):
                    s = s + lds_f32(uint32(sums + 4 * w))
                sts_f32(uint32(share + 8), s)
            meet()
            s = as_float(ld_cluster_u32(cluster_address(uint32(share + 8), uint32(0))))
            for r in unroll(1, cluster):
                s = s + as_float(ld_cluster_u32(cluster_address(uint32(share + 8), uint32(r))))
            log_sum = log2_approx(s) * LN_2
            writes = rank == 0 and tid == 0
            if writes:
                stg_f32(to + 4 * L_TOP, top)
                stg_f32(to + 4 * L_LOG_SUM, log_sum)
            for n in range(min(wanted, MOST_LOGPROBS)):
                if writes:
                    x = as_float(uint32(best ^ (0x80000000 if best >= 0x80000000 else 0xFFFFFFFF)))
                    stg_u32(to + 4 * (L_TOKENS + int64(n)), first)
                    stg_f32(to + 4 * (L_LOGPROBS + int64(n)), (x - top) - log_sum)
                if token == int32(first):
                    key, token = best_left(line, low_end, high_end, start, key, token)
                best, first = best_of(sm, uint32(share + 16 + 8 * n), key, token, tid, WARPS, cluster)
        cluster_arrive()
        cluster_wait()

    return logprobs


def entries(width: Width) -> list[Entry]:
    """One kernel for every vocabulary."""
    if width.label != "v41":
        return []
    shape = {"cluster": CLUSTER, "threads": THREADS, "most": MOST_VOCABULARY}
    size = 4 * MOST_ROWS * width.spec.vocab_size
    return [Entry("sample.logprobs", make, shape, width.chips, top_logprobs, size, size)]
