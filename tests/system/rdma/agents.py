"""Checks in two guests: an agent in each, and a conversation of the first that the second pulls over RDMA.

The engine is the stand-in of `tests.kv.fleet`, here with pages of the full-width model's size.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import redis.asyncio

from dsuf.kv.agent import Agent, AgentOptions
from dsuf.kv.embedded import server_binary
from tests.kv import fleet
from tests.system.rdma.guests import NETWORKS
from tests.system.rdma.owner import SLOT_BYTES, set_link

OWNER, READER = (f"{NETWORKS[0]}.{number}" for number in (1, 2))
REDIS = f"redis://{OWNER}:6379"
FOLDER = Path("/dev/shm")
TOKENS = 6_000
CONVERSATIONS = 3


def _options(address: str) -> AgentOptions:
    key = FOLDER / "fleet.key"
    key.write_text("one key of both machines, for this test only")
    key.chmod(0o600)
    paths = {"paths": ("shm", "rdma", "tcp"), "require_rdma": True, "rdma_ports": ("rxe1",)}
    address = {"listen": f"{address}:7001", "key_file": key}
    return fleet.options(FOLDER, "agent", REDIS, host_bytes=250 * SLOT_BYTES, **paths, **address)


def _ids(seed: int) -> np.ndarray:
    """One more than is saved: the last token of a reply is never fed to the model."""
    return fleet.conversation(seed, TOKENS + 1)


def _digest(seed: int) -> bytes:
    return fleet.digest(f"turn {seed}")


@asynccontextmanager
async def _node(address: str) -> AsyncIterator[fleet.Node]:
    # only in a guest: this module is also collected beside the tests that need the small pages and the real waits
    from tests.system.rdma import patience  # noqa: F401

    fleet.SLOT, fleet.SNAPSHOT = SLOT_BYTES, SLOT_BYTES + 188
    agent = Agent(_options(address))
    await agent.open()
    print(*agent.lines, sep="\n", flush=True)
    try:
        yield fleet.Node(agent)
    finally:
        await agent.close()


async def owner() -> None:
    command = [server_binary(), "--bind", OWNER, "--port", "6379", "--protected-mode", "no"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(FOLDER)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        async with redis.asyncio.from_url(REDIS) as client, _node(OWNER) as node:
            for seed in range(CONVERSATIONS):
                await node.save(_ids(seed), tokens=TOKENS, request=f"{seed}", segments=[(TOKENS + 1, _digest(seed))])
            await node.announced()
            await client.set("saved", 1)
            while not await client.exists("over"):
                await asyncio.sleep(0.2)
            await node.settled()
    finally:
        server.kill()


@asynccontextmanager
async def prepare() -> AsyncIterator[fleet.Node]:
    async with redis.asyncio.from_url(REDIS, socket_connect_timeout=1) as client:
        while not await _saved(client):
            await asyncio.sleep(0.2)
        async with _node(READER) as node:
            try:
                yield node
                await node.settled()
            finally:
                await client.set("over", 1)


async def _saved(client: redis.asyncio.Redis) -> bool:
    try:
        return bool(await client.exists("saved"))
    except redis.ConnectionError:
        return False


async def _pull(node: fleet.Node, seed: int, notes: list[str]) -> fleet.Turn:
    """A turn that finds the whole of a conversation; all bytes are compared there."""
    started_s = time.perf_counter()
    turn = await node.turn([_digest(seed)])
    notes.append(f"{turn.source}, {turn.tokens} tokens in {time.perf_counter() - started_s:.2f} s {turn.why}")
    return turn


async def check_a_conversation_is_pulled_by_rdma_and_then_is_here(node: fleet.Node, notes: list[str]) -> None:
    turn = await _pull(node, 0, notes)
    assert (turn.source, turn.tokens) == ("remote", TOKENS)
    assert list(node.agent.fetcher.bytes_by_path) == ["rdma"]
    again = await _pull(node, 0, notes)
    assert (again.source, again.tokens) == ("local", TOKENS)


async def check_a_request_that_is_cancelled_mid_pull_leaves_nothing(node: fleet.Node, notes: list[str]) -> None:
    pulling = asyncio.create_task(_pull(node, 1, notes))
    while not any(entry.state.name == "WRITING" for entry in node.agent.store.entries.values()):
        await asyncio.sleep(0)
        assert not pulling.done()
    pulling.cancel()
    await asyncio.wait({pulling})
    await node.settled()
    assert list(node.agent.fetcher.bytes_by_path) == ["rdma"]


async def check_without_a_usable_rdma_port_it_is_pulled_by_tcp(node: fleet.Node, notes: list[str]) -> None:
    set_link(False)  # RDMA is on this device only, control and TCP on the other
    while node.agent.transports["rdma"].offer() is not None:
        await asyncio.sleep(0.05)
    turn = await _pull(node, 2, notes)
    assert (turn.source, turn.tokens) == ("remote", TOKENS)
    assert list(node.agent.fetcher.bytes_by_path) == ["rdma", "tcp"]
