import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsuf.kv.transport.base import Read, TransferFailed
from dsuf.kv.transport.rdma import link as module
from dsuf.kv.transport.rdma.link import Rail, RdmaLink, split
from dsuf.kv.transport.rdma.messages import Keys, Open, Ticket, decode, encode
from dsuf.kv.transport.rdma.queue_pair import FLUSHED, REMOTE_ACCESS, RETRIES_EXCEEDED, SUCCESS

MIB = 1 << 20
ADDRESS = 1 << 40


class FakePair:
    """Keeps what is posted until the test completes it."""

    def __init__(self, depth=4):
        self.reason, self.depth, self.posted, self.seen, self.closed = None, depth, [], [], False

    @property
    def room(self):
        return self.depth - len(self.posted) if self.reason is None else 0

    @property
    def idle(self):
        return not self.posted

    def post_read(self, address, key, segments, done):
        assert self.room > 0 and not self.closed
        self.seen.append((address, key, tuple(segments)))
        self.posted.append(done)

    def complete(self, status=SUCCESS, count=1):
        for _ in range(count):
            if status != SUCCESS:
                self.reason = self.reason or f"status {status}"
            self.posted.pop(0)(status)

    def break_down(self, status=RETRIES_EXCEEDED):
        """The first names the cause, the rest comes back flushed; none of what is given back lands here again."""
        self.complete(status)
        while self.posted:
            self.complete(FLUSHED)

    def fail(self, reason):
        self.reason = self.reason or reason
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self):
        while self.posted:
            self.complete(FLUSHED)

    def close(self):
        self.closed, self.reason = True, self.reason or "closed"
        self._flush()


class Owner:
    """Answers Open with one key a rail and range."""

    key, host, offer = "owner@1", "there:1", b""

    def __init__(self, rails, windows=1):
        self.rails, self.windows, self.asked = rails, windows, []

    async def ask(self, body):
        self.asked.append(decode(body, Open))
        return encode(Keys([[100 * rail + window for window in range(self.windows)] for rail in range(self.rails)]))


def make(pairs, rates=None, windows=1):
    owner, ended = Owner(len(pairs), windows), []
    rails = [
        Rail(index, f"rail{index}", pair, rate)
        for index, (pair, rate) in enumerate(zip(pairs, rates or [100] * len(pairs), strict=True))
    ]
    return RdmaLink(owner, 7, ADDRESS, rails, 16, ended.append), owner, ended


def ticket(*windows):
    return encode(Ticket(5, list(windows)))


def reading(link, nbytes, start=0):
    return asyncio.create_task(link.read(ticket((0, 64 * MIB)), [Read(start, 0, nbytes)]))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_a_read_is_done_when_all_requests_have_come():
    async def scenario():
        pair = FakePair()
        link, owner, _ = make([pair])
        task = reading(link, 6 * MIB)
        await settle()
        assert owner.asked == [Open(7, 5)]
        assert len(pair.posted) == 4  # no more than it has room for
        pair.complete(count=4)
        await settle()
        assert not task.done() and len(pair.posted) == 2
        pair.complete(count=2)
        await task
        assert [address - ADDRESS for address, _, _ in pair.seen] == [i * MIB for i in range(6)]

    run(scenario())


def test_requests_are_dealt_by_rate():
    async def scenario():
        slow, fast = FakePair(64), FakePair(64)
        link, _, _ = make([slow, fast], rates=[100, 300])
        task = reading(link, 32 * MIB)
        await settle()
        assert (len(slow.posted), len(fast.posted)) == (8, 24)
        slow.complete(count=8)
        fast.complete(count=24)
        await task

    run(scenario())


