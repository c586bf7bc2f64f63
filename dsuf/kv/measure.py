"""What the paths between two servers on this machine reach, beside a plain copy and a plain socket in the same run.

    tcp against raw_socket   `TcpLink.read` against one thread that sends and one that receives the same bytes
    shm against memcpy       `ShmLink.read` against memmove of the same bytes within this process

The owner is another process. Each figure is the best of the rounds, which take turns, so that a busy machine slows all.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dsuf import wire
from dsuf.kv.arena import Arena
from dsuf.kv.channel import Identity
from dsuf.kv.control import ControlServer
from dsuf.kv.entries import Store
from dsuf.kv.peers import dial
from dsuf.kv.transport.base import Extent, Read
from dsuf.kv.transport.shm import ShmTransport
from dsuf.kv.transport.tcp import TcpTransport

_CHUNK = 4 << 20
_LEASE = 1
_OWNER, _READER = (Identity(name, name, "here", b"measure".ljust(32)) for name in ("owner", "reader"))


@dataclass(frozen=True)
class _Owner:
    """Where the owner is; tcp and shm, which are measured, ask it nothing."""

    key: str
    host: str
    offer: bytes


def measure_paths(nbytes: int, slot_bytes: int, rounds: int = 5) -> dict[str, float]:
    """Bytes a second by tcp, raw_socket, shm, memcpy and digest for reads of `nbytes` in slots."""
    key = secrets.token_bytes(32)
    here, there = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="dsuf-measure-") as folder:
        path = Path(folder) / "owner.sock"
        process = multiprocessing.get_context("spawn").Process(
            target=_own, args=(there, path, nbytes, slot_bytes, key), daemon=True
        )
        process.start()
        try:
            there.close()
            ports = here.recv()
            return asyncio.run(_measure(ports, path, nbytes, slot_bytes, key, rounds))
        finally:
            here.close()
            process.join(5.0)
            process.kill()


async def _measure(
    ports: tuple[int, int], path: Path, nbytes: int, slot_bytes: int, key: bytes, rounds: int
) -> dict[str, float]:
    arena = Arena(nbytes, slot_bytes, 128)
    count = arena.slots * slot_bytes
    reads = [Read(0, 0, count)]
    owner = f"{_OWNER.sid}@{_OWNER.boot}"
    tcp = await TcpTransport(arena, dial, key, _READER).link(_Owner(owner, f"127.0.0.1:{ports[0]}", b""))
    shm = await ShmTransport(arena, None, key, _READER).link(_Owner(owner, "", str(path).encode()))
    raw = socket.create_connection(("127.0.0.1", ports[1]))
    source = bytearray(count)
    origin = ctypes.addressof(ctypes.c_char.from_buffer(source))

    async def in_thread(work: Callable[[], object]) -> None:
        await asyncio.to_thread(work)

    works: dict[str, Callable[[], Awaitable[None]]] = {
        "tcp": lambda: tcp.read(_LEASE.to_bytes(8, "little"), reads),
        "raw_socket": lambda: in_thread(lambda: _receive(raw, arena.view[:count])),
        "shm": lambda: shm.read(b"", reads),
        "memcpy": lambda: in_thread(lambda: ctypes.memmove(arena.address, origin, count)),
        "digest": lambda: in_thread(lambda: [arena.digest(slot) for slot in range(arena.slots)]),
    }
    best = dict.fromkeys(works, float("inf"))
    for turn in range(rounds + 1):  # the first one touches the memory
        for name, work in works.items():
            begin = time.perf_counter()
            await work()
            if turn:
                best[name] = min(best[name], time.perf_counter() - begin)
    await tcp.close()
    raw.close()
    return {name: count / seconds for name, seconds in best.items()}


def _receive(sock: socket.socket, view: memoryview) -> None:
    sock.sendall(b"g")
    at = 0
    while at < len(view):
        at += sock.recv_into(view[at : at + _CHUNK])


def _own(pipe: Connection, path: Path, nbytes: int, slot_bytes: int, key: bytes) -> None:
    asyncio.run(_serve(pipe, path, nbytes, slot_bytes, key))


async def _serve(pipe: Connection, path: Path, nbytes: int, slot_bytes: int, key: bytes) -> None:
    """The owner's process: until the pipe is closed."""
    arena = Arena(nbytes, slot_bytes, 128)
    count = arena.slots * slot_bytes
    arena.view[:count] = secrets.token_bytes(1 << 16).ljust(count, b"x")
    tcp = TcpTransport(arena, dial, key, _OWNER)
    shm = ShmTransport(arena, path, key, _OWNER)
    server = ControlServer(Store(arena, 1), {}, {"tcp": tcp.serve, "shm": shm.serve}, key, _OWNER)
    await tcp.expose(f"{_READER.sid}@{_READER.boot}#1", _LEASE, [Extent(0, count)])
    listener, raw = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    server.listen(listener)
    server.listen(wire.listen(path))
    threading.Thread(target=_send, args=(raw, arena.view[:count]), daemon=True).start()
    pipe.send((listener.getsockname()[1], raw.getsockname()[1]))
    await asyncio.to_thread(_closed, pipe)


def _send(listener: socket.socket, view: memoryview) -> None:
    sock, _ = listener.accept()
    while sock.recv(1):
        sock.sendall(view)


def _closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return
