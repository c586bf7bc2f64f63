"""Attention over the own window and the selected compressed entries, in whole-sequence form.

Tokens stand in `Group`s of B sequences of equal length T inside the one token axis. Windows are computed block by block
(each block of `sliding_window` queries sees its own and the previous block), compressed entries densely under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dsuf.spec import LayerRole, Spec
from recipes.toy import quantise
from recipes.toy.layers import Linear, Mode, Norm, rope
from recipes.toy.quantise import straight_through

SCORED_ROWS = 2048  # at a time, by all index heads: long sequences would take tens of gigabytes
SINK_COLUMNS = 4  # one real; with four, rows of probabilities stay aligned for the matrix units


@dataclass(frozen=True)
class Group:
    """B sequences of T tokens at `offset` of the token axis; T is a multiple of the window."""

    offset: int
    count: int
    length: int

    def take(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]."""
        return x[self.offset : self.offset + self.count * self.length].unflatten(0, (self.count, self.length))


def divide(x: Tensor, groups: tuple[Group, ...]) -> list[Tensor]:
    """[N, ...] -> [B, T, ...] for every group; one concatenation in the backward pass."""
    parts = x.split([group.count * group.length for group in groups])
    return [part.unflatten(0, (group.count, group.length)) for part, group in zip(parts, groups, strict=True)]


@dataclass
class Pass:
    """What the layers of one forward pass share."""

    groups: tuple[Group, ...]
    position: Tensor  # int64 [N]
    start: Tensor  # int64 [N]: first position whose decoder window row is real for this query (0: all)
    rotary: dict[int, tuple[Tensor, Tensor]]  # by ratio > 0: cos, sin [N, rope / 2]
    sparse: bool  # False: attend to every visible entry (dense warm-up of the indexer)
    probes: tuple[Tensor, ...] = ()  # per group int64 [B, R]: rows at which index scores learn from attention
    entries: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # per group: C, index latent, K
    selection: list[Tensor] = field(default_factory=list)  # per group bool [B, T, n]
    candidates: list[Tensor] = field(default_factory=list)
    probe_scores: list[Tensor] = field(default_factory=list)  # per group [B, R, n]
    probe_mass: list[Tensor] = field(default_factory=list)  # per group [B, R, n]: summed attention of the served layers
    index_reports: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def close_index(self, topk: int) -> None:
        """Turn the scores and attention gathered since the last index source into its loss and recall."""
        for scores, mass in zip(self.probe_scores, self.probe_mass, strict=True):
            self.index_reports.append(index_report(scores, mass, topk))
        self.probe_scores, self.probe_mass = [], []


