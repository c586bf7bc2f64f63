"""Steps, pages and copies of all ranks, each set as if it were one: what the backend says once is done on every rank.

Ranks hold the same slots and pages of the same numbers, and run the same steps on the same bits. The first one gives
out slots and pages, its copies go out, and its results are read; the others follow. Something has ended when it has
ended on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dsuf.engine.gpu.copies import Copies
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.ranks import Marks, Ranks
from dsuf.engine.gpu.step_graph import Bucket, Entry, StepGraphs, usual
from dsuf.engine.messages import TokenLogprobs
from dsuf.engine.tier import Buffer
from dsuf.errors import DeviceError
from dsuf.kernels.slots import HEADER_BYTES, RECORD_BYTES, Record, records_of, top_logprobs


class AllSteps:
    """See step_graph.StepGraphs for what each method does."""

    def __init__(self, every: Sequence[StepGraphs], ranks: Ranks) -> None:
        self.every, self.first, self._ranks = list(every), every[0], ranks
        self.masks = self.first.masks
        for steps in self.every:
            steps.masks = self.masks  # page-locked for all devices

    def warm_up(self, sequences: int, *, drafts: bool) -> None:
        """Capture what usual steps of up to so many sequences run, and run it for nobody, so that no stream waits for
        that later.
        """
        if not self.first.graphs:
            return
        for bucket in usual(self.first.model.spec.dspark_block_size, sequences, drafts=drafts):
            self.draft(bucket, [])
            if bucket.masked:
                self.score(bucket)
            self.verify(bucket)
        self._ranks.synchronize()

    def admit(self, slot: int, record: np.ndarray) -> None:
        for steps in self.every:
            steps.admit(slot, record)

    def set(self, slot: int, position: int = -1, token: int = 0, *, active: bool) -> None:
        for steps in self.every:
            steps.set(slot, position, token, active=active)

    def draft(self, bucket: Bucket, entries: Sequence[Entry]) -> None:
        for steps in self._captured(bucket, "draft" if bucket.groups else None):
            steps.draft(bucket, entries)

    def score(self, bucket: Bucket) -> None:
        for steps in self._captured(bucket, "score"):
            steps.score(bucket)

    def verify(self, bucket: Bucket) -> int:
        numbers = [steps.verify(bucket) for steps in self._captured(bucket, "choose" if bucket.masked else "verify")]
        return numbers[0]

    def _captured(self, bucket: Bucket, half: str | None) -> list[StepGraphs]:
        """All of them; no graph is made while a rank waits for another's."""
        for steps in self.every if half is not None else ():
            steps.capture(bucket, half)
        return self.every

    def result(self, number: int) -> list[Record] | None:
        """What a step did; None while a rank runs it. Raises DeviceError where a join gave up or ranks disagree."""
        first, *others = (steps.entry(number) for steps in self.every)
        if first is None or any(entry is None for entry in others):
            return None
        self._ranks.check()
        records = records_of(first)
        end = HEADER_BYTES + len(records) * RECORD_BYTES
        for rank, entry in enumerate(others, 1):
            if not np.array_equal(entry[:end], first[:end]):
                raise DeviceError(
                    f"rank {rank} has another result than rank 0 in step {number}: GPUs that share a model must agree "
                    "in every bit. The engine must be started again; `dsuf doctor` looks at each GPU."
                )
        return records

    def logprobs(self, number: int, first: int, logits: Sequence[float], wanted: int) -> list[TokenLogprobs]:
        """Of the tokens with these logits, chosen in rows first, first + 1, ... of a step that has ended."""
        rows = (self.first.logprobs_of(number, first + i) for i in range(len(logits)))
        return [TokenLogprobs(*top_logprobs(row, logit, wanted)) for row, logit in zip(rows, logits, strict=True)]

    def logits(self, first: int, count: int) -> list[np.ndarray]:
        return self.first.logits(first, count)

    def drafts(self, entries: Sequence[Entry]) -> list[list[int]]:
        return self.first.drafts(entries)

    def send_masks(self, rows: dict[int, int]) -> None:
        for steps in self.every:
            steps.send_masks(rows)


class AllPages:
    """See pages.Pages. `copies` are those of the ranks that follow."""

    def __init__(self, every: Sequence[Pages], ranks: Ranks, copies: Sequence[Copies] = ()) -> None:
        self._first, *self._others = every
        self._ranks, self._copies = ranks, copies
        self.count, self.page_bytes = self._first.count, self._first.page_bytes

    @property
    def free(self) -> int:
        return self._first.free

    def open(self) -> int:
        slot = self._first.open()
        self._follow(slot)
        return slot

    def reserve(self, slot: int, tokens: int) -> None:
        self._first.reserve(slot, tokens)
        self._follow(slot)

    def _follow(self, slot: int) -> None:
        for pages in self._others:
            pages.follow(slot, self._first)

    def release(self, slot: int) -> None:
        for pages in self._others:
            pages.leave(slot)
        self._first.release(slot, _Gone(self._ranks.record(), self._copies))


class _Gone:
    """No rank works with what was given back, and none that follows copies into it."""

    def __init__(self, marks: Marks, copies: Sequence[Copies]) -> None:
        self._marks, self._copies = marks, [(one, one.pages.copies) for one in copies]

    def done(self) -> bool:
        return self._marks.done() and all(copies.progress() >= number for copies, number in self._copies)

    def wait(self) -> None:
        self._marks.wait()
        for copies, number in self._copies:
            copies.finish(number)


class AllCopies:
    """See copies.Copies. A snapshot is the first rank's, a restore everybody's, under the same number."""

    def __init__(self, every: Sequence[Copies]) -> None:
        self.every, self.first, self.others = list(every), every[0], list(every[1:])

    def share(self, memory: memoryview | None) -> None:
        for copies in self.others:
            copies.borrow(None)
        registered = self.first.share(memory)
        for copies in self.others:
            copies.borrow(registered)

    def close(self) -> None:
        for copies in self.others:
            copies.borrow(None)
        self.first.close()

    def snapshot(
        self, slot: int, position: int, decoder_start: int, pages: Mapping[int, Buffer], state: Sequence[Buffer]
    ) -> int:
        number = self.first.snapshot(slot, position, decoder_start, pages, state)
        for copies in self.others:
            copies.pages.copies = number
        return number

    def restore(self, slot: int, position: int, pages: Sequence[Buffer], state: Sequence[Buffer]) -> tuple[int, int]:
        first, *_ = [copies.restore(slot, position, pages, state) for copies in self.every]
        return first

    def progress(self) -> int:
        return min([copies.progress() for copies in self.every])

    def land(self, slot: int, *, wait: bool = True) -> bool:
        return all([copies.land(slot, wait=wait) for copies in self.every])

    def forget(self, slot: int) -> None:
        for copies in self.every:
            copies.forget(slot)
