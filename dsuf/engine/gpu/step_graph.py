"""A decode step as two graphs of a row bucket, draft and verify, and the memory through which host and device talk.

    steps = StepGraphs(device, model, slots)
    number = steps.queue(entries, sampled=..., masked=..., logprobs=...)     -> queues both graphs, numbers the step
    steps.result(number)                                                     -> its records, None while it runs

A bucket is the number of rows (6, 12, 24, 48 with drafts; 1, 2, 4, 8, 16, 24, 48 without), of drafting sequences, and
what its sequences ask for beside tokens. Its graphs are captured when it is first wanted. Lengths, tokens and limits
live in the slots on the device, so a captured graph serves every batch; the batch table alone is written by the host,
when it changes. The ring of results lies in page-locked memory; the device writes each entry's flag last.

Where somebody is bound to a grammar, verify is two graphs, score (up to the logits) and choose: the host reads the
drafts and makes masks of what may follow them while the device scores, and the device waits for nobody.

`graphs` False launches the kernels one by one instead: the slow twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.engine.gpu import draft_walk, step_walk
from dsuf.engine.gpu.buffers import Rows
from dsuf.engine.gpu.launches import Launches
from dsuf.engine.gpu.step_walk import Model
from dsuf.kernels import slots as words
from dsuf.kernels.slots import MOST_ROWS, Record

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device, Event, Graph

RING = 16  # steps whose results are kept
STAGES = 8  # batch tables on their way
GROUPS = (1, 2, 4, 8)  # drafting sequences of a bucket
PLAIN_ROWS = (1, 2, 4, 8, 16, 24, 48)
VERIFY_PURPOSE = -1


@dataclass(frozen=True)
class Entry:
    """A sequence's part of a step: its slot, most rows, whether it drafts."""

    slot: int
    rows: int
    drafts: bool


@dataclass(frozen=True)
class Bucket:
    """What a captured pair of graphs serves."""

    rows: int
    groups: int  # drafting sequences, 0: nobody drafts
    count: int  # entries of the batch table
    sampled: bool = False
    masked: bool = False
    logprobs: bool = False


def bucket_of(
    entries: Sequence[Entry], block: int, *, sampled: bool = False, masked: bool = False, logprobs: bool = False
) -> Bucket:
    """The smallest bucket that holds the entries, at most 8 of which draft."""
    drafting = sum(entry.drafts for entry in entries)
    rows = sum(entry.rows for entry in entries)
    if not drafting:
        size = next(size for size in PLAIN_ROWS if size >= rows)
        return Bucket(size, 0, size, sampled, masked, logprobs)
    groups = next(size for size in GROUPS if size >= drafting and size * (block + 1) >= rows)
    count = groups if drafting == len(entries) else groups * (block + 1)
    return Bucket(groups * (block + 1), groups, count, sampled, masked, logprobs)


def splits(entries: Sequence[Entry]) -> list[list[int]]:
    """Indices of the entries, cut into steps of at most 48 rows and 8 drafting sequences each."""
    parts: list[list[int]] = []
    rows = drafting = 0
    for index, entry in enumerate(entries):
        rows, drafting = rows + entry.rows, drafting + entry.drafts
        if not parts or rows > MOST_ROWS or drafting > GROUPS[-1]:
            parts.append([])
            rows, drafting = entry.rows, int(entry.drafts)
        parts[-1].append(index)
    return parts


def usual(block: int, sequences: int, *, drafts: bool) -> Iterator[Bucket]:
    """What steps of up to so many sequences run in where all draft or nobody does."""
    rows = block + 1
    some = [Bucket(rows * groups, groups, groups) for groups in GROUPS] if drafts else []
    some += [Bucket(size, 0, size) for size in (PLAIN_ROWS[:1] if drafts else PLAIN_ROWS)]
    most = next((size for size in (GROUPS if drafts else PLAIN_ROWS) if size >= sequences), MOST_ROWS)
    for sampled, masked in itertools.product((False, True), repeat=2):
        yield from (replace(one, sampled=sampled, masked=masked) for one in some if one.count <= most)


