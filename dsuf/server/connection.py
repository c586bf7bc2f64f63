"""One HTTP connection: uvicorn's, with what ASGI has no words for.

A stream writes its chunks straight to the transport while the client keeps up, which costs a third of the way through
the layers of middleware, and can cut a client off that has stopped reading. A request line and headers must come within
a time and a size: the parser has no limit of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_KEY = "dsuf.connection"
_HEAD_BYTES = 65_536
_HEAD_S = 60.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(HttpToolsProtocol):
    """Puts itself into the scope of its requests. For use between the start and the end of a chunked response."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._cycles: list[RequestResponseCycle] = []  # not ended; more than one when requests are pipelined
        self._head_bytes: int | None = 0  # of a head that is not complete; None between heads
        self._head_limit: asyncio.TimerHandle | None = None

    @staticmethod
    def of(scope: Scope) -> Connection:
        """The connection that a request came by."""
        return scope[_KEY]

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        super().on_message_begin()
        self.scope[_KEY] = self
        self._limit_head()

    def on_headers_complete(self) -> None:
        """A request can be started; it waits while an earlier one is answered."""
        self._head_bytes = None
        self._head_limit.cancel()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell every request of this connection; uvicorn tells the latest one."""
        super().connection_lost(error)
        self._head_limit.cancel()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _limit_head(self) -> None:
        self._head_bytes = self._head_bytes or 0
        if self._head_limit is not None:
            self._head_limit.cancel()
        self._head_limit = self.loop.call_later(_HEAD_S, self.transport.abort)

    @property
    def takes_more(self) -> bool:
        """Whether the client has read nearly all that was written."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, body: bytes) -> None:
        """Write a part of the running response."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def cut_off(self) -> None:
        """End the connection without waiting for what the client has not read."""
        self.transport.abort()
