"""Push and join on the interpreter: several ranks in one memory, many rounds, a rank that does not come."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import reduce
from tests.kernels.helpers import bf16, execute, made, values

BLOCKS = 3


class Rank:
    """What a rank keeps; its sums have room for twice the elements."""

    def __init__(self, ranks: int, elements: int):
        self.room = 2 * elements
        self.inbox = np.zeros(reduce.inbox_bytes(ranks, self.room), np.uint8)
        self.epochs = np.zeros(reduce.MOST_BLOCKS, np.uint32)
        self.out = np.full(elements, 0x7FC0, np.uint16)
        self.fault = np.zeros(1, np.uint32)


@pytest.fixture(scope="module")
def kernels():
    return made(reduce.make_push), made(reduce.make_join)


def inboxes(ranks: list[Rank]) -> list[np.ndarray | int]:
    return [r.inbox for r in ranks] + [0] * (reduce.MOST_RANKS - len(ranks))


def push(kernel, ranks: list[Rank], rank: int, part: np.ndarray) -> None:
    own, elements = ranks[rank], part.view(np.uint16).size
    arguments = [part, own.epochs, rank, len(ranks), elements, own.room, *inboxes(ranks)]
    execute(kernel, arguments, grid=(BLOCKS, 1))


def join(kernel, ranks: list[Rank], rank: int, bound_us: int = 1000) -> None:
    own = ranks[rank]
    arguments = [own.inbox, own.epochs, own.out, own.fault, len(ranks), own.out.size, own.room, bound_us, 9]
    execute(kernel, arguments, grid=(BLOCKS, 1))


@pytest.mark.parametrize(("count", "elements"), [(1, 8), (2, 6 * 5120), (4, 1000), (8, 128)])
def test_every_rank_gets_the_same_sum_round_after_round(kernels, count: int, elements: int):
    rng = np.random.default_rng(elements)
    ranks = [Rank(count, elements) for _ in range(count)]
    for _ in range(3 if elements < 5000 else 1):
        parts = [bf16(rng, elements) for _ in range(count)]
        for r in range(count):
            push(kernels[0], ranks, r, parts[r])
        for r in range(count):
            join(kernels[1], ranks, r)
        total = np.zeros(elements, np.float32)
        for part in parts:
            total = total + values(part).astype(np.float32)
        for own in ranks:
            assert (own.out == formats.float32_to_bf16(total)).all() and own.fault[0] == 0


def test_a_rank_may_push_the_next_round_before_the_others_have_joined_this_one(kernels):
    rng = np.random.default_rng(1)
    ranks, parts = [Rank(2, 64) for _ in range(2)], [bf16(rng, 64) for _ in range(4)]
    push(kernels[0], ranks, 0, parts[0])
    push(kernels[0], ranks, 1, parts[1])
    join(kernels[1], ranks, 0)
    push(kernels[0], ranks, 0, parts[2])
    join(kernels[1], ranks, 1)
    both = values(parts[0]).astype(np.float32) + values(parts[1]).astype(np.float32)
    assert (ranks[1].out == formats.float32_to_bf16(both)).all()
    push(kernels[0], ranks, 1, parts[3])
    join(kernels[1], ranks, 0)
    both = values(parts[2]).astype(np.float32) + values(parts[3]).astype(np.float32)
    assert (ranks[0].out == formats.float32_to_bf16(both)).all()


def test_a_rank_that_does_not_come_is_named_in_the_fault_word(kernels):
    ranks, part = [Rank(3, 64) for _ in range(3)], bf16(np.random.default_rng(2), 64)
    push(kernels[0], ranks, 0, part)
    push(kernels[0], ranks, 2, part)
    join(kernels[1], ranks, 0, bound_us=0)
    assert ranks[0].fault[0] == 9 << 8 | 2


@pytest.mark.parametrize(("count", "k"), [(2, 6), (4, 3)])
def test_experts_of_all_ranks_add_up_to_the_sum_over_slots(kernels, count: int, k: int):
    rng, rows, d, each = np.random.default_rng(k), 5, 64, 4
    ranks, kernel = [Rank(count, rows * d) for _ in range(count)], made(reduce.make_push_experts)
    experts = np.stack([rng.permutation(count * each)[:k] for _ in range(rows)]).astype(np.int32)
    experts[3] = -1  # an inactive row
    parts = bf16(rng, rows * k, d)
    for r, own in enumerate(ranks):
        mine = parts.copy()
        mine[(experts // each != r).ravel()] = 0x7FC0  # nobody wrote it
        arguments = [mine, experts, r * each, each, k, d, own.epochs, r, count, rows * d, own.room, *inboxes(ranks)]
        execute(kernel, arguments, grid=(BLOCKS, 1))
    want = np.zeros((rows, d), np.float32)
    for r in range(count):
        chosen = (experts // each == r)[:, :, None]
        share = np.where(chosen, values(parts).reshape(rows, k, d), 0).astype(np.float32)
        partial = np.zeros((rows, d), np.float32)
        for slot in range(k):
            partial += share[:, slot]
        want += values(formats.float32_to_bf16(partial)).astype(np.float32)
    for r, own in enumerate(ranks):
        join(kernels[1], ranks, r)
        assert (own.out.reshape(rows, d) == formats.float32_to_bf16(want)).all() and own.fault[0] == 0


@pytest.mark.parametrize("count", [2, 4])
def test_rows_of_all_ranks_stand_beside_each_other(kernels, count: int):
    rng, rows, mine = np.random.default_rng(count), 3, 20
    ranks, kernel = [Rank(count, 2 * rows * mine) for _ in range(count)], made(reduce.make_join_rows)
    parts = [rng.standard_normal((rows, mine)).astype(np.float32) for _ in range(count)]
    for r, part in enumerate(parts):
        push(kernels[0], ranks, r, part)
    for own in ranks:
        out = np.zeros((rows, count * mine), np.float32)
        arguments = [own.inbox, own.epochs, out, own.fault, count, 2 * rows * mine, own.room, mine, 1000, 9]
        execute(kernel, arguments, grid=(BLOCKS, 1))
        assert np.array_equal(out, np.concatenate(parts, axis=1))
