"""The engine: requests in, events out, one turn of the wheel at a time.

    step = park and bring back, decode, publish      and then, if a prompt waits for it,
    step = one chunk of prefill, publish

The same object runs in the engine process under `serve` and in-process under `run` and `bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dsuf.engine.backend import MOST_REWOUND, Backend, ClassMap, Emitted, Limits, Progress
from dsuf.engine.check import check_request
from dsuf.engine.constraint import ConstraintFactory
from dsuf.engine.gate import Gate
from dsuf.engine.ledger import Ledger
from dsuf.engine.messages import Admitted, Event, Finished, FinishReason, Rejected, Request, Status, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.parking import Parking
from dsuf.engine.pieces import LEAST_ROWS
from dsuf.engine.saving import Saver
from dsuf.engine.scheduler import Scheduler
from dsuf.engine.sequence import Phase, Sequence, Trace
from dsuf.engine.tier import Tier
from dsuf.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from dsuf.engine.cpu import CpuBackend
    from dsuf.engine.gpu.backend import GpuBackend
    from dsuf.model.checkpoint import Checkpoint

__all__ = ["Engine", "EngineOptions", "Progress", "open_engine"]

Grammars = Callable[["Checkpoint"], ConstraintFactory | None]
TierFactory = Callable[[Limits], Tier | None]


class Engine:
    """Owns the scheduler and a loaded backend; everything is called from one thread."""

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
        *,
        tier: Tier | None = None,
        constraints: ConstraintFactory | None = None,
    ) -> None:
        self.backend = backend
        self.options = options
        self.limits: Limits = backend.limits
        self._check_options()
        self._clock = clock
        self._scheduler = Scheduler(
            Ledger(self.limits, options.park_bytes),
            max_sequences=options.max_sequences,
            budget_s=options.prefill_budget_s,
            pass_rows=min(options.prefill_chunk, LEAST_ROWS),
        )
        self._parking = Parking(backend)
        self._saver = Saver(tier, backend, options.resume_every) if tier and self.limits.page_bytes else None
        self._gate = Gate(constraints, self._saver)
        self._sequences: dict[str, Sequence] = {}
        self._events: list[Event] = []  # said between turns (cancels); go out with the next one
        self._rows = 0
        self._left_s = 0.0  # of the chunk between two decode steps; nothing: it is over
        self._fresh = False  # nobody has used that chunk yet
        self._ahead = False  # a step may have been queued whose tokens nobody has seen

    @property
    def idle(self) -> bool:
        """True when `step` would do and say nothing."""
        return not self._sequences and not self._events and not self._copying

    def submit(self, request: Request, trace: Trace | None = None) -> None:
        """Queue a request. For one that cannot run: PromptError, UsageError or NotSupported, and nothing is kept."""
        if request.id in self._sequences:
            raise UsageError(f"request id {request.id!r} is running already. Give each request an id of its own.")
        check_request(request, self.limits, constraints=self._gate.constraints)
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
        self._gate.enter(sequence)

    def cancel(self, id: str, keep: int | None = None) -> None:
        """End a request wherever it is, at once; its Finished comes with the next step. An unknown id is no error.

        `keep`: only so many of its tokens are of use, because a stop string came late.
        """
        sequence = self._sequences.get(id)
        if sequence is None:
            return
        stats, useful = sequence.stats(self._clock()), sequence.phase is Phase.DECODE
        if useful and keep is not None and keep < len(sequence.emitted):
            useful = keep > 0 and self._rewind(sequence, keep)
        if useful:
            self._save_reply(sequence, keep)
        self._end(sequence, Finished(id, "cancelled", stats))

    def step(self) -> list[Event]:
        """One turn of the wheel; [] when idle. What a backend raises goes through: `abort` then ends what runs."""
        self._settle()
        if self._ahead and self._scheduler.prompts_due(self._clock()):
            self._ahead = False
            self._publish(self.backend.poll(wait=True))
            if self._events:  # of steps that were queued before a prompt came; they do not wait for it
                return self._take_events()
        worked = (self._fresh or self._left_s > 0) and self._prefill()
        if not worked:
            worked = self._decode()
            self._left_s, self._fresh = self.options.prefill_budget_s, True
            worked = worked or self._prefill()
        if worked:  # a chunk that follows must not hold back what a step has emitted
            wait = self._scheduler.prompts_due(self._clock())
            self._publish(self.backend.poll(wait=wait))
            self._ahead = not wait
        elif not self._events and (self._gate.holds or self._copying):
            self._gate.wait()
        return self._take_events()

    def abort(self, message: str) -> list[Event]:
        """After a fault: what is still to be said, then Finished with reason "error" for every request.

        The backend is not asked to release anything, because it may be what failed; the engine is of no more use.
        """
        now = self._clock()
        for sequence in self._sequences.values():
            self._scheduler.remove(sequence)
            self._gate.leave(sequence)
            self._events.append(Finished(sequence.id, "error", sequence.stats(now), message))
        self._sequences.clear()
        return self._take_events()

    def generate(self, request: Request, trace: Trace | None = None) -> Iterator[Event]:
        """Run one request where no other runs, for `run` and `bench`; closing the iterator cancels it.

        After Finished it goes on until all copies have ended. Who closes it before that leaves them under way, and the
        next request may come meanwhile.
        """
        if self._sequences or self._events:
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
            parked=self._scheduler.parked,
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
                **self._kept_memory(),
            },
        )

    def _kept_memory(self) -> dict[str, str]:
        """Where the next engine finds what this one holds in host memory."""
        tables = getattr(self.backend, "host_tables", None)
        return {} if tables is None else {"engram_memory": str(tables.path)}

    def ledger(self) -> dict[str, int]:
        """Bytes in use by kind."""
        parked = self._parking.nbytes
        return {**self.backend.ledger(), **({"parked": parked} if parked else {})}

    @property
    def _copying(self) -> bool:
        return self._saver is not None and self._saver.copying

    def _settle(self) -> None:
        """Take note of what others have done meanwhile: copies, constraints, look-ups."""
        self._parking.settle()
        if self._saver is not None:
            self._saver.settle()
        for sequence, error in self._gate.settle():
            self._forget(sequence)
            self._events.append(Rejected(sequence.id, type(error).__name__, str(error)))

    # ---- prompts

    def _decode(self) -> bool:
        """Make room, then one step. Whether anybody was in it."""
        turn = self._scheduler.plan()
        for sequence in turn.park:
            self._parking.park(sequence)
        for sequence in turn.resume:
            self._parking.resume(sequence)
        if turn.decode:
            self.backend.enqueue(turn.decode)
        return bool(turn.decode)

    def _prefill(self) -> bool:
        """One chunk: prompts in the scheduler's order until its time is over. Whether there was any.

        A prompt that is complete ends the turn, so that its first token goes out; the next turn uses what is left.
        """
        worked = False
        while (sequence := self._scheduler.next_prompt(start := self._clock())) is not None:
            every, at = self.options.resume_every, sequence.prompt_len - sequence.prompt_left
            rows = min(sequence.prompt_left, every - at % every)
            if not (self._fresh or self.backend.fits(sequence, rows, self._left_s)):
                break
            done, got = self._advance(sequence, rows, start)
            worked = True
            if done:
                return True
            if self._left_s <= 0 or got < rows:
                break
        self._left_s, self._fresh = 0.0, False
        return worked

    def _advance(self, sequence: Sequence, rows: int, start: float) -> tuple[bool, int]:
        """Give a prompt what is left of the chunk: whether it is complete, and the rows it got."""
        if not sequence.admitted:
            self._admit(sequence)
        before, short = sequence.prefilled, self._scheduler.is_short(sequence)
        done = self.backend.prefill(sequence, rows, self._left_s)
        took, got = self._clock() - start, sequence.prefilled - before
        self._left_s, self._fresh = self._left_s - took, False
        self._scheduler.spent(sequence, got, took, short=short)
        if done:
            self._scheduler.prefilled(sequence)
        if self._saver is not None:
            self._saver.prefilled(sequence, got, took, done=done)
        return done, got

    def _admit(self, sequence: Sequence) -> None:
        sequence.admitted = True
        if sequence.hit is not None:
            self._saver.restore(sequence)
        cached, source = sequence.cached_tokens, sequence.hit.source if sequence.hit is not None else "none"
        self._events.append(Admitted(sequence.id, sequence.prompt_len, cached, source))

    # ---- what came out

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _publish(self, emitted: list[Emitted]) -> None:
        now, rows = self._clock(), 0
        for item in emitted:
            sequence = item.sequence
            if sequence.phase is Phase.DONE:  # cancelled while the step was under way
                continue
            if item.record is not None:
                sequence.count_step(item.record)
                rows += item.rows
            if item.ids:
                sequence.first_token_s = now if sequence.first_token_s is None else sequence.first_token_s
                sequence.last_token_s = now
                self._events.append(Tokens(sequence.id, item.ids, item.logprobs))
            if item.reason is not None:
                self._finish(sequence, item.reason, item.message)
            elif self._saver is not None:
                self._saver.save_periodic(sequence, sequence.last_position)
        self._rows = rows

    def _rewind(self, sequence: Sequence, keep: int) -> bool:
        """Go back to the token after the first `keep`, so that all of those are in the cache; False where it cannot."""
        position = sequence.prompt_len + keep
        if sequence.last_position - position > MOST_REWOUND:
            return False
        try:
            self.backend.rewind(sequence, position)
        except UsageError:  # a restored sequence does not reach back so far
            return False
        return True

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        if sequence.phase is Phase.DECODE and reason != "error":
            self._save_reply(sequence)
        self._end(sequence, Finished(sequence.id, reason, sequence.stats(self._clock()), message))

    def _save_reply(self, sequence: Sequence, keep: int | None = None) -> None:
        if self._saver is not None:
            self._saver.save_reply(sequence, keep)

    def _end(self, sequence: Sequence, finished: Finished) -> None:
        self.backend.release(sequence)
        self._parking.drop(sequence)
        self._forget(sequence)
        self._events.append(finished)

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._gate.leave(sequence)
        del self._sequences[sequence.id]
        if self._saver is not None:
            self._saver.end(sequence)

    def _check_options(self) -> None:
        verify, draft_len = self.options.verify, self.limits.draft_len
        if verify != "auto" and verify > draft_len:
            raise ConfigError(
                f"verify is {verify}, this checkpoint drafts {draft_len} tokens a step. Use 0 to {draft_len} or auto."
            )


def backend_of(options: EngineOptions) -> str:
    """`Limits.backend` of what `open_engine` opens for these options, known before it does."""
    return "gpu" if options.gpus else "cpu"


def open_engine(
    options: EngineOptions,
    progress: Progress | None = None,
    class_map: ClassMap | None = None,
    grammars: Grammars | None = None,
    tier: TierFactory | None = None,
) -> Engine:
    """Open the checkpoint on the backend that `options.gpus` names and load it.

    `class_map` gives Engram's class of each token id [vocab] for a checkpoint without `engram_token_map.json`,
    `grammars` what makes constraints for the checkpoint's tokenizer, `tier` the cache tier of a backend with these
    limits. Raises CheckpointError, ConfigError or DeviceError.
    """
    backend = _backend(options, class_map)
    backend.load(progress or (lambda what, share: None))
    return Engine(
        backend,
        options,
        tier=tier(backend.limits) if tier is not None else None,
        constraints=grammars(backend.checkpoint) if grammars is not None else None,
    )


def _backend(options: EngineOptions, class_map: ClassMap | None) -> CpuBackend | GpuBackend:
    """The arithmetic is imported where it is used: messages stay light."""
    if options.gpus:
        from dsuf.engine.gpu.open import open_backend

        return open_backend(options, class_map)
    from dsuf.engine.cpu import CpuBackend

    return CpuBackend(options, class_map)
