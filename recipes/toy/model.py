"""The backbone of the architecture in PyTorch, whole sequences at once, differentiable, on the checkpoint's grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsuf.spec import LayerRole, Spec
from recipes.toy import quantise
from recipes.toy.attention import Attention, Group, Pass
from recipes.toy.layers import Engram, Experts, Linear, Mixes, Mode, Norm, Weight, fold, frequencies, unfold


@dataclass
class Batch:
    """Sequences of one step on the device."""

    groups: tuple[Group, ...]
    ids: Tensor  # int64 [N]
    position: Tensor  # int64 [N]
    start: Tensor  # int64 [N]
    probes: tuple[Tensor, ...] = ()


class Block(nn.Module):
    """Attention and experts between hyper-connections; one backbone layer or drafter stage."""

    def __init__(self, spec: Spec, mode: Mode, role: LayerRole | None, experts: int, chosen: int) -> None:
        super().__init__()
        self.attn = Attention(spec, mode, role)
        self.attn_norm = Norm(mode, spec.hidden_size)
        self.ffn_norm = Norm(mode, spec.hidden_size)
        self.hc_attn = Mixes(spec, "attn")
        self.hc_ffn = Mixes(spec, "ffn")
        self.ffn = Experts(spec, mode, experts, chosen)
        if role and role.engram is not None:
            self.engram = Engram(spec, mode, spec.engram_num_embeddings[role.engram])

    def forward(self, streams: Tensor, pre: Tensor, *attention: object) -> tuple[Tensor, Tensor]:
        """streams [N, n, D], pre [N, n] of the sublayer before; `attention` is handed on to the attention."""
        a_pre, a_post, a_comb = self.hc_attn(streams)
        out = self.attn(self.attn_norm(fold(streams, pre)), *attention)
        streams = unfold(out, streams, a_post, a_comb)
        f_pre, f_post, f_comb = self.hc_ffn(streams)
        out = self.ffn(self.ffn_norm(fold(streams, a_pre)))
        return unfold(out, streams, f_post, f_comb), f_pre


class EngramHash:
    """Table rows of every token for every Engram layer."""

    def __init__(self, spec: Spec, class_map: np.ndarray, device: torch.device | str) -> None:
        self.spec = spec
        self.classes = torch.as_tensor(np.asarray(class_map, np.int64), device=device)
        bound = ((1 << 63) - 1) // spec.engram_compressed_vocab_size // 2
        sizes = spec.engram_max_ngram_size
        draws = [
            np.random.default_rng(10007 * layer).integers(0, bound, sizes, np.int64) for layer in spec.engram_layer_ids
        ]
        self.multipliers = torch.as_tensor(np.array([2 * d + 1 for d in draws]), device=device)
        primes = np.array(engram_primes(spec))
        self.primes = torch.as_tensor(primes, device=device)
        self.offsets = torch.as_tensor(np.cumsum(primes, 1) - primes, device=device)

    def rows(self, ids: Tensor, groups: Sequence[Group]) -> Tensor:
        """ids [N] -> int64 [Engram layers, N, columns]."""
        return torch.cat([self._group(group.take(ids)).flatten(1, 2) for group in groups], 1)

    def _group(self, ids: Tensor) -> Tensor:
        sizes, heads = self.spec.engram_max_ngram_size, self.spec.engram_n_heads
        classes = self.classes[ids]
        pad = self.classes[self.spec.engram_pad_token_id]
        back = [classes]
        for shift in range(1, sizes):
            back.append(torch.cat((pad.expand(ids.shape[0], shift), classes[:, :-shift]), 1))
        h = back[0] * self.multipliers[:, 0, None, None]
        columns = []
        for i in range(1, sizes):
            h = h ^ (back[i] * self.multipliers[:, i, None, None])
            span = slice((i - 1) * heads, i * heads)
            columns.append(h.unsqueeze(-1) % self.primes[:, None, None, span] + self.offsets[:, None, None, span])
        return torch.cat(columns, -1)


def engram_primes(spec: Spec) -> list[list[int]]:
    """Bucket counts per Engram layer, n-gram size major, then head: primes not used before."""
    used: set[int] = set()
    layers = []
    for _ in spec.engram_layer_ids:
        row = []
        for _ in range(spec.engram_max_ngram_size - 1):
            number = spec.engram_vocab_size - 1
            for _ in range(spec.engram_n_heads):
                number += 1
                while number in used or any(number % d == 0 for d in range(2, int(number**0.5) + 1)):
                    number += 1
                used.add(number)
                row.append(number)
        layers.append(row)
    return layers


class Backbone(nn.Module):
    """Everything but the drafter."""

    def __init__(self, spec: Spec, class_map: np.ndarray, mode: Mode | None = None) -> None:
        super().__init__()
        self.spec, self.mode = spec, mode or Mode()
        self.class_map = np.asarray(class_map)
        width = spec.hidden_size
        self.embed = Weight(self.mode, quantise.bf16, (spec.vocab_size, width), 0.5)
        self.head = Linear(self.mode, quantise.bf16, spec.vocab_size, width)
        self.norm = Norm(self.mode, width)
        counts = (spec.n_routed_experts, spec.num_experts_per_tok)
        self.layers = nn.ModuleList(Block(spec, self.mode, role, *counts) for role in spec.layers)
        self.hash: EngramHash | None = None

    def prepare(self) -> None:
        """Round every weight once; the values serve until `release`."""
        prepare(self)

    def logits(self, x: Tensor) -> Tensor:
        """Folded streams [M, D] -> [M, V]."""
        return self.head(self.norm(x))

    def forward(
        self, batch: Batch, sparse: bool = True, layer_rms: list[float] | None = None
    ) -> tuple[Tensor, Tensor, Pass]:
        """-> folded streams [N, D], taps [N, 3 D], and the pass with its index reports."""
        spec, device = self.spec, batch.ids.device
        if self.hash is None or self.hash.classes.device != device:
            self.hash = EngramHash(spec, self.class_map, device)
        rows = self.hash.rows(batch.ids, batch.groups)
        shared = Pass(
            batch.groups,
            batch.position,
            batch.start,
            rotary_tables(spec, batch.position, self.norm.weight.dtype),
            sparse,
            batch.probes,
        )
        x = F.embedding(batch.ids, self.embed.value())
        streams, pre = initial_streams(x, spec.hc_mult)
        taps = []
        for role, block in zip(spec.layers, self.layers, strict=True):
            if role.engram is not None:
                streams = block.engram(streams, rows[role.engram])
            if role.is_tap:
                taps.append(streams.mean(1))
            streams, pre = block(streams, pre, shared)
            if layer_rms is not None:
                layer_rms.append(streams.square().mean().sqrt().item())
        if batch.probes:
            shared.close_index(spec.index_topk)
        return fold(streams, pre), torch.cat(taps, -1), shared


def initial_streams(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Embedded rows [N, D] -> equal streams [N, n, D] and pre = (1, 0, 0, ...)."""
    pre = torch.zeros(x.shape[0], n, dtype=x.dtype, device=x.device)
    pre[:, 0] = 1
    return x.unsqueeze(1).expand(-1, n, -1).contiguous(), pre


@cache
def _turns(spec: Spec, ratio: int, device: torch.device) -> Tensor:
    return torch.as_tensor(frequencies(spec, ratio), device=device)


def rotary_tables(spec: Spec, position: Tensor, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor]]:
    """cos and sin [..., rope / 2] for each ratio of the backbone."""
    tables = {}
    for ratio in sorted(set(spec.compress_ratios)):
        angle = position.to(torch.float64).unsqueeze(-1) * _turns(spec, ratio, position.device)
        tables[ratio] = (angle.cos().to(dtype), angle.sin().to(dtype))
    return tables


def prepare(module: nn.Module) -> None:
    """Round every weight of the module once for the passes of a step."""
    for part in module.modules():
        if isinstance(part, Weight):
            part.live = None
            part.live = part.value()


def release(module: nn.Module) -> None:
    """Forget the rounded weights, as after an optimiser step."""
    for part in module.modules():
        if isinstance(part, Weight):
            part.live = None
