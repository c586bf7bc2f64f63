"""Leaving in order: refuse new calls politely, let running streams end, then stop; a second signal stops at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from dsuf.server.service import Service

_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # for the error events of the streams that are broken off


class Drain:
    """What signals do to one server. `stop` ends the HTTP server; it may be called more than once."""

    def __init__(self, service: Service, stop: Callable[[], None]) -> None:
        self._service, self._stop = service, stop
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        """First signal: drain. Second: break off what runs and stop."""
        if self._task is None:
            # a load balancer needs time to notice; somebody at a terminal does not
            self.begin(0.0 if number == signal.SIGINT else self._service.options.drain_delay_s)
        else:
            self.stop_now()

    def begin(self, delay_s: float) -> None:
        """Drain, unless that goes on already."""
        if self._task is None:
            self._service.draining = True
            self._task = asyncio.create_task(self._drain(delay_s))

    def stop_now(self) -> None:
        """Break off what runs and stop."""
        if self._task is not None:
            self._task.cancel()
        self._service.draining = True
        self._task = asyncio.create_task(self._break_off())

    async def _drain(self, delay_s: float) -> None:
        service = self._service
        if service.prefixes is not None:
            await service.prefixes.draining()
        service.log({"event": "drain_begin", "open_requests": service.admission.open})
        loop = asyncio.get_running_loop()
        end = loop.time() + delay_s
        while loop.time() < end:
            await asyncio.sleep(min(_POLL_S, max(end - loop.time(), 0)))
        end = loop.time() + service.options.drain_timeout_s
        while service.admission.open and loop.time() < end:
            await asyncio.sleep(_POLL_S)
        await self._break_off()

    async def _break_off(self) -> None:
        """End every call with an error event, wait for those to be written, stop."""
        service = self._service
        broken = service.admission.open
        for exchange in list(service.exchanges):
            exchange.interrupt("shutdown")
        loop = asyncio.get_running_loop()
        end = loop.time() + _LAST_WORDS_S
        while service.admission.open and loop.time() < end:
            await asyncio.sleep(_POLL_S)
        service.log({"event": "drain_end", "broken_off": broken})
        self._stop()
