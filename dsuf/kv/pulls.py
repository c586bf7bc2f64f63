"""Which peer to pull from, and who shares a pull: requests that want the same entry wait for one transfer.

A pull that nobody wants any more is broken off, so an abandoned request costs no more memory or wire.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from dsuf.kv.directory import Directory, DirectoryDown, Holder
from dsuf.kv.entry import Entry
from dsuf.kv.fetch import Fallback, Fetcher, Granted
from dsuf.kv.names import Names

HOLDERS_TRIED = 3
ROUNDS = 2  # look-ups in the directory for one request, when what it said turned out to be stale


@dataclass(eq=False)
class Pull:
    """One transfer and those who wait for it."""

    key: bytes
    granted: Granted
    users: set[Hashable] = field(default_factory=set)
    task: asyncio.Task[Entry] | None = None
    begun: bool = False

    @property
    def entry(self) -> Entry | None:
        """What it brought, once it has."""
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if done else None


@dataclass(eq=False)
class _Asking:
    """The way to a lease at some holder, and how many look-ups wait for it."""

    task: asyncio.Task[Pull] | None = None
    waiters: int = 0


class Pulls:
    """All pulls of one agent; `landed` is called with each that has come, before anything else runs."""

    def __init__(self, directory: Directory, fetcher: Fetcher, landed: Callable[[Pull, Entry], None]) -> None:
        self._directory, self._fetcher, self._landed = directory, fetcher, landed
        self._asking: dict[bytes, _Asking] = {}
        self._pulls: dict[bytes, Pull] = {}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Pulls under way."""
        return len(self._pulls)

    async def find(self, names: Names, keys: Sequence[bytes], beyond: int) -> Pull:
        """A pull, under way, of the longest of `keys` that a peer has and that is longer than `beyond` tokens.

        The caller adds itself to its users before it awaits anything else. Raises Fallback.
        """
        announced = 0
        for _ in range(ROUNDS):
            if not keys:
                break
            try:
                found = await self._directory.find(keys)
            except DirectoryDown as error:
                raise Fallback("directory", str(error)) from None
            running = next((i for i, key in enumerate(keys) if key in self._pulls), None)
            if running is not None and (not found or running <= found[0]):
                return self._pulls[keys[running]]
            if not found:
                break
            index, holders = found
            holders = [holder for holder in holders if holder.tokens > beyond][:HOLDERS_TRIED]
            announced = max(announced, *(holder.tokens for holder in holders), 0)
            try:
                return await self._wait(keys[index], holders, names, beyond)
            except Fallback as error:
                if error.kind != "stale":
                    raise _lost(error, announced) from None
            keys = keys[index + 1 :]
        raise _lost(Fallback("stale" if announced else "none", "no server has a longer prefix"), announced)

    def leave(self, pull: Pull, user: Hashable = None) -> None:
        """A user does not want it any more."""
        pull.users.discard(user)
        if not pull.users and not pull.task.done():
            pull.task.cancel()
            self._forget(pull)

    async def close(self) -> None:
        """Break everything off."""
        tasks = [asking.task for asking in self._asking.values()] + [pull.task for pull in self._pulls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._background, *self._fetcher.undoing, return_exceptions=True)

    async def _wait(self, key: bytes, holders: list[Holder], names: Names, beyond: int) -> Pull:
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = _Asking()
            asking.task = asyncio.create_task(self._ask(asking, holders, key, names, beyond))
            asking.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        asking.waiters += 1
        try:
            return await asyncio.shield(asking.task)
        except asyncio.CancelledError:
            done = asking.task.done() and not asking.task.cancelled() and asking.task.exception() is None
            if done and asking.waiters == 1:
                self.leave(asking.task.result())
            raise
        finally:
            asking.waiters -= 1

    async def _ask(self, asking: _Asking, holders: list[Holder], key: bytes, names: Names, beyond: int) -> Pull:
        """Lease at the first holder that gives, and begin to pull."""
        try:
            last = Fallback("stale", "no other server has it")
            for holder in holders:
                try:
                    granted = await self._fetcher.ask(holder, key, names, beyond)
                    break
                except Fallback as error:
                    last = error
            else:
                raise last
            if not asking.waiters:
                self._give_up(granted)
                raise Fallback("forgotten", "the request has ended")
            pull = self._pulls[key] = Pull(key, granted)
            pull.task = asyncio.create_task(self._run(pull))
            pull.task.add_done_callback(functools.partial(self._ran, pull))
            return pull
        except Fallback:
            raise
        except Exception as error:  # a fault of ours is no reason for a request to fail
            raise Fallback("fault", f"{type(error).__name__}: {error}") from error
        finally:
            self._asking.pop(key, None)

    async def _run(self, pull: Pull) -> Entry:
        pull.begun = True
        entry = await self._fetcher.run(pull.granted, "pull")
        self._landed(pull, entry)  # it is READY since this very turn of the loop: nothing could evict it
        return entry

    def _ran(self, pull: Pull, task: asyncio.Task[Entry]) -> None:
        self._forget(pull)
        if not task.cancelled():
            task.exception()
        if not pull.begun:
            self._give_up(pull.granted)

    def _forget(self, pull: Pull) -> None:
        if self._pulls.get(pull.key) is pull:
            del self._pulls[pull.key]

    def _give_up(self, granted: Granted) -> None:
        task = asyncio.create_task(self._fetcher.give_up(granted))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _lost(error: Fallback, tokens: int) -> Fallback:
    error.tokens = tokens
    return error
