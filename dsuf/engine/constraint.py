"""Sequences whose tokens must follow a grammar: what the engine asks of one, and a guard around it.

A `Constraint` follows one sequence and says, token by token, what may come next. It is made from the string that a
request carries, in a thread of its own because a grammar can take long to compile; the request waits for it, nobody
else does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from dsuf.errors import DsufError, UsageError

WORD = 32  # tokens in a word of a mask


class Constraint(Protocol):
    """The state of one sequence in its grammar."""

    def advance(self, ids: Items[int]) -> None:
        """These allowed tokens were emitted; an EOS that ends the sequence is not told."""
        ...

    def fill(self, masks: np.ndarray, drafts: Items[int]) -> int:
        """Write rows 0..n of masks uint32 [len(drafts) + 1, words] and return n, the drafts that are allowed.

        Bit t % 32 of word t // 32 of row i: token t may follow drafts[:i]. Where the grammar may end, the bits of the
        EOS ids are set; no row is empty. The state stays as it is.
        """
        ...


ConstraintFactory = Callable[[str], Constraint]  # raises UsageError for a string that it cannot read


class Guard:
    """One sequence's constraint for a backend: bool masks, and a fault instead of an exception."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self.fault: str | None = None  # why the sequence cannot go on

    def advance(self, ids: Items[int]) -> None:
        """These tokens were emitted."""
        if ids and self.fault is None:
            try:
                self._constraint.advance(ids)
            except Exception as error:  # a grammar library's fault ends this sequence, not the engine
                self.fault = _fault(error)

    def allowed(self, drafts: Items[int], vocab_size: int) -> np.ndarray | None:
        """bool [n + 1, vocab]: what may follow each of the first n drafts, which are all those that are allowed.

        None, with `fault` set, where the sequence cannot go on.
        """
        masks = np.zeros((len(drafts) + 1, -(-vocab_size // WORD)), np.uint32)
        kept = self.fill(masks, drafts)
        if kept is None:
            return None
        bits = np.unpackbits(masks[: kept + 1].astype("<u4").view(np.uint8), axis=1, bitorder="little")
        return bits[:, :vocab_size].view(bool)

    def fill(self, masks: np.ndarray, drafts: Items[int]) -> int | None:
        """The same as `Constraint.fill`; None, with `fault` set, where the sequence cannot go on."""
        if self.fault is None:
            try:
                kept = self._constraint.fill(masks, drafts)
            except Exception as error:
                self.fault = _fault(error)
            else:
                filled = masks[: kept + 1].any(axis=1)
                kept = kept if filled.all() else int(np.argmin(filled)) - 1  # a draft leads where nothing may follow
                if kept < 0:
                    self.fault = "the constraint allows no token to follow. Loosen the schema or regex."
        return kept if self.fault is None else None


class Compiling:
    """A constraint in the making."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.done = threading.Event()
        self.guard: Guard | None = None
        self.error: DsufError | None = None


class Compiler:
    """Makes constraints one after the other in a thread of its own."""

    def __init__(self, factory: ConstraintFactory) -> None:
        self._factory = factory
        self._queue: queue.SimpleQueue[Compiling] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, source: str) -> Compiling:
        """Begin; `done` is set when `guard` or `error` is there."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="constraints", daemon=True)
            self._thread.start()
        compiling = Compiling(source)
        self._queue.put(compiling)
        return compiling

    def _work(self) -> None:
        while True:
            compiling = self._queue.get()
            try:
                compiling.guard = Guard(self._factory(compiling.source))
            except DsufError as error:
                compiling.error = error
            except Exception as error:
                compiling.error = UsageError(f"the constraint cannot be read: {error}. Check the schema or regex.")
            compiling.done.set()


def _fault(error: Exception) -> str:
    return f"the constraint failed: {error}. Send the request without it or with another schema."
