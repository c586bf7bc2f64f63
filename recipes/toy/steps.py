"""One training step of the target and one of the drafter, captured as a CUDA graph where there is a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.toy.attention import Group
from recipes.toy.batches import Arrays, Sampler
from recipes.toy.drafter import Anchors, Drafter
from recipes.toy.layers import Experts
from recipes.toy.losses import draft_loss, index_loss, token_loss
from recipes.toy.model import Backbone, Batch, prepare, release

INDEX_WEIGHT = 0.3
CLIP = 1.0


@dataclass
class Inputs:
    """Device tensors of fixed shape that each step's batch is copied into."""

    batch: Batch
    rows: Tensor
    targets: Tensor
    weights: Tensor
    kinds: Tensor
    anchors: Tensor

    @classmethod
    def like(cls, groups: tuple[Group, ...], arrays: Arrays, device: torch.device) -> Inputs:
        def put(x: object) -> Tensor:
            return torch.as_tensor(x).to(device)

        probes = tuple(put(p) for p in arrays.probes)
        batch = Batch(groups, put(arrays.ids), put(arrays.position), put(arrays.start), probes)
        names = ("rows", "targets", "weights", "kinds", "anchors")
        return cls(batch, *(put(getattr(arrays, name)) for name in names))

    def fill(self, arrays: Arrays) -> None:
        for name in ("ids", "position", "start"):
            getattr(self.batch, name).copy_(torch.from_numpy(getattr(arrays, name)))
        for name in ("rows", "targets", "weights", "kinds", "anchors"):
            getattr(self, name).copy_(torch.from_numpy(getattr(arrays, name)))
        for held, new in zip(self.batch.probes, arrays.probes, strict=True):
            held.copy_(torch.from_numpy(new))

    def drafts(self) -> Anchors:
        return Anchors(self.anchors[:, 0], self.anchors[:, 1], self.anchors[:, 2], self.anchors[:, 3:])


class Optimiser:
    """AdamW with a learning rate that a captured graph reads from memory; matrices decay, vectors do not."""

    def __init__(self, module: nn.Module, rate: float, device: torch.device) -> None:
        self.peak, on_gpu = rate, device.type == "cuda"
        matrices = [p for p in module.parameters() if p.dim() > 1]
        vectors = [p for p in module.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.rate = torch.tensor(rate, device=device)
        self.parameters = matrices + vectors
        options = {"lr": self.rate, "fused": True, "capturable": True} if on_gpu else {"lr": rate}
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-9, **options)

    def schedule(self, done: float) -> None:
        """done in [0, 1]: 2 % warm-up, then a cosine to 0.5 % of the peak."""
        share = min(1.0, done / 0.02) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
        self.rate.fill_(self.peak * max(share, 1e-3))
        for group in self.adam.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = self.peak * max(share, 1e-3)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.adam.step()


class TargetStep:
    """Backbone: next tokens, margins and index scores."""

    def __init__(self, backbone: Backbone, optimiser: Optimiser, inputs: Inputs, groups: int, sparse: bool) -> None:
        self.backbone, self.optimiser, self.inputs, self.sparse = backbone, optimiser, inputs, sparse
        device = inputs.weights.device
        self.by_group = torch.zeros(groups, 3, device=device)  # rows, right, smallest margin
        self.scalars = torch.zeros(4, device=device)  # loss, index KL, recall, share

    def __call__(self) -> None:
        inputs = self.inputs
        self.optimiser.adam.zero_grad(set_to_none=True)
        prepare(self.backbone)
        x, _, shared = self.backbone(inputs.batch, self.sparse)
        loss, margin = token_loss(self.backbone.logits(x.index_select(0, inputs.rows)), inputs.targets, inputs.weights)
        kl, recall, share = index_loss(shared)
        self.optimiser.step(loss + INDEX_WEIGHT * kl)
        release(self.backbone)
        with torch.no_grad():
            for part in self.backbone.modules():
                if isinstance(part, Experts):
                    part.balance(1e-3 * self.optimiser.rate / self.optimiser.peak)
            self._report(margin)
            self.scalars.copy_(torch.stack((loss, kl, recall, share)))

    def _report(self, margin: Tensor) -> None:
        inputs, used = self.inputs, (self.inputs.weights > 0).to(torch.float32)
        self.by_group.zero_()
        self.by_group[:, 0].index_add_(0, inputs.kinds, used)
        self.by_group[:, 1].index_add_(0, inputs.kinds, used * (margin > 0))
        self.by_group[:, 2] = 99.0
        self.by_group[:, 2].scatter_reduce_(0, inputs.kinds, torch.where(used > 0, margin, 99.0), "amin")


class DraftStep:
    """Drafter on the taps of the frozen backbone, whose weights were prepared once."""

    def __init__(self, backbone: Backbone, drafter: Drafter, optimiser: Optimiser, inputs: Inputs) -> None:
        self.backbone, self.drafter, self.optimiser, self.inputs = backbone, drafter, optimiser, inputs
        self.scalars = torch.zeros(7, device=inputs.weights.device)  # loss, acceptance of 5 slots, accepted drafts

    def __call__(self) -> None:
        self.optimiser.adam.zero_grad(set_to_none=True)
        prepare(self.drafter)
        with torch.no_grad():
            _, taps, _ = self.backbone(self.inputs.batch)
        position, anchors = self.inputs.batch.position, self.inputs.drafts()
        loss, slots, accepted = draft_loss(self.drafter, self.backbone, taps, position, anchors)
        self.optimiser.step(loss)
        release(self.drafter)
        with torch.no_grad():
            for part in self.drafter.modules():
                if isinstance(part, Experts):
                    part.balance(1e-3 * self.optimiser.rate / self.optimiser.peak)
            self.scalars.copy_(torch.cat((loss.view(1), slots, accepted.view(1))))


class Captured:
    """A step as a CUDA graph; on a CPU the step itself."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step, self.graph = step, None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def __call__(self) -> None:
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


def first_inputs(sampler: Sampler, device: torch.device) -> Inputs:
    """Buffers of the sampler's shape, filled with one batch."""
    return Inputs.like(sampler.groups, sampler.batch(), device)
