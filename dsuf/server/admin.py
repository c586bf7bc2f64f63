"""The admin socket of one server: a Unix socket in the user's own runtime folder that tells its state and takes orders.

`dsuf drain` is its client. It asks once and then hears the state twice a second, until the server hangs up at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Literal

import msgspec

from dsuf import wire
from dsuf.server.drain import Drain
from dsuf.server.service import Service

SOCKET_NAME = "admin.sock"
_TELL_EVERY_S = 0.5


class Order(msgspec.Struct, frozen=True):
    """What a client wants."""

    what: Literal["state", "drain", "stop"]  # stop: break off what runs


class State(msgspec.Struct, frozen=True):
    """What it hears."""

    state: str  # starting, ready, draining or gone
    open_requests: int
    address: str
    pid: int


class Admin:
    """The server's end. Lives in its event loop."""

    def __init__(self, path: Path, service: Service, drain: Drain, address: str, pid: int) -> None:
        self._path, self._service, self._drain = path, service, drain
        self._address, self._pid = address, pid
        self._peers: set[wire.FramePeer] = set()  # those that wait for the end
        self._listener: asyncio.Server | None = None
        self._teller: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to listen. Raises WireError when the socket cannot be made."""
        self._listener = await wire.serve_frames(self._path, Order, self._connected)

    async def close(self) -> None:
        """Hang up."""
        self._listener.close()
        if self._teller is not None:
            self._teller.cancel()
        for peer in self._peers:
            peer.close()
        self._path.unlink(missing_ok=True)

    def _connected(self, peer: wire.FramePeer) -> None:
        peer.on_message = lambda order: self._obey(order, peer)
        peer.on_end = lambda failure: self._peers.discard(peer)

    def _obey(self, order: Order, peer: wire.FramePeer) -> None:
        if order.what == "drain":
            self._drain.begin(self._service.options.drain_delay_s)
        elif order.what == "stop":
            self._drain.stop_now()
        self._tell(peer)
        if order.what != "state":
            self._peers.add(peer)
            self._teller = self._teller or asyncio.create_task(self._tell_all())

    async def _tell_all(self) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            for peer in list(self._peers):
                self._tell(peer)

    def _tell(self, peer: wire.FramePeer) -> None:
        service = self._service
        with contextlib.suppress(OSError):  # it went away
            peer.send(State(service.state, service.admission.open, self._address, self._pid))
