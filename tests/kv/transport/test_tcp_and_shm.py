import asyncio
import contextlib
import os
import socket

import pytest

from dsuf import wire
from dsuf.kv.arena import Arena
from dsuf.kv.channel import Identity
from dsuf.kv.control import ControlServer
from dsuf.kv.entries import Store
from dsuf.kv.peers import dial
from dsuf.kv.transport import shm as shm_module
from dsuf.kv.transport.base import Extent, Read, TransferFailed, TransportUnavailable
from dsuf.kv.transport.shm import ShmTransport
from dsuf.kv.transport.tcp import CONNECTIONS, TcpTransport, _deal, is_loopback

KEY, SLOT, SLOTS = b"k" * 32, 4096, 300
OWNER, READER, THIEF = (Identity(name, name, "here", b"n" * 32) for name in ("owner", "reader", "thief"))


class Twin:
    key = "owner@owner"

    def __init__(self, host="", offer=b""):
        self.host, self.offer = host, offer


@contextlib.asynccontextmanager
async def owner(folder):
    """(arena, tcp transport, shm transport, twin for tcp, twin for shm) of an owner that listens."""
    arena = Arena(SLOT * SLOTS, SLOT, 128)
    arena.view[:] = os.urandom(arena.nbytes)
    path = folder / "owner.sock"
    tcp, shm = TcpTransport(arena, dial, KEY, OWNER), ShmTransport(arena, path, KEY, OWNER)
    server = ControlServer(Store(arena, 1), {}, {"tcp": tcp.serve, "shm": shm.serve}, KEY, OWNER)
    listener = socket.create_server(("127.0.0.1", 0))
    server.listen(listener)
    server.listen(wire.listen(path))
    try:
        yield arena, tcp, shm, Twin(f"127.0.0.1:{listener.getsockname()[1]}"), Twin(offer=str(path).encode())
    finally:
        await server.close()
        arena.close()


def scattered(arena):
    """Ranges of odd sizes in odd places, and the same bytes."""
    reads = [Read(7 * SLOT, 0, 3 * SLOT), Read(100 * SLOT, 3 * SLOT, SLOT), Read(0, 90 * SLOT, SLOT)]
    return reads, [bytes(arena.view[read.remote : read.remote + read.length]) for read in reads]


@pytest.mark.parametrize("path", ["tcp", "shm"])
@pytest.mark.parametrize("connections", [1, CONNECTIONS])
def test_every_range_lands_where_it_should_and_nothing_else_changes(tmp_path, path, connections, monkeypatch):
    monkeypatch.setattr("dsuf.kv.transport.tcp.is_loopback", lambda host: connections == 1)

    async def story():
        async with owner(tmp_path) as (theirs, tcp, shm, tcp_twin, shm_twin):
            mine = Arena(SLOT * SLOTS, SLOT, 128)
            reader = {"tcp": TcpTransport, "shm": lambda a, _, k, m: ShmTransport(a, None, k, m)}[path](
                mine, dial, KEY, READER
            )
            link = await reader.link(tcp_twin if path == "tcp" else shm_twin)
            extents = [Extent(0, SLOT), Extent(7 * SLOT, 3 * SLOT), Extent(100 * SLOT, SLOT)]
            ticket = await (tcp if path == "tcp" else shm).expose("reader@reader#1", 5, extents)
            reads, expected = scattered(theirs)
            for _ in range(2):
                await link.read(ticket, reads)
            assert [bytes(mine.view[read.local : read.local + read.length]) for read in reads] == expected
            untouched = bytes(mine.view[4 * SLOT : 90 * SLOT]) + bytes(mine.view[91 * SLOT :])
            assert not any(untouched)
            await link.close()
            assert not link.alive

    asyncio.run(story())


@pytest.mark.parametrize(
    "attempt",
    ["another lease", "outside", "across the end", "other reader", "after revoke"],
)
def test_tcp_gives_a_reader_the_ranges_of_its_own_lease_only(tmp_path, attempt):
    async def story():
        async with owner(tmp_path) as (_, tcp, _, twin, _):
            mine = Arena(SLOT * SLOTS, SLOT, 128)
            link = await TcpTransport(mine, dial, KEY, THIEF if attempt == "other reader" else READER).link(twin)
            ticket = await tcp.expose("reader@reader#1", 5, [Extent(SLOT, SLOT)])
            read = {"outside": Read(0, 0, 100), "across the end": Read(2 * SLOT - 1, 0, 2)}.get(
                attempt, Read(SLOT, 0, SLOT)
            )
            if attempt == "another lease":
                ticket = (6).to_bytes(8, "little")
            if attempt == "after revoke":
                await tcp.revoke(5)
                await tcp.revoke(5)
            with pytest.raises(TransferFailed):
                await link.read(ticket, [read])
            assert not any(mine.view)

    asyncio.run(story())


