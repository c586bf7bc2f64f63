"""A whole step's choices on the interpreter against dsuf.engine.choose: draft rows drawn, judged, emitted, reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dsuf.engine.choose import Drafting, choose_tokens
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Sequence
from dsuf.kernels import accept, rows, sample, slots
from dsuf.kernels.lang import Kernel
from tests.kernels.helpers import execute, made

VOCABULARY, BLOCK, RING = 151, 5, 2


def kernels_of(cluster: int) -> tuple[Kernel, Kernel]:
    shape = {"cluster": cluster, "threads": 256, "most": 8192}
    return made(sample.make_filter, **shape), made(accept.make, **shape)


@pytest.fixture(scope="module")
def kernels() -> tuple[Kernel, Kernel]:
    return kernels_of(1)


GREEDY = Sampling(temperature=0.0)


@dataclass
class Member:
    """One sequence, on both sides."""

    sampling: Sampling = GREEDY
    verify: int = 5
    budget: int = 50
    emitted: int = 3
    eos: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    noise: float = 0.3  # of the target beside the drafter
    allowed: np.ndarray | None = None  # bool [6, vocabulary]
    draft: bool = True

    def sequence(self, number: int) -> Sequence:
        request = Request(
            id=str(number), prompt_ids=[1] * 7, max_tokens=self.budget, sampling=self.sampling, eos_ids=list(self.eos),
            ignore_eos=self.ignore_eos, min_tokens=self.min_tokens,
        )  # fmt: skip
        made = Sequence(request, self.budget, self.draft, self.verify, None)
        made.emitted = [2] * self.emitted
        return made

    def record(self, number: int) -> np.ndarray:
        s = self.sampling
        return slots.slot_record(
            token=2, position=6 + self.emitted, emitted=self.emitted, budget=self.budget, eos=self.eos,
            ignore_eos=self.ignore_eos, min_tokens=self.min_tokens, temperature=s.temperature, top_p=s.top_p,
            top_k=s.top_k, seed=s.seed, verify=self.verify, masked=self.allowed is not None, generation=40 + number,
            drafts=self.draft,
        )  # fmt: skip


class Step:
    """Device buffers of a batch whose entry m uses slot m."""

    def __init__(self, members: list[Member], seed: int):
        rng = np.random.default_rng(seed)
        self.members, count = members, len(members)
        self.state = np.concatenate([m.record(i) for i, m in enumerate(members)])
        self.batch = np.full((slots.MOST_ROWS, 4), -1, np.int32)
        self.batch[:count] = [(i, 6 * i, 6, i) for i in range(count)]
        self.draft_logits = (rng.standard_normal((BLOCK * count, VOCABULARY)) * 2).astype(np.float32)
        self.logits = np.full((6 * count, VOCABULARY), np.nan, np.float32)
        for i, m in enumerate(members):
            like = np.concatenate([self.draft_logits[5 * i : 5 * i + 5], rng.standard_normal((1, VOCABULARY)) * 2])
            self.logits[6 * i : 6 * i + 6] = like + m.noise * rng.standard_normal((6, VOCABULARY))
        self.confidence = rng.standard_normal(slots.MOST_ROWS).astype(np.float32)
        self.counters, self.ring = np.zeros(16, np.uint32), np.zeros((RING, slots.RING_BYTES), np.uint8)
        self.drafts = np.full(slots.MOST_ROWS, -5, np.int32)
        self.mask = np.zeros((6 * count, 5), np.uint32)
        for i, m in enumerate(members):
            if m.allowed is not None:
                bits = np.zeros((6, 160), np.uint8)
                bits[:, :VOCABULARY] = m.allowed
                self.mask[6 * i : 6 * i + 6] = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def run(self, kernels, count: int | None = None) -> list[slots.Record]:
        choose, judge = kernels
        count = len(self.members) if count is None else count
        draft_table, table = (np.full((slots.FIELDS, slots.MOST_ROWS), -9, np.int32) for _ in range(2))
        draft_records, records = (np.full((slots.MOST_ROWS, 8), 0xCDCDCDCD, np.uint32) for _ in range(2))
        execute(made(rows.make_draft), [self.state, self.batch, count, draft_table, 48, 12, 99, BLOCK])
        drafting = [self.draft_logits, draft_table, self.state, 0, draft_records, self.drafts, VOCABULARY, 0, 1, 0]
        execute(choose, drafting, grid=(choose.cluster * BLOCK * count, 1))
        for i, m in enumerate(self.members):
            if m.sampling.temperature == 0:  # what markov.finish leaves for greedy rows
                barred = self.draft_logits[5 * i : 5 * i + 5].copy()
                for ahead in range(max(0, min(5, m.min_tokens - m.emitted))):
                    barred[ahead, list(m.eos)] = -np.inf
                self.drafts[5 * i : 5 * i + 5] = np.argmax(barred, axis=1)
        verify = [draft_table, self.drafts, self.confidence, table, self.counters, 48, 12]
        execute(made(rows.make_verify), [self.state, self.batch, count, *verify])
        self.table, self.records = table, records
        common = [self.logits, table, self.state, self.mask, records, 0, VOCABULARY, 0, 1, -1]
        execute(choose, common, grid=(choose.cluster * 6 * count, 1))
        arguments = [self.logits, records, self.draft_logits, draft_records, self.drafts, self.confidence, self.mask]
        arguments += [table, draft_table, self.state, self.batch, self.counters, self.ring, RING, count, VOCABULARY]
        execute(judge, arguments, grid=(judge.cluster * count, 1))
        number = int(self.counters[slots.C_STEP])
        entry = self.ring[number % RING]
        assert slots.flag_of(entry) == number
        return slots.records_of(entry)

    def expected(self, number: int, live: int, judged: int) -> tuple[Sequence, list[int], int, list[int], str | None]:
        member = self.members[number]
        sequence = member.sequence(number)
        drafting = Drafting(sequence)
        drafted = [drafting(row, i) for i, row in enumerate(self.draft_logits[5 * number : 5 * number + 5])]
        allowed = None if member.allowed is None else member.allowed[: max(live, 1)]
        found = self.logits[6 * number : 6 * number + live]
        accepted, tokens = choose_tokens(sequence, found, drafted[:judged], drafting.probabilities[:judged], allowed)
        kept, reason = sequence.cut(tokens)
        return sequence, drafted, min(accepted, len(kept)), kept, reason


REASONS = {None: slots.RUNS, "stop": slots.STOP, "length": slots.LENGTH}


def check(step: Step, found: list[slots.Record]) -> list[int]:
    state, lengths = step.state.view(np.int32).reshape(-1, 32), []
    for i, member in enumerate(step.members):
        record = found[i]
        sequence, drafted, accepted, kept, reason = step.expected(i, record.rows, record.judged)
        assert record.judged == min(member.verify, sequence.budget_left)
        assert record.rows == min(record.judged + 1, sequence.budget_left)
        assert record.drafted == drafted, i
        assert (record.accepted, record.emitted) == (accepted, kept), i
        assert record.reason == REASONS[reason] and record.slot == i and record.generation == 40 + i
        assert record.position == sequence.last_position and record.after == 2
        assert record.confidence == step.confidence[5 * i : 5 * i + 5].tolist()
        assert record.logits == [float(step.logits[6 * i + j, token]) for j, token in enumerate(kept)]
        sequence.emit(kept)
        assert state[i, slots.S_TOKEN] == kept[-1] and state[i, slots.S_POSITION] == sequence.last_position
        assert state[i, slots.S_EMITTED] == len(sequence.emitted) and state[i, slots.S_REASON] == REASONS[reason]
        assert state[i, slots.S_ACTIVE] == (reason is None)
        lengths.append(accepted)
    return lengths


def sampled(seed: int, **other) -> Sampling:
    return Sampling(seed=seed, **other)


@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0])
def test_greedy_and_sampled_blocks_are_judged_as_the_engine_judges_them(kernels, noise: float):
    members = [
        Member(noise=noise),
        Member(sampling=sampled(3, temperature=0.75), noise=noise),
        Member(sampling=sampled(4, temperature=1.5), noise=noise, verify=3),
        Member(sampling=sampled(5, temperature=1.0), noise=noise, verify=0),
    ]
    step = Step(members, 1)
    lengths = check(step, step.run(kernels))
    assert max(lengths) > 0 if noise < 1 else min(lengths) < 5


def test_filtered_blocks_are_judged_by_what_the_filters_keep_and_a_cluster_shares_a_row():
    members = [
        Member(sampling=sampled(1, temperature=1.0, top_p=0.75), noise=0.5, verify=2),
        Member(sampling=sampled(2, temperature=0.75, top_k=9), noise=2.0, verify=1),
    ]
    step = Step(members, 4)
    check(step, step.run(kernels_of(2)))


@pytest.mark.parametrize("budget", [1, 2, 5, 6])
def test_the_budget_ends_a_sequence_and_changes_no_token_before(kernels, budget: int):
    members = [
        Member(noise=0.02, budget=3 + budget),
        Member(noise=0.02, budget=3 + budget, sampling=sampled(budget, temperature=0.25)),
    ]
    step = Step(members, 7)
    check(step, step.run(kernels))


def test_an_accepted_eos_ends_a_sequence_unless_it_is_ignored_or_may_not_come_yet(kernels):
    eos = tuple(range(0, VOCABULARY, 19))
    members = [
        Member(noise=0.02, eos=eos[:8]),
        Member(noise=0.02, eos=eos[:8], ignore_eos=True),
        Member(noise=0.02, eos=eos[:8], min_tokens=6),
        Member(noise=0.02, eos=eos[:8], min_tokens=6, sampling=sampled(3, temperature=1.0)),
    ]
    step = Step(members, 3)
    for i in range(4):  # every second row wants an EOS
        step.draft_logits[5 * i + 1 : 5 * i + 5 : 2, eos[2]] = 20
        step.logits[6 * i + 1 : 6 * i + 6 : 2, eos[2]] = 20
    found = step.run(kernels)
    check(step, found)
    assert found[0].reason == slots.STOP and eos[2] not in found[2].emitted[:3] and found[1].reason == slots.RUNS


def test_a_constraint_rejects_forbidden_drafts_and_rules_what_follows(kernels):
    rng = np.random.default_rng(12)
    members = []
    for i in range(4):
        allowed = rng.random((6, VOCABULARY)) < (0.5 if i % 2 else 0.9)
        allowed[:, 3] = True
        members.append(Member(noise=0.1, allowed=allowed, sampling=sampled(i, temperature=0.0 if i < 2 else 0.7)))
    step = Step(members, 5)
    check(step, step.run(kernels))


def test_entries_that_rest_are_reported_without_tokens_and_keep_their_state(kernels):
    members = [Member(noise=0.1), Member(noise=0.1), Member(noise=0.1, sampling=sampled(1))]
    step = Step(members, 1)
    words = step.state.view(np.int32).reshape(-1, 32)
    words[1, slots.S_ACTIVE], words[1, slots.S_REASON] = 0, slots.STOP
    step.batch[2, 0] = -1
    step.logits[6:] = np.nan
    before = step.state.copy()
    found = step.run(kernels)
    assert [len(r.emitted) > 0 for r in found] == [True, False, False]
    assert [r.slot for r in found] == [0, 1, -1] and found[1].reason == slots.STOP and found[1].rows == 0
    assert (step.state[slots.SLOT_BYTES :] == before[slots.SLOT_BYTES :]).all()


def test_steps_follow_each_other_in_the_ring(kernels):
    step = Step([Member(noise=0.1), Member(noise=0.1, sampling=sampled(4))], 2)
    for number in range(1, RING + 2):
        found = step.run(kernels)
        assert int(step.counters[slots.C_STEP]) == number and found[0].position >= 9 + number - 1
    flags = [slots.flag_of(entry) for entry in step.ring]
    assert sorted(flags) == [2, 3]
