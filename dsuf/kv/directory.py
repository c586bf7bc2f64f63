"""Who has which entry: small records in Redis, each a hint that the holder itself confirms or refuses.

    {dsuf:<ns>}:srv:<sid>   hash    boot, addr, host, state                         10 s, renewed every 3 s
    {dsuf:<ns>}:kv:<key>    hash    one field a holder: boot|entry|tokens|bytes|seq    30 min from the last announcement
    {dsuf:<ns>}:seq         counter orders announcements
    {dsuf:<ns>}:ev          channel own|<sid>|<key of the entry that was continued>

A key is an entry's name or a segment's, so text and ids lead to entries alike. A server writes only its own field, so
no two can overwrite each other; a field counts only while its server's key carries the same boot id, so records of a
dead or restarted server are void without any clean-up. Redis down, slow or empty costs hits, never a request: calls
have deadlines, after a failure all fail at once until the heartbeat gets through again, and then all is announced anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from dsuf.errors import EnvironmentProblem

SERVER_TTL_S, BEAT_S = 10.0, 3.0
RECORD_TTL_S, REFRESH_S = 1800.0, 600.0
FIND_S, WRITE_S = 0.15, 1.0  # an answer takes 0.2 ms, but a CPU backend may hold every core
RETRY_S = 1.0
CONNECTIONS = 8
ANNOUNCE_BATCH, ANNOUNCE_EVERY_S = 20, 0.1  # 200 a second when everything is announced anew
MAX_CANDIDATES = 512
MAX_DROPS = 100_000  # remembered while Redis is down; the rest runs out by itself
_LISTEN_S = 30.0

_FIND = """
for i, key in ipairs(KEYS) do
  local fields = redis.call('HGETALL', key)
  local live = {}
  for j = 1, #fields, 2 do
    local server = redis.call('HMGET', ARGV[1] .. fields[j], 'boot', 'state', 'addr', 'host')
    if server[1] and server[1] == string.match(fields[j + 1], '^([^|]+)|') and server[2] ~= 'gone' then
      live[#live + 1] = {fields[j], fields[j + 1], server[3], server[4]}
    end
  end
  if #live > 0 then return {i, live} end
end
return false
"""
# KEYS: server, sequence, records ...; ARGV: sid, boot, "entry|tokens|bytes", ttl ms, channel, continued key
_PUBLISH = """
if redis.call('HGET', KEYS[1], 'boot') ~= ARGV[2] then return redis.error_reply('STALE') end
local seq = redis.call('INCR', KEYS[2])
for i = 3, #KEYS do
  redis.call('HSET', KEYS[i], ARGV[1], ARGV[2] .. '|' .. ARGV[3] .. '|' .. seq)
  redis.call('PEXPIRE', KEYS[i], ARGV[4])
end
if ARGV[6] ~= '' then redis.call('PUBLISH', ARGV[5], 'own|' .. ARGV[1] .. '|' .. ARGV[6]) end
return seq
"""
# KEYS: records ...; ARGV: sid, "boot|entry|". Deletes only what this very entry wrote.
_DROP = """
for i, key in ipairs(KEYS) do
  local value = redis.call('HGET', key, ARGV[1])
  if value and string.sub(value, 1, #ARGV[2]) == ARGV[2] then redis.call('HDEL', key, ARGV[1]) end
end
return 1
"""
# KEYS: server; ARGV: ttl ms, boot, then fields. 1 when this boot id was registered before.
_BEAT = """
local known = redis.call('HGET', KEYS[1], 'boot') == ARGV[2]
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return known and 1 or 0
"""


class DirectoryDown(EnvironmentProblem):
    """Redis did not answer, or not in time."""


@dataclass(frozen=True)
class Holder:
    """One server that says it has an entry."""

    sid: str
    boot: str
    entry: int
    tokens: int
    nbytes: int
    sequence: int
    address: str  # host:port of its control connection
    host_id: str  # equal for servers on one machine


@dataclass(frozen=True)
class Server:
    """What a server says of itself."""

    sid: str
    boot: str
    address: str
    host_id: str


@dataclass(frozen=True)
class Announcement:
    """What should be in Redis about one READY entry."""

    entry: int
    keys: tuple[bytes, ...]
    tokens: int
    nbytes: int
    continues: bytes = b""  # name of the entry that its conversation was continued from


class Directory:
    """One server's view of Redis. `open` never fails because of Redis; `find` does, quickly."""

    def __init__(self, url: str, ns: bytes, me: Server, on_continued: Callable[[bytes], None] | None = None) -> None:
        self.me, self.state = me, "up"
        self.problem: str | None = "not connected yet"  # None: Redis answers
        self.reannounced = 0
        self._on_continued = on_continued or (lambda name: None)
        self._prefix = f"{{dsuf:{ns[:4].hex()}}}"
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=WRITE_S,
            protocol=3,
            socket_timeout=WRITE_S,
            socket_connect_timeout=WRITE_S,
            retry=None,
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)
        self._find, self._publish, self._drop, self._beat = map(
            self._redis.register_script, (_FIND, _PUBLISH, _DROP, _BEAT)
        )
        self._announced: dict[int, Announcement] = {}  # what should be there
        self._dirty: dict[int, Announcement | None] = {}  # and is not yet; None: to be dropped
        self._dropped: dict[int, Announcement] = {}
        self._written: dict[int, asyncio.Event] = {}
        self._wake, self._failed = asyncio.Event(), asyncio.Event()
        self._run_id: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Register if Redis answers, and keep trying otherwise."""
        with contextlib.suppress(DirectoryDown):
            await self._register()
        loops = (self._heartbeat(), self._announce(), self._listen(), self._refresh())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        """Say that this server is gone, and leave."""
        left = set(self._tasks)
        while left:  # the client swallows a cancellation that reaches it while it connects
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=0.05)
        self.state = "gone"
        if self.problem is None:
            with contextlib.suppress(DirectoryDown):
                await self._register()
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def set_state(self, state: str) -> None:
        """`up`, `draining` (still asked for entries) or `gone` (asked no more)."""
        self.state = state
        with contextlib.suppress(DirectoryDown):
            await self._register()

    async def find(self, keys: Sequence[bytes]) -> tuple[int, list[Holder]] | None:
        """Index of the first key that a live server holds, with its holders, the newest first. Raises DirectoryDown."""
        if self.problem is not None:
            raise DirectoryDown(self.problem)
        if not keys:
            return None
        names = [self._record(key) for key in keys[:MAX_CANDIDATES]]
        found = await self._call(self._find(keys=names, args=[f"{self._prefix}:srv:"]), FIND_S)
        if not found:
            return None
        holders = [holder for line in found[1] if (holder := _holder(line)) and holder.sid != self.me.sid]
        return found[0] - 1, sorted(holders, key=lambda holder: -holder.sequence)

    def announce(self, announcement: Announcement) -> asyncio.Event:
        """Record an entry as soon as Redis takes it; the event is set then."""
        self._announced[announcement.entry] = announcement
        self._dirty[announcement.entry] = announcement
        self._wake.set()
        return self._written.setdefault(announcement.entry, asyncio.Event())

    def withdraw(self, entry: int) -> None:
        """Remove what `announce` recorded."""
        announcement = self._announced.pop(entry, None)
        if announcement is not None and len(self._dropped) < MAX_DROPS:
            self._dropped[entry], self._dirty[entry] = announcement, None
            self._wake.set()

    # ---- what runs beside

    async def _register(self) -> None:
        """Write this server's key; when it was not there, everything is announced anew. Raises DirectoryDown."""
        me = self.me
        fields = ["boot", me.boot, "addr", me.address, "host", me.host_id, "state", self.state]
        arguments = [int(SERVER_TTL_S * 1000), me.boot, *fields]
        known = await self._call(self._beat(keys=[f"{self._prefix}:srv:{me.sid}"], args=arguments), WRITE_S)
        info = await self._call(self._redis.info("server"), WRITE_S)
        restarted = self._run_id is not None and info.get("run_id") != self._run_id
        self._run_id, self.problem = info.get("run_id"), None
        if not known or restarted:
            self.reannounced += bool(self._announced)
            self._dirty.update(self._announced)
        self._wake.set()

    async def _heartbeat(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self.problem else BEAT_S):
                    await self._failed.wait()
            if self._failed.is_set():
                self._failed.clear()
                await asyncio.sleep(RETRY_S)
            with contextlib.suppress(DirectoryDown):
                await self._register()

    async def _announce(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty and self.problem is None:
                for entry in list(self._dirty)[:ANNOUNCE_BATCH]:
                    with contextlib.suppress(DirectoryDown):
                        await self._write(entry)
                if len(self._dirty) >= ANNOUNCE_BATCH:
                    await asyncio.sleep(ANNOUNCE_EVERY_S)

    async def _write(self, entry: int) -> None:
        """Bring one entry's records up to date."""
        what, me = self._dirty.pop(entry), self.me
        try:
            if what is None:
                gone = self._dropped.pop(entry)
                names = [self._record(key) for key in gone.keys]
                await self._call(self._drop(keys=names, args=[me.sid, f"{me.boot}|{entry}|"]), WRITE_S)
            else:
                names = [f"{self._prefix}:srv:{me.sid}", f"{self._prefix}:seq", *map(self._record, what.keys)]
                value = f"{entry}|{what.tokens}|{what.nbytes}"
                channel, ttl_ms = f"{self._prefix}:ev", int(RECORD_TTL_S * 1000)
                arguments = [me.sid, me.boot, value, ttl_ms, channel, what.continues.hex()]
                await self._call(self._publish(keys=names, args=arguments), WRITE_S)
            self._written.pop(entry, asyncio.Event()).set()
        except DirectoryDown:
            if what is None:
                self._dropped.setdefault(entry, gone)
            self._dirty.setdefault(entry, what)  # unless something newer is to be written
            raise

    async def _refresh(self) -> None:
        """Announce everything again long before records run out."""
        while True:
            await asyncio.sleep(REFRESH_S)
            self._dirty.update(self._announced)
            self._wake.set()

    async def _listen(self) -> None:
        """Hear of continuations; a lost message costs nothing but a copy that is kept longer."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(f"{self._prefix}:ev")
                    while True:
                        message = await channel.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_S)
                        if message is not None:
                            self._hear(message["data"].decode())
            await asyncio.sleep(RETRY_S)

    def _hear(self, text: str) -> None:
        kind, sid, name = [*text.split("|"), "", ""][:3]
        with contextlib.suppress(ValueError):
            if kind == "own" and sid != self.me.sid and name:
                self._on_continued(bytes.fromhex(name))

    async def _call(self, answer: Awaitable[Any], within_s: float) -> Any:
        """Await Redis. Raises DirectoryDown, and until the heartbeat succeeds `find` then fails at once."""
        task = asyncio.ensure_future(answer)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else may look
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
            if done:
                return task.result()
            self.problem = f"Redis: no answer within {within_s * 1000:.0f} ms"
        except (RedisError, OSError) as error:
            self.problem = f"Redis: {str(error) or type(error).__name__}"
        finally:
            task.cancel()
        self._failed.set()
        raise DirectoryDown(self.problem)

    def _record(self, key: bytes) -> str:
        return f"{self._prefix}:kv:{key.hex()}"


def _holder(line: list[Any]) -> Holder | None:
    """One holder of a `_FIND` answer; None for a record that this version cannot read."""
    try:
        sid, value, address, host_id = (part.decode() for part in line)
        boot, entry, tokens, nbytes, sequence = value.split("|")
        return Holder(sid, boot, int(entry), int(tokens), int(nbytes), int(sequence), address, host_id)
    except (AttributeError, UnicodeDecodeError, ValueError):
        return None
