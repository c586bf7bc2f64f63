"""The Markov chain on the interpreter: greedy and sampled slots in one batch, biases, confidences, barred EOS."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import markov, sample, slots
from dsuf.ops.philox import Purpose, uniform
from dsuf.ops.sample import filtered_probabilities, pick
from tests.kernels.helpers import assert_near, bf16, execute, made, values

RANK, VOCABULARY, D, BLOCK, GRID = 32, 208, 64, 5, 3


class Chain:
    """Buffers of a chain over some groups, the poisoned ones included."""

    def __init__(self, state: np.ndarray, groups: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.embed, self.head = bf16(rng, VOCABULARY, RANK), bf16(rng, VOCABULARY, RANK)
        self.proj = bf16(rng, D + RANK)
        self.base = rng.standard_normal((groups * BLOCK, VOCABULARY)).astype(np.float32)
        self.x = bf16(rng, groups * BLOCK, D)
        self.logits, self.state, self.groups = self.base.copy(), state, groups
        self.table = np.zeros((slots.FIELDS, slots.MOST_ROWS), np.int32)
        self.table[slots.T_SEQUENCE] = -1
        self.parts = np.zeros((BLOCK, markov.MOST_GROUPS, markov.BLOCKS, 2), np.uint32)
        self.picked, self.drafts = (np.full(slots.MOST_ROWS, -7, np.int32) for _ in range(2))
        self.confidence = np.full(slots.MOST_ROWS, np.nan, np.float32)

    def place(self, group: int, slot: int, token: int, position: int) -> None:
        rows = slice(BLOCK * group, BLOCK * group + BLOCK)
        self.table[slots.T_SEQUENCE, rows] = slot
        self.table[slots.T_TOKEN, rows] = [token, 3, 3, 3, 3]
        self.table[slots.T_POSITION, rows] = np.arange(position, position + BLOCK)
        self.table[slots.T_OFFSET, rows] = range(BLOCK)

    def run(self, step, finish, chooser=None) -> None:
        for i in range(BLOCK):
            arguments = [self.embed, self.head, self.logits, self.state, self.table, self.parts, self.picked]
            execute(step, [*arguments, self.drafts, self.groups, i, VOCABULARY, BLOCK], grid=(GRID, 1))
            if chooser is not None:
                records = np.zeros((slots.MOST_ROWS, 8), np.uint32)
                rest = [self.picked, VOCABULARY, i, BLOCK, int(Purpose.DRAFT)]
                execute(chooser, [self.logits, self.table, self.state, 0, records, *rest], grid=(2 * self.groups, 1))
        arguments = [self.embed, self.proj, self.x, self.state, self.table, self.parts, self.picked, self.drafts]
        execute(finish, [*arguments, self.confidence, BLOCK], grid=(BLOCK * self.groups, 1))

    def check(self, group: int, token: int, choose) -> None:
        """Follow the chain in float64 from the kernel's own choices."""
        embed, head, proj = values(self.embed), values(self.head), values(self.proj)
        for i in range(BLOCK):
            row = BLOCK * group + i
            want = self.base[row] + head @ embed[token]
            assert_near(self.logits[row].astype(float), want, 1e-5, 1e-5)
            features = np.concatenate([values(self.x[row]), embed[token]])
            assert_near(self.confidence[row : row + 1].astype(float), (proj @ features)[None], 1e-5, 1e-4)
            token = choose(self.logits[row], i)
            assert self.drafts[row] == token


@pytest.fixture(scope="module")
def kernels():
    return made(markov.make_step, rank=RANK, warps=6, stages=2, kept=5), made(markov.make_finish, d=D, rank=RANK)


@pytest.mark.parametrize("groups", [1, 8])
def test_greedy_chains_follow_the_float64_chain_and_inactive_groups_write_nothing(kernels, groups: int):
    state = np.concatenate([slots.slot_record(token=i, position=9, emitted=0, budget=9) for i in range(8)])
    chain = Chain(state, groups)
    for group in range(0, groups, 3):
        chain.place(group, group, 5 + group, 20)
    chain.run(*kernels)
    for group in range(groups):
        rows = slice(BLOCK * group, BLOCK * group + BLOCK)
        if group % 3 == 0:
            chain.check(group, 5 + group, lambda row, i: int(np.argmax(row)))
        else:
            assert (chain.logits[rows] == chain.base[rows]).all() and (chain.drafts[rows] == -7).all()
            assert np.isnan(chain.confidence[rows]).all()


def test_a_chain_alone_has_the_bits_of_a_chain_in_company(kernels):
    state = np.concatenate([slots.slot_record(token=i, position=9, emitted=0, budget=9) for i in range(2)])
    together, alone = Chain(state, 2), Chain(state, 2)
    for chain in (together, alone):
        chain.place(1, 1, 8, 20)
    together.place(0, 0, 4, 7)
    together.run(*kernels)
    alone.run(*kernels)
    assert (together.logits[5:] == alone.logits[5:]).all()
    assert (together.drafts[5:10] == alone.drafts[5:10]).all() and (
        together.confidence[5:10] == alone.confidence[5:10]
    ).all()


def test_sampled_slots_draw_and_an_eos_that_may_not_come_yet_is_not_chosen(kernels):
    rng = np.random.default_rng(1)
    records = [
        slots.slot_record(token=1, position=9, emitted=2, budget=99, temperature=1.5, top_p=0.9, seed=77),
        slots.slot_record(token=1, position=9, emitted=2, budget=99, eos=[6, 100], min_tokens=5),
        slots.slot_record(token=1, position=9, emitted=2, budget=99),
    ]  # fmt: skip
    chain = Chain(np.concatenate(records), 3, seed=3)
    chain.base[:, [6, 100]] += 40 + rng.random((15, 2)).astype(np.float32)
    chain.base[:5, [6, 100]] = -4
    chain.logits = chain.base.copy()
    for group in range(3):
        chain.place(group, group, 50 + group, 20)
    chain.run(*kernels, made(sample.make_filter, cluster=2, threads=256, most=8192))

    def drawn(row: np.ndarray, i: int) -> int:
        return pick(filtered_probabilities(row, 1.5, float(np.float32(0.9))), uniform(77, 21 + i, Purpose.DRAFT)[0])

    def barred(row: np.ndarray, i: int) -> int:
        row = row.copy()
        row[[6, 100]] = -np.inf if i < 3 else row[[6, 100]]
        return int(np.argmax(row))

    chain.check(0, 50, drawn)
    chain.check(1, 51, barred)
    chain.check(2, 52, lambda row, i: int(np.argmax(row)))
    assert set(chain.drafts[10:15]) <= {6, 100} and set(chain.drafts[8:10]) <= {6, 100}


def test_the_real_rank_agrees():
    chain = Chain(slots.slot_record(token=1, position=9, emitted=0, budget=9), 1)
    rng = np.random.default_rng(8)
    embed, head = bf16(rng, VOCABULARY, 256), bf16(rng, VOCABULARY, 256)
    chain.place(0, 0, 11, 20)
    arguments = [embed, head, chain.logits, chain.state, chain.table, chain.parts, chain.picked, chain.drafts]
    execute(
        made(markov.make_step, rank=256, warps=6, stages=2, kept=5), [*arguments, 1, 0, VOCABULARY, BLOCK], grid=(2, 1)
    )
    assert_near(chain.logits[0].astype(float), chain.base[0] + values(head) @ values(embed)[11], 1e-5, 1e-4)
    best = chain.parts[0, 0, :2]
    winner = best[best[:, 0].argmax(), 1]
    assert winner == np.argmax(chain.logits[0])