def test_a_revoked_lease_is_cut_off_in_the_middle_of_a_transfer(tmp_path):
    async def story():
        async with owner(tmp_path) as (_, tcp, _, twin, _):
            sock = await dial(twin.host)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            from dsuf.kv.channel import Channel
            from dsuf.kv.transport.tcp import Data, Get

            stalled = Channel(sock)  # a reader that asks and then does not read
            await stalled.meet(KEY, READER, {}, "tcp")
            await tcp.expose("reader@reader#1", 5, [Extent(0, SLOT * SLOTS)])
            ranges = (0).to_bytes(8, "little") + (SLOT * SLOTS).to_bytes(8, "little")
            for _ in range(40):  # more than all buffers between them hold
                await stalled.send(Get(5, ranges))
            await stalled.receive(Data)
            await asyncio.sleep(0.05)
            await asyncio.wait_for(tcp.revoke(5), 1)
            assert not tcp._exposed
            stalled.close()

    asyncio.run(story())


def test_shm_refuses_ranges_outside_of_either_arena(tmp_path):
    async def story():
        async with owner(tmp_path) as (theirs, _, _, _, twin):
            mine = Arena(SLOT, SLOT, 128)
            link = await ShmTransport(mine, None, KEY, READER).link(twin)
            for read in (Read(theirs.nbytes, 0, 1), Read(-1, 0, 1), Read(0, mine.nbytes, 1), Read(0, -1, 1)):
                with pytest.raises(TransferFailed):
                    await link.read(b"", [read])

    asyncio.run(story())


def test_the_memory_of_a_peer_cannot_be_written(tmp_path):
    async def story():
        async with owner(tmp_path) as (_, _, _, _, twin):
            mine = Arena(SLOT, SLOT, 128)
            link = await ShmTransport(mine, None, KEY, READER).link(twin)
            with pytest.raises(TypeError):
                link._mapping[0] = 1

    asyncio.run(story())


def test_a_descriptor_that_could_shrink_is_not_mapped(tmp_path, monkeypatch):
    async def story():
        async with owner(tmp_path) as (_, _, _, _, twin):
            monkeypatch.setattr(shm_module, "SIZE_SEALS", 1 << 20)
            with pytest.raises(TransportUnavailable, match="shrink"):
                await ShmTransport(Arena(SLOT, SLOT, 128), None, KEY, READER).link(twin)

    asyncio.run(story())


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_nothing_is_given_without_the_key(tmp_path, path):
    async def story():
        async with owner(tmp_path) as (_, _, _, tcp_twin, shm_twin):
            mine = Arena(SLOT, SLOT, 128)
            with pytest.raises((TransferFailed, TransportUnavailable)):
                if path == "tcp":
                    await TcpTransport(mine, dial, b"x" * 32, READER).link(tcp_twin)
                else:
                    await ShmTransport(mine, None, b"x" * 32, READER).link(shm_twin)

    asyncio.run(story())


def test_after_an_abort_no_byte_arrives(tmp_path):
    async def story():
        async with owner(tmp_path) as (_, tcp, _, tcp_twin, shm_twin):
            mine = Arena(SLOT * SLOTS, SLOT, 128)
            await tcp.expose("reader@reader#1", 5, [Extent(0, SLOT * SLOTS)])
            links = [await TcpTransport(mine, dial, KEY, READER).link(tcp_twin)]
            links.append(await ShmTransport(mine, None, KEY, READER).link(shm_twin))
            for link in links:
                task = asyncio.create_task(link.read((5).to_bytes(8, "little"), [Read(0, 0, SLOT * SLOTS)]))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await link.abort()
                mine.view[: SLOT * SLOTS] = bytes(SLOT * SLOTS)
                await asyncio.sleep(0.05)
                assert not any(mine.view) and not link.alive

    asyncio.run(story())


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_reads_are_dealt_to_connections_evenly_and_whole(parts):
    reads = [Read(1000, 0, 10), Read(5000, 10, 1), Read(9000, 11, 90)]
    shares = _deal(reads, parts)
    assert len(shares) == parts
    covered = sorted((r.remote + i, r.local + i) for share in shares for r in share for i in range(r.length))
    assert covered == sorted((r.remote + i, r.local + i) for r in reads for i in range(r.length))
    assert max(sum(r.length for r in share) for share in shares) <= -(-101 // parts)


def test_what_is_loopback():
    assert all(map(is_loopback, ("127.0.0.1:5", "127.9.9.9:1", "[::1]:7", "localhost:0")))
    assert not any(map(is_loopback, ("192.0.2.1:5", "[2001:db8::1]:7", "example.org:80")))