def test_each_rail_reads_with_its_own_key():
    async def scenario():
        pairs = [FakePair(), FakePair()]
        link, _, _ = make(pairs, windows=2)
        task = asyncio.create_task(
            link.read(ticket((0, MIB), (5 * MIB, MIB)), [Read(0, 0, MIB), Read(5 * MIB, MIB, MIB)])
        )
        await settle()
        keys = {key for pair in pairs for _, key, _ in pair.seen}
        assert keys == {0, 101}  # window 0 on rail 0, window 1 on rail 1
        for pair in pairs:
            pair.complete()
        await task

    run(scenario())


def test_a_dead_rail_gives_its_requests_to_the_others():
    async def scenario():
        dying, other = FakePair(), FakePair()
        link, _, _ = make([dying, other])
        task = reading(link, 8 * MIB)
        await settle()
        dying.break_down()
        while other.posted:
            other.complete()
        await task
        wanted = {ADDRESS + i * MIB for i in range(8)}
        assert {address for address, _, _ in other.seen} == wanted
        assert link.alive

    run(scenario())


def test_a_request_is_repeated_only_once():
    async def scenario():
        pairs = [FakePair(), FakePair(), FakePair()]
        link, _, _ = make(pairs)
        task = reading(link, MIB)
        await settle()
        pairs[0].break_down()
        pairs[1].break_down()
        with pytest.raises(TransferFailed, match="rail1: status 12"):
            await task
        assert not pairs[2].seen and link.alive

    run(scenario())


def test_a_link_without_rails_is_dead():
    async def scenario():
        pair = FakePair()
        link, _, _ = make([pair])
        task = reading(link, 8 * MIB)
        await settle()
        pair.break_down()
        with pytest.raises(TransferFailed, match="rail0: status 12"):
            await task
        assert not link.alive

    run(scenario())


def test_a_refused_key_is_not_tried_on_another_rail_and_fails_when_nothing_is_on_its_way():
    async def scenario():
        refused, other = FakePair(), FakePair()
        link, _, _ = make([refused, other])
        task = reading(link, 8 * MIB)
        await settle()
        refused.break_down(REMOTE_ACCESS)
        await settle()
        assert not task.done() and len(other.posted) == 4
        other.complete(count=4)
        with pytest.raises(TransferFailed, match="status 10"):
            await task
        assert len(other.seen) == 4

    run(scenario())


