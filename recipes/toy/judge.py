"""What a trained model knows, from one forward pass an example: margins, exact matches, accepted drafts.

An answer is reproduced greedily exactly if every answer token is the argmax after the true tokens before it, so exact
match needs no decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from recipes.toy.attention import Group
from recipes.toy.batches import BLOCK, Sequence
from recipes.toy.drafter import Anchors, Drafter
from recipes.toy.losses import margins
from recipes.toy.model import Backbone, Batch


@dataclass
class Verdict:
    """One example: its smallest margin and how many tokens each step of the drafter emits."""

    sequence: Sequence
    margin: float
    emitted: list[int]


def packs(sequences: list[Sequence], tokens: int) -> Iterator[list[Sequence]]:
    """Examples of like length together, at most `tokens` padded tokens at a time."""
    pack: list[Sequence] = []
    for s in sorted(sequences, key=lambda s: len(s.ids)):
        if pack and (len(pack) + 1) * (len(s.ids) + 32) > tokens:
            yield pack
            pack = []
        pack.append(s)
    if pack:
        yield pack


@torch.no_grad()
def judge(
    backbone: Backbone, drafter: Drafter | None, sequences: list[Sequence], truncated: bool, tokens: int = 32768
) -> list[Verdict]:
    """Teacher-forced verdicts with weights that `prepare` has rounded."""
    verdicts, span = [], backbone.spec.sliding_window
    device = backbone.norm.weight.device
    for pack in packs(sequences, tokens):
        length = -(-max(len(s.ids) for s in pack) // span) * span
        ids = np.full((len(pack), length), backbone.spec.pad_token_id)
        start = np.zeros((len(pack), length), np.int64)
        for i, s in enumerate(pack):
            ids[i, : len(s.ids)] = s.ids
            begin = max(0, s.prompt - span) if truncated else 0
            start[i, begin:] = begin
        position = np.tile(np.arange(length), len(pack))
        batch = Batch(
            (Group(0, len(pack), length),), *(torch.as_tensor(a.reshape(-1)).to(device) for a in (ids, position, start))
        )
        x, taps, _ = backbone(batch)
        for i, s in enumerate(pack):
            first = i * length
            rows = slice(first + s.prompt - 1, first + len(s.ids) - 1)
            margin = margins(backbone.logits(x[rows]), batch.ids[first + s.prompt : first + len(s.ids)]).min().item()
            emitted = _steps(backbone, drafter, taps[first : first + length], s, int(start[i, -1])) if drafter else []
            verdicts.append(Verdict(s, margin, emitted))
    return verdicts


def _steps(backbone: Backbone, drafter: Drafter, taps: torch.Tensor, s: Sequence, start: int) -> list[int]:
    """Tokens per draft-and-verify step of a greedy run over the example (five drafts verified); its taps [T, 3 D]."""
    places = np.arange(s.prompt - 1, len(s.ids) - 2)
    if not len(places):
        return []
    device = taps.device
    row, position = torch.as_tensor(places, device=device), torch.arange(len(taps), device=device)
    tokens = torch.as_tensor(s.ids[places + 1], device=device).unsqueeze(1).expand(-1, BLOCK + 1)
    anchors = Anchors(row, torch.zeros_like(row), torch.full_like(row, start), tokens)
    drafts = drafter.draft(backbone, taps, position, anchors)[0].cpu().numpy()
    emitted, place = [], 0
    while place < len(places):
        true = s.ids[places[place] + 2 : places[place] + 2 + BLOCK]
        same = drafts[place, : len(true)] == true
        accepted = int(same.cumprod().sum())
        step = min(accepted + 1, len(s.ids) - (places[place] + 2))
        emitted.append(step)
        place += step
    return emitted


def table(verdicts: list[Verdict]) -> str:
    """Per group: examples, exact matches, smallest margin and where, tokens per step."""
    by_group: dict[str, list[Verdict]] = defaultdict(list)
    for v in verdicts:
        size = len(v.sequence.ids)
        label = f" drawn, {'to 160' if size <= 160 else 'to 576' if size <= 576 else 'longer'}"
        by_group[v.sequence.kind + ("" if v.sequence.fixed else label)].append(v)
    lines = []
    for name, part in by_group.items():
        worst = min(part, key=lambda v: v.margin)
        exact = sum(v.margin > 0 for v in part)
        steps = [n for v in part for n in v.emitted]
        pace = f"{np.mean(steps):.2f}" if steps else "-"
        known = f"{exact:4d}/{len(part):4d} exact, margin {worst.margin:6.2f} ({worst.sequence.name})"
        lines.append(f"{name:24s} {known}, {pace} tokens a step")
    return "\n".join(lines)
