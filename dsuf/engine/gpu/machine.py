"""Everything of one GPU that a backend works with: checkpoint, weights, pages, workspace, graphs, in that order.

machine = Machine.load(options, class_map, device, progress)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.backend import Progress, StepCounts
from dsuf.engine.gpu.buffers import KIND, Workspace
from dsuf.engine.gpu.launches import Pool
from dsuf.engine.gpu.pages import Pages, Sizes
from dsuf.engine.gpu.step_graph import StepGraphs
from dsuf.engine.gpu.step_walk import Caches, Model
from dsuf.engine.gpu.weights import Weights
from dsuf.engine.options import EngineOptions
from dsuf.errors import CheckpointError, ConfigError, DeviceError
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.slots import C_TOTAL_ROWS, C_TOTAL_SLOTS, COUNTER_BYTES
from dsuf.layout import PAGE_TOKENS, pages_for
from dsuf.model.checkpoint import Checkpoint
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

LOOKAHEAD = 64  # positions of the rope tables beyond the context
SPARE_BYTES = 1 << 30  # of the device that graphs, the driver and others may take
DEFAULT_CONTEXTS = 2  # of full length that the page pool holds where nobody says


@dataclass(frozen=True)
class Machine:
    """See the module."""

    device: Device
    checkpoint: Checkpoint | None
    spec: Spec
    max_context: int
    slots: int
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
    ) -> Machine:
        """Read a checkpoint onto the device. Raises CheckpointError, ConfigError or DeviceError."""
        progress("checkpoint", 0.0)
        checkpoint = Checkpoint.open(options.ckpt)
        classes = checkpoint.class_map()
        if classes is None and class_map is not None:
            classes = class_map(checkpoint)
        spec = checkpoint.spec
        if classes is None:
            if spec.engram_layer_ids:
                raise CheckpointError("no Engram class map: expected engram_token_map.json or a tokenizer beside it.")
            classes = np.zeros(spec.vocab_size, np.int32)
        context = context_of(options, spec)
        weights = Weights.allocate(device, spec, classes, positions=context + LOOKAHEAD)
        weights.load(checkpoint, lambda done, total: progress("weights", done / total))
        place_tables(weights, checkpoint)
        pad = int(classes[spec.engram_pad_token_id])
        machine = cls.over(device, spec, weights, pad, options, checkpoint=checkpoint, graphs=graphs)
        progress("weights", 1.0)
        return machine

    @classmethod
    def over(
        cls,
        device: Device,
        spec: Spec,
        weights: Weights,
        pad_class: int,
        options: EngineOptions,
        *,
        checkpoint: Checkpoint | None = None,
        graphs: bool = True,
    ) -> Machine:
        """Caches, workspace and graphs over weights that are there."""
        context, slots = context_of(options, spec), options.max_sequences
        work = Workspace.allocate(device, spec, context, slots, HISTORY)
        most_pages = pages_for(context + LOOKAHEAD)
        count = page_count(options, device, spec, most_pages)
        pages = Pages(device, spec, slots=slots, count=count, most_pages=most_pages)
        counters = device.allocate(64, KIND)
        device.zero(counters, 64)
        model = Model(spec, weights, caches_of(pages), work, pad_class, counters, counters + 4)
        steps = StepGraphs(device, model, slots, graphs=graphs)
        context = min(context, count * PAGE_TOKENS - LOOKAHEAD)
        return cls(device, checkpoint, spec, context, slots, pages, model, steps, counters)

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


def page_count(options: EngineOptions, device: Device, spec: Spec, most_pages: int) -> int:
    """Pages of the pool: what was asked for, else what fits, up to some sequences of full length."""
    if options.cache_tokens is not None:
        return max(pages_for(options.cache_tokens), 1)
    sizes = Sizes.of(spec)
    free = device.memory()[0] - SPARE_BYTES - options.max_sequences * sizes.slot
    count = min(DEFAULT_CONTEXTS * most_pages, free // sizes.page)
    if count < 1:
        raise DeviceError("no room for a single cache page is left on the GPU. Use fewer --max-sequences.")
    return int(count)


def caches_of(pages: Pages) -> Caches:
    """Addresses for the walks."""
    return Caches(
        windows=pages.windows,
        pitch=pages.window_pitch,
        layer_pitch=pages.ring * pages.row_bytes,
        ring=pages.ring,
        pool=Pool(pages.pool, pages.table, pages.most_pages, pages.layout),
        pairs=pages.pairs,
        history=pages.history,
        history_slots=HISTORY,
    )


def place_tables(weights: Weights, checkpoint: Checkpoint) -> None:
    """Engram tables as they are stored, in device memory."""
    for layer in weights.spec.engram_layer_ids:
        for name, tensor in (("engram_table", "weight"), ("engram_table_scales", "scale")):
            raw = checkpoint.raw(f"layers.{layer}.engram.embed.{tensor}")
            address = weights.device.allocate(raw.nbytes, "weights, engram tables")
            weights.device.upload(address, raw)
            setattr(weights.layers[layer], name, address)
