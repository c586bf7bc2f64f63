import asyncio
import functools

import pytest

from dsuf.kv.transport.base import Extent, TransferFailed
from dsuf.kv.transport.rdma import owner as module
from dsuf.kv.transport.rdma.messages import Connect, Connected, Hello, Keys, OfferedPort, Open, Ticket, decode, encode
from dsuf.kv.transport.rdma.owner import RdmaOwner

HELLO = Hello("roce-ipv4", "gid", 0, 1, 2, 5, 16)


class FakeWindow:
    def __init__(self, pair, rkey):
        self.pair, self.rkey, self.closed = pair, rkey, False

    def close(self):
        assert not self.pair.closed, "windows are closed before their queue pair"
        self.closed = True


class FakePair:
    def __init__(self, port, joins):
        self.port, self.joins, self.closed, self.windows = port, joins, False, []
        self.bind_s = 0

    def join(self, gid, hello):
        if not self.joins:
            raise TransferFailed(f"{self.port} cannot connect")

    async def open_windows(self, ranges):
        windows = [FakeWindow(self, 1000 * id(self) + offset) for offset, _ in ranges]
        self.windows += windows
        try:
            await asyncio.sleep(self.bind_s)
        except asyncio.CancelledError:
            for window in windows:
                window.close()
            raise
        return windows

    def close(self):
        self.closed = True


class FakeRails:
    def __init__(self, *names):
        self.names, self.pairs, self.unreachable = names, [], set()

    def offered(self):
        return [OfferedPort(name, ["roce-ipv4"], 400) for name in self.names]

    def report(self):
        return list(self.names)

    def make_pair(self, name, kind, *, serves):
        assert serves
        if name not in self.names:
            raise TransferFailed(f"no port {name}")
        self.pairs.append(FakePair(name, name not in self.unreachable))
        return self.pairs[-1], HELLO, None


def scenario(story):
    """Run an async test in a loop of its own, for 10 s at most."""

    @functools.wraps(story)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(story(**fixtures), 10))

    return run


async def linked(*ports):
    """(rails, owner, link of reader a#1)."""
    rails = FakeRails(*ports)
    owner = RdmaOwner(rails, 0)
    return rails, owner, (await connect(owner, ports=ports)).link


async def connect(owner, peer="a#1", ports=("p0",), closed=()):
    body = encode(Connect([(port, HELLO) for port in ports], list(closed)))
    return decode(await owner.answer(peer, body), Connected)


async def open_(owner, link, lease, peer="a#1"):
    return decode(await owner.answer(peer, encode(Open(link, lease))), Keys).rails


@scenario
async def test_a_link_gets_a_key_for_each_range_and_rail():
    owner = RdmaOwner(FakeRails("p0", "p1"), 4096)
    reply = await connect(owner, ports=("p0", "p1"))
    assert reply.address == 4096 and reply.rails == [HELLO, HELLO]
    ticket = decode(await owner.expose("a#1", 9, [Extent(300, 10), Extent(100, 20)]), Ticket)
    assert ticket.windows == [(100, 20), (300, 10)]
    keys = await open_(owner, reply.link, 9)
    assert [len(rail) for rail in keys] == [2, 2]
    assert await open_(owner, reply.link, 9) == keys  # the same lease again, no new windows
    assert sum(len(pair.windows) for pair in owner._rails.pairs) == 4


@scenario
async def test_revoking_a_lease_closes_its_windows_and_no_other():
    rails, owner, link = await linked("p0")
    for lease in (1, 2):
        await owner.expose("a#1", lease, [Extent(lease * 100, 10)])
        await open_(owner, link, lease)
    await owner.revoke(1)
    await owner.revoke(1)
    assert [window.closed for window in rails.pairs[0].windows] == [True, False]
    with pytest.raises(TransferFailed, match="over"):
        await open_(owner, link, 1)


@scenario
async def test_a_lease_or_a_link_of_another_peer_is_not_opened():
    owner = RdmaOwner(FakeRails("p0"), 0)
    mine, theirs = (await connect(owner, "a#1")).link, (await connect(owner, "b#1")).link
    await owner.expose("a#1", 1, [Extent(0, 10)])
    for peer, link in (("b#1", theirs), ("b#1", mine), ("a#1", theirs)):
        with pytest.raises(TransferFailed, match="over"):
            await open_(owner, link, 1, peer)


@scenario
async def test_when_a_peer_is_gone_its_windows_then_its_queue_pairs_go():
    rails, owner, link = await linked("p0")
    other = (await connect(owner, "b#1")).link
    await owner.expose("a#1", 1, [Extent(0, 10)])
    await open_(owner, link, 1)
    await owner.gone("a#1")
    await owner.gone("a#1")
    assert rails.pairs[0].windows[0].closed and rails.pairs[0].closed and not rails.pairs[1].closed
    await owner.expose("b#1", 2, [Extent(0, 10)])
    assert await open_(owner, other, 2, "b#1")


