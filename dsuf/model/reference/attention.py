"""Attention of a backbone layer over its window and the shared compressed cache, as reference model.md 3 states it.

c = rms(wq_a x), q = rope(wq_b c);  k = Q8(rope(rms(wkv x))) is key and value of the window
source layers add entries to the compressed cache; index sources choose each row's entries
o = wo_b [wo_a,g unrope(attend(q, window ++ chosen entries))]
"""

from __future__ import annotations

import numpy as np

from dsuf.model.reference.batch import Batch, Phases, Span
from dsuf.model.reference.sparse import Selection, select, write_entries
from dsuf.model.reference.weights import BlockWeights, LayerWeights
from dsuf.ops import qdq
from dsuf.ops.attend import attend
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import Numerics
from dsuf.ops.product import grouped_product, product
from dsuf.ops.rope import rotate
from dsuf.spec import Spec


def quantised(x: np.ndarray, numerics: Numerics) -> np.ndarray:
    """Input of an FP8 or FP4 weight, or a window latent."""
    return qdq.q8(x) if numerics.quantise else x


def window_latent(
    projected: np.ndarray, kv_norm: np.ndarray, phases: Phases, spec: Spec, numerics: Numerics
) -> np.ndarray:
    """wkv x [rows, ..., d], kv_norm [..., d] -> window latents [rows, ..., d] as cached."""
    k = numerics.round(rms_norm(numerics.round(projected), kv_norm, spec.rms_norm_eps))
    rotate(k, phases.forward)
    return quantised(numerics.round(k), numerics)


def queries(
    x: np.ndarray, weights: BlockWeights, phases: Phases, spec: Spec, numerics: Numerics
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention input [rows, D] -> q [rows, H, d], the layer's own window latents [rows, d], and what wq_b gives beyond
    the heads (an index source's index queries before rope, else nothing) [rows, rest].
    """
    projected = numerics.round(product(quantised(x, numerics), weights.wq_a_wkv_t))
    latents = np.empty_like(projected)
    c, k = latents[:, : spec.q_lora_rank], latents[:, spec.q_lora_rank :]
    c[:] = rms_norm(projected[:, : spec.q_lora_rank], weights.q_norm, spec.rms_norm_eps)
    k[:] = numerics.round(rms_norm(projected[:, spec.q_lora_rank :], weights.kv_norm, spec.rms_norm_eps))
    rotate(k, phases.forward)
    latents = quantised(numerics.round(latents), numerics)  # c for wq_b, k for the cache: the same point, one call
    c, k = latents[:, : spec.q_lora_rank], latents[:, spec.q_lora_rank :]
    projected = numerics.round(product(c, weights.wq_b_t))
    width = spec.num_attention_heads * spec.head_dim
    q = projected[:, :width].reshape(-1, spec.num_attention_heads, spec.head_dim)
    rotate(q, phases.forward)
    return numerics.round(q), k, projected[:, width:]


def output(o: np.ndarray, weights: BlockWeights, phases: Phases, spec: Spec, numerics: Numerics) -> np.ndarray:
    """Attention result [rows, H, d] -> [rows, D]."""
    o = numerics.round(o)
    rotate(o, phases.inverse)
    grouped = numerics.round(o).reshape(o.shape[0], spec.o_groups, -1)
    y = numerics.round(grouped_product(grouped, weights.wo_a_t))
    return numerics.round(product(quantised(y, numerics), weights.wo_b_t))


def attention(
    x: np.ndarray,
    weights: LayerWeights,
    batch: Batch,
    chosen: Selection,
    spec: Spec,
    numerics: Numerics,
    *,
    compress: bool,
) -> np.ndarray:
    """Attention input [rows, D] -> [rows, D]; writes the layer's window rows and, with `compress`, its entries."""
    role = weights.role
    phases = batch.compressed if role.ratio else batch.plain
    q, k, index_q = queries(x, weights, phases, spec, numerics)
    if role.is_kv_source and compress:
        write_entries(x, weights, batch, spec, numerics)
    if role.is_index_source:
        select(x, index_q, weights, batch, chosen, spec, numerics)
    bias = batch.decoder_window_bias if role.index >= spec.decoder_start_layer else batch.window_bias
    windows = [window_views(k[span.rows], span, role.index, spec) for span in batch.spans]
    if role.ratio:
        keys, bias = chosen.keys, np.concatenate([bias, chosen.bias], axis=1)
        for span, view in zip(batch.spans, windows, strict=True):
            keys[span.rows, : spec.sliding_window] = view
    else:
        keys = windows[0] if len(windows) == 1 else np.concatenate(windows)
    return output(attend(q, keys, bias, weights.attn_sink, numerics), weights, phases, spec, numerics)


def window_views(k: np.ndarray, span: Span, layer: int, spec: Spec) -> np.ndarray:
    """Store the new latents [rows, d] and view each row's window: [rows, W, d], oldest first, itself last."""
    windows = span.caches.windows
    windows.rows(span.start, span.end)[layer] = k
    recent = windows.rows(span.start - spec.sliding_window + 1, span.end)[layer]
    step, item = recent.strides
    shape = (span.count, spec.sliding_window, spec.head_dim)
    return np.ndarray(shape, recent.dtype, recent, strides=(step, step, item))  # rows overlap: to be read only
