"""A fleet without time, network or Redis of its own: a clock that jumps, wires that stall or break, a shared table."""

import asyncio
import contextlib
import selectors
import socket
from concurrent.futures import Future, ThreadPoolExecutor

from dsuf.kv.arena import Arena
from dsuf.kv.channel import Identity
from dsuf.kv.control import ControlServer
from dsuf.kv.desk import Desk
from dsuf.kv.directory import DirectoryDown, Holder
from dsuf.kv.entries import Store
from dsuf.kv.fetch import Fetcher
from dsuf.kv.names import BLOCK_TOKENS, Names
from dsuf.kv.peers import Peers
from dsuf.kv.rates import Circuits, Rates
from dsuf.kv.transport.tcp import TcpTransport
from tests.kv.fleet import SLOT, SNAPSHOT

KEY = b"k" * 32


class _Jump(selectors.SelectSelector):
    """Never waits: when nothing is readable, the clock jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("nothing will ever happen: a future is lost")
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; threads are run inline, so that no time passes in them."""

    def __init__(self):
        self._jump = _Jump()
        super().__init__(self._jump)
        self.set_default_executor(_Inline())

    def time(self):
        return self._jump.now


class _Inline(ThreadPoolExecutor):
    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Table:
    """What all simulated directories share. `stale`: withdrawn records are still told."""

    def __init__(self):
        self.down = self.stale = False
        self.records = {}  # key -> {sid: Holder}
        self.withdrawn = {}
        self.boots = {}  # sid -> boot
        self.sequence = 0

    def clear(self):
        self.records.clear()
        self.withdrawn.clear()


class SimulatedDirectory:
    """The interface of `Directory` over a Table."""

    def __init__(self, table, me, address):
        self._table, self.me, self._address = table, me, address
        self.announced = {}
        table.boots[me.sid] = me.boot

    async def find(self, keys):
        await asyncio.sleep(0.0002)
        if self._table.down:
            await asyncio.sleep(0.05)
            raise DirectoryDown("Redis is down")
        for i, key in enumerate(keys):
            told = [self._table.records, *([self._table.withdrawn] if self._table.stale else [])]
            live = [
                holder
                for records in told
                for holder in records.get(key, {}).values()
                if holder.sid != self.me.sid and self._table.boots.get(holder.sid) == holder.boot
            ]
            if live:
                return i, live
        return None

    def announce(self, said):
        self.announced[said.entry] = said
        self.write(said)
        done = asyncio.Event()
        done.set()
        return done

    def write(self, said):
        self._table.sequence += 1
        if self._table.down:
            return
        for key in said.keys:
            holder = Holder(
                *(self.me.sid, self.me.boot, said.entry, said.tokens, said.nbytes),
                *(self._table.sequence, self._address, self.me.host_id),
            )
            self._table.records.setdefault(key, {})[self.me.sid] = holder

    def withdraw(self, entry):
        said = self.announced.pop(entry, None)
        for key in said.keys if said else ():
            holder = self._table.records.get(key, {}).get(self.me.sid)
            if holder is not None and holder.entry == entry:
                self._table.withdrawn.setdefault(key, {})[self.me.sid] = self._table.records[key].pop(self.me.sid)

    def announce_all(self):
        """What a heartbeat does that finds Redis empty."""
        for said in self.announced.values():
            self.write(said)


class Wires:
    """Every connection of the simulated fleet; each direction can stall or be cut, and adds `delay_s`."""

    def __init__(self):
        self.servers = {}  # address -> ControlServer
        self.delay_s = 0.0
        self.stalled = set()  # addresses whose connections carry nothing
        self._tasks = set()
        self._ends = {}

    async def dial(self, address):
        server = self.servers.get(address)
        if server is None:
            raise ConnectionRefusedError("nobody listens")
        while address in self.stalled:
            await asyncio.sleep(0.05)
        left, middle_left = socket.socketpair()
        middle_right, right = socket.socketpair()
        for sock in (left, middle_left, middle_right):
            sock.setblocking(False)
        ends = self._ends.setdefault(address, set())
        ends.add((middle_left, middle_right))
        for source, target in ((middle_left, middle_right), (middle_right, middle_left)):
            task = asyncio.create_task(self._carry(address, source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        server.serve(right)
        return left

    async def _carry(self, address, source, target):
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 4096):
                await asyncio.sleep(self.delay_s)
                while address in self.stalled:
                    await asyncio.sleep(0.05)
                await loop.sock_sendall(target, data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self, address):
        """Break every connection to an address."""
        for pair in self._ends.pop(address, ()):
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    async def close(self):
        for address in list(self._ends):
            self.cut(address)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


class SimulatedAgent:
    """The parts of `Agent` that matter, over a Table and Wires."""

    def __init__(self, name, boot, table, wires, slots=60):
        self.address = f"sim-{name}:1"
        me = Identity(name, f"{name}{boot}", f"host {name}", b"n" * 32)
        self.arena = Arena(slots * SLOT, SLOT, BLOCK_TOKENS)
        self.store = Store(self.arena, SNAPSHOT)
        tcp = TcpTransport(self.arena, wires.dial, KEY, me)
        self.control = wires.servers[self.address] = ControlServer(
            self.store, {"tcp": tcp}, {"tcp": tcp.serve}, KEY, me
        )
        self.rates, loop = Rates(), asyncio.get_running_loop()
        self.peers = Peers({"tcp": tcp}, wires.dial, KEY, me, Circuits(loop.time))
        self.fetcher = Fetcher(self.store, self.peers, self.rates)
        self.directory = SimulatedDirectory(table, me, self.address)
        names = Names.of(KEY, b"n" * 32, "")
        self.desk = Desk(self.store, lambda tenant: names, self.directory, self.fetcher, resume_tokens=256)

    async def close(self):
        await self.desk.pulls.close()
        await self.peers.close()
        await self.control.close()
        self.arena.close()
