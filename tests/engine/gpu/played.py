"""The backend over a played device: slots, steps and results behave as the kernels do, with a rule instead of a model.

The token after `token` at `position` is rule(token, position); drafts follow the rule but where it says otherwise.
Results come `delay` looks after a step was queued, so that the host really runs ahead.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from dsuf.engine.engine import Engine
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.step_graph import Bucket, Entry, batch_table
from dsuf.engine.options import EngineOptions
from dsuf.engine.pieces import Piece, Pieces
from dsuf.kernels import slots as words
from dsuf.kernels.slots import Record

VOCABULARY, BLOCK = 64, 5


def rule(token: int, position: int) -> int:
    """The token that follows `token` at `position`."""
    return (31 * token + 7 * position + 5) % (VOCABULARY - 4) + 4  # 0 .. 3 never come by themselves


def text(token: int, position: int, count: int) -> list[int]:
    """The greedy continuation."""
    ids = []
    for _ in range(count):
        token = rule(token, position)
        position += 1
        ids.append(token)
    return ids


class PlayedSteps:
    """dsuf.engine.gpu.step_graph.StepGraphs without a device."""

    def __init__(self, slots: int, delay: int) -> None:
        self.state = [dict[int, Any]() for _ in range(slots)]
        self.delay, self.queued, self.rows_run = delay, 0, []
        self._results: dict[int, list[Record]] = {}
        self._looks: dict[int, int] = {}
        self.masks = np.zeros((48, BLOCK + 1, VOCABULARY // 32), np.uint32)
        self._masks: dict[int, np.ndarray] = {}  # bool [rows, vocabulary] by entry
        self.in_flight = 0
        self.deepest = 0

    def warm_up(self, sequences: int, *, drafts: bool) -> None:
        pass

    def admit(self, slot: int, record: np.ndarray) -> None:
        whole, number = record.view(np.int32), record.view(np.float32)
        own = {word: int(whole[word]) for word in range(32)}
        own[words.S_THRESHOLD] = float(number[words.S_THRESHOLD])
        self.state[slot] = own

    def set(self, slot: int, position: int = -1, token: int = 0, *, active: bool) -> None:
        self.state[slot][words.S_ACTIVE] = int(active)

    def draft(self, bucket: Bucket, entries: list[Entry]) -> None:
        assert len(entries) <= bucket.count and sum(entry.rows for entry in entries) <= bucket.rows
        assert sum(entry.drafts for entry in entries) <= bucket.groups or not bucket.groups
        self._table, self._entries = batch_table(entries), entries

    def drafts(self, entries: list[Entry]) -> list[list[int]]:
        return [self._drafts(e.slot)[: e.rows - 1] if e.drafts else [] for e in entries]

    def score(self, bucket: Bucket) -> None:
        assert bucket.masked

    def send_masks(self, rows: dict[int, int]) -> None:
        for entry, count in rows.items():
            bits = np.unpackbits(self.masks[entry, :count].view(np.uint8), axis=1, bitorder="little")
            self._masks[entry] = bits.astype(bool)

    def verify(self, bucket: Bucket) -> int:
        self.queued += 1
        self._results[self.queued] = [self._run(i, entry) for i, entry in enumerate(self._entries)]
        self._looks[self.queued], self._masks = self.delay, {}
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        self.rows_run.append([record.rows for record in self._results[self.queued]])
        return self.queued

    def result(self, number: int) -> list[Record] | None:
        if self._looks[number] > 0:
            self._looks[number] -= 1
            return None
        self.in_flight -= 1
        return self._results[number]

    def _drafts(self, slot: int) -> list[int]:
        own = self.state[slot]
        token, position = own[words.S_TOKEN], own[words.S_POSITION]
        ids = text(token, position, BLOCK)
        return [t if (position + i) % 4 else (t + 1) % VOCABULARY for i, t in enumerate(ids)]

    def _run(self, index: int, entry: Entry) -> Record:
        own = self.state[entry.slot]
        left = own[words.S_BUDGET] - own[words.S_EMITTED]
        token, position = own[words.S_TOKEN], own[words.S_POSITION]
        base = {"slot": entry.slot, "generation": own[words.S_GENERATION], "position": position, "after": token}
        if not own[words.S_ACTIVE] or own[words.S_REASON] or left <= 0:
            return Record(**base, reason=0, accepted=0, drafted=[], confidence=[], judged=0, rows=0, emitted=[],
                          logits=[])  # fmt: skip
        drafted = self._drafts(entry.slot) if entry.drafts and own[words.S_DRAFTS] else []
        wanted = own[words.S_VERIFY] if own[words.S_VERIFY] >= 0 else 3
        judged = min(wanted, len(drafted), left, entry.rows - 1)
        rows = min(judged + 1, left)
        emitted, accepted, at = [], 0, token
        for row in range(rows):
            allowed = self._masks.get(index)
            at = rule(at, position + row)
            while allowed is not None and not allowed[row][at]:
                at = (at + 1) % VOCABULARY
            emitted.append(at)
            stops = at in [own[words.S_EOS + i] for i in range(own[words.S_EOS_COUNT])]
            hit = row < judged and drafted[row] == at
            accepted += hit
            if (stops and not own[words.S_IGNORE_EOS]) or not hit:
                break
        stops = emitted[-1] in [own[words.S_EOS + i] for i in range(own[words.S_EOS_COUNT])]
        own[words.S_TOKEN], own[words.S_POSITION] = emitted[-1], position + len(emitted)
        own[words.S_EMITTED] += len(emitted)
        reason = words.STOP if stops and not own[words.S_IGNORE_EOS] else 0
        reason = reason or (words.LENGTH if own[words.S_EMITTED] >= own[words.S_BUDGET] else 0)
        own[words.S_REASON] = reason
        return Record(**base, reason=reason, accepted=accepted, drafted=drafted, confidence=[0.0] * len(drafted),
                      judged=int(judged), rows=int(rows), emitted=emitted, logits=[0.0] * len(emitted))  # fmt: skip


class PlayedPages:
    """Slots and pages by count."""

    def __init__(self, slots: int, count: int) -> None:
        self.count, self.page_bytes, self.free = count, 1024, deque(range(slots))
        self.held: dict[int, int] = {}

    def open(self) -> int:
        slot = self.free.popleft()
        self.held[slot] = 0
        return slot

    def reserve(self, slot: int, tokens: int) -> None:
        self.held[slot] = max(self.held[slot], tokens)

    def release(self, slot: int) -> None:
        del self.held[slot]
        self.free.append(slot)


class PlayedPrefill:
    """Counts rows."""

    def __init__(self) -> None:
        self.pieces = Pieces(most_rows=7, resume_every=8192, tails=False)

    def next(self, held: Any, rows: int, seconds: float) -> Piece:
        return self.pieces.next(held.sequence.prompt_len, held.sequence.prefilled, held.read, rows, seconds)

    def run(self, held: Any, piece: Piece) -> None:
        held.read, held.sequence.prefilled = piece.start + piece.rows, piece.prefilled

    def again(self, held: Any, position: int) -> None:
        pass


class PlayedDevice:
    """All ranks too. Its events end only when it is `silent`: done, without a result; or fail when it is `broken`."""

    index, lost = 0, None

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.silent = False

    def record(self) -> PlayedDevice:
        return self

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        if self.broken is not None:
            raise self.broken
        return self.silent

    def held(self) -> dict[str, int]:
        return {"weights": 1}

    def check(self) -> None:
        pass


class PlayedCopies:
    """Nothing is copied."""

    def progress(self) -> int:
        return 1

    def restore(self, slot: int, position: int, pages: Any, state: Any) -> tuple[int, int]:
        return 1, 0

    def land(self, slot: int, *, wait: bool = True) -> bool:
        return True

    def forget(self, slot: int) -> None:
        pass


def played_engine(*, delay: int = 3, slots: int = 16, **options: Any) -> Engine:
    """An engine whose backend believes that there is a GPU."""
    from pathlib import Path

    chosen = EngineOptions(Path("none"), **{"max_sequences": slots, **options})
    device = PlayedDevice()
    backend = GpuBackend(chosen, None, [device])
    backend._ranks = device
    spec = SimpleNamespace(
        vocab_size=VOCABULARY, dspark_block_size=BLOCK, num_hidden_layers=2, num_nextn_predict_layers=1, head_dim=64,
        sliding_window=8, engram_max_ngram_size=4, layers=[SimpleNamespace(ratio=2, is_kv_source=True)],
    )  # fmt: skip
    backend._machine = SimpleNamespace(spec=spec, max_context=4096)
    backend._pages, backend.all_steps = PlayedPages(slots, 4096), PlayedSteps(slots, delay)
    backend._copies, backend._prefilling = PlayedCopies(), PlayedPrefill()
    return Engine(backend, chosen)
