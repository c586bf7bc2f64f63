"""Sampling: each row's argmax, or the set of tokens that its temperature, top-k and top-p leave, and a draw from it.

    greedy    token = argmax, lowest token among equals
    sampled   kept = the top_k largest logits, of these the fewest largest whose mass reaches top_p of theirs
              (ties: lowest token first);  record = largest logit, scale, smallest kept key, cut, mass of what is kept
    pick      the token at which the running mass passes u times the mass of the kept; u = Philox(seed, position + 1)

A token is kept if its key (float32 bits as an unsigned number of the same order) is above the threshold, or equal to it
with a token up to `cut`. Masses are whole numbers (draw.py), so top-p means: the mass before a token is under
ceil(top_p 2^24) 2^-24 of the total. Against ops.sample in float64 a token differs only where u or top_p falls within
about 2^-22 of a boundary. Impossible before any of this: tokens whose bit in `mask` is clear, and EOS where min_tokens
wants more first and something else is left.

logits float32 [rows, V] (finite), V up to 131,072; slots, table: slots.py; records FILTER_BYTES a row; picked int32
[MOST_ROWS] (address 0: none); cluster j takes row first + j * stride; purpose -1: verify rows, else draft rows, greedy
ones of which are left alone. Reference: dsuf.ops.sample, dsuf.engine.choose.masked. Bytes: 4 V a row, from L2.

A cluster holds the row in shared memory; the selection is nucleus.py.

    hand-off                who writes    who waits     reused
    stretch of logits       the block     the block     never
    bins [2]                the block     the cluster   two digits later: every block has then passed the one between
    shares                  the block     the cluster   never (draw.meet)
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.draw import (
    MOST_VOCABULARY,
    allowed_bit,
    joined,
    load_four,
    load_row,
    meet,
    over_ranks,
    philox,
    scan_pair,
    share_of,
    split_mass,
    stretch_of,
    token_at,
    weight,
)
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.nucleus import BIN_BYTES, narrowed
from dsuf.kernels.ptx.convert import as_float, div
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32,
    lds_u32,
    shared_base,
    stg_f32,
    stg_u32,
    sts_f32,
    sts_u32,
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
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
    warp_max_u32,
    warp_min_u32,
)
from dsuf.kernels.route import ordered
from dsuf.kernels.rows import get, word
from dsuf.kernels.slots import (
    F_CUT,
    F_MASS,
    F_MASS_HIGH,
    F_SAMPLED,
    F_SCALE,
    F_THRESHOLD,
    F_TOKEN,
    F_TOP,
    FILTER_BYTES,
    MOST_DRAFTS,
    MOST_ROWS,
    S_EMITTED,
    S_EOS,
    S_EOS_COUNT,
    S_MASKED,
    S_MIN_TOKENS,
    S_SEED,
    S_SEED_HIGH,
    S_TEMPERATURE,
    S_TOP_K,
    S_TOP_P,
    SLOT_BYTES,
    T_MEMBER,
    T_OFFSET,
    T_POSITION,
    T_SEQUENCE,
)
from dsuf.ops.sample import filtered_probabilities

LOG2_E = 1.4426950408889634
IMPOSSIBLE = 0x007FFFFF  # key of minus infinity
MINUS_INFINITY = 0xFF800000  # bits
NONE = 0x7FFFFFFF
CLUSTER, THREADS = 8, 512


@inline
def logit_of(line: Any, i: Any, start: Any, mask: Any, allowed: Any, words: Any) -> Any:
    """A logit of a row's stretch, minus infinity where the mask (address 0: none) forbids its token."""
    x = ldg_f32(line + int64(i) * 4)
    if mask != 0:
        bit = allowed_bit(mask, allowed, words, int64(start + i))
        x = x if bit == 1 else as_float(uint32(MINUS_INFINITY))
    return x


@inline
def best_of(scratch: Any, share: Any, key: Any, token: Any, tid: Any, warps: Any, blocks: Any) -> Any:
    """Largest key of the cluster and the lowest token that has it. `share`: 8 bytes as `meet` says."""
    top = warp_max_u32(key)
    low = warp_min_u32(uint32(token if key == top else NONE))
    if tid & 31 == 0:
        sts_u32(uint32(scratch + (tid >> 5) * 8), top)
        sts_u32(uint32(scratch + (tid >> 5) * 8 + 4), low)
    sync_threads()
    lane = int32(tid & 31)
    top = uint32(0)
    low = uint32(NONE)
    if lane < warps:
        top = lds_u32(uint32(scratch + 8 * lane))
        low = lds_u32(uint32(scratch + 8 * lane + 4))
    sync_warp()
    best = warp_max_u32(top)
    best_token = warp_min_u32(uint32(low if top == best else NONE))
    if tid == 0:
        sts_u32(share, best)
        sts_u32(uint32(share + 4), best_token)
    meet()
    top = uint32(0)
    low = uint32(NONE)
    if lane < blocks:
        top = ld_cluster_u32(cluster_address(share, uint32(lane)))
        low = ld_cluster_u32(cluster_address(uint32(share + 4), uint32(lane)))
    sync_warp()
    best = warp_max_u32(top)
    best_token = warp_min_u32(uint32(low if top == best else NONE))
    return best, best_token


