"""Workspace of a decode step: every intermediate of up to 48 rows, allocated once, so that addresses are constants.

Sizes follow from the spec; shapes and formats are those of the kernels that write them (dsuf/kernels). Backbone,
drafter and prompt rows use the same workspace one after the other, because they run on one stream; only their row
tables differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dsuf.kernels import expert_plan, mixes, route
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.stream import scale_stride
from dsuf.layout import PAGE_TOKENS, pages_for
from dsuf.spec import Spec

KIND = "workspace"
BEST = 32  # entries of which the largest score is kept for the selection
MARKOV_PARTS = 5 * 132 * 8 * 2  # uint32 of markov.step
RECORD = 8  # uint32 of a row's filter
FIELDS = 12  # of a row table


class Allocator(Protocol):
    """What gives device memory."""

    def allocate(self, nbytes: int, what: str) -> int:
        """Address of nbytes, counted under `what`."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Clear it."""
        ...


@dataclass(frozen=True)
class Rows:
    """A row table, int32 [FIELDS, MOST_ROWS] at `table` (dsuf.kernels.rows): addresses of the fields.

    sequence: slot, negative for an inactive row; first, last: window keys that it sees; decoder_first: first for
    decoder layers and drafter stages.
    """

    table: int

    @property
    def token(self) -> int:
        return self._field(0)

    @property
    def sequence(self) -> int:
        return self._field(1)

    @property
    def position(self) -> int:
        return self._field(2)

    @property
    def first(self) -> int:
        return self._field(5)

    @property
    def decoder_first(self) -> int:
        return self._field(6)

    @property
    def last(self) -> int:
        return self._field(7)

    @property
    def image(self) -> int:
        return self._field(8)

    def _field(self, number: int) -> int:
        return self.table + 4 * MOST_ROWS * number


def prompt_rows(slot: int, start: int, ids: np.ndarray, decoder_start: int, window: int) -> np.ndarray:
    """Row table int32 [FIELDS, MOST_ROWS] of one sequence's tokens at positions start, start + 1, ..."""
    table = np.zeros((FIELDS, MOST_ROWS), np.int32)
    table[1] = -1
    position = np.arange(start, start + len(ids))
    first = np.maximum(position - window + 1, 0)
    own = table[:, : len(ids)]
    own[0], own[1], own[2], own[3] = ids, slot, position, np.arange(len(ids))
    own[5], own[6], own[7] = first, np.maximum(first, np.minimum(decoder_start, position)), position
    return table


@dataclass(frozen=True)
class Workspace:
    """Addresses of the intermediates, R rows; the comment gives shape and format."""

    streams: tuple[int, int]  # bf16 [R, 4, D], written by turns
    sums: tuple[int, int]  # float32 [R, 26], written by turns
    x: int  # bf16 [R, D], and as codes
    x_codes: int
    x_scales: int
    folded: int  # bf16 [R, D]
    latent: int  # bf16 [R, Q + d]
    q: int  # bf16 [R, H, d]
    o: int  # f16 [R, H, d]
    y_codes: int  # output of wo_a [R, G r]
    y_scales: int
    last: int  # bf16 [R, D]: output of attention or of the shared expert
    compressed: int  # float32 [R, 2 d]
    index_y: int  # bf16 [R, heads, di]
    index_q: int
    index_weights: int  # float32 [R, heads]
    scores: int  # float32 [R, capacity]
    best: int  # float32 [R, capacity / candidate block]
    best32: int  # float32 [R, capacity / 32]
    candidates: int  # int32 [R, kept]
    kept_of: int  # int32 [R]
    selected: int  # int32 [R, topk]
    chosen: int  # int32 [R]
    gate: int  # float32 [parts, R, E]
    experts: int  # int32 [R, k]
    shares: int  # float32 [R, k]
    plan: int
    x_half: int  # f16 [R, D]
    h: int  # f16 [R (k + 1), I]
    parts: int  # bf16 [R k, D]
    engram_codes: int
    engram_scales: int
    engram_kv: int  # bf16 [R, 5 D]
    taps: tuple[int, ...]  # bf16 [R, D] each
    tap_codes: int  # [R, taps D]
    tap_scales: int
    features: int  # bf16 [R, D], and as codes
    feature_codes: int
    feature_scales: int
    logits: int  # float32 [R, V]
    draft_logits: int  # float32 [R, V]
    records: int  # uint32 [R, 8]
    draft_records: int
    markov_parts: int
    picked: int  # int32 [R]
    drafts: int  # int32 [R], by draft row
    confidence: int  # float32 [R]
    mask: int  # uint32 [6 R, ceil(V / 32)]
    nowhere: int  # history that nobody reads
    capacity: int  # entries that scores have room for

    @classmethod
    def allocate(cls, device: Allocator, spec: Spec, max_context: int, slots: int, history_slots: int) -> Workspace:
        """Room for MOST_ROWS rows and contexts of up to `max_context` tokens; cleared, for rows that nobody uses."""
        held: dict[str, object] = {"capacity": capacity_of(max_context)}
        for name, size in sizes_of(spec, max_context).items():
            held[name] = _cleared(device, size)
        held["nowhere"] = _cleared(device, 4 * history_slots * slots)
        return cls(**held)


