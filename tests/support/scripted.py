"""A backend without arithmetic: tokens are a fixed function of the request, time may be virtual.

It checks that the engine keeps the protocol of `dsuf.engine.backend`, can run ahead as a GPU does, and fails on demand.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

from dsuf.engine.backend import Emitted, Limits
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Request, TokenLogprobs
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Sequence, StepRecord
from dsuf.layout import PAGE_TOKENS, pages_for

PAGE_BYTES, STATE_BYTES = 4, 8


def token_at(request: Request, index: int, vocab_size: int) -> int:
    """The token that `request` gets as its index-th; never below 8, so that those can be EOS ids that are not met."""
    seed = zlib.crc32(repr(request.prompt_ids).encode())
    return 8 + zlib.crc32(f"{seed} {index}".encode()) % (vocab_size - 8)


class VirtualClock:
    """Seconds that only pass when the backend says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ScriptedBackend:
    """`tokens_a_step(sequence)` tokens come out of each decode step; `script(request, index)` names them."""

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        max_context: int = 4096,
        draft_len: int = 5,
        chunk: int = 16,
        tokens_a_step: Callable[[Sequence], int] = lambda sequence: 1,
        script: Callable[[Request, int], int] | None = None,
        ahead: int = 0,
        chunk_s: float = 0.0,
        step_s: float = 0.0,
        sleep: Callable[[float], None] = lambda seconds: None,
        fail_at_step: int | None = None,
        fail_with: Exception | None = None,
        max_rows: int = 48,
        cache_pages: int | None = None,
    ) -> None:
        self.limits = Limits(
            "scripted", vocab_size, max_context, draft_len, max_rows, cache_pages, PAGE_BYTES, STATE_BYTES, 2
        )
        self.chunk, self.ahead, self.chunk_s, self.step_s = chunk, ahead, chunk_s, step_s
        self.tokens_a_step = tokens_a_step
        self.script = script or (lambda request, index: token_at(request, index, vocab_size))
        self.sleep = sleep
        self.fail_at_step, self.fail_with = fail_at_step, fail_with or RuntimeError("scripted fault")
        self.live: dict[str, Sequence] = {}  # holds memory
        self.batches: list[tuple[str, ...]] = []  # one per decode step
        self.chunks: list[str] = []  # one per prefill pass
        self.held_most = 0  # pages that were in use at once
        self._queued: list[list[tuple[Sequence, int]]] = []
        self._emitted: list[Emitted] = []
        self._stays: dict[str, int] = {}  # how often each sequence was put in
        self._pages: dict[str, int] = {}
        self._copies = 0

    def load(self, progress: Callable[[str, float], None]) -> None:
        progress("script", 1.0)

    def fits(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        return budget_s > 0

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        assert 0 < rows <= sequence.prompt_left
        if sequence.id not in self.live:
            assert sequence.prefilled == 0
            self._put_in(sequence)
        sequence.prefilled += min(self.chunk, rows)
        self.chunks.append(sequence.id)
        self.sleep(self.chunk_s)
        if sequence.prefilled < sequence.prompt_len:
            return False
        self._emit(sequence, 1, decode=False)
        return True

    def enqueue(self, batch: tuple[Sequence, ...]) -> int:
        ids = tuple(sequence.id for sequence in batch)
        assert len(set(ids)) == len(ids)
        assert all(self.live[sequence.id] is sequence and sequence.emitted for sequence in batch)
        self.batches.append(ids)
        if self.fail_at_step is not None and len(self.batches) > self.fail_at_step:
            raise self.fail_with
        assert sum(self._rows(sequence) for sequence in batch) <= self.limits.max_rows
        for sequence in batch:
            self._take_pages(sequence)
        self.sleep(self.step_s)
        self._queued.append([(sequence, self._stays[sequence.id]) for sequence in batch])
        return len(self.batches)

    def poll(self, *, wait: bool = False) -> list[Emitted]:
        while len(self._queued) > (0 if wait else self.ahead):
            for sequence, stay in self._queued.pop(0):
                if self.live.get(sequence.id) is sequence and self._stays[sequence.id] == stay:
                    self._emit(sequence, self.tokens_a_step(sequence), decode=True)
        emitted, self._emitted = self._emitted, []
        return emitted

    def rewind(self, sequence: Sequence, position: int) -> None:
        assert self.live[sequence.id] is sequence
        assert max(sequence.prompt_len, sequence.last_position - 24) <= position <= sequence.last_position
        del sequence.emitted[position - sequence.prompt_len + 1 :]

    def snapshot(self, sequence: Sequence, position: int, pages, state) -> int:
        assert self.live[sequence.id] is sequence and position % 2 == 0
        assert max(1, sequence.last_position - 24) <= position <= sequence.last_position or not sequence.emitted
        for number, page in pages.items():
            assert number < pages_for(position)
            page[:] = self._page(sequence.ids[:position], number)
        state[0][:STATE_BYTES] = position.to_bytes(STATE_BYTES, "little")
        self._copies += 1
        return self._copies

    def restore(self, sequence: Sequence, position: int, pages, state) -> int:
        assert sequence.id not in self.live and len(pages) == pages_for(position)
        assert int.from_bytes(state[0][:STATE_BYTES], "little") == position
        for number, page in enumerate(pages):
            assert bytes(page) == self._page(sequence.ids[:position], number)
        self._put_in(sequence)
        sequence.prefilled = min(position, sequence.prompt_len)
        if sequence.emitted:
            assert sequence.last_position - position < self.limits.resume_step
            sequence.prefilled = sequence.prompt_len
        self._copies += 1
        return self._copies

    def share(self, memory) -> None:
        pass

    def copied(self) -> int:
        return self._copies

    def release(self, sequence: Sequence) -> None:
        if self.live.get(sequence.id) is sequence:
            del self.live[sequence.id]
        self._emitted = [item for item in self._emitted if item.sequence is not sequence]

    def ledger(self) -> dict[str, int]:
        return {"caches": sum(sequence.prefilled + len(sequence.emitted) for sequence in self.live.values())}

    def _put_in(self, sequence: Sequence) -> None:
        self.live[sequence.id] = sequence
        self._stays[sequence.id] = self._stays.get(sequence.id, 0) + 1
        self._pages[sequence.id] = 0
        self._take_pages(sequence)

    def _rows(self, sequence: Sequence) -> int:
        drafts = self.limits.draft_len if sequence.verify is None else sequence.verify
        return 1 + drafts if sequence.draft else 1

    def _take_pages(self, sequence: Sequence) -> None:
        needed = pages_for(sequence.prompt_len + len(sequence.emitted) + self.limits.lookahead)
        self._pages[sequence.id] = max(self._pages.get(sequence.id, 0), needed)
        held = sum(self._pages[id] for id in self.live)
        self.held_most = max(self.held_most, held)
        assert self.limits.cache_pages is None or held <= self.limits.cache_pages

    @staticmethod
    def _page(ids: list[int], number: int) -> bytes:
        return zlib.crc32(repr(ids[number * PAGE_TOKENS :][:PAGE_TOKENS]).encode()).to_bytes(PAGE_BYTES, "little")

    def _emit(self, sequence: Sequence, count: int, decode: bool) -> None:
        after, position, done = sequence.last_token, sequence.last_position, len(sequence.emitted)
        kept, reason = sequence.cut([self.script(sequence.request, done + i) for i in range(count)])
        record = (
            StepRecord(position, after, kept[:-1], [0.0] * (len(kept) - 1), len(kept) - 1, kept) if decode else None
        )
        sequence.emit(kept, last=reason is not None)
        wanted = sequence.request.sampling.logprobs
        logprobs = None if wanted is None else [TokenLogprobs(-0.5, [(token, -0.5)][:wanted]) for token in kept]
        if reason is not None and self.ahead:
            del self.live[sequence.id]  # a device that runs ahead frees the row by itself
        self._emitted.append(Emitted(sequence, kept, reason, logprobs, record, rows=count))


def scripted_engine(backend: ScriptedBackend | None = None, clock: Callable[[], float] = time.monotonic, **options):
    """An engine over a scripted backend; `options` are those of EngineOptions."""
    return Engine(backend or ScriptedBackend(), EngineOptions(ckpt=Path("scripted"), **options), clock)


def scripted_factory(progress: Callable[[str, float], None], step_s: float = 0.0, **settings) -> Engine:
    """An engine factory for a process of its own; steps take `step_s` of real time. Bind with functools.partial."""
    backend = ScriptedBackend(step_s=step_s, sleep=time.sleep, **settings)
    backend.load(progress)
    return scripted_engine(backend)


def failing_factory(progress: Callable[[str, float], None], error: Exception) -> Engine:
    """A factory whose loading fails half way."""
    progress("script", 0.5)
    raise error


def slow_factory(progress: Callable[[str, float], None], seconds: float) -> Engine:
    """A factory that reports progress for a while."""
    for part in range(20):
        progress("script", part / 20)
        time.sleep(seconds / 20)
    return scripted_factory(progress)
