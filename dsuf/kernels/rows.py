"""Rows of a step, made on the device: which token of which sequence stands where, and which keys it sees.

    draft    an entry of the batch that drafts: rows 5 k .. 5 k + 4 of its draft index k: y, then noise, at positions
             p .. p + 4 of the last token's position p; keys max(decoder_start, p - W) .. p + 4 for all of them
    verify   rows first_row ..: y, then the drafts that are verified; keys max(0, p - W + 1) .. p of each row's p
             judged = min(verify or the confident prefix, drafts, budget left);  rows = min(judged + 1, budget left)
    set      the host's word: rewind a sequence, or release it

The confident prefix is the longest over which the product of sigmoid(confidence) is at least the threshold. Layouts of
slots, batch, tables and counters are in slots.py. drafts int32 and confidence float32 [MOST_ROWS] by draft row. `rows`
is the capacity of the bucket: an entry that reaches past it is left out. Reference: dsuf.engine.choose.drafts_to_judge,
ops.accept.verify_length. A thread an entry; launches decide the time.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, s32, s64, uint32, unroll
from dsuf.kernels.mixes import sigmoid
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_u32, shared_base, stg_u32, sts_u32
from dsuf.kernels.ptx.sync import (
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
    warp_sum_u32,
)
from dsuf.kernels.slots import (
    BATCH_BYTES,
    C_ARRIVALS,
    C_ROWS,
    C_STEP,
    C_TOTAL_ROWS,
    C_TOTAL_SLOTS,
    FIELDS,
    MOST_DRAFTS,
    MOST_ROWS,
    PITCH,
    S_ACTIVE,
    S_BUDGET,
    S_DECODER_START,
    S_DRAFTS,
    S_EMITTED,
    S_POSITION,
    S_REASON,
    S_THRESHOLD,
    S_TOKEN,
    S_VERIFY,
    SLOT_BYTES,
    T_FIRST,
    T_FIRST_DECODER,
    T_JUDGED,
    T_LAST,
    T_MEMBER,
    T_OFFSET,
    T_POSITION,
    T_ROWS,
    T_SEQUENCE,
    T_START,
    T_TOKEN,
)
from dsuf.ops.accept import verify_length

THREADS = 64


@inline
def word(address: Any, number: Any) -> Any:
    """The signed word of a record."""
    return int32(ldg_u32(address + 4 * number))


@inline
def put(table: Any, field: Any, index: Any, value: Any) -> None:
    """table[field][index] = value."""
    stg_u32(table + field * PITCH + int64(index) * 4, uint32(value))


@inline
def get(table: Any, field: Any, index: Any) -> Any:
    """table[field][index]."""
    return int32(ldg_u32(table + field * PITCH + int64(index) * 4))


@inline
def clear(table: Any, tid: Any) -> None:
    """Inactive rows everywhere; the block meets afterwards."""
    if tid < MOST_ROWS:
        for field in unroll(FIELDS):
            put(table, field, tid, int32(-1 if field == T_SEQUENCE else 0))
    sync_threads()


@inline
def put_row(table: Any, row: Any, token: Any, slot: Any, place: Any, offset: Any, member: Any) -> None:
    """The fields of a row that do not depend on what it sees."""
    put(table, T_TOKEN, row, token)
    put(table, T_SEQUENCE, row, slot)
    put(table, T_POSITION, row, place)
    put(table, T_OFFSET, row, offset)
    put(table, T_MEMBER, row, member)


def make_draft() -> Kernel:
    """One block; block: slots of a draft block."""

    @kernel(threads=THREADS, name="rows_draft")
    def draft(slots: s64, batch: s64, count: s32, table: s64, rows: s32, window: s32, noise: s32, block: s32) -> None:
        tid = int32(thread_index())
        wait_for_previous_kernel()
        let_next_kernel_start()
        clear(table, tid)
        if tid < count:
            entry = batch + int64(tid) * BATCH_BYTES
            slot = word(entry, 0)
            index = word(entry, 3)
            start = int32(index * block)
            if slot >= 0 and index >= 0 and start + block <= rows:
                own = slots + int64(slot) * SLOT_BYTES
                active = word(own, S_ACTIVE)
                wants = word(own, S_DRAFTS)
                if active == 1 and wants == 1:
                    token = word(own, S_TOKEN)
                    place = word(own, S_POSITION)
                    first = int32(max(max(place - window, word(own, S_DECODER_START)), 0))
                    for i in range(block):
                        row = int32(start + i)
                        put_row(table, row, int32(token if i == 0 else noise), slot, int32(place + i), i, tid)
                        put(table, T_FIRST, row, first)
                        put(table, T_FIRST_DECODER, row, first)
                        put(table, T_LAST, row, int32(place + block - 1))
                    put(table, T_START, tid, start)
                    put(table, T_ROWS, tid, block)

    return draft


def make_verify() -> Kernel:
    """One block; draft_table 0: nobody drafts."""
    CONFIDENT = MOST_DRAFTS

    @kernel(threads=THREADS, shared=16, name="rows_verify")
    def verify(
        slots: s64, batch: s64, count: s32, draft_table: s64, drafts: s64, confidence: s64, table: s64, counters: s64,
        rows: s32, window: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        clear(table, tid)
        live = int32(0)
        drafted = int32(0)
        if tid < count:
            entry = batch + int64(tid) * BATCH_BYTES
            slot = word(entry, 0)
            start = word(entry, 1)
            most = word(entry, 2)
            if slot >= 0 and start + most <= rows:
                own = slots + int64(slot) * SLOT_BYTES
                left = int32(word(own, S_BUDGET) - word(own, S_EMITTED))
                active = word(own, S_ACTIVE)
                if active == 1 and left > 0:
                    at = int32(0)  # its first draft row
                    if draft_table != 0:
                        drafted = get(draft_table, T_ROWS, tid)
                        at = get(draft_table, T_START, tid)
                    judged = int32(min(word(own, S_VERIFY), drafted))
                    if judged < 0:
                        threshold = ldg_f32(own + 4 * S_THRESHOLD)
                        product = 1.0
                        judged = int32(0)
                        for i in unroll(CONFIDENT):
                            if i < drafted:
                                product = product * sigmoid(ldg_f32(confidence + (int64(at) + i) * 4))
                                sure = product >= threshold and judged == i
                                judged = int32(judged + (1 if sure else 0))
                    judged = int32(min(min(judged, left), most - 1))
                    live = int32(min(min(judged + 1, left), most))
                    place = word(own, S_POSITION)
                    decoder = word(own, S_DECODER_START)
                    for i in range(live):
                        row = int32(start + i)
                        token = word(own, S_TOKEN)
                        if i > 0:
                            token = int32(ldg_u32(drafts + (int64(at) + i - 1) * 4))
                        first = int32(max(place + i - window + 1, 0))
                        put_row(table, row, token, slot, int32(place + i), i, tid)
                        put(table, T_FIRST, row, first)
                        put(table, T_FIRST_DECODER, row, int32(max(first, decoder)))
                        put(table, T_LAST, row, int32(place + i))
                    put(table, T_START, tid, start)
                    put(table, T_ROWS, tid, live)
                    put(table, T_JUDGED, tid, judged)
        all_rows = warp_sum_u32(uint32(live))
        all_slots = warp_sum_u32(uint32(drafted))
        if tid == 32:
            sts_u32(sm, all_rows)
            sts_u32(uint32(sm + 4), all_slots)
        sync_threads()
        if tid == 0:
            all_rows = uint32(all_rows + lds_u32(sm))
            stg_u32(counters + 4 * C_STEP, uint32(ldg_u32(counters + 4 * C_STEP) + 1))
            stg_u32(counters + 4 * C_ARRIVALS, uint32(0))
            stg_u32(counters + 4 * C_ROWS, all_rows)
            add_wide(counters + 4 * C_TOTAL_ROWS, all_rows)
            add_wide(counters + 4 * C_TOTAL_SLOTS, uint32(all_slots + lds_u32(uint32(sm + 4))))

    return verify


@inline
def add_wide(address: Any, amount: Any) -> None:
    """A 64-bit counter of two words += amount (one thread)."""
    before = ldg_u32(address)
    low = uint32(before + amount)
    stg_u32(address, low)
    if low < before:
        stg_u32(address + 4, uint32(ldg_u32(address + 4) + 1))


def make_set() -> Kernel:
    """One warp. position < 0 leaves position, token and counts as they are."""

    @kernel(threads=32, name="rows_set")
    def set_slot(slots: s64, slot: s32, position: s32, token: s32, active: s32) -> None:
        own = slots + int64(slot) * SLOT_BYTES
        wait_for_previous_kernel()
        let_next_kernel_start()
        if thread_index() == 0:
            if position >= 0:
                back = int32(word(own, S_POSITION) - position)
                stg_u32(own + 4 * S_EMITTED, uint32(word(own, S_EMITTED) - back))
                stg_u32(own + 4 * S_POSITION, uint32(position))
                stg_u32(own + 4 * S_TOKEN, uint32(token))
                stg_u32(own + 4 * S_REASON, uint32(0))
            stg_u32(own + 4 * S_ACTIVE, uint32(active))

    return set_slot


def entries(width: Width) -> list[Entry]:
    """None of them has a width."""
    if width.label != "v41":
        return []
    size = MOST_ROWS * (SLOT_BYTES + 4 * FIELDS)
    makes = (("draft", make_draft), ("verify", make_verify), ("set", make_set))
    return [Entry(f"rows.{name}", make, {}, width.chips, verify_length, size, 0) for name, make in makes]