@inline
def load_allowed(
    line: Any, logit: Any, held: Any, start: Any, mask: Any, allowed: Any, words: Any, tid: Any, threads: Any
) -> None:
    """A stretch of logits into shared memory, minus infinity where the mask forbids a token."""
    load_row(line, logit, held, tid, threads)
    if mask != 0:
        for i in range(tid, held, threads):
            bit = allowed_bit(mask, allowed, words, int64(start + i))
            if bit == 0:
                sts_f32(uint32(line + 4 * i), as_float(uint32(MINUS_INFINITY)))
    sync_threads()


@inline
def best_of_stretch(line: Any, low_end: Any, high_end: Any, start: Any) -> Any:
    """Largest key among a thread's tokens and the lowest token that has it."""
    key = uint32(0)
    token = int32(NONE)
    for some in range(low_end, high_end, 4):
        x = regs(4)
        load_four(x, line, some, high_end)
        for j in unroll(4):
            one = ordered(x[j])
            better = one > key  # a token met twice changes nothing
            key = uint32(one if better else key)
            token = int32(start + some + j if better else token)
    return key, token


@inline
def best_possible(
    line: Any, logit: Any, own: Any, eos: Any, low_end: Any, high_end: Any, start: Any, held: Any, mask: Any,
    allowed: Any, words: Any, scratch: Any, share: Any, tid: Any, warps: Any, blocks: Any,
) -> Any:  # fmt: skip
    """The row's best without its first `eos` EOS ids, or with them where nothing else is left; `line` follows."""
    best_key = uint32(0)
    best_token = uint32(NONE)
    turn = int32(0)
    looks = int32(1)
    while looks == 1:  # a second time where nothing but EOS is left: then it comes back
        if tid < eos:
            at = int32(word(own, S_EOS + tid) - start)
            if at >= 0 and at < held:
                x = logit_of(logit, at, start, mask, allowed, words)
                sts_f32(uint32(line + 4 * at), x if turn == 1 else as_float(uint32(MINUS_INFINITY)))
        sync_threads()
        key, token = best_of_stretch(line, low_end, high_end, start)
        best_key, best_token = best_of(scratch, uint32(share + 8 * turn), key, token, tid, warps, blocks)
        looks = int32(1 if turn == 0 and eos > 0 and best_key <= IMPOSSIBLE else 0)
        turn = int32(turn + 1)
    return best_key, best_token


@inline
def weights_of_kept(
    line: Any, low_end: Any, high_end: Any, start: Any, threshold: Any, cut: Any, top: Any, scale: Any
) -> Any:
    """A thread's logits become weights, 0 for what is not kept; the words of their mass."""
    high = uint32(0)
    low = uint32(0)
    for some in range(low_end, high_end, 4):
        y = regs(4)
        load_four(y, line, some, high_end)
        for j in unroll(4):
            i = int32(some + j)
            key = ordered(y[j])
            kept = (key > threshold or (key == threshold and start + i <= cut)) and i < high_end
            w = weight(y[j], top, scale)
            w = w if kept else 0.0
            a, b = split_mass(w)
            high = uint32(high + a)
            low = uint32(low + b)
            if i < high_end:
                sts_f32(uint32(line + 4 * i), w)
    return high, low


@inline
def put_filter(record: Any, top: Any, scale: Any, threshold: Any, cut: Any, total: Any) -> None:
    """What accept must know of a sampled row."""
    stg_f32(record + 4 * F_TOP, top)
    stg_f32(record + 4 * F_SCALE, scale)
    stg_u32(record + 4 * F_THRESHOLD, threshold)
    stg_u32(record + 4 * F_CUT, uint32(cut))
    stg_u32(record + 4 * F_MASS, uint32(total & 0xFFFFFFFF))
    stg_u32(record + 4 * F_MASS_HIGH, uint32(total >> 32))


