"""Checks in one guest: owner and reader are two processes, over both Soft-RoCE ports."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from dsuf.kv.transport.rdma import RdmaTransport
from dsuf.kv.transport.rdma.messages import Ticket, decode, encode
from tests.system.rdma.guests import NETWORKS
from tests.system.rdma.owner import SLOT_BYTES, Owner, RemoteOwner, make_arena, slot_reads
from tests.system.rdma.reader import Given, few_posted, refused, until, usable_ports

HOST = f"{NETWORKS[0]}.1"


def _serve() -> None:
    async def serve() -> None:
        await Owner(HOST).serve()

    asyncio.run(serve())


def prepare() -> AbstractAsyncContextManager[Given]:
    process = multiprocessing.get_context("fork").Process(target=_serve)
    process.start()
    return _prepared(process)


@asynccontextmanager
async def _prepared(process: multiprocessing.Process) -> AsyncIterator[Given]:
    arena = make_arena(filled=False)
    transport = RdmaTransport.open(arena)
    await transport.start()
    yield Given(arena, transport, await RemoteOwner.connect(HOST))
    await transport.close()
    process.kill()


async def check_both_ports_are_found_with_their_ipv4_addresses(given: Given, notes: list[str]) -> None:
    notes += given.transport.report()
    assert len(given.transport.report()) == 2
    for number, network in enumerate(NETWORKS):
        [line] = [line for line in given.transport.report() if f"rxe{number}:1" in line]
        first, second, third = map(int, network.split("."))
        assert f"ffff:{first:02x}{second:02x}:{third:02x}01" in line and f"on eth{number}" in line
        assert "roce-ipv4" in line and "keys by memory windows" in line


async def check_64_megabytes_arrive_scattered_and_whole(given: Given, notes: list[str]) -> None:
    slots = given.slots
    scattered = slots.copy()
    random.Random(1).shuffle(scattered)
    started_s = time.perf_counter()
    link = await given.link()
    connected_s = time.perf_counter()
    lease, ticket = await given.lease(slots)
    await link.read(ticket, slot_reads(slots, scattered))
    read_s = time.perf_counter()
    digests = await given.owner.call("digests")
    assert [given.arena.digest(slot) for slot in scattered] == digests
    moved = len(slots) * SLOT_BYTES
    notes.append(f"connected in {(connected_s - started_s) * 1e3:.0f} ms")
    notes.append(
        f"{moved / 1e6:.1f} MB in {read_s - connected_s:.2f} s, {moved / (read_s - connected_s) / 1e6:.0f} MB/s"
    )
    await given.owner.call("revoke", lease)
    await link.close()


async def check_a_lease_is_read_twice_and_by_two_links(given: Given, notes: list[str]) -> None:
    digests = await given.owner.call("digests")
    links = [await given.link(), await given.link()]
    lease, ticket = await given.lease([5, 6, 9])
    for round_ in range(2):
        for number, link in enumerate(links):
            local = 10 * round_ + 3 * number
            await link.read(ticket, slot_reads([9, 6, 5], [local, local + 1, local + 2]))
            assert [given.arena.digest(local + i) for i in range(3)] == [digests[9], digests[6], digests[5]]
    assert all(link.alive for link in links)
    await given.owner.call("revoke", lease)
    for link in links:
        await link.close()


async def check_a_lease_in_many_pieces_has_a_key_for_each(given: Given, notes: list[str]) -> None:
    slots = list(range(0, given.arena.slots, 2))
    link = await given.link()
    lease, ticket = await given.lease(slots)
    started_s = time.perf_counter()
    await link.read(ticket, slot_reads(slots[:1], [1]))
    notes.append(f"{2 * len(slots)} windows and one page in {(time.perf_counter() - started_s) * 1e3:.0f} ms")
    await link.read(ticket, slot_reads(slots, slots))
    digests = await given.owner.call("digests")
    assert [given.arena.digest(slot) for slot in slots] == [digests[slot] for slot in slots]
    started_s = time.perf_counter()
    await given.owner.call("revoke", lease)
    notes.append(f"revoked in {(time.perf_counter() - started_s) * 1e3:.0f} ms")
    await link.close()


async def check_bytes_outside_the_lease_are_not_asked_for(given: Given, notes: list[str]) -> None:
    link = await given.link()
    lease, ticket = await given.lease([5])
    with refused("does not cover"):
        await link.read(ticket, slot_reads([6], [0]))
    assert link.alive
    await link.close()
    await given.owner.call("revoke", lease)


async def check_a_read_past_the_arena_is_refused_by_the_adapter(given: Given, notes: list[str]) -> None:
    link = await given.link()
    _, ticket = await given.lease([5])
    # The reader claims that its window is larger than what the owner bound. Soft-RoCE checks the bounds of the memory
    # behind a window and not the window's, so the claim goes past the arena.
    forged = encode(Ticket(decode(ticket, Ticket).lease, [(0, given.owner.nbytes + 2 * SLOT_BYTES)]))
    started_s = time.perf_counter()
    with refused("refused the key or the range"):
        await link.read(forged, slot_reads([-(-given.owner.nbytes // SLOT_BYTES)], [0]))
    notes.append(f"refused after {(time.perf_counter() - started_s) * 1e3:.1f} ms")
    assert [rail.lost for rail in link._rails] == [True, False]  # it was not tried again on the other
    await link.close()
    await given.new_link_works()


async def check_a_key_is_refused_once_its_lease_is_over(given: Given, notes: list[str]) -> None:
    link = await given.link()
    lease, ticket = await given.lease([5])
    await link.read(ticket, slot_reads([5], [0]))
    await given.owner.call("revoke", lease)
    started_s = time.perf_counter()
    with refused("refused the key or the range"):
        await link.read(ticket, slot_reads([5], [1]))
    notes.append(f"refused after {(time.perf_counter() - started_s) * 1e3:.1f} ms")
    await link.close()
    await given.new_link_works()


async def check_a_key_is_refused_over_the_queue_pair_of_another_link(given: Given, notes: list[str]) -> None:
    link, thief = await given.link(), await given.link()
    lease, ticket = await given.lease([5])
    await link.read(ticket, slot_reads([5], [0]))
    for own, stolen in zip(thief._rails, link._rails, strict=True):
        own.keys = stolen.keys
    thief._lease = lease
    with refused("refused the key or the range"):
        await thief.read(ticket, slot_reads([5], [1]))
    await thief.close()
    await link.read(ticket, slot_reads([5], [2]))  # whose key it is does not notice
    await link.close()
    await given.owner.call("revoke", lease)


async def check_a_lease_that_is_over_is_not_opened(given: Given, notes: list[str]) -> None:
    link = await given.link()
    lease, ticket = await given.lease([5])
    await given.owner.call("revoke", lease)
    with refused("lease or link is over"):
        await link.read(ticket, slot_reads([5], [0]))
    assert link.alive
    await link.close()


async def check_another_peer_cannot_open_the_lease(given: Given, notes: list[str]) -> None:
    other = await RemoteOwner.connect(HOST)
    link = await given.transport.link(other)
    lease, ticket = await given.lease([5])
    with refused("lease or link is over"):
        await link.read(ticket, slot_reads([5], [0]))
    await link.close()
    other.close()
    await given.owner.call("revoke", lease)


async def check_nothing_arrives_after_an_abort(given: Given, notes: list[str]) -> None:
    link, slots = await given.link(), given.slots
    _, ticket = await given.lease(slots)
    with few_posted():
        reading = await given.under_way(link, ticket)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        started_s = time.perf_counter()
        await link.abort()
    notes.append(f"abort took {(time.perf_counter() - started_s) * 1e3:.1f} ms")
    notes.append(f"{given.arrived()} of {len(slots)} pages had arrived")
    assert 0 < given.arrived() < len(slots), f"{given.arrived()} of {len(slots)} pages had arrived"
    given.arena.view[:] = bytes(given.arena.nbytes)
    await asyncio.sleep(0.5)
    assert given.arrived() == 0
    assert not link.alive
    with refused("given up"):
        await link.read(ticket, slot_reads([5], [0]))
    await given.new_link_works()


async def check_a_device_without_memory_windows_registers_the_range(given: Given, notes: list[str]) -> None:
    await given.owner.call("windows", False)
    link = await given.link()
    lease, ticket = await given.lease([5, 7])
    await link.read(ticket, slot_reads([7], [0]))
    assert given.arena.digest(0) == (await given.owner.call("digests"))[7]
    await given.owner.call("revoke", lease)
    with refused("refused the key or the range"):
        await link.read(ticket, slot_reads([5], [1]))
    await link.close()
    await given.owner.call("windows", True)


async def check_a_port_that_goes_down_and_comes_back_is_noticed(given: Given, notes: list[str]) -> None:
    await given.owner.call("set_link", False)
    await until(lambda: any("rxe1:1 is DOWN" in line for line in given.transport.report()))
    notes += given.transport.report()
    given.owner.offer, _ = await given.owner.call("hello")
    link = await given.link()
    assert len(link._rails) == 1
    await link.close()
    await given.owner.call("set_link", True)
    await until(lambda: usable_ports(given.transport.report()) == 2)
    given.owner.offer, _ = await given.owner.call("hello")
    await given.new_link_works()


async def check_an_owner_killed_mid_read_is_noticed_within_four_seconds(given: Given, notes: list[str]) -> None:
    link, slots = await given.link(), given.slots
    _, ticket = await given.lease(slots)
    with few_posted():
        reading = await given.under_way(link, ticket)
        await given.owner.call("die")
        died_s = time.perf_counter()
        with refused("did not answer"):
            await reading
    noticed_s = time.perf_counter() - died_s
    notes.append(f"noticed {noticed_s:.2f} s after the kill")
    assert noticed_s < 4
    await link.close()
