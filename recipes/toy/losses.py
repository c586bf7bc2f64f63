"""What is minimised: next tokens with a margin, index scores against attention, drafts and their confidence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.toy.attention import Pass
from recipes.toy.drafter import Anchors, Drafter
from recipes.toy.model import Backbone

MARGIN = 6.0  # logits between the right token and the best other one, below which a row is pushed


def margins(logits: Tensor, targets: Tensor) -> Tensor:
    """Logit of the target minus the largest other one: positive where greedy decoding is right."""
    own = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return own - logits.scatter(-1, targets.unsqueeze(-1), -torch.inf).amax(-1)


def token_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy plus hinge on the margin; also the margins."""
    margin = margins(logits, targets)
    entropy = F.cross_entropy(logits, targets, reduction="none")
    loss = ((entropy + 0.1 * torch.relu(MARGIN - margin)) * weights).sum()
    return loss, margin.detach()


def index_loss(shared: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over groups and index sources: KL, recall of the true top 8, share of attention selected."""
    parts = [torch.stack(column) for column in zip(*shared.index_reports, strict=True)]
    return parts[0].mean(), parts[1].mean(), parts[2].mean()


def draft_loss(
    drafter: Drafter, backbone: Backbone, taps: Tensor, position: Tensor, anchors: Anchors
) -> tuple[Tensor, Tensor, Tensor]:
    """-> loss, conditional acceptance per slot [5], mean accepted drafts."""
    x = drafter(backbone, taps, position, anchors)
    before, after = anchors.tokens[:, :-1].clamp(min=0), anchors.tokens[:, 1:]
    there = (after >= 0).to(x.dtype)
    e, bias = drafter.markov(before)
    logits = drafter.logits(backbone, x) + bias
    entropy = F.cross_entropy(logits.flatten(0, 1), after.clamp(min=0).flatten(), reduction="none").view(there.shape)
    with torch.no_grad():
        right = (logits.argmax(-1) == after).to(x.dtype) * there
        kept = right.cumprod(-1)
        reached = torch.cat((there[:, :1], kept[:, :-1] * there[:, 1:]), 1)
    confidence = drafter.confidence(x, e)
    bce = F.binary_cross_entropy_with_logits(confidence, right, reduction="none")
    loss = (entropy * there).sum() / there.sum() + (bce * reached).sum() / reached.sum()
    return loss, (right * reached).sum(0) / reached.sum(0).clamp(min=1), kept.sum(-1).mean()
