"""What the device keeps of every sequence, and what it tells the host after a step: layouts, packing, unpacking.

    slot record   SLOT_BYTES a sequence slot; the host writes it once, `accept` moves token, position and emitted
    batch         int32 [MOST_ROWS, 4]: slot (-1: none), first row, most rows, draft index (-1: does not draft)
    row table     int32 [FIELDS, MOST_ROWS], field f at table + PITCH f; one for draft rows, one for verify rows
    counters      uint32 [16]
    ring entry    RING_BYTES: a header of 64 bytes, then RECORD_BYTES an entry of the batch, in mapped host memory

Words are 32 bits; `S_*`, `T_*`, `C_*`, `R_*` number them. The last emitted token of a sequence is not in its cache: it
stands at `position`, which is also how many tokens the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_ROWS = 48
MOST_DRAFTS = 5
MOST_EOS = 8
SLOT_BYTES = 128
(
    S_ACTIVE, S_TOKEN, S_POSITION, S_EMITTED, S_BUDGET, S_MIN_TOKENS, S_IGNORE_EOS, S_EOS_COUNT,
) = range(8)  # fmt: skip
S_EOS = 8
(
    S_TEMPERATURE, S_TOP_P, S_TOP_K, S_SEED, S_SEED_HIGH, S_VERIFY, S_THRESHOLD, S_DRAFTS, S_LOGPROBS, S_DECODER_START,
    S_MASKED, S_GENERATION, S_REASON,
) = range(16, 29)  # fmt: skip
RUNS, STOP, LENGTH = range(3)  # reasons

BATCH_BYTES = 16  # an entry of the batch

PITCH = 4 * MOST_ROWS
T_TOKEN, T_SEQUENCE, T_POSITION, T_OFFSET, T_MEMBER, T_FIRST, T_FIRST_DECODER, T_LAST, T_IMAGE = range(9)
T_START, T_ROWS, T_JUDGED = range(9, 12)  # of an entry of the batch, not of a row
FIELDS = 12
TABLE_BYTES = FIELDS * PITCH

C_STEP, C_ARRIVALS, C_ROWS, C_TOTAL_ROWS, C_TOTAL_ROWS_HIGH, C_TOTAL_SLOTS, C_TOTAL_SLOTS_HIGH = range(7)
COUNTER_BYTES = 64

HEADER_BYTES, RECORD_BYTES = 64, 128
RING_BYTES = HEADER_BYTES + MOST_ROWS * RECORD_BYTES
(
    R_SLOT, R_GENERATION, R_COUNT, R_REASON, R_ACCEPTED, R_DRAFTED, R_JUDGED, R_ROWS, R_POSITION, R_AFTER,
) = range(10)  # fmt: skip
R_TOKENS, R_DRAFTS, R_CONFIDENCE, R_LOGITS = 10, 16, 21, 26

FILTER_BYTES = 32  # of a row's filter record: argmax, largest, scale, threshold, cut, mass (64 bits), sampled
F_TOKEN, F_TOP, F_SCALE, F_THRESHOLD, F_CUT, F_MASS, F_MASS_HIGH, F_SAMPLED = range(8)

LOGPROB_BYTES = 256  # of a row: largest logit, log of the sum, 20 tokens, 20 log probabilities
MOST_LOGPROBS = 20
L_TOP, L_LOG_SUM, L_TOKENS, L_LOGPROBS = 0, 1, 2, 22


def slot_record(
    *, token: int, position: int, emitted: int, budget: int, eos: Sequence[int] = (), ignore_eos: bool = False,
    min_tokens: int = 0, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, verify: int = -1,
    threshold: float = 0.0, drafts: bool = True, logprobs: int | None = None, decoder_start: int = 0,
    masked: bool = False, generation: int = 0, active: bool = True,
) -> np.ndarray:  # fmt: skip
    """uint8 [SLOT_BYTES]: a sequence whose last token `token` stands at `position`, `emitted` of `budget` tokens done.

    verify -1: by confidence. Raises ValueError for more EOS ids than the record holds.
    """
    ids = sorted(eos)
    if len(ids) > MOST_EOS:
        raise ValueError(f"{len(ids)} EOS ids; a slot holds {MOST_EOS}")
    words = np.zeros(SLOT_BYTES // 4, np.uint32)
    whole = {
        S_ACTIVE: active, S_TOKEN: token, S_POSITION: position, S_EMITTED: emitted, S_BUDGET: budget,
        S_MIN_TOKENS: min_tokens, S_IGNORE_EOS: ignore_eos, S_EOS_COUNT: len(ids), S_TOP_K: top_k,
        S_SEED: seed & 0xFFFFFFFF, S_SEED_HIGH: seed >> 32 & 0xFFFFFFFF, S_VERIFY: verify, S_DRAFTS: drafts,
        S_LOGPROBS: -1 if logprobs is None else logprobs, S_DECODER_START: decoder_start, S_MASKED: masked,
        S_GENERATION: generation,
    }  # fmt: skip
    for word, value in whole.items():
        words[word] = int(value) & 0xFFFFFFFF
    words[S_EOS : S_EOS + len(ids)] = ids
    numbers = words.view(np.float32)
    numbers[S_TEMPERATURE], numbers[S_TOP_P], numbers[S_THRESHOLD] = temperature, top_p, threshold
    return words.view(np.uint8)


@dataclass(frozen=True)
class Record:
    """What one step did for one entry of the batch."""

    slot: int
    generation: int
    reason: int  # RUNS, STOP or LENGTH
    accepted: int
    drafted: list[int]  # the whole block; empty without drafting
    confidence: list[float]  # logits, one a draft
    judged: int
    rows: int
    position: int  # of the token that the rows follow
    after: int  # that token
    emitted: list[int]
    logits: list[float]  # raw, one an emitted token


def flag_of(entry: np.ndarray) -> int:
    """Number of the step that this ring entry (uint8 [RING_BYTES]) holds; read it before anything else."""
    return int(entry[:4].view(np.uint32)[0])


def records_of(entry: np.ndarray) -> list[Record]:
    """The records of a ring entry, in the order of the batch; entries that did not run have no tokens."""
    members = int(entry[4:8].view(np.uint32)[0])
    return [
        _record(entry[HEADER_BYTES + i * RECORD_BYTES : HEADER_BYTES + (i + 1) * RECORD_BYTES]) for i in range(members)
    ]


def _record(raw: np.ndarray) -> Record:
    whole, number = raw.view(np.int32), raw.view(np.float32)
    count, drafted = int(whole[R_COUNT]), int(whole[R_DRAFTED])
    return Record(
        slot=int(whole[R_SLOT]),
        generation=int(whole[R_GENERATION]),
        reason=int(whole[R_REASON]),
        accepted=int(whole[R_ACCEPTED]),
        drafted=whole[R_DRAFTS : R_DRAFTS + drafted].tolist(),
        confidence=number[R_CONFIDENCE : R_CONFIDENCE + drafted].tolist(),
        judged=int(whole[R_JUDGED]),
        rows=int(whole[R_ROWS]),
        position=int(whole[R_POSITION]),
        after=int(whole[R_AFTER]),
        emitted=whole[R_TOKENS : R_TOKENS + count].tolist(),
        logits=number[R_LOGITS : R_LOGITS + count].tolist(),
    )


def top_logprobs(row: np.ndarray, logit: float, count: int) -> tuple[float, list[tuple[int, float]]]:
    """uint8 [LOGPROB_BYTES] of a row -> (log probability of the token with this logit, the `count` most likely)."""
    number, whole = row.view(np.float32), row.view(np.int32)
    own = float(np.float64(logit) - number[L_TOP]) - float(number[L_LOG_SUM])
    best = [(int(whole[L_TOKENS + i]), float(number[L_LOGPROBS + i])) for i in range(count)]
    return own, best
