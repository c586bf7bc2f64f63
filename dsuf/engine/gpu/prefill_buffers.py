"""Workspace of prefill chunks: every intermediate of up to `rows` rows, allocated once, and how much that is.

Rows are those of one sequence at consecutive positions. The private window ring and history hold a chunk and what
stands before it, so that rows of one chunk never meet in a slot. The carried rows hold what enters the decoder at the
last sliding_window positions of every slot, between the chunks of a truncated prefill (model.md 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsuf.kernels.chunk_seam import SPLITS
from dsuf.kernels.latents import window_row_bytes
from dsuf.kernels.mixes import ROWS_OF_FN, STREAMS, SUMS
from dsuf.kernels.stream import scale_stride
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

KIND = "workspace, prefill"
SCORES_BYTES = 512 << 20  # of index scores at once, at most
SCORE_TILE = 64  # entries: a row of scores is a multiple of it
FIELDS = 7  # of a row table, int32 [FIELDS, rows]


@dataclass(frozen=True)
class ChunkRows:
    """Addresses of a chunk's row table, named as those of a decode step (buffers.Rows)."""

    token: int
    sequence: int
    position: int
    image: int
    first: int
    decoder_first: int
    last: int

    @classmethod
    def at(cls, table: int, rows: int) -> ChunkRows:
        """The fields one after the other, `rows` each."""
        return cls(*(table + 4 * rows * field for field in range(FIELDS)))

    def after(self, row: int) -> ChunkRows:
        """The table without its first rows."""
        return ChunkRows(*(getattr(self, name) + 4 * row for name in self.__dataclass_fields__))


def row_table(slot: int, start: int, ids: np.ndarray, decoder_start: int, window: int, rows: int) -> np.ndarray:
    """int32 [FIELDS, rows] of one sequence's tokens at positions start, start + 1, ... in the order of ChunkRows."""
    table = np.zeros((FIELDS, rows), np.int32)
    table[1] = -1
    position = np.arange(start, start + len(ids))
    first = np.maximum(position - window + 1, 0)
    own = table[:, : len(ids)]
    own[0], own[1], own[2], own[4], own[6] = ids, slot, position, first, position
    own[5] = np.maximum(first, np.minimum(decoder_start, position))
    return table


def history_slots(spec: Spec, rows: int) -> int:
    """Of the private history: a power of two that holds a chunk and the tokens before it."""
    return 1 << (rows + spec.engram_max_ngram_size).bit_length()


def carried_bytes(spec: Spec) -> tuple[int, int]:
    """Of one row that enters the decoder: streams, coefficients."""
    return 2 * STREAMS * spec.hidden_size, 4 * ROWS_OF_FN


@dataclass(frozen=True)
class ChunkBuffers:
    """Addresses; n rows. bf16 rows in product order (dsuf/kernels/gemm.py) are marked with a P."""

    table: int
    streams: int  # bf16 [n, 4, D]
    coefficients: int  # float32 [n, 24]
    sums: int  # float32 [SPLITS, n, 26]
    q8_rows: int  # P [n, D]: a sublayer's input, quantised
    x_rows: int  # P [n, D]: the same, as it is
    latent: int  # bf16 [n, Q + d]
    codes: int  # e4m3 and ue8m0 of decode kernels' outputs: query latents, Engram rows, taps
    scales: int
    expanded: int  # P: their values
    q: int  # bf16 [n, H, d]
    o: int  # P [n, H d]
    y: int  # bf16 [n, G r]
    y_rows: int  # P [n, G r]
    last: int  # bf16 [n, D]
    compressed: int  # float32 [n, 2 d]
    index_y: int  # bf16 [n, heads, di]
    index_q: int
    index_weights: int  # float32 [n, heads]
    scores: int  # float32 [as many rows as fit, entries]
    candidates: int  # int32 [n, kept blocks]
    kept_of: int  # int32 [n]
    selected: int  # int32 [n, topk]
    chosen: int  # int32 [n]
    gate: int  # float32 [n, E]
    experts: int  # int32 [n, k]
    shares: int  # float32 [n, k]
    offsets: int  # int32 [E + 1]
    order: int  # int32 [n k]
    hidden: int  # P [n k, I]
    parts: int  # bf16 [n k, D]
    shared: int  # bf16 [n, 2 I]
    shared_rows: int  # P [n, I]
    engram_kv: int  # bf16 [n, 5 D]
    windows: int  # private ring
    history: int  # private history
    taps: int  # bf16 [taps, n, D]
    carried_streams: int  # bf16 [slots, W, 4, D]
    carried_coefficients: int  # float32 [slots, W, 24]

    @classmethod
    def allocate(cls, device: Device, spec: Spec, rows: int, slots: int, context: int) -> ChunkBuffers:
        """Take the memory. Raises DeviceError when it does not fit."""
        sizes = sizes_of(spec, rows, slots, context)
        return cls(**{name: device.allocate(size, KIND) for name, size in sizes.items()})


