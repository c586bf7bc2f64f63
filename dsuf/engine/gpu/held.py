"""What the GPU backend keeps of a sequence and of a queued step, and the record that a slot begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.sequence import Sequence, StepRecord
from dsuf.kernels.slots import Record, slot_record

if TYPE_CHECKING:
    from dsuf.engine.gpu.ranks import Marks


@dataclass
class Held:
    """A sequence on the device."""

    sequence: Sequence
    slot: int
    generation: int
    decoder_start: int = 0  # first position whose decoder rows are real
    oldest: int = 0  # where it was restored
    read: int = 0  # prompt rows that passes have read; before a tail one more than `sequence.prefilled`
    tail_from: int | None = None  # truncated prefill: the decoder has seen nothing from here on
    decodes: bool = False  # its slot is admitted


@dataclass(frozen=True)
class Pass:
    """A queued step."""

    number: int
    held: tuple[Held, ...]
    rows: tuple[int, ...]  # first row of each
    event: Marks
    first: bool  # it gives a prompt's first token: no decode step


def streams(held: Mapping[str, Held]) -> bool:
    """Whether anybody decodes."""
    return any(one.decodes for one in held.values())


def step_record(record: Record) -> StepRecord:
    """What a trace keeps of it."""
    accepted = min(record.accepted, len(record.emitted))
    return StepRecord(record.position, record.after, record.drafted, record.confidence, accepted, record.emitted)


def admission(held: Held, threshold: float) -> np.ndarray:
    """Slot record, uint8: the sequence goes on from its last token; `threshold` cuts where confidence decides."""
    sequence = held.sequence
    request, sampling = sequence.request, sequence.request.sampling
    return slot_record(
        token=sequence.last_token, position=sequence.last_position, emitted=len(sequence.emitted),
        budget=sequence.budget, eos=request.eos_ids, ignore_eos=request.ignore_eos, min_tokens=request.min_tokens,
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed,
        verify=-1 if sequence.verify is None else sequence.verify, threshold=threshold, drafts=sequence.draft,
        logprobs=sampling.logprobs, decoder_start=held.decoder_start, masked=sequence.constraint is not None,
        generation=held.generation,
    )  # fmt: skip
