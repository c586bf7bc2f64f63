"""The shared compressed cache: what a kv source adds to it, and which entries an index source chooses from it.

    entry      C_j = Q4e(rope(c_j at j * ratio)), c_j = rms(pooled group; norm)
    index key  K_j = Q4p(rope(rms(wk c_j; k_norm) at j * ratio)), from the latent before rope
    scores     as in dsuf/ops/index.py, qI = Q4p(rope(index wq_b c)), w = (weights_proj x) / sqrt(width * heads)

Keys always come from the layer's own kv source. Source: reference model.md 3.5, 3.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dsuf.model.reference.batch import Batch, bias_of
from dsuf.model.reference.caches import Packed
from dsuf.model.reference.weights import LayerWeights
from dsuf.ops import qdq
from dsuf.ops.compress import completed, pool, visible
from dsuf.ops.index import KEY_TILE, candidate_mask, index_scores, key_tiles, largest, mask_invisible
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import Numerics
from dsuf.ops.product import product
from dsuf.ops.rope import rotate
from dsuf.spec import Spec


@dataclass
class Selection:
    """What index sources chose and later layers read again.

    keys [rows, W + index_topk, d]: the first W slots are filled by each layer with its window, the others hold the
    chosen entries; bias [rows, index_topk] masks slots without an entry. candidates: for each sequence the entries
    [rows, entries] that Reindex layers may choose from, None where nothing is excluded.
    """

    keys: np.ndarray | None = None
    bias: np.ndarray | None = None
    candidates: list[np.ndarray | None] = field(default_factory=list)


def write_entries(x: np.ndarray, weights: LayerWeights, batch: Batch, spec: Spec, numerics: Numerics) -> None:
    """Attention input [rows, D] of a kv source -> the entries and index keys that these rows complete, stored."""
    ratio, layer = weights.role.ratio, weights.role.index
    completes = [completed(span.start, span.count, ratio) for span in batch.spans]
    projected = product(x, weights.compressor_t)
    pooled = projected if ratio == 1 else _pooled_groups(projected, layer, ratio, batch, completes, spec)
    if not pooled.shape[0]:
        return
    latents = numerics.round(rms_norm(numerics.round(pooled), weights.compressor_norm, spec.rms_norm_eps))
    keys = numerics.round(product(latents, weights.index_wk_t))
    keys = numerics.round(rms_norm(keys, weights.index_k_norm, spec.rms_norm_eps))
    phase = batch.compressed_table.at(np.concatenate([np.arange(e.start, e.stop) for e in completes]) * ratio)
    rotate(latents, phase)
    rotate(keys, phase)
    latents, keys, packed = _stored(numerics.round(latents), numerics.round(keys), numerics)
    at = 0
    for span, entries in zip(batch.spans, completes, strict=True):
        rows = slice(at, at + len(entries))
        at = rows.stop
        if entries:
            own = None if packed is None else tuple(plane[rows] for plane in packed)
            span.caches.write_entries(layer, entries.start, latents[rows], keys[rows], own)


def _pooled_groups(
    projected: np.ndarray, layer: int, ratio: int, batch: Batch, completes: list[range], spec: Spec
) -> np.ndarray:
    """(kv, gate) rows [rows, 2d] join those of the open groups; whole groups are pooled: [entries, d]."""
    groups = []
    for span, entries in zip(batch.spans, completes, strict=True):
        recent = span.caches.open_groups[layer]
        recent.rows(span.start, span.end)[0] = projected[span.rows]
        if entries:
            whole = recent.rows(entries.start * ratio, entries.stop * ratio)[0]
            groups.append(whole.reshape(len(entries), ratio, -1))
    if not groups:
        return projected[:0, : spec.head_dim]
    joined = groups[0] if len(groups) == 1 else np.concatenate(groups)
    return pool(joined[..., : spec.head_dim], joined[..., spec.head_dim :])


def _stored(latents: np.ndarray, keys: np.ndarray, numerics: Numerics) -> tuple[np.ndarray, np.ndarray, Packed | None]:
    """Roped latents and keys -> their values as cached, and the packed form in quantised numerics."""
    if not numerics.quantise:
        return latents, keys, None
    packed = (*qdq.q4e_encode(latents), *qdq.q4p_encode(keys))
    return qdq.q4e_decode(*packed[:2]), qdq.q4p_decode(*packed[2:]), packed


def select(
    x: np.ndarray,
    index_q: np.ndarray,
    weights: LayerWeights,
    batch: Batch,
    chosen: Selection,
    spec: Spec,
    numerics: Numerics,
) -> None:
    """At an index source: choose each row's entries, gather them into `chosen`.

    x [rows, D] attention input, index_q [rows, index heads * index width] before rope.
    """
    role = weights.role
    heads, width = spec.index_n_heads, spec.index_head_dim
    q = index_q.reshape(-1, heads, width)
    rotate(q, batch.compressed.forward)
    q = numerics.round(q)
    q = qdq.q4p(q) if numerics.quantise else q
    head_weights = numerics.round(product(x, weights.index_weights_t)) * (width * heads) ** -0.5
    seen = visible(batch.positions, role.ratio)
    if chosen.keys is None:
        shape = (batch.rows, spec.sliding_window + spec.index_topk, spec.head_dim)
        chosen.keys = np.zeros(shape, numerics.dtype)
    picks = np.empty((batch.rows, spec.index_topk), np.intp)
    real = np.empty(picks.shape, bool)
    if role.is_candidate_source:
        chosen.candidates = [None] * len(batch.spans)
    for number, span in enumerate(batch.spans):
        rows, entries = span.rows, span.caches.entries[role.kv_source]
        allowed = chosen.candidates[number] if role.uses_candidates else None
        scores = _masked_scores(q[rows], head_weights[rows], entries.keys, seen[rows], allowed, spec, numerics)
        if role.is_candidate_source:
            chosen.candidates[number] = candidate_mask(
                scores, seen[rows], spec.candidate_block_size, spec.candidate_topk_blocks
            )
        picks[rows] = largest(scores, spec.index_topk)
        real[rows] = scores[np.arange(span.count)[:, None], picks[rows]] > -np.inf
        chosen.keys[rows, spec.sliding_window :] = entries.latents[picks[rows]]
    chosen.bias = bias_of(real, numerics.dtype)


def _masked_scores(
    q: np.ndarray,
    head_weights: np.ndarray,
    keys: np.ndarray,
    seen: np.ndarray,
    allowed: np.ndarray | None,
    spec: Spec,
    numerics: Numerics,
) -> np.ndarray:
    """Scores of one sequence [rows, entries in whole tiles, at least index_topk], -inf where a row may not choose."""
    tiles = key_tiles(int(seen[-1]), spec.index_topk)
    scores = numerics.round(index_scores(q, head_weights, keys[: tiles * KEY_TILE]))
    mask_invisible(scores, seen)
    if allowed is not None:
        scores[~allowed] = -np.inf
    return scores
