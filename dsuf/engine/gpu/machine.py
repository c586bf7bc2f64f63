"""Everything of one GPU that a backend works with: weights, pages, workspace, graphs, and what they may take.

machines.py makes them, one a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.backend import StepCounts
from dsuf.engine.gpu import prefill_buffers
from dsuf.engine.gpu.buffers import KIND, Workspace
from dsuf.engine.gpu.engram_tables import Placement
from dsuf.engine.gpu.memory import SPARE_SLOTS, Ledger, plan_memory
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.ranks import ALONE, Rank, Ranks, exchange_bytes
from dsuf.engine.gpu.step_graph import StepGraphs
from dsuf.engine.gpu.step_walk import Model
from dsuf.engine.gpu.weights import Weights
from dsuf.engine.options import EngineOptions
from dsuf.errors import ConfigError
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.slots import C_TOTAL_ROWS, C_TOTAL_SLOTS, COUNTER_BYTES, MOST_ROWS
from dsuf.layout import PAGE_TOKENS, PageLayout, pages_for
from dsuf.model.checkpoint import Checkpoint
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

LOOKAHEAD = 64  # tokens beyond the context that ropes, page tables and pages have room for


@dataclass(frozen=True)
class Machine:
    """One rank. `ledger`, `max_context` and `slots` are those of every rank."""

    device: Device
    checkpoint: Checkpoint | None
    spec: Spec
    max_context: int
    slots: int
    ledger: Ledger
    pages: Pages
    model: Model
    steps: StepGraphs
    counters: int  # uint32 [2]: distinct experts read, backbone and drafter

    @classmethod
    def over(
        cls,
        device: Device,
        ledger: Ledger,
        weights: Weights,
        pad_class: int,
        *,
        checkpoint: Checkpoint | None = None,
        graphs: bool = True,
        rank: Rank = ALONE,
    ) -> Machine:
        """Caches, workspace and graphs over weights that are there, a rank's share of them."""
        spec, slots = weights.spec, ledger.slots
        work = Workspace.allocate(device, spec, ledger.max_context + LOOKAHEAD, slots, HISTORY)
        most_pages = pages_for(ledger.max_context + LOOKAHEAD)
        pages = Pages(device, spec, slots=slots, count=ledger.pages, most_pages=most_pages)
        counters = device.allocate(64, KIND)
        device.zero(counters, 64)
        model = Model(
            spec, weights, pages.caches, work, pad_class, expert_counter=counters,
            draft_expert_counter=counters + 4, rank=rank,
        )  # fmt: skip
        steps = StepGraphs(device, model, slots, graphs=graphs)
        context = min(ledger.max_context, ledger.pages * PAGE_TOKENS - LOOKAHEAD)
        return cls(device, checkpoint, spec, context, slots, ledger, pages, model, steps, counters)

    def counts(self, steps: int) -> StepCounts:
        """Totals so far; waits for the queued work."""
        raw = self.device.download(self.steps.counters, COUNTER_BYTES)
        experts = self.device.download(self.counters, 8).view(np.uint32)
        wide = [int(raw[4 * word : 4 * word + 8].view(np.uint64)[0]) for word in (C_TOTAL_ROWS, C_TOTAL_SLOTS)]
        return StepCounts(steps, wide[0], wide[1], int(experts[0]), int(experts[1]))


def total(every: Sequence[StepCounts], spec: Spec) -> StepCounts:
    """Of all ranks, each of which counted the experts that it has read."""
    first, split = every[0], len(every) > 1
    for name, experts in (("experts", spec.n_routed_experts), ("drafter_experts", spec.dspark_n_routed_experts)):
        if split and experts % len(every) == 0:
            first = replace(first, **{name: sum(getattr(counts, name) for counts in every)})
    return first


def context_of(options: EngineOptions, spec: Spec) -> int:
    """Tokens of the longest sequence. Raises ConfigError for more than the checkpoint was made for."""
    asked, most = options.max_context, spec.max_position_embeddings
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_context is {asked}, this checkpoint was made for {most} tokens (max_position_embeddings). "
            "Use at most that, or leave the flag out."
        )
    return asked or most


def _prefill_bytes(options: EngineOptions, spec: Spec, context: int) -> int:
    """Workspace of prompt passes that do not go through the decode walk."""
    if options.prefill_chunk <= MOST_ROWS:
        return 0
    slots = options.max_sequences + SPARE_SLOTS
    return prefill_buffers.workspace_bytes(spec, options.prefill_chunk, slots, context + LOOKAHEAD)


def exchange_rows(options: EngineOptions, spec: Spec) -> int:
    """Rows at most of which ranks add up something at once."""
    few = options.prefill_chunk <= MOST_ROWS
    return MOST_ROWS if few else max(options.prefill_chunk, spec.sliding_window)


def ledgers_of(options: EngineOptions, spec: Spec, ranks: Ranks) -> list[Ledger]:
    """What everything will take on each rank, told before anything is loaded: the same pages, context and place of
    Engram's tables on all, as many as the fullest one has room for. Raises ConfigError or DeviceError.
    """
    context_of(options, spec)
    every = [(device, ranks.rank(index)) for index, device in enumerate(ranks.devices)]
    found = [ledger_of(options, spec, *one, options.max_context) for one in every]
    if len(found) > 1:
        context = min(ledger.max_context for ledger in found)
        engram = "host" if any(ledger.engram == "host" for ledger in found) else found[0].engram
        found = [ledger_of(options, spec, *one, context, engram) for one in every]
        pages = min(ledger.pages for ledger in found)
        found = [ledger.with_pages(pages, PageLayout.of(spec).page_bytes) for ledger in found]
    for ledger, (device, _) in zip(found, every, strict=True):
        print(f"memory of GPU {device.index} ({device.name}):", *ledger.lines(), sep="\n  ", file=sys.stderr)
    return found


def ledger_of(
    options: EngineOptions, spec: Spec, device: Device, rank: Rank, context: int | None, engram: Placement | None = None
) -> Ledger:
    """What everything will take on one device. Raises DeviceError."""
    return plan_memory(
        spec,
        *device.memory(),
        max_context=context,
        max_sequences=options.max_sequences,
        cache_tokens=options.cache_tokens,
        lookahead=LOOKAHEAD,
        rank=rank.index,
        ranks=rank.count,
        engram=engram,
        workspace=lambda context: _prefill_bytes(options, spec, context),
        exchange=exchange_bytes(spec, rank, exchange_rows(options, spec)),
    )