def index_report(scores: Tensor, mass: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """scores [B, R, n] (-inf where invisible), mass [B, R, n] -> KL, recall of the true top 8, share of mass selected.

    Rows count by the attention that they give to compressed entries at all.
    """
    total = mass.sum(-1, keepdim=True)
    target = mass / (total + 1e-9)
    log_p = torch.log_softmax(scores, -1).masked_fill(scores == -torch.inf, 0.0)
    row = total.squeeze(-1).clamp(0.02, 1.0) * (total.squeeze(-1) > 0)
    kl = (target * (torch.log(target + 1e-9) - log_p)).sum(-1)
    with torch.no_grad():
        chosen = torch.zeros_like(mass).scatter_(-1, scores.topk(min(topk, scores.shape[-1]), -1).indices, 1.0)
        best = mass.topk(min(8, mass.shape[-1]), -1)
        recall = chosen.gather(-1, best.indices).mean(-1)
        share = (chosen * target).sum(-1)
    weight = row / (row.sum() + 1e-9)
    return (kl * weight).sum(), (recall * weight).sum(), (share * weight).sum()


def visible_entries(length: int, ratio: int, device: torch.device) -> Tensor:
    """bool [T, T / ratio]: entry j is complete once token (j + 1) * ratio - 1 is there."""
    rows = torch.arange(length, device=device).unsqueeze(1)
    return torch.arange(length // ratio, device=device) < (rows + 1) // ratio


class Compressor(nn.Module):
    """Entries and index keys of a kv source."""

    def __init__(self, spec: Spec, mode: Mode, ratio: int) -> None:
        super().__init__()
        self.mode, self.ratio = mode, ratio
        self.wkv = Linear(mode, quantise.bf16, spec.head_dim, spec.hidden_size)
        if ratio > 1:
            self.wgate = Linear(mode, quantise.bf16, spec.head_dim, spec.hidden_size)
        self.norm = Norm(mode, spec.head_dim)

    def latent(self, x: Tensor) -> Tensor:
        """Attention input [B, T, D] -> [B, T / ratio, head_dim] before rope."""
        kv = self.wkv(x)
        if self.ratio > 1:
            gate = torch.softmax(self.wgate(x).unflatten(1, (-1, self.ratio)), 2)
            kv = (gate * kv.unflatten(1, (-1, self.ratio))).sum(2)
        return self.norm(kv)


class Indexer(nn.Module):
    """Scores of an index source; it learns from detached inputs only, so that matching attention moves nothing else."""

    def __init__(self, spec: Spec, mode: Mode, own_keys: bool) -> None:
        super().__init__()
        self.mode, self.heads, self.width = mode, spec.index_n_heads, spec.index_head_dim
        self.wq_b = Linear(mode, quantise.fp8_blocks, self.heads * self.width, spec.q_lora_rank)
        self.weights_proj = Linear(mode, quantise.bf16, self.heads, spec.hidden_size)
        if own_keys:
            self.wk = Linear(mode, quantise.bf16, self.width, spec.head_dim)
            self.k_norm = Norm(mode, self.width)

    def keys(self, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._grid(rope(self.k_norm(self.wk(latent.detach())), cos, sin))

    def queries(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D], c [B, T, Q] -> index queries [B, T, heads, width] and head weights [B, T, heads]."""
        q = self.wq_b(c.detach()).unflatten(-1, (self.heads, self.width))
        w = self.weights_proj(x.detach()) * (self.width * self.heads) ** -0.5
        return self._grid(rope(q, cos, sin)), w

    def _grid(self, x: Tensor) -> Tensor:
        return straight_through(x, quantise.q4p) if self.mode.activations else x

    @staticmethod
    def scores(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
        """[B, T, n]."""
        parts = torch.relu(torch.einsum("bthd,bnd->bthn", q, keys))
        return torch.einsum("bthn,bth->btn", parts, w)


class Attention(nn.Module):
    """Attention of one backbone layer or drafter stage (role None)."""

    def __init__(self, spec: Spec, mode: Mode, role: LayerRole | None) -> None:
        super().__init__()
        self.spec, self.mode, self.role = spec, mode, role
        self.heads, self.width, self.scale = spec.num_attention_heads, spec.head_dim, spec.head_dim**-0.5
        fp8, rank = quantise.fp8_blocks, spec.q_lora_rank
        self.wq_a = Linear(mode, fp8, rank, spec.hidden_size)
        self.q_norm = Norm(mode, rank)
        self.wq_b = Linear(mode, fp8, self.heads * self.width, rank)
        self.wkv = Linear(mode, fp8, self.width, spec.hidden_size)
        self.kv_norm = Norm(mode, self.width)
        self.wo_a = Linear(
            mode, fp8, spec.o_groups * spec.o_lora_rank, self.heads * self.width // spec.o_groups, plain=True
        )
        self.wo_b = Linear(mode, fp8, spec.hidden_size, spec.o_groups * spec.o_lora_rank)
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        if role and role.is_kv_source:
            self.compressor = Compressor(spec, mode, role.ratio)
        if role and role.is_index_source:
            self.indexer = Indexer(spec, mode, role.is_kv_source)

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """Attention input [N, D] -> [N, D]."""
        cos, sin = shared.rotary[self.role.ratio]
        c, q = self.project_queries(x, cos, sin)
        k = self.window_keys(x, cos, sin)
        parts = zip(*(divide(t, shared.groups) for t in (x, c, q, k, cos, sin)), strict=True)
        outputs = []
        for number, (gx, gc, gq, gk, gcos, gsin) in enumerate(parts):
            if self.role.ratio:
                self._prepare(shared, number, gx, gc, gcos, gsin)
            outputs.append(self._attend(shared, number, gq, gk).flatten(0, 1))
        return self.project_output(torch.cat(outputs), cos, sin)

    def project_queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c = self.q_norm(self.wq_a(x))
        q = self.wq_b(c).unflatten(-1, (self.heads, self.width))
        return c, rope(q, cos, sin)

    def window_keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        k = rope(self.kv_norm(self.wkv(x)), cos, sin)
        return straight_through(k, quantise.q8) if self.mode.activations else k

    def project_output(self, o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        o = rope(o, cos, sin, inverse=True)
        o = o.flatten(-2).unflatten(-1, (self.spec.o_groups, -1))
        a = self.wo_a.value().unflatten(0, (self.spec.o_groups, -1))
        return self.wo_b(torch.einsum("zgi,gri->zgr", o, a).flatten(-2))

    def _prepare(self, shared: Pass, number: int, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Entries, keys and selection of one group where this layer makes them."""
        role, topk = self.role, self.spec.index_topk
        if role.is_kv_source:
            latent = self.compressor.latent(x)
            at = (cos[:, :: role.ratio], sin[:, :: role.ratio])
            entry = rope(latent, *at)
            entry = straight_through(entry, quantise.q4e) if self.mode.activations else entry
            _put(shared.entries, number, (entry, latent, self.indexer.keys(latent, *at)))
        if not role.is_index_source:
            return
        if number == 0 and shared.probes:
            shared.close_index(topk)
        keys = shared.entries[number][2]
        q, w = self.indexer.queries(x, c, cos, sin)
        visible = visible_entries(x.shape[1], role.ratio, x.device)
        if shared.sparse:
            with torch.no_grad():
                parts = zip(q.split(SCORED_ROWS, 1), w.split(SCORED_ROWS, 1), strict=True)
                scores = torch.cat([self.indexer.scores(*part, keys) for part in parts], 1)
                scores = scores.masked_fill(~visible, -torch.inf)
                if role.uses_candidates:
                    scores = scores.masked_fill(~shared.candidates[number], -torch.inf)
                if role.is_candidate_source:
                    _put(shared.candidates, number, self._candidate_mask(scores, visible))
                _put(shared.selection, number, _largest(scores, topk))
        else:
            _put(shared.selection, number, visible.expand(x.shape[0], -1, -1))
        if shared.probes:
            rows = shared.probes[number]
            scores = self.indexer.scores(_rows(q, rows), _rows(w, rows), keys)
            shared.probe_scores.append(scores.masked_fill(~visible[rows], -torch.inf))
            shared.probe_mass.append(torch.zeros_like(scores))

    def _candidate_mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Entries [B, T, n] of the best blocks; the block of the newest visible entry is always among them."""
        size, keep = self.spec.candidate_block_size, self.spec.candidate_topk_blocks
        n = scores.shape[-1]
        blocks = nn.functional.pad(scores, (0, -n % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        newest = (visible.sum(-1).clamp(min=1) - 1) // size
        here = torch.arange(blocks.shape[-1], device=scores.device) == newest.unsqueeze(-1)
        best = _largest(blocks.masked_fill(here, torch.inf), keep)
        return best.unsqueeze(-1).expand(*best.shape, size).flatten(-2)[..., :n]

    def _attend(self, shared: Pass, number: int, q: Tensor, k: Tensor) -> Tensor:
        """q [B, T, H, d], window keys [B, T, d] -> [B, T, H, d]."""
        group = shared.groups[number]
        q = q * self.scale
        keys, window = self._window_scores(shared, group, q, k)
        sink = _sink_columns(self.attn_sink).expand(*q.shape[:3], -1)
        span = window.shape[-1]
        if not self.role.ratio:
            return self._window_values(torch.softmax(torch.cat((window, sink), -1), -1)[..., :span], keys)
        entries = shared.entries[number][0]
        far = torch.einsum("bthd,bnd->bthn", q, entries)
        if shared.probes:
            self._observe(shared, number, window, far, sink)
        far = far.masked_fill(~shared.selection[number].unsqueeze(2), -torch.inf)
        p = torch.softmax(torch.cat((window, sink, far), -1), -1)
        values = torch.einsum("bthn,bnd->bthd", p[..., span + SINK_COLUMNS :], entries)
        return self._window_values(p[..., :span], keys) + values

    def _window_scores(self, shared: Pass, group: Group, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """-> keys [B, blocks, 2W, d] and masked scores [B, T, H, 2W]."""
        span = self.spec.sliding_window
        keys = _with_previous(k.unflatten(1, (-1, span)))
        scores = torch.einsum("bcqhd,bckd->bcqhk", q.unflatten(1, (-1, span)), keys)
        at = group.take(shared.position).unflatten(1, (-1, span))
        key_at = _with_previous(at.unsqueeze(-1), missing=-(1 << 40)).squeeze(-1)
        distance = at.unsqueeze(-1) - key_at.unsqueeze(-2)
        seen = (distance >= 0) & (distance < span)
        if self.role.index >= self.spec.decoder_start_layer:
            seen = seen & (key_at.unsqueeze(-2) >= group.take(shared.start).unflatten(1, (-1, span)).unsqueeze(-1))
        scores = scores.masked_fill(~seen.unsqueeze(-2), -torch.inf)
        return keys, scores.flatten(1, 2)

    def _window_values(self, p: Tensor, keys: Tensor) -> Tensor:
        p = p.unflatten(1, (-1, self.spec.sliding_window))
        return torch.einsum("bcqhk,bckd->bcqhd", p, keys).flatten(1, 2)

    @torch.no_grad()
    def _observe(self, shared: Pass, number: int, window: Tensor, far: Tensor, sink: Tensor) -> None:
        """Add this layer's attention over all visible entries at the probe rows, summed over heads."""
        rows = shared.probes[number]
        visible = visible_entries(window.shape[1], self.role.ratio, far.device)[rows].unsqueeze(2)
        there = _rows(far, rows).masked_fill(~visible, -torch.inf)
        p = torch.softmax(torch.cat((_rows(window, rows), _rows(sink, rows), there), -1), -1)
        shared.probe_mass[number] += p[..., window.shape[-1] + SINK_COLUMNS :].sum(2)


def _sink_columns(sink: Tensor) -> Tensor:
    """[H] -> [1, 1, H, SINK_COLUMNS]: the sink and columns without weight."""
    return nn.functional.pad(sink.view(1, 1, -1, 1), (0, SINK_COLUMNS - 1), value=-torch.inf)


def _put(items: list, number: int, item: object) -> None:
    if number < len(items):
        items[number] = item
    else:
        items.append(item)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, ...], rows [B, R] -> [B, R, ...]."""
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), rows]


def _largest(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest finite scores of the last axis."""
    if scores.shape[-1] <= count:
        return scores > -torch.inf
    picked = scores.topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, picked, True) & (scores > -torch.inf)


def _with_previous(blocks: Tensor, missing: float = 0) -> Tensor:
    """[B, blocks, W, d] -> [B, blocks, 2W, d]: the block before, then the block itself."""
    before = torch.full_like(blocks[:, :1], missing)
    return torch.cat((torch.cat((before, blocks[:, :-1]), 1), blocks), 2)