def test_a_lost_rail_makes_the_link_end_after_a_while(monkeypatch):
    async def scenario():
        now = [1000.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        pairs = [FakePair(), FakePair()]
        link, _, _ = make(pairs)
        task = reading(link, 2 * MIB)
        await settle()
        pairs[0].break_down()
        while pairs[1].posted:
            pairs[1].complete()
        await task
        assert link.alive
        now[0] += module.REJOIN_S
        assert not link.alive

    run(scenario())


def test_an_abort_waits_for_what_is_on_its_way_and_ends_the_link():
    async def scenario():
        pair = FakePair()
        link, _, ended = make([pair])
        task = reading(link, 8 * MIB)
        await settle()
        task.cancel()
        await settle()
        assert len(pair.posted) == 4
        await link.abort()
        assert pair.closed and pair.idle and not link.alive and ended == [7]
        assert len(pair.seen) == 4  # what waited was dropped
        with pytest.raises(TransferFailed, match="given up"):
            await reading(link, MIB)

    run(scenario())


def test_an_abort_fails_the_read_under_way():
    async def scenario():
        pairs = [FakePair(), FakePair()]
        link, _, _ = make(pairs)
        task = reading(link, 8 * MIB)
        await settle()
        await link.abort()
        with pytest.raises(TransferFailed, match="given up"):
            await task

    run(scenario())


def test_an_adapter_that_does_not_flush_is_closed(monkeypatch):
    async def scenario():
        monkeypatch.setattr(module, "FLUSH_S", 0.01)
        pair = FakePair()
        pair.fail = lambda reason: None
        link, _, _ = make([pair])
        task = reading(link, MIB)
        await settle()
        await link.abort()
        assert pair.closed and pair.idle
        with pytest.raises(TransferFailed):
            await task

    run(scenario())


def test_a_link_is_closed_once():
    async def scenario():
        pair = FakePair()
        link, _, ended = make([pair])
        await link.close()
        await link.close()
        await link.abort()
        assert ended == [7] and pair.closed

    run(scenario())


def test_too_few_keys_or_a_torn_ticket_fail_the_read():
    async def scenario():
        link, owner, _ = make([FakePair()])
        owner.windows = 2
        with pytest.raises(TransferFailed, match="one key"):
            await reading(link, MIB)
        with pytest.raises(TransferFailed, match="cannot be read"):
            await link.read(b"\x93", [Read(0, 0, 1)])
        owner.windows = 0  # the rail is out at the owner
        with pytest.raises(TransferFailed, match="not opened"):
            await reading(link, MIB)

    run(scenario())


def test_keys_are_asked_for_once_a_lease():
    async def scenario():
        pair = FakePair()
        link, owner, _ = make([pair])
        for lease in (5, 5, 6):
            task = asyncio.create_task(link.read(encode(Ticket(lease, [(0, MIB)])), [Read(0, 0, MIB)]))
            await settle()
            pair.complete()
            await task
        assert owner.asked == [Open(7, 5), Open(7, 6)]

    run(scenario())


def test_a_request_that_cannot_be_posted_fails_the_read():
    async def scenario():
        pair = FakePair()
        link, _, _ = make([pair])

        def refuse(*arguments):
            raise TransferFailed("no room in the adapter")

        pair.post_read = refuse
        with pytest.raises(TransferFailed, match="no room"):
            await reading(link, MIB)

    run(scenario())


def test_nothing_to_read_asks_nobody():
    async def scenario():
        link, owner, _ = make([FakePair()])
        await link.read(ticket(), [])
        assert owner.asked == []

    run(scenario())


def test_neighbours_share_a_request_and_a_long_read_is_cut():
    reads = [Read(0, 9000, 100), Read(100, 5000, 100), Read(300, 0, 250)]
    requests = list(split(reads, [(0, 1000)], 128, 4))
    assert [(r.remote, r.length, r.segments) for r in requests] == [
        (0, 128, [(9000, 100), (5000, 28)]),
        (128, 72, [(5028, 72)]),
        (300, 128, [(0, 128)]),
        (428, 122, [(128, 122)]),
    ]


@pytest.mark.parametrize("read", [Read(99, 0, 2), Read(150, 0, 1), Read(200, 0, 11), Read(0, 0, 101)])
def test_bytes_outside_the_windows_are_never_asked_for(read):
    with pytest.raises(TransferFailed, match="does not cover"):
        list(split([read], [(0, 100), (200, 10)], MIB, 4))


@given(st.data())
def test_requests_are_the_reads_and_break_no_limit(data):
    cuts = sorted(data.draw(st.sets(st.integers(1, 999), max_size=6)))
    edges = [0, *cuts, 1000]
    windows = [(a, b - a) for a, b in itertools.pairwise(edges)]
    lengths = data.draw(st.lists(st.integers(1, 200), max_size=8))
    reads = []
    for number, length in enumerate(lengths):
        remote = data.draw(st.integers(0, 1000 - length))
        reads.append(Read(remote, number * 1000, length))
    max_request, max_segments = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 512)
        requests = list(split(reads, windows, max_request, max_segments))
    wanted = [(read.remote + i, read.local + i) for read in reads for i in range(read.length)]
    got = []
    for request in requests:
        start, length = windows[request.window]
        assert start <= request.remote and request.remote + request.length <= start + length
        assert request.length <= max_request and 1 <= len(request.segments) <= max_segments
        at = request.remote
        for offset, size in request.segments:
            assert offset // 512 == (offset + size - 1) // 512
            got += [(at + i, offset + i) for i in range(size)]
            at += size
        assert at == request.remote + request.length
    assert got == wanted