def scores_pitch(tokens: int, ratio: int) -> int:
    """Scores of a row over the entries of so many tokens."""
    return -(-max(tokens // ratio, 1) // SCORE_TILE) * SCORE_TILE


def sizes_of(spec: Spec, rows: int, slots: int, context: int) -> dict[str, int]:
    """Bytes of each buffer for sequences of up to `context` tokens."""
    ratio = min(role.ratio for role in spec.layers if role.is_index_source)
    d, width, heads, k = spec.hidden_size, spec.head_dim, spec.num_attention_heads, spec.num_experts_per_tok
    index, taps = spec.index_n_heads * spec.index_head_dim, len(spec.dspark_target_layer_ids)
    coded = max(spec.q_lora_rank, spec.engram_columns * spec.engram_head_dim, taps * d)
    output, i = spec.o_groups * spec.o_lora_rank, spec.moe_intermediate_size
    streams, coefficients = carried_bytes(spec)
    a_row = {
        "table": 4 * FIELDS, "streams": streams, "coefficients": coefficients, "sums": 4 * SPLITS * SUMS,
        "q8_rows": 2 * d, "x_rows": 2 * d, "latent": 2 * (spec.q_lora_rank + width), "codes": coded,
        "scales": scale_stride(coded), "expanded": 2 * coded, "q": 2 * heads * width, "o": 2 * heads * width,
        "y": 2 * output, "y_rows": 2 * output, "last": 2 * d, "compressed": 8 * width, "index_y": 2 * index,
        "index_q": 2 * index, "index_weights": 4 * spec.index_n_heads, "candidates": 4 * spec.candidate_topk_blocks,
        "kept_of": 4, "selected": 4 * spec.index_topk, "chosen": 4, "gate": 4 * spec.n_routed_experts,
        "experts": 4 * k, "shares": 4 * k, "order": 4 * k, "hidden": 2 * k * i, "parts": 2 * k * d, "shared": 4 * i,
        "shared_rows": 2 * i, "engram_kv": 2 * (spec.hc_mult + 1) * d, "taps": 2 * taps * d,
    }  # fmt: skip
    sizes = {name: rows * size for name, size in a_row.items()}
    carried = slots * spec.sliding_window
    return sizes | {
        "scores": min(SCORES_BYTES, 4 * rows * scores_pitch(context, ratio)),
        "offsets": 4 * (spec.n_routed_experts + 1),
        "windows": (rows + spec.sliding_window) * window_row_bytes(width),
        "history": 4 * history_slots(spec, rows),
        "carried_streams": carried * streams,
        "carried_coefficients": carried * coefficients,
    }


def workspace_bytes(spec: Spec, rows: int, slots: int, context: int) -> int:
    """What a device must have for prefill, rounded up as it allocates."""
    return sum(-(-size // 256) * 256 for size in sizes_of(spec, rows, slots, context).values())
