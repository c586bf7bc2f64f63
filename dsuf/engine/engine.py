"""The engine: requests in, events out, one turn of the wheel at a time.

    step = plan, decode everybody, one piece of a prompt, publish

The same object runs in the engine process under `serve` and in-process under `run` and `bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dsuf.engine.backend import Backend, Emitted, Limits, Progress
from dsuf.engine.check import check_request
from dsuf.engine.messages import Admitted, Event, Finished, FinishReason, Request, Status, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.scheduler import Scheduler
from dsuf.engine.sequence import Phase, Sequence, Trace
from dsuf.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from dsuf.model.checkpoint import Checkpoint

__all__ = ["Engine", "EngineOptions", "Progress", "open_engine"]

ClassMap = Callable[["Checkpoint"], "np.ndarray | None"]


class Engine:
    """Owns the scheduler and a loaded backend; everything is called from one thread."""

    def __init__(self, backend: Backend, options: EngineOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.backend = backend
        self.options = options
        self.limits: Limits = backend.limits
        self._check_options()
        self._clock = clock
        self._scheduler = Scheduler(options.max_sequences)
        self._sequences: dict[str, Sequence] = {}
        self._events: list[Event] = []  # said between turns (cancels); go out with the next one
        self._rows = 0

    @property
    def idle(self) -> bool:
        """True when `step` would do and say nothing."""
        return not self._sequences and not self._events

    def submit(self, request: Request, trace: Trace | None = None) -> None:
        """Queue a request. For one that cannot run: PromptError, UsageError or NotSupported, and nothing is kept."""
        if request.id in self._sequences:
            raise UsageError(f"request id {request.id!r} is running already. Give each request an id of its own.")
        check_request(request, self.limits)
        draft = self.options.draft if request.draft is None else request.draft
        verify = self.options.verify if request.verify is None else request.verify
        sequence = Sequence(
            request,
            budget=min(request.max_tokens, self.limits.max_context - len(request.prompt_ids)),
            draft=draft,
            verify=None if verify == "auto" else verify,
            trace=trace,
        )
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence, self._clock())

    def cancel(self, id: str) -> None:
        """End a request wherever it is, at once; its Finished comes with the next step. An unknown id is no error."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    def step(self) -> list[Event]:
        """One turn of the wheel; [] when idle. What a backend raises goes through: `abort` then ends what runs."""
        turn = self._scheduler.plan(self._clock())
        if turn.started and turn.prefill is not None:
            self._events.append(Admitted(turn.prefill.id, turn.prefill.prompt_len))
        if turn.decode:
            self.backend.enqueue(turn.decode)
        if turn.prefill is not None:
            rows = turn.prefill.prompt_left
            if self.backend.prefill(turn.prefill, rows, self.options.prefill_budget_s):
                self._scheduler.prefilled(turn.prefill)
        if turn.decode or turn.prefill is not None:
            self._publish(self.backend.poll())
        return self._take_events()

    def abort(self, message: str) -> list[Event]:
        """After a fault: what is still to be said, then Finished with reason "error" for every request.

        The backend is not asked to release anything, because it may be what failed; the engine is of no more use.
        """
        now = self._clock()
        for sequence in self._sequences.values():
            self._scheduler.remove(sequence)
            self._events.append(Finished(sequence.id, "error", sequence.stats(now), message))
        self._sequences.clear()
        return self._take_events()

    def generate(self, request: Request, trace: Trace | None = None) -> Iterator[Event]:
        """Run one request on an idle engine, for `run` and `bench`; closing the iterator cancels it."""
        if not self.idle:
            raise UsageError("generate() needs an idle engine; use submit() and step() for several requests.")
        self.submit(request, trace)
        try:
            while not self.idle:
                yield from self.step()
        except GeneratorExit:
            self.cancel(request.id)
            self._events.clear()
            raise

    def status(self) -> Status:
        """The engine's state now."""
        everybody = self._sequences.values()
        return Status(
            ready=True,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            waiting_tokens=sum(sequence.prompt_left for sequence in everybody),
            context_tokens=sum(sequence.prefilled + len(sequence.emitted) for sequence in everybody),
            rows=self._rows,
            max_context=self.limits.max_context,
            max_sequences=self.options.max_sequences,
            info={
                "backend": self.limits.backend,
                "numerics": self.options.numerics,
                "prefill": self.options.prefill,
                **{f"{kind}_bytes": count for kind, count in self.ledger().items()},
            },
        )

    def ledger(self) -> dict[str, int]:
        """Bytes in use by kind."""
        return self.backend.ledger()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _publish(self, emitted: list[Emitted]) -> None:
        now, rows = self._clock(), 0
        for item in emitted:
            sequence = item.sequence
            if sequence.phase is Phase.DONE:  # cancelled while the step was under way
                continue
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            sequence.last_token_s = now
            if item.record is not None:
                sequence.count_step(item.record)
                rows += item.rows
            self._events.append(Tokens(sequence.id, item.ids, item.logprobs))
            if item.reason is not None:
                self._finish(sequence, item.reason)
        self._rows = rows

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.backend.release(sequence)
        self._scheduler.remove(sequence)
        del self._sequences[sequence.id]
        self._events.append(Finished(sequence.id, reason, sequence.stats(self._clock())))

    def _check_options(self) -> None:
        verify, draft_len = self.options.verify, self.limits.draft_len
        if verify != "auto" and verify > draft_len:
            raise ConfigError(
                f"verify is {verify}, this checkpoint drafts {draft_len} tokens a step. Use 0 to {draft_len} or auto."
            )


def open_engine(options: EngineOptions, progress: Progress | None = None, class_map: ClassMap | None = None) -> Engine:
    """Open the checkpoint on the CPU backend and load it.

    `class_map` gives Engram's class of each token id [vocab] for a checkpoint without `engram_token_map.json`.
    Raises CheckpointError or ConfigError.
    """
    from dsuf.engine.cpu import CpuBackend  # the arithmetic is imported where it is used: messages stay light

    backend = CpuBackend(options, class_map)
    backend.load(progress or (lambda what, share: None))
    return Engine(backend, options)
