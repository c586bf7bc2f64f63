"""A checkpoint of the small width with few layers but every kind of them, and helpers to run engines over it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsuf.engine.engine import Engine
from dsuf.engine.gpu import launches, machines
from dsuf.engine.gpu.backend import GpuBackend
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.ranks import Ranks
from dsuf.engine.messages import Request, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Trace
from dsuf.model.synthetic import load_config, write_checkpoint
from tests.support.simt_device import SimtDevice


def small_config(**changes: Any) -> dict[str, Any]:
    """Six layers: window, Engram and ratio 2, candidate source, two that reuse, one that selects inside candidates."""
    config = copy.deepcopy(load_config("tiny"))
    config["image_token_id"] = 250
    config["text_config"].update(
        vocab_size=256,
        num_hidden_layers=6,
        compress_ratios=[0, 2, 1, 1, 1, 1, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 4],
        candidate_source_layer_id=2,
        engram_layer_ids=[1],
        engram_num_embeddings=config["text_config"]["engram_num_embeddings"][:1],
        dspark_target_layer_ids=[3, 4, 5],
        num_nextn_predict_layers=1,
        dspark_noise_token_id=255,
        n_routed_experts=4,
        num_experts_per_tok=2,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        **changes,
    )
    return config


def written(folder: Path) -> Path:
    """The checkpoint on disk."""
    write_checkpoint(small_config(), folder)
    return folder


@contextlib.contextmanager
def few_score_blocks() -> Iterator[None]:
    """Index scores by 8 blocks instead of 132, of which all but a few have nothing to do in contexts as short as these.

    They cost the stand-in several times what the others do; how many there are changes no score.
    """
    kept, launches.SCORE_BLOCKS = launches.SCORE_BLOCKS, 8
    try:
        yield
    finally:
        launches.SCORE_BLOCKS = kept


def gpu_engine(folder: Path, *, graphs: bool = True, **options: Any) -> Engine:
    """An engine over the GPU backend on the stand-in."""
    given = {"max_context": 256, "max_sequences": 4, "cache_tokens": 1024, "prefill_chunk": 48, **options}
    chosen = EngineOptions(folder, **given)
    backend = GpuBackend(chosen, None, [SimtDevice()], graphs=graphs)
    backend.load(lambda what, share: None)
    return Engine(backend, chosen)


def machine_on(device: Any, options: EngineOptions) -> Machine:
    """The checkpoint on one device, without graphs."""
    return machines.load(options, None, Ranks([device]), lambda what, share: None, graphs=False)[0]


def texts(engine: Engine, *requests: Request, traces: dict[str, Trace] | None = None) -> dict[str, list[int]]:
    """Submit all and step until idle: what each emitted."""
    for request in requests:
        engine.submit(request, (traces or {}).get(request.id))
    ids: dict[str, list[int]] = {request.id: [] for request in requests}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                ids[event.id] += event.ids
    return ids
