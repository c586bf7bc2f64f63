"""Every tensor of a checkpoint: name, dtype and shape, in the order in which the files hold them.

A parameter is stored as one tensor or, when it is quantised, as `.weight` and `.scale`:

    norm, bf16   BF16 [shape]
    f32          F32 [shape]
    fp8          F8_E4M3 [o, i] and F8_E8M0 [o/32, i/32]     one scale a 32x32 block
    rows         F8_E4M3 [o, i] and F8_E8M0 [o, i/32]        one scale a row and 32 columns (Engram tables)
    fp4          I8 [o, i/2] and F8_E8M0 [o, i/32]           two codes a byte, even column in the low nibble

Source: tensor tables of the reference document (sections 2 to 8 and 10), which add up to the published totals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dsuf.errors import ConfigError
from dsuf.spec import BLOCK, Spec

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
MOST_TENSORS = 4_000_000  # 40 times the real model; a config beyond this is a mistake, not a checkpoint

Kind = Literal["norm", "bf16", "f32", "fp8", "rows", "fp4"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor; `dtype` is spelled as safetensors does."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as the model sees it; `name` lacks `.weight` for the quantised kinds."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    def tensors(self) -> tuple[TensorInfo, ...]:
        """The one or two tensors that store it."""
        if self.kind == "f32":
            return (TensorInfo(self.name, "F32", self.shape),)
        if self.kind in ("norm", "bf16"):
            return (TensorInfo(self.name, "BF16", self.shape),)
        rows, columns = self.shape
        scale = (-(-rows // BLOCK) if self.kind == "fp8" else rows, -(-columns // BLOCK))
        weight = ("I8", (rows, columns // 2)) if self.kind == "fp4" else ("F8_E4M3", self.shape)
        return TensorInfo(self.name + ".weight", *weight), TensorInfo(self.name + ".scale", "F8_E8M0", scale)


def inventory(spec: Spec, config: dict[str, Any]) -> dict[str, TensorInfo]:
    """All tensors by name, in file order; the vision part is there when `config` has a `vision_config`."""
    return {info.name: info for parameter in parameters(spec, config) for info in parameter.tensors()}


def parameters(spec: Spec, config: dict[str, Any]) -> Iterator[Parameter]:
    """All parameters in file order. Raises ConfigError for a vision_config that lacks a dimension."""
    experts = spec.num_hidden_layers * spec.n_routed_experts
    experts += spec.num_nextn_predict_layers * spec.dspark_n_routed_experts
    if 6 * experts > MOST_TENSORS:
        raise ConfigError(f"config.json asks for {experts} routed experts in all; at most {MOST_TENSORS // 6} can be.")
    width, vocabulary = spec.hidden_size, spec.vocab_size
    yield Parameter("embed.weight", "bf16", (vocabulary, width))
    yield Parameter("head.weight", "bf16", (vocabulary, width))
    yield Parameter("norm.weight", "norm", (width,))
    for layer in range(spec.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(prefix, spec, spec.n_routed_experts)
        yield from _compressed_attention(prefix, spec, layer)
        yield from _engram(prefix, spec, layer)
    for stage in range(spec.num_nextn_predict_layers):
        yield from _block(f"mtp.{stage}.", spec, spec.dspark_n_routed_experts)
        yield from _drafter(f"mtp.{stage}.", spec, stage)
    if config.get("vision_config") is not None:
        yield from _vision(config["vision_config"], width)


def _block(prefix: str, spec: Spec, experts: int) -> Iterator[Parameter]:
    """What every layer and every drafter stage has: attention, norms, hyper-connections, experts."""
    width, heads_width, mixed = spec.hidden_size, spec.num_attention_heads * spec.head_dim, spec.o_groups
    attn = prefix + "attn."
    yield Parameter(attn + "wq_a", "fp8", (spec.q_lora_rank, width))
    yield Parameter(attn + "q_norm.weight", "norm", (spec.q_lora_rank,))
    yield Parameter(attn + "wq_b", "fp8", (heads_width, spec.q_lora_rank))
    yield Parameter(attn + "wkv", "fp8", (spec.head_dim, width))
    yield Parameter(attn + "kv_norm.weight", "norm", (spec.head_dim,))
    yield Parameter(attn + "wo_a", "fp8", (mixed * spec.o_lora_rank, heads_width // mixed))
    yield Parameter(attn + "wo_b", "fp8", (width, mixed * spec.o_lora_rank))
    yield Parameter(attn + "attn_sink", "f32", (spec.num_attention_heads,))
    yield Parameter(prefix + "attn_norm.weight", "norm", (width,))
    yield Parameter(prefix + "ffn_norm.weight", "norm", (width,))
    for part in ("attn", "ffn"):
        yield Parameter(f"{prefix}hc_{part}_fn", "f32", (spec.hc_mix_rows, spec.hc_mult * width))
        yield Parameter(f"{prefix}hc_{part}_base", "f32", (spec.hc_mix_rows,))
        yield Parameter(f"{prefix}hc_{part}_scale", "f32", (3,))
    yield Parameter(prefix + "ffn.gate.weight", "bf16", (experts, width))
    yield Parameter(prefix + "ffn.gate.bias", "f32", (experts,))
    yield Parameter(prefix + "ffn.gate.bias_vl", "f32", (experts,))
    for expert in range(experts):
        yield from _expert(f"{prefix}ffn.experts.{expert}.", "fp4", spec)
    yield from _expert(prefix + "ffn.shared_experts.", "fp8", spec)


def _expert(prefix: str, kind: Kind, spec: Spec) -> Iterator[Parameter]:
    yield Parameter(prefix + "w1", kind, (spec.moe_intermediate_size, spec.hidden_size))
    yield Parameter(prefix + "w2", kind, (spec.hidden_size, spec.moe_intermediate_size))
    yield Parameter(prefix + "w3", kind, (spec.moe_intermediate_size, spec.hidden_size))


def _compressed_attention(prefix: str, spec: Spec, layer: int) -> Iterator[Parameter]:
    """Compressor and index key of a kv source; index queries of an index source."""
    role, attn = spec.layers[layer], prefix + "attn."
    if role.is_kv_source:
        yield Parameter(attn + "compressor.wkv.weight", "bf16", (spec.head_dim, spec.hidden_size))
        if role.ratio > 1:
            yield Parameter(attn + "compressor.wgate.weight", "bf16", (spec.head_dim, spec.hidden_size))
        yield Parameter(attn + "compressor.norm.weight", "norm", (spec.head_dim,))
        yield Parameter(attn + "indexer.wk.weight", "bf16", (spec.index_head_dim, spec.head_dim))
        yield Parameter(attn + "indexer.k_norm.weight", "norm", (spec.index_head_dim,))
    if role.is_index_source:
        yield Parameter(attn + "indexer.wq_b", "fp8", (spec.index_n_heads * spec.index_head_dim, spec.q_lora_rank))
        yield Parameter(attn + "indexer.weights_proj.weight", "bf16", (spec.index_n_heads, spec.hidden_size))


def _engram(prefix: str, spec: Spec, layer: int) -> Iterator[Parameter]:
    ordinal, width = spec.layers[layer].engram, spec.hidden_size
    if ordinal is None:
        return
    gathered = spec.engram_columns * spec.engram_head_dim
    yield Parameter(prefix + "engram.embed", "rows", (spec.engram_num_embeddings[ordinal], spec.engram_head_dim))
    yield Parameter(prefix + "engram.wkv", "fp8", (width * (spec.hc_mult + 1), gathered))
    yield Parameter(prefix + "engram.q_weight", "norm", (spec.hc_mult, width))
    yield Parameter(prefix + "engram.k_weight", "norm", (spec.hc_mult, width))


def _drafter(prefix: str, spec: Spec, stage: int) -> Iterator[Parameter]:
    """What only the first stage (context features) and the last stage (heads) have."""
    width, rank = spec.hidden_size, spec.dspark_markov_rank
    if stage == 0:
        yield Parameter(prefix + "main_proj", "fp8", (width, width * len(spec.dspark_target_layer_ids)))
        yield Parameter(prefix + "main_norm.weight", "norm", (width,))
    if stage == spec.num_nextn_predict_layers - 1:
        yield Parameter(prefix + "norm.weight", "norm", (width,))
        yield Parameter(prefix + "markov_head.embed.weight", "bf16", (spec.vocab_size, rank))
        yield Parameter(prefix + "markov_head.head.weight", "bf16", (spec.vocab_size, rank))
        yield Parameter(prefix + "confidence_head.proj.weight", "bf16", (1, width + rank))


_VISION_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "patch_size", "downsample_ratio")


def _vision(vision: Any, width: int) -> Iterator[Parameter]:
    """The vision encoder, its aligner to `width` and the three learned image vectors."""
    found = [vision.get(key) if isinstance(vision, dict) else None for key in _VISION_KEYS]
    wrong = [
        f"vision_config.{key} is {value!r}"
        for key, value in zip(_VISION_KEYS, found, strict=True)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000_000
    ]
    if wrong:
        raise ConfigError(f"config.json cannot be used: {'; '.join(wrong)}; expected positive integers.")
    depth, hidden, inner, patch, down = found
    yield Parameter("vision.patch_embed.proj.weight", "bf16", (hidden, 3 * patch * patch))
    yield Parameter("vision.patch_embed.proj.bias", "bf16", (hidden,))
    for block in range(depth):
        prefix = f"vision.blocks.{block}."
        yield Parameter(prefix + "norm1.weight", "norm", (hidden,))
        yield Parameter(prefix + "attn.wqkv.weight", "bf16", (3 * hidden, hidden))
        yield Parameter(prefix + "attn.wqkv.bias", "bf16", (3 * hidden,))
        yield Parameter(prefix + "attn.wo.weight", "bf16", (hidden, hidden))
        yield Parameter(prefix + "attn.wo.bias", "bf16", (hidden,))
        yield Parameter(prefix + "norm2.weight", "norm", (hidden,))
        yield Parameter(prefix + "mlp.w1.weight", "bf16", (2 * inner, hidden))
        yield Parameter(prefix + "mlp.w2.weight", "bf16", (hidden, inner))
    yield Parameter("vision.norm.weight", "norm", (hidden,))
    for name, columns in (("aligner.w1", down * down * hidden), ("aligner.w2", width)):
        yield Parameter(name + ".weight", "bf16", (width, columns))
        yield Parameter(name + ".bias", "bf16", (width,))
    for name in ("image_start", "image_end", "image_newline"):
        yield Parameter(name, "bf16", (width,))
