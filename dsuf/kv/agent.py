"""The agent: owner of the arena, of all leases and of every connection to peers and Redis; a process of its own.

Verbs calls, registration and digests hold the interpreter lock or the memory bus, so none of it runs where HTTP or the
engine's wheel does. Web and engine are clients over a Unix socket; the engine also maps the arena, whose descriptor a
second socket beside the first gives to processes of this user. `run` and `bench` run the same agent in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dsuf import wire
from dsuf.errors import ConfigError, EnvironmentProblem
from dsuf.kv.arena import Arena
from dsuf.kv.channel import Identity
from dsuf.kv.control import ControlServer
from dsuf.kv.desk import Desk
from dsuf.kv.directory import Directory, Server
from dsuf.kv.embedded import Embedded
from dsuf.kv.entries import Store
from dsuf.kv.entry import State
from dsuf.kv.fetch import Fetcher
from dsuf.kv.keys import own_key, read_key
from dsuf.kv.names import BLOCK_TOKENS, RESUME_TOKENS, Names
from dsuf.kv.peers import Peers, dial
from dsuf.kv.rates import Circuits, Rates
from dsuf.kv.service import Service
from dsuf.kv.transport.base import Transport, TransportUnavailable
from dsuf.kv.transport.shm import ShmTransport
from dsuf.kv.transport.tcp import TcpTransport, is_loopback

CHECK_EVERY_S = 10.0
LEAVE_S = 2.0  # leases that run have so long at the end


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is started with."""

    host_bytes: int
    slot_bytes: int  # of a cache page
    snapshot_bytes: int
    namespace: bytes
    runtime_dir: Path  # the user's checked 0700 folder: key, embedded Redis, sockets of peers
    socket_path: Path  # for this server's web and engine
    backend: str  # whose bytes they are, as the namespace has it; an engine with another one is given nothing
    key_file: Path | None = None
    redis_url: str | None = None
    listen: str = "127.0.0.1:0"  # address that peers can reach, and port
    paths: tuple[str, ...] = ("shm", "rdma", "tcp")
    require_rdma: bool = False
    rdma_ports: tuple[str, ...] | None = None
    resume_tokens: int = RESUME_TOKENS

    def __post_init__(self) -> None:
        """Raise ConfigError for what is not safe or contradicts itself."""
        if self.redis_url and self.key_file is None and not _is_here(self.redis_url):
            raise ConfigError(
                "DSUF_REDIS_URL names a server beyond this machine, and no --kv-key-file is given. Give every server "
                "of the fleet the same key file, made with `openssl rand -hex 32`."
            )
        if not is_loopback(self.listen) and self.key_file is None:
            raise ConfigError(f"--kv-listen {self.listen} is open to other machines and needs a --kv-key-file.")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535 or host.strip("[]") in ("0.0.0.0", "::", "*"):
            raise ConfigError(
                f"--kv-listen is {self.listen!r}, expected ADDRESS:PORT with an address that peers can reach."
            )
        if self.require_rdma and "rdma" not in self.paths:
            raise ConfigError("--kv-require-rdma contradicts the paths that are allowed.")


