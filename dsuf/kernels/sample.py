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
    bins [2], shares [2]    the block     the cluster   two exchanges later: every block has then passed the one between
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.draw import (
    LOW,
    LOW_MASK,
    MOST_VOCABULARY,
    allowed_bit,
    joined,
    load_row,
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
from dsuf.kernels.nucleus import (
    BIN_BYTES,
    DIGITS,
    FAR_DIGITS,
    bins_of_cluster,
    fill_bins,
    get_wide,
    last_kept,
    mass_wanted,
    put_wide,
)
from dsuf.kernels.ptx.convert import as_float, div
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32,
    lds_f32,
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
    """Largest key of the cluster and the lowest token that has it. `share`: 8 bytes that nobody reads any more."""
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
    cluster_arrive()
    cluster_wait()
    top = uint32(0)
    low = uint32(NONE)
    if lane < blocks:
        top = ld_cluster_u32(cluster_address(share, uint32(lane)))
        low = ld_cluster_u32(cluster_address(uint32(share + 4), uint32(lane)))
    sync_warp()
    best = warp_max_u32(top)
    best_token = warp_min_u32(uint32(low if top == best else NONE))
    return best, best_token


def make_filter(*, cluster: int, threads: int, most: int) -> Kernel:
    """most: largest vocabulary, up to 16,384 tokens a block; threads at least 256."""
    WARPS, MOST_STRETCH = threads // 32, -(-most // cluster)
    AT_WARP = 2 * BIN_BYTES
    AT_SHARE = AT_WARP + 8 * WARPS
    AT_FOUND = AT_SHARE + 48
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
        share = uint32(sm + AT_SHARE)  # two for the argmax, two for ties, two for masses
        found = uint32(sm + AT_FOUND)
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
            load_row(line, logit, held, tid, threads)
            if bits != 0:
                for i in range(tid, held, threads):
                    bit = allowed_bit(bits, allowed, words, int64(start + i))
                    if bit == 0:
                        sts_f32(uint32(line + 4 * i), as_float(uint32(MINUS_INFINITY)))
            sync_threads()
            top_key = uint32(0)
            argmax = uint32(NONE)
            turn = int32(0)
            looks = int32(1)
            while looks == 1:  # a second time where nothing but EOS is left: then it comes back
                if tid < eos:
                    at = int32(word(own, S_EOS + tid) - start)
                    if at >= 0 and at < held:
                        x = logit_of(logit, at, start, bits, allowed, words)
                        sts_f32(uint32(line + 4 * at), x if turn == 1 else as_float(uint32(MINUS_INFINITY)))
                sync_threads()
                key = uint32(0)
                token = int32(NONE)
                for some in range(low_end, high_end, 4):
                    x = regs(4)
                    for j in unroll(4):
                        x[j] = lds_f32(uint32(line + 4 * min(some + j, high_end - 1)))
                    for j in unroll(4):
                        one = ordered(x[j])
                        better = one > key  # a token met twice changes nothing
                        key = uint32(one if better else key)
                        token = int32(start + some + j if better else token)
                top_key, argmax = best_of(scratch, uint32(share + 8 * turn), key, token, tid, WARPS, cluster)
                looks = int32(1 if turn == 0 and eos > 0 and top_key <= IMPOSSIBLE else 0)
                turn = int32(turn + 1)
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
                for which in range(2):  # top-k by count, then top-p by mass
                    wanted = int32(top_k if which == 0 else 0)
                    if wanted > 0 or (which == 1 and top_p < 1.0):
                        goal = int64(wanted)
                        near = int32(0)  # digits of the distance, then of the key
                        prefix = uint32(0)
                        ties = int64(2)
                        mass = int64(0)
                        digit = int32(0)
                        first_one = low_end
                        last_one = high_end
                        while digit < DIGITS and ties != 1:
                            hist = uint32(sm + side * BIN_BYTES)
                            first_one, last_one = fill_bins(
                                hist, line, first_one, last_one, start, threshold, cut, top, scale, which, digit, near,
                                prefix, tid, threads,
                            )  # fmt: skip
                            cluster_arrive()
                            cluster_wait()
                            count, mine = bins_of_cluster(hist, which, tid, cluster)
                            measure = int64(mine if which == 1 else count)
                            a, b, c, d = scan_pair(
                                uint32(measure >> LOW), uint32(measure & LOW_MASK), scratch, tid, WARPS
                            )
                            above = joined(a, b)
                            total = joined(c, d)
                            if digit == 0:
                                share_wanted = mass_wanted(total, top_p)
                                goal = int64(max(min(share_wanted if which == 1 else goal, total), 1))
                            if above < goal and goal <= above + measure:
                                sts_u32(found, uint32(tid))
                                put_wide(uint32(found + 8), goal - above)
                                put_wide(uint32(found + 16), count)
                                put_wide(uint32(found + 24), mine)
                            sync_threads()
                            at = int32(lds_u32(found))
                            goal = get_wide(uint32(found + 8))
                            ties = get_wide(uint32(found + 16))
                            mass = get_wide(uint32(found + 24))
                            sync_threads()
                            near = int32(near | at << (16 - 8 * min(digit, 2)) if digit < FAR_DIGITS else near)
                            byte = uint32(uint32(255 - at) << (24 - 8 * max(digit - FAR_DIGITS, 0)))
                            prefix = uint32(prefix | byte if digit >= FAR_DIGITS else prefix)
                            digit = int32(digit + 1)
                            side = int32(side ^ 1)
                        # of the `ties` tokens that share them all, as many stay as it takes to reach the goal
                        each = int64(max(mass // ties, 1))
                        stay = int64((goal + each - 1) // each if which == 1 else goal)
                        stay = int64(max(min(stay, ties), 1))
                        threshold, cut = last_kept(line, first_one, last_one, start, top, scale, digit, near, prefix,
                                                   threshold, cut, stay, found, scratch, uint32(share + 16), rank, tid,
                                                   WARPS, cluster)  # fmt: skip
                # logits become weights: 0 for what is not kept
                high = uint32(0)
                low = uint32(0)
                for some in range(low_end, high_end, 4):
                    y = regs(4)
                    for j in unroll(4):
                        y[j] = lds_f32(uint32(line + 4 * min(some + j, high_end - 1)))
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
                a, b, c, d = scan_pair(high, low, scratch, tid, WARPS)
                before, total = over_ranks(uint32(share + 32), c, d, rank, tid, cluster)
                if rank == 0 and tid == 0:
                    stg_f32(record + 4 * F_TOP, top)
                    stg_f32(record + 4 * F_SCALE, scale)
                    stg_u32(record + 4 * F_THRESHOLD, threshold)
                    stg_u32(record + 4 * F_CUT, uint32(cut))
                    stg_u32(record + 4 * F_MASS, uint32(total & 0xFFFFFFFF))
                    stg_u32(record + 4 * F_MASS_HIGH, uint32(total >> 32))
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
