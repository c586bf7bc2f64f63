"""Machines of all ranks: a checkpoint, or random weights, on one GPU or shared by several.

    ranks = Ranks(devices)
    machines = load(options, class_map, ranks, progress)       in rank order, from one checkpoint
    machines = make(config, options, ranks)                    random weights, made on the devices

Each rank's weights are loaded by a thread of its own, so that what all of them need is read from the disk once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dsuf.engine.backend import ClassMap, Progress
from dsuf.engine.gpu.engram_tables import place, place_shares
from dsuf.engine.gpu.machine import LOOKAHEAD, Machine, exchange_rows, ledgers_of
from dsuf.engine.gpu.memory import Ledger
from dsuf.engine.gpu.phases import Phases
from dsuf.engine.gpu.ranks import Ranks
from dsuf.engine.gpu.weight_fill import fill
from dsuf.engine.gpu.weight_load import load as load_weights
from dsuf.engine.gpu.weights import Weights
from dsuf.engine.options import EngineOptions
from dsuf.errors import CheckpointError
from dsuf.model.checkpoint import Checkpoint
from dsuf.spec import Spec


def load(
    options: EngineOptions, class_map: ClassMap | None, ranks: Ranks, progress: Progress, *, graphs: bool = True
) -> list[Machine]:
    """Read a checkpoint, each rank its share. Raises CheckpointError, ConfigError or DeviceError."""
    progress("checkpoint", 0.0)
    phases = Phases()
    phases("checkpoint")
    checkpoint = Checkpoint.open(options.ckpt)
    classes, spec = _classes(checkpoint, class_map), checkpoint.spec
    ledgers = ledgers_of(options, spec, ranks)
    phases("weights")
    every = _allocated(ranks, spec, classes, ledgers)
    tables = place(every, checkpoint, ledgers[0].engram, options.engram_memory)

    def fetch(weights: Weights) -> None:
        if checkpoint.holes_seed is not None:
            fill(weights, checkpoint.config, checkpoint.holes_seed)
        else:
            tell = (lambda done, total: progress("weights", done / total)) if weights is every[0] else None
            load_weights(weights, checkpoint, tell)

    _each(ranks, fetch, every)
    if tables is not None:
        phases("rest of Engram tables")
        tables.result()
    phases("caches, workspace and graphs")
    machines = _over(ranks, ledgers, every, classes, options, checkpoint=checkpoint, graphs=graphs)
    progress("weights", 1.0)
    phases.tell(f"loaded {options.ckpt.name}")
    return machines


def make(
    config: dict[str, Any], options: EngineOptions, ranks: Ranks, *, seed: int = 0, graphs: bool = True
) -> list[Machine]:
    """Random weights for a config; nothing is read. Raises ConfigError or DeviceError."""
    spec = Spec.from_config(config)
    classes = (np.arange(spec.vocab_size) % spec.engram_compressed_vocab_size).astype(np.int32)
    ledgers = ledgers_of(options, spec, ranks)
    every = _allocated(ranks, spec, classes, ledgers)
    place_shares(every)
    _each(ranks, lambda weights: fill(weights, config, seed), every)
    return _over(ranks, ledgers, every, classes, options, graphs=graphs)


def _classes(checkpoint: Checkpoint, class_map: ClassMap | None) -> np.ndarray:
    """Engram's class of each token id."""
    classes = checkpoint.class_map()
    if classes is None and class_map is not None:
        classes = class_map(checkpoint)
    if classes is not None:
        return classes
    if checkpoint.spec.engram_layer_ids:
        raise CheckpointError("no Engram class map: expected engram_token_map.json or a tokenizer beside it.")
    return np.zeros(checkpoint.spec.vocab_size, np.int32)


def _allocated(ranks: Ranks, spec: Spec, classes: np.ndarray, ledgers: Sequence[Ledger]) -> list[Weights]:
    positions, count = ledgers[0].max_context + LOOKAHEAD, len(ranks.devices)
    return [
        Weights.allocate(device, spec, classes, positions=positions, rank=rank, ranks=count)
        for rank, device in enumerate(ranks.devices)
    ]


def _each(ranks: Ranks, do: Callable[[Weights], object], every: Sequence[Weights]) -> None:
    """Each rank's beside the others', where it has a GPU of its own."""
    with ThreadPoolExecutor(len(every) if ranks.several else 1, "loading") as pool:
        for _ in pool.map(do, every):
            pass


def _over(
    ranks: Ranks,
    ledgers: Sequence[Ledger],
    every: Sequence[Weights],
    classes: np.ndarray,
    options: EngineOptions,
    *,
    checkpoint: Checkpoint | None = None,
    graphs: bool,
) -> list[Machine]:
    """Caches, workspace and graphs of each, and what they exchange."""
    spec = every[0].spec
    if len(every) > 1:
        ranks.prepare(spec, exchange_rows(options, spec))
    pad = int(classes[spec.engram_pad_token_id])
    return [
        Machine.over(weights.device, ledger, weights, pad, checkpoint=checkpoint, graphs=graphs, rank=ranks.rank(index))
        for index, (ledger, weights) in enumerate(zip(ledgers, every, strict=True))
    ]