class Agent:
    """Made and closed in one event loop; `open` returns when clients can be served."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.rates = Rates()
        self.lines: list[str] = []  # what to say once at the start
        self.control: ControlServer | None = None
        self.directory: Directory | None = None
        self._stack = contextlib.AsyncExitStack()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Raises EnvironmentProblem or ConfigError when it cannot serve; Redis may be down."""
        options = self.options
        key = read_key(options.key_file) if options.key_file else own_key(options.runtime_dir)
        self.identity = Identity(secrets.token_hex(6), secrets.token_hex(6), host_id(), options.namespace)
        self.arena = Arena(options.host_bytes, options.slot_bytes, BLOCK_TOKENS)
        self._stack.callback(self.arena.close)
        self.store = Store(self.arena, options.snapshot_bytes)
        self.transports, data = await self._open_transports(key)
        self.control = ControlServer(self.store, self.transports, data, key, self.identity)
        listener = await self._listen()
        address = options.listen.rpartition(":")[0] + f":{listener.getsockname()[1]}"
        directory = await self._open_directory(address)
        self._stack.push_async_callback(self.control.close)
        peers = Peers(self.transports, dial, key, self.identity, Circuits(asyncio.get_running_loop().time))
        self._stack.push_async_callback(peers.close)
        self.fetcher = Fetcher(self.store, peers, self.rates)
        self.desk = Desk(self.store, self._names(key), directory, self.fetcher, options.resume_tokens)
        if self.desk.pulls is not None:
            self._stack.push_async_callback(self.desk.pulls.close)
        service = Service(self)
        await service.open(options.socket_path)
        self._stack.push_async_callback(service.close)
        checks = asyncio.create_task(self._check())
        self._stack.callback(checks.cancel)
        self.lines += self._report(address)

    async def close(self) -> None:
        """No new leases; those that run have a moment; then everybody is cut off."""
        if self.control is not None:
            self.control.leaving = True
        if self.directory is not None:
            await self.directory.set_state("gone")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while self.control is not None and any("@" in lease.holder for lease in self.store.leases.values()):
                    await asyncio.sleep(0.02)
        await self._stack.aclose()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises what the integrity check found."""
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({waiting, self._fault}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._fault.done():
            await self._fault

    async def leave(self, draining: bool) -> None:
        """The server drains: peers still get what is here."""
        if self.directory is not None:
            await self.directory.set_state("draining" if draining else "up")

    def numbers(self) -> dict[str, float]:
        """Counters and gauges."""
        slots, store = self.store.slots, self.store
        return {
            "entries": len(store.entries),
            "writing": sum(entry.state is State.WRITING for entry in store.entries.values()),
            "bytes": self.arena.slots * self.arena.slot_bytes,
            "used_bytes": (slots.total - slots.free) * self.arena.slot_bytes,
            "leases": len(store.leases),
            "requests": len(self.desk.visits),
            "pulls_running": self.desk.pulls.running if self.desk.pulls else 0,
            "fences": self.control.fences,
            "refused_connections": self.control.refused,
            "redis_up": float(self.directory is not None and self.directory.problem is None),
            **{f"outcome.{kind}": count for kind, count in self.desk.outcomes.items()},
            **{f"reuse_lost_tokens.{kind}": count for kind, count in self.desk.lost.items()},
            **{f"pulled_bytes.{path}": count for path, count in self.fetcher.bytes_by_path.items()},
        }

    async def _open_transports(self, key: bytes) -> tuple[dict[str, Transport], dict]:
        options, transports, data = self.options, {}, {}
        for path in options.paths:
            if path == "tcp":
                transport = TcpTransport(self.arena, dial, key, self.identity)
                data["tcp"] = transport.serve
            elif path == "shm":
                transport = ShmTransport(self.arena, self._peer_socket(), key, self.identity)
                data["shm"] = transport.serve
            else:
                transport = await self._open_rdma()
            if transport is not None:
                transports[path] = transport
                self._stack.push_async_callback(transport.close)
        return transports, data

    async def _open_rdma(self) -> Transport | None:
        try:
            from dsuf.kv.transport.rdma import RdmaTransport

            transport = await asyncio.to_thread(RdmaTransport.open, self.arena, ports=self.options.rdma_ports)
            await transport.start()
            if self.options.require_rdma and transport.offer() is None:
                await transport.close()
                raise TransportUnavailable("; ".join(transport.report()))
            return transport
        except TransportUnavailable as error:
            if self.options.require_rdma:
                raise EnvironmentProblem(f"--kv-require-rdma: {error}") from None
            self.lines.append(f"kv path rdma: not usable, {error}")
            return None

    def _peer_socket(self) -> Path:
        """Where servers of this user on this machine find our memory; sockets of dead agents are removed."""
        folder = self.options.runtime_dir
        for path in folder.glob("kv-*.sock"):
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    sock.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)
                except OSError:
                    pass
        return folder / f"kv-{self.identity.sid}.sock"

    async def _listen(self) -> socket.socket:
        host, _, port = self.options.listen.rpartition(":")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot listen on --kv-listen {self.options.listen}: {error.strerror}. Choose another port."
            ) from None
        self.control.listen(listener)
        if "shm" in self.transports:
            path = self._peer_socket()
            self.control.listen(wire.listen(path))
            self._stack.callback(path.unlink, missing_ok=True)
        return listener

    async def _open_directory(self, address: str) -> Directory | None:
        """Redis by its address, else our own. None where there is none to be had."""
        url = self.options.redis_url
        if url is None:
            try:
                embedded = Embedded(self.options.runtime_dir)
            except EnvironmentProblem as error:
                self.lines.append(f"kv: {error}")
                return None
            await embedded.open()
            self._stack.push_async_callback(embedded.close)
            url = embedded.url
        me = Server(self.identity.sid, self.identity.boot, address, self.identity.host_id)
        self.directory = Directory(url, self.identity.ns, me, lambda name: self.desk.continued(name))
        await self.directory.open()
        self._stack.push_async_callback(self.directory.close)
        return self.directory

    def _names(self, key: bytes):  # noqa: ANN202
        known: dict[str, Names] = {}

        def names(tenant: str) -> Names:
            if tenant not in known:
                known[tenant] = Names.of(key, self.options.namespace, tenant)
            return known[tenant]

        return names

    def _report(self, address: str) -> list[str]:
        pages = "huge pages" if self.arena.huge else "ordinary pages"
        problem = self.directory.problem if self.directory else "none"
        redis = "own Redis" if self.options.redis_url is None else "shared Redis"
        return [
            f"kv: {self.arena.nbytes >> 20} MiB of host memory on {pages}, peers on {address}, "
            f"{redis} {'up' if problem is None else problem.removeprefix('Redis: ')}",
            *(f"kv path {line}" for transport in self.transports.values() for line in transport.report()),
        ]

    async def _check(self) -> None:
        """At idle: every count is accounted for, and one entry after the other has the bytes it was saved with."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                self.store.check()
            except AssertionError as error:
                self._fault.set_exception(EnvironmentProblem(f"the cache's books are wrong: {error}. It starts anew."))
                return
            entries = list(self.store.ready_entries())
            if entries:
                await self._check_entry(random.choice(entries))

    async def _check_entry(self, entry) -> None:  # noqa: ANN001
        now = asyncio.get_running_loop().time()
        lease = self.store.lease(entry, "check", float("inf"), entry.used_s)
        damaged = await asyncio.to_thread(self.store.damaged, entry)
        self.store.end(lease.id, now)
        self.store.unpin(lease.id, entry)
        if damaged is not None and not entry.leases:
            self.desk.outcomes["damaged"] += 1
            self.store.drop(entry)


def host_id() -> str:
    """Equal for processes that reach each other by loopback: one boot of one machine, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "unix" or (parts.hostname is not None and is_loopback(f"{parts.hostname}:0"))
