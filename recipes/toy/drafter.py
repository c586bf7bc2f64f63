"""The DSpark drafter: three stages over the target's taps, Markov head and confidence head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsuf.spec import Spec
from recipes.toy import quantise
from recipes.toy.attention import Attention
from recipes.toy.layers import Linear, Mode, Norm, Weight, fold
from recipes.toy.model import Backbone, Block, initial_streams, rotary_tables


@dataclass
class Anchors:
    """Places to draft from. Row = index in the flat token axis of the last verified position p."""

    row: Tensor  # int64 [A]
    first: Tensor  # int64 [A]: row of the sequence's first token
    start: Tensor  # int64 [A]: first position whose drafter row is real
    tokens: Tensor  # int64 [A, 6]: tokens at p + 1 .. p + 6


@dataclass
class BlockContext:
    """What the attention of one stage needs besides its input."""

    rows: Tensor  # int64 [A, W]: flat rows of the window
    seen: Tensor  # bool [A, W]
    features: Tensor  # [N, D]: main features of every row
    row_rotary: tuple[Tensor, Tensor]  # [N, rope / 2]
    block_rotary: tuple[Tensor, Tensor]  # [A * 5, rope / 2]
    size: int


class DraftAttention(Attention):
    """Every slot of a block sees the window rows and all slots of its block."""

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Attention input of the block rows [A * 5, D] -> [A * 5, D]."""
        cos, sin = context.block_rotary
        _, q = self.project_queries(x, cos, sin)
        own = self.window_keys(x, cos, sin).unflatten(0, (-1, context.size))
        past = self.window_keys(context.features, *context.row_rotary)[context.rows]
        keys = torch.cat((past, own), 1)
        q = q.unflatten(0, (-1, context.size))
        scores = torch.einsum("aqhd,akd->aqhk", q, keys) * self.scale
        seen = torch.cat((context.seen, context.seen.new_ones(own.shape[:2])), 1)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        sink = self.attn_sink.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
        out = torch.einsum("aqhk,akd->aqhd", p, keys).flatten(0, 1)
        return self.project_output(out, cos, sin)


class Drafter(nn.Module):
    """Trained with the backbone frozen; shares its embedding and head."""

    def __init__(self, spec: Spec, mode: Mode | None = None) -> None:
        super().__init__()
        self.spec, self.mode = spec, mode or Mode()
        width, rank = spec.hidden_size, spec.dspark_markov_rank
        counts = (spec.dspark_n_routed_experts, spec.dspark_num_experts_per_tok)
        self.mtp = nn.ModuleList(Block(spec, self.mode, None, *counts) for _ in range(spec.num_nextn_predict_layers))
        for stage in self.mtp:
            stage.attn = DraftAttention(spec, self.mode, None)
        first, last = self.mtp[0], self.mtp[-1]
        first.main_proj = Linear(self.mode, quantise.fp8_blocks, width, width * len(spec.dspark_target_layer_ids))
        first.main_norm = Norm(self.mode, width)
        last.norm = Norm(self.mode, width)
        last.markov_embed = Weight(self.mode, quantise.bf16, (spec.vocab_size, rank), 0.5)
        last.markov_head = Linear(self.mode, quantise.bf16, spec.vocab_size, rank, gain=0.1)
        last.confidence_head = Linear(self.mode, quantise.bf16, 1, width + rank, gain=0.1)

    def forward(self, backbone: Backbone, taps: Tensor, position: Tensor, anchors: Anchors) -> Tensor:
        """taps [N, 3 D] -> folded streams of the block rows [A, 5, D]."""
        spec, size = self.spec, self.spec.dspark_block_size
        first = self.mtp[0]
        features = first.main_norm(first.main_proj(taps))
        context = self._context(features, position, anchors)
        noise = torch.full_like(anchors.tokens[:, : size - 1], spec.dspark_noise_token_id)
        ids = torch.cat((anchors.tokens[:, :1], noise), 1).flatten()
        streams, pre = initial_streams(F.embedding(ids, backbone.embed.value()), spec.hc_mult)
        for stage in self.mtp:
            streams, pre = stage(streams, pre, context)
        return fold(streams, pre).unflatten(0, (-1, size))

    def _context(self, features: Tensor, position: Tensor, anchors: Anchors) -> BlockContext:
        span, size = self.spec.sliding_window, self.spec.dspark_block_size
        back = torch.arange(span - 1, -1, -1, device=position.device)
        rows = anchors.row.unsqueeze(1) - back
        inside = rows >= anchors.first.unsqueeze(1)
        rows = rows.clamp(min=0)
        at = position[anchors.row].unsqueeze(1)
        seen = inside & (position[rows] >= anchors.start.unsqueeze(1)) & (at - position[rows] < span)
        block = (at + 1 + torch.arange(size, device=at.device)).flatten()
        tables = [rotary_tables(self.spec, p, features.dtype)[0] for p in (position, block)]
        return BlockContext(rows, seen, features, tables[0], tables[1], size)

    def logits(self, backbone: Backbone, x: Tensor) -> Tensor:
        """Folded rows [..., D] -> base logits [..., V]."""
        return backbone.head(self.mtp[-1].norm(x))

    def markov(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens before each slot -> their Markov vectors [..., rank] and logit bias [..., V]."""
        e = F.embedding(tokens, self.mtp[-1].markov_embed.value())
        return e, self.mtp[-1].markov_head(e)

    def confidence(self, x: Tensor, e: Tensor) -> Tensor:
        """Logit that a slot is accepted given that all before it are; x [..., D] folded, e [..., rank]."""
        return self.mtp[-1].confidence_head(torch.cat((x, e), -1)).squeeze(-1)

    @torch.no_grad()
    def draft(self, backbone: Backbone, taps: Tensor, position: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Greedy drafts [A, 5] and their confidence logits [A, 5]."""
        x = self(backbone, taps, position, anchors)
        base, token = self.logits(backbone, x), anchors.tokens[:, 0]
        drafts, confidences = [], []
        for slot in range(self.spec.dspark_block_size):
            e, bias = self.markov(token)
            token = (base[:, slot] + bias).argmax(-1)
            drafts.append(token)
            confidences.append(self.confidence(x[:, slot], e))
        return torch.stack(drafts, 1), torch.stack(confidences, 1)