@scenario
async def test_links_that_the_reader_has_ended_are_closed_with_its_next_one():
    rails, owner, first = await linked("p0")
    theirs = (await connect(owner, "b#1")).link
    await owner.expose("a#1", 1, [Extent(0, 10)])
    await open_(owner, first, 1)
    second = (await connect(owner, closed=[first, theirs, 999])).link
    assert [pair.closed for pair in rails.pairs] == [True, False, False]
    assert await open_(owner, second, 1)  # the lease itself goes on


@scenario
async def test_a_peer_that_forgets_to_end_its_links_loses_the_oldest(monkeypatch):
    monkeypatch.setattr(module, "MAX_LINKS", 3)
    rails = FakeRails("p0")
    owner = RdmaOwner(rails, 0)
    for _ in range(5):
        await connect(owner)
    assert [pair.closed for pair in rails.pairs] == [True, True, False, False, False]


@scenario
async def test_a_rail_that_cannot_be_joined_is_left_out_and_without_any_the_link_fails():
    rails = FakeRails("p0", "p1")
    rails.unreachable = {"p0"}
    owner = RdmaOwner(rails, 0)
    reply = await connect(owner, ports=("p0", "p1", "p7"))
    assert reply.rails == [None, HELLO, None] and rails.pairs[0].closed
    await owner.expose("a#1", 1, [Extent(0, 10)])
    assert [len(rail) for rail in await open_(owner, reply.link, 1)] == [0, 1, 0]
    with pytest.raises(TransferFailed, match="none of the ports"):
        await connect(owner, ports=("p0",))


@scenario
async def test_a_port_is_not_given_twice_to_one_link():
    rails = FakeRails("p0")
    with pytest.raises(TransferFailed, match="twice"):
        await connect(RdmaOwner(rails, 0), ports=("p0", "p0"))
    assert rails.pairs == []


@scenario
async def test_a_rail_that_does_not_bind_in_time_has_no_keys(monkeypatch):
    monkeypatch.setattr(module, "BIND_S", 0.01)
    rails, owner, link = await linked("p0", "p1")
    rails.pairs[0].bind_s = 5
    await owner.expose("a#1", 1, [Extent(0, 10)])
    assert [len(rail) for rail in await open_(owner, link, 1)] == [0, 1]
    rails.pairs[1].bind_s = 5
    await owner.expose("a#1", 2, [Extent(0, 10)])
    with pytest.raises(TransferFailed, match="no rail"):
        await open_(owner, link, 2)


@scenario
async def test_a_lease_revoked_while_it_is_opened_leaves_no_window():
    rails, owner, link = await linked("p0")
    rails.pairs[0].bind_s = 0.01
    await owner.expose("a#1", 1, [Extent(0, 10), Extent(20, 10)])
    opening = asyncio.create_task(open_(owner, link, 1))
    await asyncio.sleep(0.005)
    await owner.revoke(1)
    assert len(rails.pairs[0].windows) == 2 and all(window.closed for window in rails.pairs[0].windows)
    with pytest.raises(TransferFailed):
        await opening


@scenario
async def test_an_opening_that_is_cancelled_leaves_no_window_open():
    rails, owner, link = await linked("p0")
    rails.pairs[0].bind_s = 0.01
    await owner.expose("a#1", 1, [Extent(0, 10), Extent(20, 10)])
    opening = asyncio.create_task(open_(owner, link, 1))
    await asyncio.sleep(0.005)
    opening.cancel()
    await asyncio.sleep(0)
    await owner.revoke(1)
    assert rails.pairs[0].windows and all(window.closed for window in rails.pairs[0].windows)


def test_ranges_are_joined_and_cut_at_registered_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    extents = [Extent(250, 10), Extent(30, 20), Extent(50, 160), Extent(40, 5), Extent(400, 0)]
    assert module._windows(extents) == [(30, 70), (100, 100), (200, 10), (250, 10)]


@scenario
async def test_too_many_ranges_are_left_to_another_path(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEYS", 5)
    owner = RdmaOwner(FakeRails("p0", "p1"), 0)
    await owner.expose("a#1", 1, [Extent(i * 100, 10) for i in range(2)])
    with pytest.raises(TransferFailed, match="too many keys"):
        await owner.expose("a#1", 2, [Extent(i * 100, 10) for i in range(3)])


@scenario
async def test_closing_leaves_nothing():
    rails, owner, link = await linked("p0")
    await owner.expose("a#1", 1, [Extent(0, 10)])
    await open_(owner, link, 1)
    await owner.close()
    assert rails.pairs[0].closed and rails.pairs[0].windows[0].closed
