"""The token after the last draft that stands: from what P has more of than Q at a rejected draft, else from P itself.

    rejected   w = max(2^31 P - 2^31 Q, 0), as whole numbers; P alone where their mass is at most LEAST_RESIDUAL
    complete   w = P's kept weights
    token      the one at which the running mass of w passes u times all of it, u = Philox(RESIDUAL | BONUS)

P and Q are the kept weights of a row over their mass (sample.py's records). A cluster holds the row, each block a
stretch of it in shared memory. Reference: dsuf.ops.accept. Bytes: 4 V a row, twice where a draft was rejected, from L2.

    hand-off   who writes    who waits     reused
    weights    the block     the block     second look (residual without mass)
    shares     each block    the cluster   never
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.draw import (
    allowed_bit,
    joined,
    load_row,
    over_ranks,
    philox,
    scan_pair,
    share_of,
    sum_of_row,
    token_at,
)
from dsuf.kernels.lang import float32, inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import div, fmax
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_f32, lds_u32, sts_f32, sts_u32
from dsuf.kernels.ptx.sync import sync_threads
from dsuf.kernels.rows import word
from dsuf.kernels.slots import FILTER_BYTES, S_EOS, S_SEED, S_SEED_HIGH
from dsuf.kernels.verdict import barred_eos, filter_of, kept_weight, mass_of
from dsuf.ops.philox import Purpose

LEAST_RESIDUAL = 21  # 1e-8 in units of 2^-31
RESIDUAL, BONUS = int(Purpose.RESIDUAL), int(Purpose.BONUS)


@inline
def weights_to_draw_from(
    line: Any, record: Any, q_line: Any, q_record: Any, residual: Any, mask: Any, allowed: Any, words: Any, start: Any,
    held: Any, tid: Any, threads: Any,
) -> None:  # fmt: skip
    """Logits of a row's stretch become P's kept weights, or where `residual` is 1 those of max(P - Q, 0) in 2^31."""
    threshold, cut, top, scale = filter_of(record)
    p_unit = div(2147483648.0, float32(mass_of(record)))
    q_threshold, q_cut, q_top, q_scale = threshold, cut, top, scale
    q_unit = 0.0
    if residual == 1:
        q_unit = div(2147483648.0, float32(mass_of(q_record)))
        q_threshold, q_cut, q_top, q_scale = filter_of(q_record)
    for start_at in range(tid, held, 4 * threads):
        y = regs(4, 0.0)
        for j in unroll(4):
            if residual == 1 and start_at + j * threads < held:
                y[j] = ldg_f32(q_line + int64(start_at + j * threads) * 4)
        for j in unroll(4):
            i = int32(start_at + j * threads)
            if i < held:
                w = kept_weight(lds_f32(uint32(line + 4 * i)), int32(start + i), threshold, cut, top, scale)
                if mask != 0:
                    bit = allowed_bit(mask, allowed, words, int64(start + i))
                    w = w if bit == 1 else 0.0
                if residual == 1:
                    q = kept_weight(y[j], int32(start + i), q_threshold, q_cut, q_top, q_scale)
                    w = fmax(w * p_unit - q * q_unit, 0.0)
                sts_f32(uint32(line + 4 * i), w)


@inline
def clear_barred(line: Any, own: Any, record: Any, accepted: Any, start: Any, held: Any, tid: Any) -> None:
    """No weight for the EOS ids that may not come yet."""
    barred = barred_eos(own, record, accepted)
    sync_threads()
    if tid < barred:
        at = int32(word(own, S_EOS + tid) - start)
        if at >= 0 and at < held:
            sts_f32(uint32(line + 4 * at), 0.0)
    sync_threads()


@inline
def token_of_cluster(
    line: Any, low_end: Any, high_end: Any, ahead: Any, target: Any, start: Any, found: Any, share: Any, rank: Any,
    tid: Any, blocks: Any,
) -> Any:  # fmt: skip
    """The token over which the running mass passes the target: one thread of one block finds it."""
    if tid == 0:
        sts_u32(found, uint32(0))
    sync_threads()
    at = token_at(line, low_end, high_end, ahead, target)
    if at >= 0:
        sts_u32(found, uint32(start + at))
    sync_threads()
    _, token = over_ranks(share, uint32(0), lds_u32(found), rank, tid, blocks)
    return int32(token)


@inline
def token_after(
    line: Any, own: Any, logits: Any, records: Any, draft_logits: Any, draft_records: Any, row: Any, q_row: Any,
    accepted: Any, judged: Any, place: Any, mask: Any, allowed: Any, vocabulary: Any, start: Any, held: Any,
    low_end: Any, high_end: Any, scratch: Any, share: Any, found: Any, rank: Any, tid: Any, threads: Any, warps: Any,
    blocks: Any,
) -> Any:  # fmt: skip
    """A draw behind `accepted` of `judged` drafts; row int64 of P, q_row of Q, place of the token before the block."""
    record = records + row * FILTER_BYTES
    residual = int32(1 if accepted < judged else 0)
    purpose = int32(RESIDUAL if residual == 1 else BONUS)
    total = int64(0)
    ahead = int64(0)
    looks = int32(0)
    while looks < 2:  # a second time where the residual has no mass
        load_row(line, logits + (row * vocabulary + start) * 4, held, tid, threads)
        weights_to_draw_from(
            line, record, draft_logits + (q_row * vocabulary + start) * 4, draft_records + q_row * FILTER_BYTES,
            residual, mask, allowed, int64((vocabulary + 31) >> 5), start, held, tid, threads,
        )  # fmt: skip
        clear_barred(line, own, record, accepted, start, held, tid)
        high, low = sum_of_row(line, low_end, high_end)
        a, b, c, d = scan_pair(high, low, scratch, tid, warps)
        before, total = over_ranks(uint32(share + 8 * looks), c, d, rank, tid, blocks)
        ahead = int64(before + joined(a, b))
        again = residual == 1 and total <= LEAST_RESIDUAL
        looks = int32(looks + 1 if again else 2)
        residual = int32(0)
    number = philox(ldg_u32(own + 4 * S_SEED), ldg_u32(own + 4 * S_SEED_HIGH), int32(place + accepted + 1), purpose)
    target = share_of(total, number)
    return token_of_cluster(line, low_end, high_end, ahead, target, start, found, uint32(share + 16), rank, tid, blocks)