def capacity_of(max_context: int) -> int:
    """Entries of a context."""
    return pages_for(max_context) * PAGE_TOKENS


def _cleared(device: Allocator, size: int | tuple[int, ...]) -> int | tuple[int, ...]:
    if isinstance(size, tuple):
        return tuple(_cleared(device, part) for part in size)
    address = device.allocate(size, KIND)
    device.zero(address, size)
    return address


def sizes_of(spec: Spec, max_context: int) -> dict[str, int | tuple[int, ...]]:
    """Bytes of each buffer; the ledger's forecast of the workspace is their sum."""
    d, inner, q = spec.hidden_size, spec.moe_intermediate_size, spec.q_lora_rank
    heads, y = spec.num_attention_heads * spec.head_dim, spec.o_groups * spec.o_lora_rank
    k = max(spec.num_experts_per_tok, spec.dspark_num_experts_per_tok)
    index, taps = spec.index_n_heads * spec.index_head_dim, len(spec.dspark_target_layer_ids)
    gathered, capacity = spec.engram_columns * spec.engram_head_dim, capacity_of(max_context)
    per_row: dict[str, int | tuple[int, ...]] = {
        "streams": (2 * mixes.STREAMS * d,) * 2, "sums": (4 * mixes.SUMS,) * 2, "x": 2 * d, "x_codes": d,
        "x_scales": scale_stride(d), "folded": 2 * d, "latent": 2 * (q + spec.head_dim),
        "q": 2 * heads, "o": 2 * heads, "y_codes": y,
        "y_scales": scale_stride(y), "last": 2 * d, "compressed": 8 * spec.head_dim, "index_y": 2 * index,
        "index_q": 2 * index, "index_weights": 4 * spec.index_n_heads, "scores": 4 * capacity,
        "best": 4 * capacity // spec.candidate_block_size, "best32": 4 * capacity // BEST,
        "candidates": 4 * spec.candidate_topk_blocks, "kept_of": 4, "selected": 4 * spec.index_topk, "chosen": 4,
        "gate": 4 * route.parts_of(d) * max(spec.n_routed_experts, spec.dspark_n_routed_experts),
        "experts": 4 * k, "shares": 4 * k,
        "x_half": 2 * d, "h": 2 * (k + 1) * inner, "parts": 2 * k * d, "engram_codes": gathered,
        "engram_scales": scale_stride(gathered), "engram_kv": 2 * (mixes.STREAMS + 1) * d, "taps": (2 * d,) * taps,
        "tap_codes": taps * d, "tap_scales": scale_stride(taps * d), "features": 2 * d, "feature_codes": d,
        "feature_scales": scale_stride(d), "logits": 4 * spec.vocab_size, "draft_logits": 4 * spec.vocab_size,
        "records": 4 * RECORD, "draft_records": 4 * RECORD, "picked": 4, "drafts": 4, "confidence": 4,
        "mask": 4 * (spec.dspark_block_size + 1) * -(-spec.vocab_size // 32),
    }  # fmt: skip
    sizes: dict[str, int | tuple[int, ...]] = {
        name: tuple(MOST_ROWS * part for part in size) if isinstance(size, tuple) else MOST_ROWS * size
        for name, size in per_row.items()
    }
    return sizes | {"plan": expert_plan.plan_bytes(MOST_ROWS * k), "markov_parts": 4 * MARKOV_PARTS}
