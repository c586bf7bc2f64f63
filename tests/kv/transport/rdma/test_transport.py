import asyncio
from types import SimpleNamespace

import pytest

from dsuf.kv.transport.base import TransferFailed, TransportUnavailable
from dsuf.kv.transport.rdma.messages import Hello, Offer, OfferedPort, encode
from dsuf.kv.transport.rdma.owner import RdmaOwner
from dsuf.kv.transport.rdma.transport import RdmaTransport


class FakePair:
    def __init__(self, port, joins):
        self.port, self.joins, self.joined, self.closed, self.reason = port, joins, None, False, None
        self.device = SimpleNamespace(max_segments=16)

    idle = True

    def join(self, gid, hello):
        if not self.joins:
            raise TransferFailed(f"{self.port} cannot connect")
        self.joined = hello

    def fail(self, reason):
        self.reason = self.reason or reason

    def close(self):
        self.closed, self.reason = True, self.reason or "closed"


class FakeRails:
    """Ports of these names, each with one address; a queue pair's number is its place in `pairs`."""

    def __init__(self, *names, gbps=400):
        self.names, self.gbps, self.pairs, self.unreachable = list(names), gbps, [], set()

    def offered(self):
        return [OfferedPort(name, ["roce-ipv4"], self.gbps) for name in self.names]

    def report(self):
        return self.names

    def make_pair(self, name, kind, *, serves):
        self.pairs.append(FakePair(name, name not in self.unreachable))
        return self.pairs[-1], Hello(kind, name, 0, len(self.pairs), 0, 5, 16), None


def transport(*names, **more):
    rails = FakeRails(*names, **more)
    return RdmaTransport(rails, RdmaOwner(rails, 4096)), rails


class Peer:
    key, host = "owner@1", "there:7"

    def __init__(self, owner):
        self.owner, self.offer = owner, owner.offer()

    async def ask(self, body):
        return await self.owner.answer("reader@1#1", body)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_a_link_joins_both_ends_of_every_pair_of_ports():
    async def scenario():
        (reader, own), (owner, theirs) = transport("a0", "a1", gbps=200), transport("b0", "b1", "b2")
        link = await reader.link(Peer(owner))
        assert [pair.joined.gid for pair in own.pairs] == ["b0", "b1"]
        assert [pair.joined.gid for pair in theirs.pairs] == ["a0", "a1"]
        assert [(rail.name, rail.gbps) for rail in link._rails] == [("a0-b0", 200), ("a1-b1", 200)]
        assert link.alive

    run(scenario())


@pytest.mark.parametrize("lame", ["reader", "owner"])
def test_a_pair_of_ports_that_do_not_reach_each_other_is_left_out(lame):
    async def scenario():
        (reader, own), (owner, theirs) = transport("a0", "a1"), transport("b0", "b1")
        (own if lame == "reader" else theirs).unreachable = {"a0", "b0"}
        link = await reader.link(Peer(owner))
        assert [(rail.index, rail.name) for rail in link._rails] == [(1, "a1-b1")]
        assert own.pairs[0].closed and not own.pairs[1].closed

    run(scenario())


def test_when_no_pair_reaches_the_link_fails_and_leaves_nothing():
    async def scenario():
        (reader, own), (owner, theirs) = transport("a0"), transport("b0")
        own.unreachable = {"a0"}
        with pytest.raises(TransferFailed, match="a0 cannot connect"):
            await reader.link(Peer(owner))
        assert own.pairs[0].closed and not theirs.pairs[0].closed
        own.unreachable = set()
        await reader.link(Peer(owner))
        assert theirs.pairs[0].closed  # it was told with the next link

    run(scenario())


def test_the_owner_is_told_which_links_have_ended():
    async def scenario():
        (reader, _), (owner, theirs) = transport("a0"), transport("b0")
        peer = Peer(owner)
        first, second = await reader.link(peer), await reader.link(peer)
        await first.close()
        await second.abort()
        await reader.link(peer)
        assert [pair.closed for pair in theirs.pairs] == [True, True, False]

    run(scenario())


def test_a_control_connection_that_breaks_closes_what_was_made():
    async def scenario():
        (reader, own), (owner, _) = transport("a0"), transport("b0")
        peer = Peer(owner)

        async def broken(body):
            raise TransferFailed("the owner hung up")

        peer.ask = broken
        with pytest.raises(TransferFailed, match="hung up"):
            await reader.link(peer)
        assert own.pairs[0].closed

    run(scenario())


def test_peers_without_a_port_in_common_or_of_another_version_are_not_linked():
    async def scenario():
        (reader, own), (owner, _) = transport("a0"), transport("b0")
        peer = Peer(owner)
        for offer in (
            Offer(1, [OfferedPort("b0", ["ib"], 400)]),
            Offer(1, []),
            Offer(2, [OfferedPort("b0", ["roce-ipv4"], 400)]),
        ):
            peer.offer = encode(offer)
            with pytest.raises(TransportUnavailable, match="no port here reaches one of there:7"):
                await reader.link(peer)
        assert own.pairs == []

    run(scenario())


def test_a_machine_whose_ports_are_not_usable_yet_offers_nothing_and_says_why():
    reader, rails = transport()
    assert reader.offer() is None
    rails.names = ["a0"]
    assert reader.offer() == encode(Offer(1, [OfferedPort("a0", ["roce-ipv4"], 400)]))
    assert reader.report() == ["rdma: a0"]
