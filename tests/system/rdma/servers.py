"""Checks in two guests: a `dsuf serve` in each, and a conversation that goes on at the other one over RDMA."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from dsuf.kv.embedded import server_binary
from tests.system.rdma.guests import NETWORKS

ADDRESSES = [f"{NETWORKS[0]}.{number}" for number in (1, 2)]
REDIS = f"redis://{ADDRESSES[0]}:6379"
FOLDER, SHARED = Path("/dev/shm"), Path("/mnt")
PORT, KV_PORT = 8000, 7001
FIRST = {"role": "user", "content": "Who are you?"}
SECOND = {"role": "user", "content": "What can you do?"}
REPLY_TOKENS = 12


@dataclass(frozen=True)
class Turn:
    """What a client and the server's log say about one request."""

    text: str
    prompt: int
    completion: int
    cached: int
    source: str
    accept_length: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.prompt} + {self.completion} tokens, {self.cached} cached ({self.source}), "
            f"{self.accept_length} tokens a step, {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Server:
    """One of the two, as its clients see it."""

    index: int

    @property
    def url(self) -> str:
        return f"http://{ADDRESSES[self.index]}:{PORT}"

    async def ready(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=10) as client:
                return (await client.get(f"{self.url}/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self, messages: list[dict[str, str]]) -> Turn:
        before, started_s = len(self._ended()), time.perf_counter()
        body = {"model": "deepseek-chat", "messages": messages, "max_tokens": REPLY_TOKENS}
        async with httpx.AsyncClient(timeout=60) as client:
            reply = (await client.post(f"{self.url}/v1/chat/completions", json=body)).json()
        assert "usage" in reply, reply
        while len(self._ended()) == before:
            await asyncio.sleep(0.05)
        usage, line = reply["usage"], self._ended()[-1]
        return Turn(
            reply["choices"][0]["message"]["content"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_cache_hit_tokens"],
            line["cache_source"],
            line["average_accept_length"],
            time.perf_counter() - started_s,
        )

    async def pulled_bytes(self) -> dict[str, float]:
        """Bytes that this server has pulled so far, by path."""
        async with httpx.AsyncClient(timeout=60) as client:
            metrics = (await client.get(f"{self.url}/metrics")).text
        name = "dsuf_kv_pulled_bytes_total{"
        lines = [line for line in metrics.splitlines() if line.startswith(name)]
        return {line.split('path="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    def _ended(self) -> list[dict[str, Any]]:
        lines = (SHARED / f"requests.{self.index}").read_text().splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in parsed if line.get("event") == "request_end"]


@contextmanager
def _serving(index: int) -> Iterator[subprocess.Popen[bytes]]:
    """`dsuf serve` of the built-in checkpoint; its log lines go where both guests see them."""
    key = FOLDER / "fleet.key"
    key.write_text("one key of both machines, for this test only")
    key.chmod(0o600)
    command = [sys.executable, "-m", "tests.system.rdma.patient_dsuf", "serve", "--host", ADDRESSES[index]]
    command += ["--port", str(PORT), "--kv-listen", f"{ADDRESSES[index]}:{KV_PORT}", "--kv-key-file", str(key)]
    command += ["--kv-host-bytes", "64m", "--kv-require-rdma"]
    with open(log_path := SHARED / f"requests.{index}", "w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, "DSUF_REDIS_URL": REDIS}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield server
        finally:
            server.terminate()
            server.wait(30)
            print(log_path.read_text(), flush=True)


async def owner() -> None:
    command = [server_binary(), "--bind", ADDRESSES[0], "--port", "6379", "--protected-mode", "no"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(FOLDER)]
    directory = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with _serving(0) as serving:
            async with redis.asyncio.from_url(REDIS) as client:
                while not await _exists(client, "over"):
                    assert serving.poll() is None, "the server has ended"
                    await asyncio.sleep(0.5)
    finally:
        directory.kill()


@asynccontextmanager
async def prepare() -> AsyncIterator[list[Server]]:
    servers = [Server(0), Server(1)]
    async with redis.asyncio.from_url(REDIS, socket_connect_timeout=1) as client:
        with _serving(1) as serving:
            try:
                for server in servers:
                    while not await server.ready():
                        assert serving.poll() is None, "the server has ended"
                        await asyncio.sleep(0.5)
                yield servers
            finally:
                await client.set("over", 1)


async def _exists(client: redis.asyncio.Redis, key: str) -> bool:
    try:
        return bool(await client.exists(key))
    except redis.ConnectionError:
        return False


async def check_the_next_turn_goes_on_from_what_the_other_server_holds(servers: list[Server], notes: list[str]) -> None:
    stays, other = servers
    first = await stays.ask([FIRST])
    notes.append(f"first turn: {first}")
    following = [FIRST, {"role": "assistant", "content": first.text}, SECOND]
    moved = await other.ask(following)
    notes.append(f"second turn at the other: {moved}")
    stayed = await stays.ask(following)
    notes.append(f"second turn at the same: {stayed}")
    assert moved.source == "remote"
    assert moved.cached >= first.prompt + first.completion - 3
    assert (moved.text, moved.accept_length) == (stayed.text, stayed.accept_length)
    pulled = await other.pulled_bytes()
    notes.append(f"pulled bytes: {pulled}")
    assert pulled.get("rdma", 0) > 0 and not pulled.get("tcp")


async def check_an_answer_asked_for_again_goes_on_from_its_prompt(servers: list[Server], notes: list[str]) -> None:
    stays, other = servers
    question = {"role": "user", "content": "Who made you?"}
    first = await other.ask([question])
    again = await stays.ask([question])
    notes.append(f"first: {first}; again at the other server: {again}")
    assert (again.source, again.text, again.accept_length) == ("remote", first.text, first.accept_length)
    assert again.cached >= first.prompt - 2
    assert (await stays.pulled_bytes()).get("rdma", 0) > 0
