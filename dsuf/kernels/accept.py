"""End of a step: how many drafts stand, the token that follows them, the sequence moved on, and the host told.

    greedy    draft i stands while it is the argmax of row i; then the argmax of the first row that disagrees
    sampled   draft d stands if u Q(d) < P(d) (verdict.py); then a draw from what is left (residual.py)
    cut       up to and with an EOS (reason STOP), or the last token of the budget (LENGTH)
    advance   position and emitted += tokens, token = the last one, inactive with a reason
    report    ring entry of the step: one record a batch entry, then the flag, release at system scope

P and Q are the kept weights of a row (sample.py's records) over their mass; of Q the logits are those that the Markov
chain left. Where the block reaches the end of the budget there is no row after the last draft, and nothing follows it.
Layouts: slots.py; mask as in sample.py. Reference: dsuf.ops.accept, dsuf.engine.choose.choose_tokens, Sequence.cut. A
cluster an entry: greedy entries take a few loads, sampled ones two rows of logits from L2.

    hand-off                who writes        who waits           reused
    verdicts                threads 0 .. 4    the block           never
    weights, shares         residual.py
    record                  thread 0          warp 0              never
    arrivals                each cluster      the last one        zeroed by rows.verify
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.draw import MOST_VOCABULARY, stretch_of
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, s32, s64, uint32, unroll
from dsuf.kernels.ptx.memory import atom_add, ldg_u32, lds_u32, shared_base, st_release_sys, stg_u32, sts_u32
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
from dsuf.kernels.residual import token_after
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
    S_EOS_COUNT,
    S_GENERATION,
    S_IGNORE_EOS,
    S_MASKED,
    S_POSITION,
    S_REASON,
    S_TOKEN,
    SLOT_BYTES,
    STOP,
    T_JUDGED,
    T_ROWS,
    T_START,
)
from dsuf.kernels.verdict import is_eos, stands
from dsuf.ops.accept import accept_sampled

CLUSTER, THREADS = 8, 512
WORDS = RECORD_BYTES // 4


@inline
def put_word(record: Any, number: Any, value: Any) -> None:
    """A word of the record in shared memory."""
    sts_u32(uint32(record + 4 * number), uint32(value))


@inline
def standing(
    own: Any, logits: Any, records: Any, draft_logits: Any, draft_records: Any, drafts: Any, first: Any,
    draft_row: Any, place: Any, judged: Any, sampled: Any, mask: Any, mask_row: Any, vocabulary: Any, verdict: Any,
    tid: Any,
) -> Any:  # fmt: skip
    """How many of the judged drafts stand, the first ones in a row; a thread judges one."""
    if tid < judged:
        token = word(drafts, int64(draft_row + tid))
        yes = int32(0)
        if sampled == 1:
            yes = stands(own, logits, records, draft_logits, draft_records, token, int32(first + tid),
                         int32(draft_row + tid), int32(place + tid), tid, mask, int32(mask_row + tid),
                         vocabulary)  # fmt: skip
        else:
            best = word(records + int64(first + tid) * FILTER_BYTES, F_TOKEN)
            yes = int32(1 if token == best else 0)
        sts_u32(uint32(verdict + 4 * tid), uint32(yes))
    sync_threads()
    accepted = int32(0)
    unbroken = int32(1)
    for i in range(judged):
        unbroken = int32(unbroken & int32(lds_u32(uint32(verdict + 4 * i))))
        accepted = int32(accepted + unbroken)
    return accepted


@inline
def advance(
    record: Any, own: Any, drafts: Any, draft_row: Any, logits: Any, first: Any, accepted: Any, rows: Any,
    following: Any, place: Any, vocabulary: Any,
) -> Any:  # fmt: skip
    """The accepted drafts and what follows them, cut at EOS or the budget, into slot and record; the reason to end."""
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
        put_word(record, R_LOGITS + kept, ldg_u32(logits + (int64(first + kept) * vocabulary + token) * 4))
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
    return reason


@inline
def describe_drafts(record: Any, drafts: Any, confidence: Any, draft_row: Any, drafted: Any) -> None:
    """The drafted block and its confidences, whether judged or not."""
    for i in range(drafted):
        put_word(record, R_DRAFTS + i, word(drafts, int64(draft_row + i)))
        put_word(record, R_CONFIDENCE + i, word(confidence, int64(draft_row + i)))


@inline
def hand_to_host(record: Any, ring_memory: Any, ring: Any, member: Any, count: Any, counters: Any, tid: Any) -> None:
    """A warp copies the record into the step's ring entry; whoever comes last raises the entry's flag.

    Each adds with release, the last one has acquired all, and its flag releases them to the host.
    """
    step = ldg_u32(counters + 4 * C_STEP)
    entry = ring_memory + int64(int32(step) % ring) * RING_BYTES
    to = entry + HEADER_BYTES + int64(member) * RECORD_BYTES
    for i in unroll(WORDS // 32):
        stg_u32(to + 4 * int64(tid + 32 * i), lds_u32(uint32(record + 4 * (tid + 32 * i))))
    sync_warp()
    if tid == 0:
        before_me = int32(atom_add(counters + 4 * C_ARRIVALS, uint32(1)))
        if before_me == count - 1:
            stg_u32(entry + 4, uint32(count))
            stg_u32(entry + 8, ldg_u32(counters + 4 * C_ROWS))
            st_release_sys(entry, step)


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
        line = uint32(sm + AT_ROW)
        start, held, low_end, high_end = stretch_of(vocabulary, rank, tid, cluster, threads)
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
            accepted = standing(own, logits, records, draft_logits, draft_records, drafts, first, draft_row, place,
                                judged, sampled, bits, mask_row, vocabulary, uint32(sm + AT_VERDICT), tid)  # fmt: skip
            if accepted < rows:
                row = int64(first + accepted)
                following = word(records + row * FILTER_BYTES, F_TOKEN)
                if sampled == 1:
                    following = token_after(
                        line, own, logits, records, draft_logits, draft_records, row, int64(draft_row + accepted),
                        accepted, judged, place, bits, int64(mask_row + accepted), vocabulary, start, held, low_end,
                        high_end, sm, share, uint32(sm + AT_FOUND), rank, tid, threads, WARPS, cluster,
                    )  # fmt: skip
            if sampled == 1:  # every block has read the slot, and the shares
                cluster_arrive()
                cluster_wait()
        if rank == 0 and tid < 32:
            record = uint32(sm + AT_RECORD)
            sts_u32(uint32(record + 4 * tid), uint32(0))
            sync_warp()
            if tid == 0:
                put_word(record, R_SLOT, slot)
                put_word(record, R_DRAFTED, drafted)
                put_word(record, R_JUDGED, judged)
                put_word(record, R_ROWS, rows)
                put_word(record, R_POSITION, place)
                describe_drafts(record, drafts, confidence, draft_row, drafted)
                reason = int32(0)
                if slot >= 0:
                    put_word(record, R_GENERATION, word(own, S_GENERATION))
                    put_word(record, R_AFTER, word(own, S_TOKEN))
                    reason = word(own, S_REASON)
                if rows > 0:
                    reason = advance(record, own, drafts, draft_row, logits, first, accepted, rows, following, place,
                                     vocabulary)  # fmt: skip
                put_word(record, R_REASON, reason)
            sync_warp()
            hand_to_host(record, ring_memory, ring, member, count, counters, tid)

    return accept


def entries(width: Width) -> list[Entry]:
    """One kernel for every vocabulary."""
    if width.label != "v41":
        return []
    shape = {"cluster": CLUSTER, "threads": THREADS, "most": MOST_VOCABULARY}
    size = 2 * 4 * MOST_ROWS // (MOST_DRAFTS + 1) * width.spec.vocab_size
    return [Entry("accept", make, shape, width.chips, accept_sampled, size, size)]
