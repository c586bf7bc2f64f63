"""Push and join on the interpreter: several ranks in one memory, many rounds, a rank that does not come."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import reduce
from tests.kernels.helpers import bf16, execute, values

BLOCKS = 3


class Rank:
    """What a rank keeps."""

    def __init__(self, ranks: int, elements: int):
        self.inbox = np.zeros(reduce.inbox_bytes(ranks, elements), np.uint8)
        self.epochs = np.zeros(reduce.MOST_BLOCKS, np.uint32)
        self.out = np.full(elements, 0x7FC0, np.uint16)
        self.fault = np.zeros(1, np.uint32)


@pytest.fixture(scope="module")
def kernels():
    return reduce.make_push(), reduce.make_join()


def push(kernel, ranks: list[Rank], rank: int, part: np.ndarray) -> None:
    inboxes = [r.inbox for r in ranks] + [0] * (reduce.MOST_RANKS - len(ranks))
    execute(kernel, [part, ranks[rank].epochs, rank, len(ranks), part.size, *inboxes], grid=(BLOCKS, 1))


def join(kernel, ranks: list[Rank], rank: int, bound_us: int = 1000) -> None:
    own = ranks[rank]
    arguments = [own.inbox, own.epochs, own.out, own.fault, len(ranks), own.out.size, bound_us, 9]
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
