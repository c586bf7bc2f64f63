"""Requests that cannot start yet, because something is made for them: a constraint, the look-up of a saved prefix."""

from __future__ import annotations

import time

from dsuf.engine.constraint import Compiler, Compiling, ConstraintFactory
from dsuf.engine.saving import Saver
from dsuf.engine.sequence import Sequence
from dsuf.errors import DsufError

_WAIT_S = 0.001


class Gate:
    """Holds sequences back (`sequence.held`) until everything is there that they start with."""

    def __init__(self, constraints: ConstraintFactory | None, saver: Saver | None) -> None:
        self._compiler = Compiler(constraints) if constraints is not None else None
        self._saver = saver
        self._held: dict[str, tuple[Sequence, Compiling | None]] = {}

    @property
    def constraints(self) -> bool:
        """Whether constraints can be made."""
        return self._compiler is not None

    @property
    def holds(self) -> bool:
        """Whether anybody is held back."""
        return bool(self._held)

    def enter(self, sequence: Sequence) -> None:
        """Have made what a new sequence needs."""
        constraint, compiling = sequence.request.constraint, None
        if self._compiler is not None and constraint is not None:
            compiling = self._compiler.start(constraint)
        if self._saver is not None:
            self._saver.want(sequence)
        if compiling is not None or self._saver is not None:
            self._held[sequence.id] = sequence, compiling
            sequence.held = True

    def settle(self) -> list[tuple[Sequence, DsufError]]:
        """Let go whom nothing holds back any more; those that cannot run, and why."""
        refused = []
        for sequence, compiling in list(self._held.values()):
            if compiling is not None:
                if not compiling.done.is_set():
                    continue
                if compiling.error is not None:
                    refused.append((sequence, compiling.error))
                    del self._held[sequence.id]
                    continue
                sequence.constraint = compiling.guard
            if self._saver is None or self._saver.found(sequence):
                del self._held[sequence.id]
                sequence.held = False
        return refused

    def leave(self, sequence: Sequence) -> None:
        """The sequence is no more."""
        self._held.pop(sequence.id, None)

    def wait(self) -> None:
        """Sleep for a moment; there is nothing else to do."""
        if self._saver is not None:
            self._saver.tier.wait(_WAIT_S)
        else:
            time.sleep(_WAIT_S)
