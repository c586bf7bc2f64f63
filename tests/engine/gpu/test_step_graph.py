"""Row buckets, batch tables, and graphs that are captured once for each bucket."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsuf.engine.gpu.all_ranks import AllSteps
from dsuf.engine.gpu.buffers import prompt_rows
from dsuf.engine.gpu.ranks import Ranks
from dsuf.engine.gpu.step_graph import Entry, StepGraphs, batch_table, bucket_of, splits
from dsuf.kernels.slots import MOST_ROWS
from tests.support.simt_device import SimtDevice

BLOCK = 5
entries = st.lists(
    st.one_of(st.just(Entry(3, 1, drafts=False)), st.integers(1, 6).map(lambda rows: Entry(1, rows, drafts=True))),
    min_size=1,
    max_size=40,
)


@given(entries)
def test_every_step_fits_a_bucket_and_nobody_is_left_out(wanted):
    parts = splits(wanted)
    assert [index for part in parts for index in part] == list(range(len(wanted)))
    for part in parts:
        step = [wanted[index] for index in part]
        rows, drafting = sum(e.rows for e in step), sum(e.drafts for e in step)
        bucket = bucket_of(step, BLOCK)
        assert rows <= bucket.rows <= MOST_ROWS and len(step) <= bucket.count <= MOST_ROWS
        assert bucket.groups >= drafting and bucket.groups * BLOCK <= 40
        assert bucket.groups or not drafting


def test_buckets_are_those_of_the_design():
    drafting = [bucket_of([Entry(i, 6, drafts=True) for i in range(n)], BLOCK) for n in (1, 2, 3, 4, 5, 8)]
    assert [bucket.rows for bucket in drafting] == [6, 12, 24, 24, 48, 48]
    plain = [bucket_of([Entry(i, 1, drafts=False) for i in range(n)], BLOCK) for n in (1, 2, 3, 5, 9, 17, 48)]
    assert [bucket.rows for bucket in plain] == [1, 2, 4, 8, 16, 24, 48]


@given(entries)
def test_rows_of_a_batch_stand_one_after_the_other(wanted):
    part = [wanted[index] for index in splits(wanted)[0]]
    table = batch_table(part)
    ends = np.cumsum([entry.rows for entry in part])
    assert (table[: len(part), 1] == ends - table[: len(part), 2]).all()
    drafting = table[: len(part), 3]
    assert drafting[drafting >= 0].tolist() == list(range(sum(e.drafts for e in part)))
    assert (table[len(part) :] == -1).all()


def test_prompt_rows_see_their_window_and_no_decoder_row_before_the_first_real_one():
    table = prompt_rows(2, 10, np.array([5, 6, 7]), 8, 4)
    assert table[0, :3].tolist() == [5, 6, 7] and table[1, :4].tolist() == [2, 2, 2, -1]
    assert table[2, :3].tolist() == [10, 11, 12] and table[7, :3].tolist() == [10, 11, 12]
    assert table[5, :3].tolist() == [7, 8, 9] and table[6, :3].tolist() == [8, 8, 9]


class Recorded(StepGraphs):
    """Walks that launch nothing but a zeroing."""

    def _walk(self, half, bucket):
        self.device.zero(self.counters, 4)
        self.walked.append((half, bucket))

    def _draft_walk(self, bucket, launch):
        self._walk("draft", bucket)

    def _verify_walk(self, bucket, launch):
        self._walk("verify", bucket)

    def _score_walk(self, bucket, launch):
        self._walk("score", bucket)

    def _choose_walk(self, bucket, launch):
        self._walk("choose", bucket)


VOCABULARY = 70


def recorded(device):
    work = SimpleNamespace(
        mask=device.allocate(MOST_ROWS * 6 * 12, "test"), drafts=device.allocate(4 * MOST_ROWS, "test")
    )
    spec = SimpleNamespace(dspark_block_size=BLOCK, vocab_size=VOCABULARY)
    steps = Recorded(device, SimpleNamespace(spec=spec, work=work), 4)
    steps.walked = []
    return steps


def test_drafts_come_and_masks_go_between_the_halves_of_the_second_graph():
    device = SimtDevice()
    steps = recorded(device)
    work = steps.model.work
    batch = [Entry(1, 6, drafts=True), Entry(2, 1, drafts=False), Entry(3, 4, drafts=True)]
    device.zero(work.mask, MOST_ROWS * 6 * 12)
    device.upload(work.drafts, np.arange(10, 10 + MOST_ROWS, dtype=np.int32))
    bucket = bucket_of(batch, BLOCK, masked=True)
    steps.draft(bucket, batch)
    steps.score(bucket)
    assert steps.drafts(batch) == [[10, 11, 12, 13, 14], [], [15, 16, 17]]
    steps.masks[:] = 0
    steps.masks[2, 1, 2] = 1 << 5  # token 69 may follow the third entry's first draft
    steps.send_masks({2: 4})
    assert steps.verify(bucket) == 1
    assert [half for half, _ in steps.walked] == ["draft", "score", "choose"]
    sent = device.download(work.mask, MOST_ROWS * 6 * 12).view(np.uint32)
    assert np.flatnonzero(sent).tolist() == [(2 * 6 + 1) * 3 + 2]
    steps.queue(batch)
    assert [half for half, _ in steps.walked][3:] == ["verify"]  # the drafts' graph serves both


def test_a_bucket_is_captured_once_and_the_table_is_sent_when_it_changes():
    device = SimtDevice()
    steps, sent = recorded(device), []
    copy = device.copy_async
    device.copy_async = lambda *args: sent.append(args) or copy(*args)
    one, two = [Entry(1, 6, drafts=True)], [Entry(2, 6, drafts=True)]
    for batch in (one, one, two, two, one):
        steps.queue(batch)
    assert [half for half, _ in steps.walked] == ["draft", "verify"]
    assert len(sent) == 3 and steps.queued == 5
    steps.queue([Entry(1, 1, drafts=False)])
    assert [half for half, _ in steps.walked] == ["draft", "verify", "verify"]
    steps.inject((0,) * 7)
    steps.queue(one)
    assert [half for half, _ in steps.walked][3:] == ["draft"]  # its graph is made anew


def test_what_usual_steps_run_is_captured_before_they_come():
    steps = recorded(SimtDevice())
    AllSteps([steps], Ranks([steps.device])).warm_up(8, drafts=True)
    known = list(steps.walked)
    for count in range(1, 9):
        batch = [Entry(slot, 6, drafts=True) for slot in range(count)]
        for sampled in (False, True):
            steps.queue(batch, sampled=sampled)
            bucket = bucket_of(batch, BLOCK, sampled=sampled, masked=True)
            steps.draft(bucket, batch)
            steps.score(bucket)
            steps.verify(bucket)
    steps.queue([Entry(0, 1, drafts=False)])  # a prompt's first token
    assert steps.walked == known
    few = recorded(SimtDevice())
    AllSteps([few], Ranks([few.device])).warm_up(2, drafts=False)
    assert {bucket.rows for _, bucket in few.walked} == {1, 2}
