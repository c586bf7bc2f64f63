"""The RDMA devices and ports in use: found, opened, the arena registered on them, and watched from then on.

Ports are looked for again every 30 s and at each event of a device, since in a pod addresses come late. Connections
over a port that went away are ended at once, so that their requests can take another. Left out: placing parts of the
arena on the NUMA nodes of the adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Iterable

from dsuf.kv.arena import Arena
from dsuf.kv.transport.base import TransferFailed, TransportUnavailable
from dsuf.kv.transport.rdma import ports
from dsuf.kv.transport.rdma.messages import Hello, OfferedPort
from dsuf.kv.transport.rdma.ports import Gid, Port
from dsuf.kv.transport.rdma.queue_pair import QueuePair
from dsuf.kv.transport.rdma.verbs import Device

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 30.0


class Rails:
    """Usable ports with their opened devices. Made off the event loop, since registering memory is slow."""

    def __init__(self, arena: Arena, wanted: tuple[str, ...] | None) -> None:
        self._arena, self._wanted = arena, wanted
        self._devices: dict[str, Device] = {}
        self._lost_devices: set[str] = set()
        self._ports: dict[str, Port] = {}
        self.reasons: list[str] = []  # why other ports are not usable
        self._pairs: weakref.WeakSet[QueuePair] = weakref.WeakSet()
        self._stop, self._wake = False, asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._adopt(*self._scan())

    def offered(self) -> list[OfferedPort]:
        """What peers are told: usable ports, fastest first."""
        return [OfferedPort(port.name, [gid.kind for gid in port.gids], port.gbps) for port in self._ports.values()]

    def report(self) -> list[str]:
        """A line for each usable port, and one for each reason against another."""
        usable = []
        for port in self._ports.values():
            windows = self._devices[port.device].has_windows
            usable.append(f"{port}, keys by {'memory windows' if windows else 'registration, it has no windows'}")
        return usable + self.reasons

    def make_pair(self, name: str, kind: str, *, serves: bool) -> tuple[QueuePair, Hello, Gid]:
        """(queue pair, our hello, our address) on a port, by an address of this kind. Raises TransferFailed."""
        port = self._ports.get(name)
        gid = next((gid for gid in port.gids if gid.kind == kind), None) if port else None
        if port is None or gid is None:
            raise TransferFailed(f"the port {name} has no address of kind {kind} now")
        pair = QueuePair(self._devices[port.device], name, port.number, serves)
        self._pairs.add(pair)
        return pair, pair.hello(gid, port.lid), gid

    async def start(self) -> None:
        """Watch from now on."""
        for device in self._devices.values():
            self._watch_device(device)
        self._watching = asyncio.create_task(self._watch())

    def _scan(self) -> tuple[list[Port], list[str], list[Device]]:
        """(usable ports, reasons against the others, devices opened for them just now). Blocks."""
        found, reasons = ports.find(self._wanted)
        opened: list[Device] = []
        failed: dict[str, str] = {name: f"{name} reported a fatal error" for name in self._lost_devices}
        for name in {port.device: None for port in found}:
            if name in self._devices or name in failed:
                continue
            device = None
            try:
                device = Device(name)
                device.register(self._arena.address, self._arena.nbytes)
                opened.append(device)
            except TransportUnavailable as error:
                failed[name] = str(error)
                if device is not None:
                    device.close()
        reasons += failed.values()
        return [port for port in found if port.device not in failed], reasons, opened

    def _adopt(self, found: list[Port], reasons: list[str], opened: Iterable[Device]) -> None:
        self._devices |= {device.name: device for device in opened}
        self._ports = {port.name: port for port in found}
        self.reasons = reasons
        for pair in list(self._pairs):
            if pair.port not in self._ports:
                pair.fail(f"the port {pair.port} went away")

    async def _watch(self) -> None:
        while not self._stop:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_AGAIN_S)
            self._wake.clear()
            if self._stop:
                return
            before = self.report()
            found, reasons, opened = await asyncio.to_thread(self._scan)
            self._adopt(found, reasons, opened)
            for line in self.report():
                if line not in before:
                    log.warning("rdma: %s", line)
            for device in opened:
                self._watch_device(device)

    def _watch_device(self, device: Device) -> None:
        def changed(lost: bool) -> None:
            if lost:
                self._lost_devices.add(device.name)
            self._wake.set()

        device.watch(changed)

    async def close(self) -> None:
        """Close pairs that are still open, then the devices."""
        self._stop = True
        self._wake.set()
        if self._watching is not None:
            await self._watching
        for made in (*list(self._pairs), *self._devices.values()):
            made.close()
        self._devices.clear()
        self._ports.clear()
