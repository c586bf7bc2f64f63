"""End of a step: how many drafts stand, the token that follows them, the sequence moved on, and the host told.

    greedy    draft i stands while it is the argmax of row i; then the argmax of the first row that disagrees
    sampled   draft d stands if u Q(d) < P(d); at the first that does not, a draw from max(P - Q, 0), or from P where
              that has no mass above 1e-8; if all stand, a draw from the row after them
    cut       up to and with an EOS (reason STOP), or the last token of the budget (LENGTH)
    advance   position and emitted += tokens, token = the last one, inactive with a reason
    report    ring entry of the step: one record a batch entry, then the flag, release at system scope

P and Q are the kept weights of a row (sample.py's records) over their mass; of Q the logits are those that the Markov
chain left. Random numbers: Philox at (position of the token, ACCEPT | RESIDUAL | BONUS). Where the block reaches the
end of the budget there is no row after the last draft, and nothing follows it. Layouts: slots.py; mask as in sample.py.
Reference: dsuf.ops.accept, dsuf.engine.choose.choose_tokens, Sequence.cut. A cluster an entry: greedy entries take a
few loads, sampled ones two rows of logits from L2.

    hand-off                who writes        who waits           reused
    verdicts                threads 0 .. 4    the block           never
    weights                 the block         the block           second look (residual without mass)
    shares                  each block        the cluster         never
    record                  thread 0          warp 0              never
    arrivals                each cluster      the last one        zeroed by rows.verify
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.draw import (
    MOST_VOCABULARY,
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
from dsuf.kernels.lang import Kernel, float32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import div, fmax
from dsuf.kernels.ptx.memory import (
    atom_add,
    ldg_f32,
    ldg_u32,
    lds_f32,
    lds_u32,
    shared_base,
    st_release_sys,
    stg_u32,
    sts_f32,
    sts_u32,
)
from dsuf.kernels.ptx.sync import (
    block_index,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    let_next_kernel_start,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.rows import get, word
from dsuf.kernels.slots import (
    BATCH_BYTES,
    C_ARRIVALS,
    C_ROWS,
    C_STEP,
    F_SAMPLED,
    F_TOKEN,
    FILTER_BYTES,
    HEADER_BYTES,
    LENGTH,
    MOST_DRAFTS,
    MOST_ROWS,
    R_ACCEPTED,
    R_AFTER,
    R_CONFIDENCE,
    R_COUNT,
    R_DRAFTED,
    R_DRAFTS,
    R_GENERATION,
    R_JUDGED,
    R_LOGITS,
    R_POSITION,
    R_REASON,
    R_ROWS,
    R_SLOT,
    R_TOKENS,
    RECORD_BYTES,
    RING_BYTES,
    S_ACTIVE,
    S_BUDGET,
    S_EMITTED,
    S_EOS,
    S_EOS_COUNT,
    S_GENERATION,
    S_IGNORE_EOS,
    S_MASKED,
    S_POSITION,
    S_REASON,
    S_SEED,
    S_SEED_HIGH,
    S_TOKEN,
    SLOT_BYTES,
    STOP,
    T_JUDGED,
    T_ROWS,
    T_START,
)
from dsuf.kernels.verdict import barred_eos, filter_of, is_eos, kept_weight, mass_of, stands
from dsuf.ops.accept import accept_sampled
from dsuf.ops.philox import Purpose

CLUSTER, THREADS = 8, 512
LEAST_RESIDUAL = 21  # 1e-8 in units of 2^-31
RESIDUAL, BONUS = int(Purpose.RESIDUAL), int(Purpose.BONUS)
WORDS = RECORD_BYTES // 4


@inline
def put_word(record: Any, number: Any, value: Any) -> None:
    """A word of the record in shared memory."""
    sts_u32(uint32(record + 4 * number), uint32(value))


def make(*, cluster: int, threads: int, most: int) -> Kernel:
    """most: largest vocabulary, up to 16,384 tokens a block."""
    WARPS, MOST_STRETCH = threads // 32, -(-most // cluster)
    AT_SHARE = 8 * WARPS
    AT_FOUND = AT_SHARE + 32
    AT_VERDICT = AT_FOUND + 16
    AT_RECORD = AT_VERDICT + 32
    AT_ROW = AT_RECORD + RECORD_BYTES

    @kernel(
        threads=threads, grid=(cluster * MOST_ROWS,), shared=AT_ROW + 4 * MOST_STRETCH, cluster=cluster,
        name=f"accept_{cluster}x{threads}",
    )  # fmt: skip
    def accept(
        logits: s64, records: s64, draft_logits: s64, draft_records: s64, drafts: s64, confidence: s64, mask: s64,
        table: s64, draft_table: s64, slots: s64, batch: s64, counters: s64, ring_memory: s64, ring: s32, count: s32,
        vocabulary: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        rank = int32(cluster_rank())
        member = int32(block_index() // cluster)
        sm = shared_base()
        share = uint32(sm + AT_SHARE)
        found = uint32(sm + AT_FOUND)
        verdict = uint32(sm + AT_VERDICT)
        line = uint32(sm + AT_ROW)
        stretch = int32((vocabulary + cluster - 1) // cluster)
        start = int32(rank * stretch)  # its first token
        held = int32(max(min(stretch, vocabulary - start), 0))
        per = int32((stretch + threads - 1) // threads | 1)  # tokens of a thread
        low_end = int32(min(tid * per, held))
        high_end = int32(min(low_end + per, held))
        # batch, tables and slots are older than the kernel before
        slot = word(batch + int64(member) * BATCH_BYTES, 0)
        own = slots + int64(max(slot, 0)) * SLOT_BYTES
        first = get(table, T_START, member)
        rows = get(table, T_ROWS, member)
        judged = get(table, T_JUDGED, member)
        drafted = int32(0)
        draft_row = int32(0)
        if draft_table != 0:
            drafted = get(draft_table, T_ROWS, member)
            draft_row = get(draft_table, T_START, member)
        place = word(own, S_POSITION)
        masked = word(own, S_MASKED)
        wait_for_previous_kernel()
        let_next_kernel_start()
        accepted = int32(0)
        following = int32(-1)
        if rows > 0:
            sampled = int32(ldg_u32(records + int64(first) * FILTER_BYTES + 4 * F_SAMPLED))
            bits = int64(mask if masked == 1 else 0)
            mask_row = int32(member * (MOST_DRAFTS + 1))
            if tid < judged:
                token = word(drafts, int64(draft_row + tid))
                yes = int32(0)
                if sampled == 1:
                    yes = stands(own, logits, records, draft_logits, draft_records, token, int32(first + tid),
                                 int32(draft_row + tid), int32(place + tid), tid, bits, int32(mask_row + tid),
                                 vocabulary)  # fmt: skip
                else:
                    best = word(records + int64(first + tid) * FILTER_BYTES, F_TOKEN)
                    yes = int32(1 if token == best else 0)
                sts_u32(uint32(verdict + 4 * tid), uint32(yes))
            sync_threads()
            standing = int32(1)
            for i in range(judged):
                standing = int32(standing & int32(lds_u32(uint32(verdict + 4 * i))))
                accepted = int32(accepted + standing)
            if accepted < rows:
                row = int64(first + accepted)
                record = records + row * FILTER_BYTES
                following = word(record, F_TOKEN)
                if sampled == 1:
                    barred = barred_eos(own, record, accepted)
                    words = int64((vocabulary + 31) >> 5)
                    allowed = int64(mask_row + accepted)
                    p_line = logits + (row * vocabulary + start) * 4
                    q_row = int64(draft_row + accepted)
                    q_line = draft_logits + (q_row * vocabulary + start) * 4
                    q_record = draft_records + q_row * FILTER_BYTES
                    residual = int32(1 if accepted < judged else 0)
                    purpose = int32(RESIDUAL if residual == 1 else BONUS)
                    p_unit = div(2147483648.0, float32(mass_of(record)))
                    threshold, cut, top, scale = filter_of(record)
                    q_threshold, q_cut, q_top, q_scale = threshold, cut, top, scale
                    q_unit = 0.0
                    if residual == 1:
                        q_unit = div(2147483648.0, float32(mass_of(q_record)))
                        q_threshold, q_cut, q_top, q_scale = filter_of(q_record)
                    before = int64(0)
                    total = int64(0)
                    ahead = int64(0)
                    looks = int32(0)
                    while looks < 2:  # a second time where the residual has no mass
                        load_row(line, p_line, held, tid, threads)
                        for start_at in range(tid, held, 4 * threads):
                            y = regs(4, 0.0)
                            for j in unroll(4):
                                if residual == 1 and start_at + j * threads < held:
                                    y[j] = ldg_f32(q_line + int64(start_at + j * threads) * 4)
                            for j in unroll(4):
                                i = int32(start_at + j * threads)
                                if i < held:
                                    x = lds_f32(uint32(line + 4 * i))
                                    w = kept_weight(x, int32(start + i), threshold, cut, top, scale)
                                    if bits != 0:
                                        bit = allowed_bit(bits, allowed, words, int64(start + i))
                                        w = w if bit == 1 else 0.0
                                    if residual == 1:
                                        q = kept_weight(y[j], int32(start + i), q_threshold, q_cut, q_top, q_scale)
                                        w = fmax(w * p_unit - q * q_unit, 0.0)
                                    sts_f32(uint32(line + 4 * i), w)
                        sync_threads()
                        if tid < barred:
                            at = int32(word(own, S_EOS + tid) - start)
                            if at >= 0 and at < held:
                                sts_f32(uint32(line + 4 * at), 0.0)
                        sync_threads()
                        high, low = sum_of_row(line, low_end, high_end)
                        a, b, c, d = scan_pair(high, low, sm, tid, WARPS)
                        before, total = over_ranks(uint32(share + 8 * looks), c, d, rank, tid, cluster)
                        ahead = int64(before + joined(a, b))
                        again = residual == 1 and total <= LEAST_RESIDUAL
                        looks = int32(looks + 1 if again else 2)
                        residual = int32(0)
                    number = philox(
                        ldg_u32(own + 4 * S_SEED), ldg_u32(own + 4 * S_SEED_HIGH), int32(place + accepted + 1), purpose
                    )
                    if tid == 0:
                        sts_u32(found, uint32(0))
                    sync_threads()
                    at = token_at(line, low_end, high_end, ahead, share_of(total, number))
                    if at >= 0:
                        sts_u32(found, uint32(start + at))
                    sync_threads()
                    _, total = over_ranks(uint32(share + 16), uint32(0), lds_u32(found), rank, tid, cluster)
                    following = int32(total)
            if sampled == 1:  # every block has read the slot, and the shares
                cluster_arrive()
                cluster_wait()
        if rank == 0 and tid < 32:
            record = uint32(sm + AT_RECORD)
            sts_u32(uint32(record + 4 * tid), uint32(0))
            sync_warp()
            reason = int32(0)
            if tid == 0:
                put_word(record, R_SLOT, slot)
                put_word(record, R_DRAFTED, drafted)
                put_word(record, R_JUDGED, judged)
                put_word(record, R_ROWS, rows)
                put_word(record, R_POSITION, place)
                for i in range(drafted):
                    put_word(record, R_DRAFTS + i, word(drafts, int64(draft_row + i)))
                    put_word(record, R_CONFIDENCE + i, word(confidence, int64(draft_row + i)))
                if slot >= 0:
                    put_word(record, R_GENERATION, word(own, S_GENERATION))
                    put_word(record, R_AFTER, word(own, S_TOKEN))
                    reason = word(own, S_REASON)
                if rows > 0:
                    emitted = word(own, S_EMITTED)
                    left = int32(word(own, S_BUDGET) - emitted)
                    ids = word(own, S_EOS_COUNT)
                    ignored = word(own, S_IGNORE_EOS)
                    ids = int32(0 if ignored == 1 else ids)
                    offered = int32(min(accepted + 1, rows))
                    kept = int32(0)
                    token = int32(0)
                    reason = int32(0)
                    while kept < offered and reason == 0:
                        token = following
                        if kept < accepted:
                            token = word(drafts, int64(draft_row + kept))
                        put_word(record, R_TOKENS + kept, token)
                        x = ldg_u32(logits + (int64(first + kept) * vocabulary + token) * 4)
                        put_word(record, R_LOGITS + kept, x)
                        kept = int32(kept + 1)
                        ends = is_eos(own, token, ids)
                        reason = int32(LENGTH if kept == left else 0)
                        reason = int32(STOP if ends == 1 else reason)
                    put_word(record, R_COUNT, kept)
                    put_word(record, R_ACCEPTED, int32(min(accepted, kept)))
                    stg_u32(own + 4 * S_TOKEN, uint32(token))
                    stg_u32(own + 4 * S_POSITION, uint32(place + kept))
                    stg_u32(own + 4 * S_EMITTED, uint32(emitted + kept))
                    stg_u32(own + 4 * S_REASON, uint32(reason))
                    stg_u32(own + 4 * S_ACTIVE, uint32(1 if reason == 0 else 0))
                put_word(record, R_REASON, reason)
            sync_warp()
            step = ldg_u32(counters + 4 * C_STEP)
            entry = ring_memory + int64(int32(step) % ring) * RING_BYTES
            to = entry + HEADER_BYTES + int64(member) * RECORD_BYTES
            for i in unroll(WORDS // 32):
                stg_u32(to + 4 * int64(tid + 32 * i), lds_u32(uint32(record + 4 * (tid + 32 * i))))
            sync_warp()
            if (
                tid == 0
            ):  # each adds with release, the last one has acquired all, and its flag releases them to the host
                before_me = int32(atom_add(counters + 4 * C_ARRIVALS, uint32(1)))
                if before_me == count - 1:
                    stg_u32(entry + 4, uint32(count))
                    stg_u32(entry + 8, ldg_u32(counters + 4 * C_ROWS))
                    st_release_sys(entry, step)

    return accept


def entries(width: Width) -> list[Entry]:
    """One kernel for every vocabulary."""
    if width.label != "v41":
        return []
    shape = {"cluster": CLUSTER, "threads": THREADS, "most": MOST_VOCABULARY}
    size = 2 * 4 * MOST_ROWS // (MOST_DRAFTS + 1) * width.spec.vocab_size
    return [Entry("accept", make, shape, width.chips, accept_sampled, size, size)]
