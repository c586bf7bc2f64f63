"""A backend of two ranks, in turns on the stand-in, says what one rank says; pages and copies are the same on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.gpu.all_ranks import AllCopies, AllPages, AllSteps
from dsuf.engine.gpu.copies import Copies
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.ranks import Rank, Ranks, Turn, in_turns
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Trace
from dsuf.errors import DeviceError
from dsuf.kernels.catalogue import CONFIGS
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.slots import HEADER_BYTES, RING_BYTES
from dsuf.layout import SnapshotLayout
from dsuf.spec import Spec
from tests.engine.gpu.small import few_score_blocks
from tests.support.in_turns import four_groups, written
from tests.support.rank_engine import assert_same_text, engine_in_turns, stop_and_resume
from tests.support.simt_device import SimtDevice

TINY = Spec.load(CONFIGS / "tiny.json")
GREEDY = Sampling(temperature=0)
IDS = np.random.default_rng(3).integers(3, 250, 7).tolist()
ROOM = {"max_context": 256, "max_sequences": 4, "cache_tokens": 1024, "prefill_chunk": 3, "prefill": "exact"}
DRAFTED, PLAIN, ENDED = (
    Request("drafted", IDS[:5], 2, GREEDY, verify=5), Request("plain", IDS[:2], 4, GREEDY, draft=False),
    Request("ended", IDS[2:4], 50, GREEDY),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with four_groups(), few_score_blocks():
        yield written(tmp_path_factory.mktemp("ranks") / "ckpt")


def test_two_ranks_say_what_one_says_and_go_on_as_if_they_had_stayed(folder: Path):
    """With drafts and without, a prompt in chunks, one out and back in, one gone back, one cancelled between them."""
    one, two = (engine_in_turns(folder, SimtDevice(), count, **ROOM) for count in (1, 2))
    traces = {request.id: Trace(keep_logits=True) for request in (DRAFTED, PLAIN)}
    for request in (DRAFTED, PLAIN):
        one.submit(request, traces[request.id])
    wanted = dict(one._sequences)
    while not one.idle:
        one.step()
    for request in (ENDED, DRAFTED, PLAIN):
        two.submit(request)
    found, done = dict(two._sequences), set()
    while not two.idle:
        two.step()
        drafted, plain = found["drafted"], found["plain"]
        if drafted.emitted and "resumed" not in done:
            stop_and_resume(two, drafted, drafted.last_position // 2 * 2)
            done.add("resumed")
        if len(plain.emitted) in (2, 3) and "back" not in done:
            two.backend.rewind(plain, plain.last_position - 1)
            done.add("back")
        if found["ended"].emitted and "ended" not in done:
            two.cancel("ended")
            done.add("ended")
    assert done == {"resumed", "back", "ended"} and len(found["ended"].emitted) < 50
    assert two.table.seats[0].joins > 50 and two.table.early == 0
    for name, trace in traces.items():
        assert_same_text(found[name].emitted, wanted[name].emitted, trace)
    assert two.backend._pages.free == two.backend._pages.count


# ---- the same pages, copies and results on all


@pytest.fixture
def pages():
    """Of two ranks, each on a device of its own."""
    every = [Pages(SimtDevice(index=i), TINY, slots=3, count=12, most_pages=8) for i in range(2)]
    ranks = Ranks([one.device for one in every])
    copies = AllCopies([Copies(one) for one in every])
    return every, AllPages(every, ranks, copies.others), copies


def tables(pages):
    return pages.device.download(pages.table, 4 * pages.slots * pages.most_pages).view(np.uint32).tolist()


@given(st.lists(st.tuples(st.sampled_from(["reserve", "open", "release"]), st.integers(1, 500)), max_size=12))
@settings(max_examples=20, deadline=None)
def test_pages_have_the_same_numbers_on_all_ranks(does):
    every = [Pages(SimtDevice(index=i), TINY, slots=3, count=12, most_pages=8) for i in range(2)]
    both, held = AllPages(every, Ranks([one.device for one in every])), []
    for do, tokens in does:
        if do == "open" and len(held) < 3:
            held.append(both.open())
        elif do == "reserve" and held and both.free >= 4:
            both.reserve(held[-1], tokens)
        elif do == "release" and held:
            both.release(held.pop(0))
    for slot in held:
        assert every[0].pages_of(slot) == every[1].pages_of(slot)
    assert tables(every[0]) == tables(every[1])
    for slot in held:
        both.release(slot)
    assert both.free == 12


def test_what_the_first_rank_saves_is_restored_on_all(pages):
    every, both, copies = pages
    slot, rng = both.open(), np.random.default_rng(0)
    both.reserve(slot, 300)
    first = every[0]
    for page in first.pages_of(slot):
        address = first.pool + page * first.page_bytes
        first.device.upload(address, rng.integers(0, 255, first.page_bytes, np.uint8))
    first.device.upload(first.windows, rng.integers(0, 100, first.slots * first.window_pitch, np.uint8))
    first.device.upload(first.history, rng.integers(0, 100, (first.slots, HISTORY), np.int32))
    kept = [bytearray(first.page_bytes) for _ in range(3)]
    state = [bytearray(SnapshotLayout.of(TINY).snapshot_bytes)]
    assert copies.snapshot(slot, 300, 0, dict(enumerate(kept)), state) == 1
    both.release(slot)
    slot = both.open()
    both.reserve(slot, 300)
    number, start = copies.restore(slot, 300, kept, state)
    assert (number, start) == (2, 0) and copies.land(slot) and copies.progress() == 2
    for i in range(3):
        found = [one.device.download(one.address(slot, i), one.page_bytes) for one in every]
        assert np.array_equal(*found) and bytes(found[0]) == bytes(kept[i])
    again = [bytearray(len(state[0]))], [bytearray(first.page_bytes) for _ in range(3)]
    second = Copies(every[1])
    second.finish(second.snapshot(slot, 300, 0, dict(enumerate(again[1])), again[0]))
    assert again == (state, kept)


def test_a_step_has_ended_when_all_ranks_say_the_same():
    def rank(entries):
        return SimpleNamespace(entry=entries.get, masks=None)

    entry = np.zeros(RING_BYTES, np.uint8)
    other = entry.copy()
    entry[4] = other[4] = 1  # one record
    other[HEADER_BYTES] = 9
    ranks = SimpleNamespace(check=lambda: None)
    steps = AllSteps([rank({1: entry, 2: entry, 3: entry}), rank({1: entry.copy(), 3: other})], ranks)
    assert len(steps.result(1)) == 1 and steps.result(2) is None
    with pytest.raises(DeviceError, match="rank 1 has another result than rank 0 in step 3"):
        steps.result(3)


def test_no_join_is_queued_before_all_ranks_have_pushed():
    queued = []

    def walk(index, count):
        turn = Turn(SimpleNamespace(launch=lambda name, grid: queued.append((name, index))), Rank(index, count))
        for names in (("a", "push", "reduce.join", "b"), ("c",)):
            for name in names:
                turn.launch(name, grid=(1, 1))
            yield turn

    in_turns([walk(0, 2), walk(1, 2)])
    assert queued == [
        ("a", 0), ("push", 0), ("a", 1), ("push", 1), ("reduce.join", 0), ("b", 0), ("reduce.join", 1), ("b", 1),
        ("c", 0), ("c", 1),
    ]  # fmt: skip
    queued.clear()
    next(walk(0, 1))
    assert [name for name, _ in queued] == ["a", "push", "reduce.join", "b"]  # nobody to wait for