def batch_table(entries: Sequence[Entry]) -> np.ndarray:
    """int32 [MOST_ROWS, 4]: slot, first row, most rows, draft index."""
    table = np.full((MOST_ROWS, 4), -1, np.int32)
    row = drafting = 0
    for line, entry in zip(table, entries, strict=False):
        line[:] = entry.slot, row, entry.rows, drafting if entry.drafts else -1
        row, drafting = row + entry.rows, drafting + entry.drafts
    return table


class StepGraphs:
    """See the module. One thread; steps are queued on the device's current stream."""

    def __init__(self, device: Device, model: Model, slots: int, *, graphs: bool = True) -> None:
        self.device, self.model, self.graphs = device, model, graphs
        self.slots = device.allocate(slots * words.SLOT_BYTES, "workspace")
        device.zero(self.slots, slots * words.SLOT_BYTES)
        self._staged_slots = device.pinned(slots * words.SLOT_BYTES).reshape(slots, words.SLOT_BYTES)
        self.rows, self.draft_rows = (self._rows() for _ in range(2))
        self.counters = device.allocate(words.COUNTER_BYTES, "workspace")
        device.zero(self.counters, words.COUNTER_BYTES)
        self._table = device.allocate(MOST_ROWS * words.BATCH_BYTES, "workspace")
        self._stages = device.pinned(STAGES * MOST_ROWS * words.BATCH_BYTES).view(np.int32)
        self._stages = self._stages.reshape(STAGES, MOST_ROWS, 4)
        self._stage = 0
        self._on_device: np.ndarray | None = None  # the batch table as the device has it
        self._ring = device.pinned(RING * words.RING_BYTES)
        self.tokens = device.pinned(RING * MOST_ROWS * words.LOGPROB_BYTES)
        self._drafted = device.pinned(4 * MOST_ROWS).view(np.int32)
        self._known: Event | None = None  # the drafts of the step under way are there
        row_words, rows = -(-model.spec.vocab_size // 32), model.spec.dspark_block_size + 1
        # uint32 [entries, rows, words]: what may follow, for the step under way; bit t of word w: token 32 w + t
        self.masks = device.pinned(4 * MOST_ROWS * rows * row_words).view(np.uint32)
        self.masks = self.masks.reshape(MOST_ROWS, rows, row_words)
        self.queued = 0  # steps so far
        self._captured: dict[tuple[Bucket, str], Graph] = {}
        self._walks = {
            "draft": self._draft_walk, "verify": self._verify_walk, "score": self._score_walk,
            "choose": self._choose_walk,
        }  # fmt: skip
        self._injected: tuple[int, ...] | None = None

    def _rows(self) -> Rows:
        address = self.device.allocate(words.TABLE_BYTES, "workspace")
        self.device.zero(address, words.TABLE_BYTES)
        return Rows(address)

    # ---- slots

    def admit(self, slot: int, record: np.ndarray) -> None:
        """Write a slot's record (slots.slot_record), after what is queued."""
        self._staged_slots[slot] = record
        at = slot * words.SLOT_BYTES
        self.device.copy_async(self.slots + at, self._staged_slots[slot].ctypes.data, words.SLOT_BYTES)

    def set(self, slot: int, position: int = -1, token: int = 0, *, active: bool) -> None:
        """Move a slot back to a token at `position`, or only start or stop it."""
        self.device.launch("rows.set", self.slots, slot, position, token, int(active), grid=(1, 1))

    # ---- steps

    def queue(
        self, entries: Sequence[Entry], *, sampled: bool = False, masked: bool = False, logprobs: bool = False
    ) -> int:
        """Queue a step whose drafts need no look from the host; its number."""
        bucket = bucket_of(entries, self.model.spec.dspark_block_size, sampled=sampled, masked=masked,
                           logprobs=logprobs)  # fmt: skip
        self.draft(bucket, entries)
        return self.verify(bucket)

    def draft(self, bucket: Bucket, entries: Sequence[Entry]) -> None:
        """The first half: the batch table and the drafts."""
        self._send(batch_table(entries))
        if bucket.groups:
            self._run(bucket, "draft")

    def score(self, bucket: Bucket) -> None:
        """The second half up to its logits, for a bucket with masks; `send_masks` and `verify` must follow."""
        if bucket.groups:
            self.device.copy_async(self._drafted.ctypes.data, self.model.work.drafts, self._drafted.nbytes)
            self._known = self.device.record()
        self._run(bucket, "score")

    def verify(self, bucket: Bucket) -> int:
        """The second half, or what `score` left of it; the number of the step."""
        self._run(bucket, "choose" if bucket.masked else "verify")
        self.queued += 1
        return self.queued

    def result(self, number: int) -> list[Record] | None:
        """What a step did, in the order of its entries; None while it runs."""
        entry = self.entry(number)
        return None if entry is None else words.records_of(entry)

    def entry(self, number: int) -> np.ndarray | None:
        """The same as the device has written it, uint8 [RING_BYTES]."""
        place = number % RING
        entry = self._ring[place * words.RING_BYTES : (place + 1) * words.RING_BYTES]
        return entry if words.flag_of(entry) == number else None

    def logprobs_of(self, number: int, row: int) -> np.ndarray:
        """uint8 [LOGPROB_BYTES] of a row of a step that has ended."""
        at = (number % RING * MOST_ROWS + row) * words.LOGPROB_BYTES
        return self.tokens[at : at + words.LOGPROB_BYTES]

    def logits(self, first: int, count: int) -> list[np.ndarray]:
        """float32 [V] of rows first, first + 1, ... of the last step; waits for it."""
        vocabulary = self.model.spec.vocab_size
        raw = self.device.download(self.model.work.logits + 4 * first * vocabulary, 4 * count * vocabulary)
        return list(raw.view(np.float32).reshape(count, vocabulary))

    # ---- while a step scores

    def drafts(self, entries: Sequence[Entry]) -> list[list[int]]:
        """What the first half drafted for each entry; waits for that, not for what `score` has queued."""
        if self._known is not None:
            self._known.wait()
        block = self.model.spec.dspark_block_size
        found, row = [], 0
        for entry in entries:
            found.append(self._drafted[row : row + entry.rows - 1].tolist() if entry.drafts else [])
            row += block if entry.drafts else 0
        return found

    def send_masks(self, rows: dict[int, int]) -> None:
        """Queue copying the first so many rows of `masks`, by entry."""
        entry_bytes, row_bytes = self.masks[0].nbytes, self.masks[0, 0].nbytes
        for entry, count in rows.items():
            target = self.model.work.mask + entry * entry_bytes
            self.device.copy_async(target, self.masks[entry].ctypes.data, count * row_bytes)

    def _send(self, table: np.ndarray) -> None:
        if self._on_device is not None and np.array_equal(table, self._on_device):
            return
        stage = self._stages[self._stage]
        self._stage = (self._stage + 1) % STAGES
        stage[:] = table
        self._on_device = table
        self.device.copy_async(self._table, stage.ctypes.data, stage.nbytes)

    def capture(self, bucket: Bucket, half: str) -> None:
        """Make the graph of "draft", "verify", "score" or "choose", if there is none."""
        key = _key(bucket, half)
        if self.graphs and key not in self._captured:
            with self.device.capture() as graph:
                self._walks[half](key[0], self.device.launch)
            self._captured[key] = graph

    def _run(self, bucket: Bucket, half: str) -> None:
        key = _key(bucket, half)
        if not self.graphs:
            self._walks[half](key[0], self.device.launch)
            return
        self.capture(bucket, half)
        self._captured[key].launch()

    def launches(self, bucket: Bucket) -> dict[str, int]:
        """Kernels in each of a captured bucket's graphs."""
        keys = {half: _key(bucket, half) for half in ("draft", "verify", "score", "choose")}
        return {half: self._captured[key].launches for half, key in keys.items() if key in self._captured}

    def inject(self, arguments: tuple[int, ...] | None) -> None:
        """Overwrite the drafts of all later steps (dsuf.kernels.inject, from its third argument on); None: no more."""
        self._injected = arguments
        self._captured = {key: graph for key, graph in self._captured.items() if key[1] != "draft"}

    # ---- what is captured

    def walk(self, bucket: Bucket, launch: Any, halves: Sequence[str] = ("draft", "verify")) -> None:
        """Every launch of a step, or of one half."""
        if bucket.groups and "draft" in halves:
            self._draft_walk(bucket, launch)
        if "verify" in halves:
            self._verify_walk(bucket, launch)

    def _draft_walk(self, bucket: Bucket, launch: Any) -> None:
        block = self.model.spec.dspark_block_size
        k = Launches(launch, self.model.spec, self.draft_rows, bucket.groups * block, self.model.rank)
        draft_walk.draft(k, self.model, self._batch(bucket))
        if self._injected is not None:
            launch("inject", self.draft_rows.table, self.model.work.drafts, *self._injected, grid=(1, 1))

    def _batch(self, bucket: Bucket) -> draft_walk.Batch:
        return draft_walk.Batch(self.slots, self._table, bucket.count, bucket.groups, bucket.sampled)

    def _verify_walk(self, bucket: Bucket, launch: Any) -> None:
        self._score_walk(bucket, launch)
        self._choose_walk(bucket, launch)

    def _score_walk(self, bucket: Bucket, launch: Any) -> None:
        m, w, k = self.model, self.model.work, self._launches(bucket, launch)
        table, draft_table = self.rows.table, self.draft_rows.table if bucket.groups else 0
        launch(
            "rows.verify", self.slots, self._table, bucket.count, draft_table, w.drafts, w.confidence,
            table, self.counters, bucket.rows, m.spec.sliding_window, grid=(1, 1),
        )  # fmt: skip
        step_walk.backbone(k, m)
        step_walk.head(k, m, w.logits)

    def _launches(self, bucket: Bucket, launch: Any) -> Launches:
        return Launches(launch, self.model.spec, self.rows, bucket.rows, self.model.rank)

    def _choose_walk(self, bucket: Bucket, launch: Any) -> None:
        """From logits to emitted tokens, slots moved on and the ring written."""
        m, w, table = self.model, self.model.work, self.rows.table
        draft_table, vocabulary = self.draft_rows.table if bucket.groups else 0, m.spec.vocab_size
        launch(
            "sample.filter", w.logits, table, self.slots, w.mask if bucket.masked else 0, w.records, 0, vocabulary, 0,
            1, VERIFY_PURPOSE, grid=(8 * bucket.rows, 1),
        )  # fmt: skip
        if bucket.logprobs:
            launch(
                "sample.logprobs", w.logits, table, self.slots, self.counters, self.tokens.ctypes.data, RING,
                vocabulary, grid=(8 * bucket.rows, 1),
            )  # fmt: skip
        launch(
            "accept", w.logits, w.records, w.draft_logits, w.draft_records, w.drafts, w.confidence,
            w.mask if bucket.masked else 0, table, draft_table, self.slots, self._table, self.counters,
            self._ring.ctypes.data, RING, bucket.count, vocabulary, grid=(8 * bucket.count, 1),
        )  # fmt: skip
        draft_walk.windows(self._launches(bucket, launch), m)


def _key(bucket: Bucket, half: str) -> tuple[Bucket, str]:
    """Drafts are the same whatever becomes of them."""
    return (replace(bucket, masked=False, logprobs=False) if half == "draft" else bucket), half