def make_filter(*, cluster: int, threads: int, most: int) -> Kernel:
    """most: largest vocabulary, up to 16,384 tokens a block; threads at least 256."""
    WARPS, MOST_STRETCH = threads // 32, -(-most // cluster)
    AT_WARP = 2 * BIN_BYTES
    AT_SHARE = AT_WARP + 8 * WARPS
    AT_FOUND = AT_SHARE + 64
    AT_ROW = AT_FOUND + 32

    @kernel(
        threads=threads, grid=(cluster * MOST_ROWS,), shared=AT_ROW + 4 * MOST_STRETCH, cluster=cluster,
        name=f"sample_filter_{cluster}x{threads}",
    )  # fmt: skip
    def filter_rows(
        logits: s64, table: s64, slots: s64, mask: s64, records: s64, picked: s64, vocabulary: s32, first: s32,
        stride: s32, purpose: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        rank = int32(cluster_rank())
        row = int64(block_index() // cluster * stride + first)
        sm = shared_base()
        scratch = uint32(sm + AT_WARP)
        share = uint32(sm + AT_SHARE)  # two for the argmax, two for ties by count, two by mass, one for masses
        line = uint32(sm + AT_ROW)
        start, held, low_end, high_end = stretch_of(vocabulary, rank, tid, cluster, threads)
        # table and slots are older than the kernel before
        slot = get(table, T_SEQUENCE, row)
        own = slots + int64(max(slot, 0)) * SLOT_BYTES
        temperature = ldg_f32(own + 4 * S_TEMPERATURE)
        offset = get(table, T_OFFSET, row)
        masked = word(own, S_MASKED)
        bits = int64(mask if masked == 1 else 0)
        allowed = int64(get(table, T_MEMBER, row) * (MOST_DRAFTS + 1) + offset)
        words = int64((vocabulary + 31) >> 5)
        later = int32(word(own, S_EMITTED) + offset - word(own, S_MIN_TOKENS))  # negative: EOS may not come yet
        eos = word(own, S_EOS_COUNT)
        eos = int32(eos if later < 0 else 0)
        wait_for_previous_kernel()
        let_next_kernel_start()
        if slot >= 0 and (purpose < 0 or temperature > 0.0):
            logit = logits + (row * vocabulary + start) * 4
            load_allowed(line, logit, held, start, bits, allowed, words, tid, threads)
            top_key, argmax = best_possible(line, logit, own, eos, low_end, high_end, start, held, bits, allowed,
                                            words, scratch, share, tid, WARPS, cluster)  # fmt: skip
            top = as_float(uint32(top_key ^ (0x80000000 if top_key >= 0x80000000 else 0xFFFFFFFF)))
            record = records + row * FILTER_BYTES
            if rank == 0 and tid == 0:
                stg_u32(record + 4 * F_TOKEN, argmax)
                stg_u32(record + 4 * F_SAMPLED, uint32(1 if temperature > 0.0 else 0))
            if temperature > 0.0:
                scale = div(LOG2_E, temperature)
                threshold = uint32(IMPOSSIBLE + 1)
                cut = int32(vocabulary)
                top_k = word(own, S_TOP_K)
                top_p = ldg_f32(own + 4 * S_TOP_P)
                side = int32(0)  # of the bins
                for by_mass in range(2):  # top-k by count, then top-p by mass
                    wanted = int32(top_k if by_mass == 0 else 0)
                    if wanted > 0 or (by_mass == 1 and top_p < 1.0):
                        threshold, cut, side = narrowed(
                            line, low_end, high_end, start, threshold, cut, top, scale, by_mass, wanted, top_p, side,
                            sm, scratch, uint32(sm + AT_FOUND), uint32(share + 16 + 16 * by_mass), rank, tid, threads,
                            WARPS, cluster,
                        )  # fmt: skip
                high, low = weights_of_kept(line, low_end, high_end, start, threshold, cut, top, scale)
                a, b, c, d = scan_pair(high, low, scratch, tid, WARPS)
                before, total = over_ranks(uint32(share + 48), c, d, rank, tid, cluster)
                if rank == 0 and tid == 0:
                    put_filter(record, top, scale, threshold, cut, total)
                if picked != 0:
                    place = int32(get(table, T_POSITION, row) + 1)
                    u = philox(ldg_u32(own + 4 * S_SEED), ldg_u32(own + 4 * S_SEED_HIGH), place, purpose)
                    target = share_of(total, u)
                    at = token_at(line, low_end, high_end, int64(before + joined(a, b)), target)
                    if at >= 0:
                        stg_u32(picked + row * 4, uint32(start + at))
        cluster_arrive()
        cluster_wait()

    return filter_rows


def entries(width: Width) -> list[Entry]:
    """One kernel for every vocabulary."""
    if width.label != "v41":
        return []
    shape = {"cluster": CLUSTER, "threads": THREADS, "most": MOST_VOCABULARY}
    size = 4 * MOST_ROWS * width.spec.vocab_size
    return [Entry("sample.filter", make_filter, shape, width.chips, filtered_probabilities, size, size)]
