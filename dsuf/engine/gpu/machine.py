"""Everything of one GPU that a backend works with: checkpoint, weights, pages, workspace, graphs, in that order.

machine = Machine.load(options, class_map, device, progress)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.engine.backend import Progress, StepCounts
from dsuf.engine.gpu import prefill_buffers
from dsuf.engine.gpu.buffers import KIND, Workspace
from dsuf.engine.gpu.engram_tables import place, place_on_device
from dsuf.engine.gpu.memory import SPARE_SLOTS, Ledger, plan_memory
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.phases import Phases
from dsuf.engine.gpu.ranks import ALONE, Rank, exchange_bytes
from dsuf.engine.gpu.step_graph import StepGraphs
from dsuf.engine.gpu.step_walk import Model
from dsuf.engine.gpu.weight_fill import fill
from dsuf.engine.gpu.weight_load import load
from dsuf.engine.gpu.weights import Weights
from dsuf.engine.options import EngineOptions
from dsuf.errors import CheckpointError, ConfigError
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.slots import C_TOTAL_ROWS, C_TOTAL_SLOTS, COUNTER_BYTES, MOST_ROWS
from dsuf.layout import PAGE_TOKENS, pages_for
from dsuf.model.checkpoint import Checkpoint
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

LOOKAHEAD = 64  # tokens beyond the context that ropes, page tables and pages have room for


@dataclass(frozen=True)
class Machine:
    """See the module."""

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
    def load(
        cls,
        options: EngineOptions,
        class_map: Callable[[Checkpoint], np.ndarray | None] | None,
        device: Device,
        progress: Progress,
        *,
        graphs: bool = True,
        rank: Rank = ALONE,
    ) -> Machine:
        """Read a checkpoint onto the device, or a rank's share of it (then engram_tables.join_shares has to follow).
        Raises CheckpointError, ConfigError or DeviceError.
        """
        progress("checkpoint", 0.0)
        phases = Phases()
        phases("checkpoint")
        checkpoint = Checkpoint.open(options.ckpt)
        classes = checkpoint.class_map()
        if classes is None and class_map is not None:
            classes = class_map(checkpoint)
        spec = checkpoint.spec
        if classes is None:
            if spec.engram_layer_ids:
                raise CheckpointError("no Engram class map: expected engram_token_map.json or a tokenizer beside it.")
            classes = np.zeros(spec.vocab_size, np.int32)
        ledger = ledger_of(options, spec, device, rank)
        phases("weights")
        share = {"rank": rank.index, "ranks": rank.count}
        weights = Weights.allocate(device, spec, classes, positions=ledger.max_context + LOOKAHEAD, **share)
        tables = place(weights, checkpoint, ledger.engram, options.engram_memory)
        if checkpoint.holes_seed is not None:
            fill(weights, checkpoint.config, checkpoint.holes_seed)
        else:
            load(weights, checkpoint, lambda done, total: progress("weights", done / total))
        if tables is not None:
            phases("rest of Engram tables")
            tables.result()
        phases("caches, workspace and graphs")
        pad = int(classes[spec.engram_pad_token_id])
        machine = cls.over(device, ledger, weights, pad, checkpoint=checkpoint, graphs=graphs, rank=rank)
        progress("weights", 1.0)
        phases.tell(f"loaded {options.ckpt.name}")
        return machine

    @classmethod
    def synthetic(
        cls,
        config: dict[str, Any],
        options: EngineOptions,
        device: Device,
        *,
        seed: int = 0,
        graphs: bool = True,
        rank: Rank = ALONE,
    ) -> Machine:
        """Random weights for a config, or a rank's share, made on the device; nothing is read. Raises ConfigError or
        DeviceError.
        """
        spec = Spec.from_config(config)
        classes = (np.arange(spec.vocab_size) % spec.engram_compressed_vocab_size).astype(np.int32)
        ledger, share = ledger_of(options, spec, device, rank), {"rank": rank.index, "ranks": rank.count}
        weights = Weights.allocate(device, spec, classes, positions=ledger.max_context + LOOKAHEAD, **share)
        place_on_device(weights)
        fill(weights, config, seed)
        return cls.over(device, ledger, weights, int(classes[spec.engram_pad_token_id]), graphs=graphs, rank=rank)

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


def ledger_of(options: EngineOptions, spec: Spec, device: Device, rank: Rank = ALONE) -> Ledger:
    """What everything will take; told before anything is loaded. Raises ConfigError or DeviceError."""
    context_of(options, spec)
    ledger = plan_memory(
        spec,
        *device.memory(),
        max_context=options.max_context,
        max_sequences=options.max_sequences,
        cache_tokens=options.cache_tokens,
        lookahead=LOOKAHEAD,
        rank=rank.index,
        ranks=rank.count,
        workspace=lambda context: _prefill_bytes(options, spec, context),
        exchange=exchange_bytes(spec, rank, options.prefill_chunk),
    )
    print(f"memory of GPU {device.index} ({device.name}):", *ledger.lines(), sep="\n  ", file=sys.stderr)
    return ledger
