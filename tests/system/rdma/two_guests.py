"""Checks in two guests: the first owns, the second reads, over two wires between two Soft-RoCE ports each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

from dsuf.kv.transport.rdma import RdmaTransport, queue_pair, verbs
from tests.system.rdma.guests import NETWORKS
from tests.system.rdma.owner import SLOT_BYTES, Owner, RemoteOwner, make_arena, set_link, slot_reads
from tests.system.rdma.reader import Given, few_posted, refused, until, usable_ports

HOST = f"{NETWORKS[0]}.1"


async def owner() -> None:
    await Owner(HOST).serve()


@asynccontextmanager
async def prepare() -> AsyncIterator[Given]:
    arena = make_arena(filled=False)
    transport = RdmaTransport.open(arena)
    await transport.start()
    with few_posted():
        yield Given(arena, transport, await RemoteOwner.connect(HOST))
    await transport.close()


def _packets() -> list[int]:
    """Packets that came in at each port so far."""
    ports = (Path(f"/sys/class/infiniband/rxe{number}/ports/1/hw_counters/rcvd_pkts") for number in (0, 1))
    return [int(port.read_text()) for port in ports]


async def _read_all(given: Given) -> tuple[float, int]:
    """(seconds that a read of everything took over a new link, rails it lost); what came is compared."""
    slots = given.slots
    given.arena.view[:] = bytes(given.arena.nbytes)
    link = await given.link()
    lease, ticket = await given.lease(slots)
    started_s = time.perf_counter()
    await link.read(ticket, slot_reads(slots, slots[::-1]))
    seconds = time.perf_counter() - started_s
    assert [given.arena.digest(slot) for slot in slots[::-1]] == await given.owner.call("digests")
    assert link.alive
    await given.owner.call("revoke", lease)
    lost = sum(rail.lost for rail in link._rails)
    await link.close()
    return seconds, lost


async def check_64_megabytes_arrive_whole_over_both_ports(given: Given, notes: list[str]) -> None:
    before = _packets()
    with mock.patch.object(queue_pair, "DEPTH", verbs.DEPTH):
        seconds, _ = await _read_all(given)
    came = [after - earlier for after, earlier in zip(_packets(), before, strict=True)]
    notes.append(f"{given.arena.nbytes / seconds / 1e6:.0f} MB/s, packets by port {came}")
    assert min(came) > 0.3 * max(came)


async def check_a_port_lost_at_the_owner_mid_read_costs_nothing_but_time(given: Given, notes: list[str]) -> None:
    await _lose_a_port_mid_read("owner", given, notes)


async def check_a_port_lost_at_the_reader_mid_read_costs_nothing_but_time(given: Given, notes: list[str]) -> None:
    await _lose_a_port_mid_read("reader", given, notes)


async def check_a_reader_that_is_late_is_cut_off_mid_read(given: Given, notes: list[str]) -> None:
    link = await given.link()
    lease, ticket = await given.lease(given.slots)
    reading = await given.under_way(link, ticket)
    started_s = time.perf_counter()
    await given.owner.call("revoke", lease)
    with refused("refused the key or the range"):
        await reading
    notes.append(f"refused {(time.perf_counter() - started_s) * 1e3:.0f} ms after the lease was over")
    assert 0 < given.arrived() < given.arena.slots
    await link.close()


async def check_a_reader_whose_control_connection_ended_is_cut_off_mid_read(given: Given, notes: list[str]) -> None:
    other = await RemoteOwner.connect(HOST)
    link = await given.transport.link(other)
    _, ticket = await other.expose([(0, given.arena.slots * SLOT_BYTES)])
    reading = await given.under_way(link, ticket)
    started_s = time.perf_counter()
    other.close()
    with refused("the owner"):
        await reading
    notes.append(f"failed {(time.perf_counter() - started_s) * 1e3:.0f} ms after the connection was closed")
    await link.close()
    await given.new_link_works()


async def check_an_owner_whose_machine_dies_mid_read_is_noticed_within_four_seconds(
    given: Given, notes: list[str]
) -> None:
    link = await given.link()
    _, ticket = await given.lease(given.slots)
    reading = await given.under_way(link, ticket)
    started_s = time.perf_counter()
    await given.owner.call("reset")
    with refused("did not answer"):
        await reading
    seconds = time.perf_counter() - started_s
    notes.append(f"noticed after {seconds:.2f} s")
    assert seconds < 4
    await link.close()


async def _lose_a_port_mid_read(side: str, given: Given, notes: list[str]) -> None:
    async def lose() -> None:
        await until(lambda: given.arrived() > 0)
        await _set_link(side, False, given)

    losing = asyncio.create_task(lose())
    seconds, lost = await _read_all(given)
    notes.append(f"read everything in {seconds:.2f} s")
    await losing
    assert lost == 1, "the read was over before the port was lost"
    await _set_link(side, True, given)
    await until(lambda: usable_ports(given.transport.report()) == 2)
    while usable_ports(await given.owner.call("report")) != 2:
        await asyncio.sleep(0.1)
    given.owner.offer, _ = await given.owner.call("hello")


async def _set_link(side: str, up: bool, given: Given) -> None:
    if side == "owner":
        await given.owner.call("set_link", up)
    else:
        set_link(up)
