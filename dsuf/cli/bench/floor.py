"""The least that a decode step or a prefill must move and compute: each weight it uses is read once, as stored.

    floor = sum over groups of weights of max(bytes / read ceiling, 2 * elements * rows / multiply ceiling)

Dense weights meet all rows. Of the routed experts only those count that were hit (counted by the backend in the
measured steps), with the rows routed to them. A row gathers one embedding row and its Engram rows. Left out: attention
over caches, window rows and activations, so that the floor is a little lower than it could be, never higher.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from dsuf.model.checkpoint import Checkpoint
from dsuf.model.inventory import Parameter, parameters


@dataclass(frozen=True)
class Cost:
    """Stored bytes and elements of a group of weights."""

    nbytes: float = 0.0
    elements: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.nbytes + other.nbytes, self.elements + other.elements)


@dataclass(frozen=True)
class WeightCosts:
    """A checkpoint's weights by how rows use them."""

    layers: tuple[Cost, ...]  # dense weights of each backbone layer
    expert: Cost  # one routed expert of one layer
    head: Cost  # final norm and output head
    drafter: Cost  # dense weights of all stages
    drafter_expert: Cost
    gathered_row_bytes: int  # embedding and Engram rows of one token


@dataclass(frozen=True)
class StepShape:
    """Means over the measured steps: rows verified, slots drafted, distinct (layer, expert) pairs hit."""

    rows: float
    slots: float
    experts: float
    drafter_experts: float


def weight_costs(checkpoint: Checkpoint) -> WeightCosts:
    """Add up the inventory of a checkpoint."""
    spec, row_bytes = checkpoint.spec, 0
    totals: defaultdict[str | int, Cost] = defaultdict(Cost)
    for parameter in parameters(spec, checkpoint.config):
        cost, use = _cost(parameter), _use_of(parameter.name)
        totals[use] += cost
        if use in ("embedding row", "engram row"):
            looked_up = spec.engram_columns if use == "engram row" else 1
            row_bytes += looked_up * cost.nbytes // parameter.shape[0]
    return WeightCosts(
        layers=tuple(totals[layer] for layer in range(spec.num_hidden_layers)),
        expert=_share(totals["expert"], spec.num_hidden_layers * spec.n_routed_experts),
        head=totals["head"],
        drafter=totals["drafter"],
        drafter_expert=_share(totals["drafter expert"], spec.num_nextn_predict_layers * spec.dspark_n_routed_experts),
        gathered_row_bytes=row_bytes,
    )


def _use_of(name: str) -> str | int:
    """How rows use a parameter; the layer's number for a dense weight of the backbone."""
    first, *rest = name.split(".")
    if first == "mtp":
        if "markov_head" in rest and "embed" in rest:
            return "markov row"  # one row a slot: nothing beside the rest
        return "drafter expert" if "experts" in rest else "drafter"
    if first == "layers":
        if "engram" in rest and "embed" in rest:
            return "engram row"
        return "expert" if "experts" in rest else int(rest[0])
    return {"embed": "embedding row", "head": "head", "norm": "head"}.get(first, "vision")


def step_floor(checkpoint: Checkpoint, shape: StepShape, ceilings: dict[str, float]) -> dict[str, float]:
    """`floor` of the bench object for a mean decode step."""
    spec, cost = checkpoint.spec, weight_costs(checkpoint)
    dense = sum(cost.layers, cost.head)  # the head meets every row: each may choose a token
    routed = shape.rows * spec.num_experts_per_tok * spec.num_hidden_layers
    groups = [  # bytes, flops
        (dense.nbytes, 2 * dense.elements * shape.rows),
        (cost.expert.nbytes * shape.experts, 2 * cost.expert.elements * routed),
        (cost.gathered_row_bytes * shape.rows, 0.0),
    ]
    if shape.slots:
        routed = shape.slots * spec.dspark_num_experts_per_tok * spec.num_nextn_predict_layers
        groups += [
            (cost.drafter.nbytes + cost.head.nbytes, 2 * (cost.drafter.elements + cost.head.elements) * shape.slots),
            (cost.drafter_expert.nbytes * shape.drafter_experts, 2 * cost.drafter_expert.elements * routed),
        ]
    return _floor(groups, ceilings) | {"distinct_experts": shape.experts / spec.num_hidden_layers}


def prefill_floor(checkpoint: Checkpoint, length: int, mode: str, ceilings: dict[str, float]) -> dict[str, float]:
    """`floor` of the bench object for one prompt; truncated prefill runs decoder layers on the last window only."""
    spec, cost = checkpoint.spec, weight_costs(checkpoint)
    tail = min(length, spec.sliding_window) if mode == "truncated" else length
    groups = [(cost.head.nbytes, 2 * cost.head.elements), (cost.gathered_row_bytes * length, 0.0)]
    distinct = []
    for layer, dense in enumerate(cost.layers):
        rows = tail if layer >= spec.decoder_start_layer else length
        distinct.append(expected_distinct_experts(spec.n_routed_experts, spec.num_experts_per_tok, rows))
        groups += [
            (dense.nbytes, 2 * dense.elements * rows),
            (cost.expert.nbytes * distinct[-1], 2 * cost.expert.elements * rows * spec.num_experts_per_tok),
        ]
    return _floor(groups, ceilings) | {"distinct_experts": sum(distinct) / len(distinct)}


def expected_distinct_experts(experts: int, chosen: int, rows: float) -> float:
    """E (1 - (1 - k/E)^B): distinct experts of a layer when each row chooses k of E evenly."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def _floor(groups: list[tuple[float, float]], ceilings: dict[str, float]) -> dict[str, float]:
    read = ceilings["read_gb_per_s"] * 1e9
    multiply = next(value for name, value in ceilings.items() if name.endswith("_gflops")) * 1e9
    return {
        "bytes": sum(nbytes for nbytes, _ in groups),
        "flops": sum(flops for _, flops in groups),
        "us": sum(max(nbytes / read, flops / multiply) for nbytes, flops in groups) * 1e6,
    }


def _cost(parameter: Parameter) -> Cost:
    return Cost(sum(tensor.nbytes for tensor in parameter.tensors()), math.prod(parameter.shape))


def _share(cost: Cost, count: int) -> Cost:
    return Cost(cost.nbytes / count, cost.elements / count)
