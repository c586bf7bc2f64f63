"""One HTTP connection: uvicorn's, with what ASGI has no words for.

A stream writes its chunks straight to the transport while the client keeps up, which costs a third of the way through
the layers of middleware, and can cut a client off that has stopped reading.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_KEY = "dsuf.connection"


class Connection(HttpToolsProtocol):
    """Puts itself into the scope of its requests. For use between the start and the end of a chunked response."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._cycles: list[RequestResponseCycle] = []  # not ended; more than one when requests are pipelined

    @staticmethod
    def of(scope: Scope) -> Connection:
        """The connection that a request came by."""
        return scope[_KEY]

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        super().on_message_begin()
        self.scope[_KEY] = self

    def on_headers_complete(self) -> None:
        """A request can be started; it waits while an earlier one is answered."""
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell every request of this connection; uvicorn tells the latest one."""
        super().connection_lost(error)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

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
