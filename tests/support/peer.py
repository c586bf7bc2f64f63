"""A scripted engine on the real pipe: what it answers, when, and how it dies is up to the test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsuf import wire
from dsuf.engine.messages import (
    Admitted,
    Cancel,
    Command,
    Event,
    Finished,
    Rejected,
    Request,
    Stats,
    Status,
    StatusRequest,
    TokenLogprobs,
    Tokens,
)

EOS = 1


@dataclass(frozen=True)
class Script:
    """The life of one request: `steps` holds the ids of each step, the first one from prefill."""

    steps: list[list[int]] = field(default_factory=list)
    reason: str = "stop"  # stop appends an EOS to the last step
    queue_s: float = 0.0
    prefill_s: float = 0.0
    step_s: float = 0.0
    hangs: bool = False  # after the steps: goes on for ever, so that only a cancel ends it
    dies: bool = False  # after the steps: hangs up without a word
    message: str = ""
    cached_tokens: int = 0
    rejects: Rejected | None = None


class Peer:
    """Connects to `path` from a thread of its own and plays `script(request)` for every request."""

    def __init__(self, path: Path, script: Callable[[Request], Script], ready: bool = True) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self._path, self._ready = path, ready
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._connection: wire.AsyncConnection | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, *events: Event) -> None:
        """Say something that no script says, such as a Status."""
        asyncio.run_coroutine_threadsafe(self._connection.send(list(events)), self._loop).result(5)

    def die(self) -> None:
        """Hang up without a word, as a killed process does."""
        asyncio.run_coroutine_threadsafe(self._connection.close(), self._loop).result(5)

    def join(self) -> None:
        """Wait for the end after the other side hung up."""
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(OSError):  # turned away, when another engine is there
            self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        deadline = time.monotonic() + 30
        while self._connection is None:
            try:
                self._connection = await wire.connect_async(self._path, list[Command])
            except wire.WireError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.005)
        await self._connection.send([Status(ready=self._ready)])
        while (commands := await self._connection.receive()) is not None:
            for command in commands:
                await self._obey(command)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._connection.close()

    async def _obey(self, command: Command) -> None:
        if isinstance(command, StatusRequest):
            await self._connection.send([Status(ready=True)])
        elif isinstance(command, Cancel):
            self.cancelled.append(command.id)
            if command.id in self.running:
                self._tasks[command.id].cancel()
        else:
            self.requests.append(command)
            self.running.add(command.id)
            self._tasks[command.id] = asyncio.create_task(self._play(command, self.script(command)))
            await asyncio.sleep(0)  # a task that is cancelled before it begins would never say that it ended

    async def _play(self, request: Request, script: Script) -> None:
        emitted = 0
        try:
            if script.rejects is not None:
                self.running.discard(request.id)
                del self._tasks[request.id]
                await self._connection.send([script.rejects])
                return
            await asyncio.sleep(script.queue_s)
            await self._connection.send([Admitted(request.id, len(request.prompt_ids), script.cached_tokens)])
            await asyncio.sleep(script.prefill_s)
            reason = script.reason
            for i, ids in enumerate(_cut(script.steps, request.max_tokens)):
                if i and script.step_s:
                    await asyncio.sleep(script.step_s)
                emitted += len(ids)
                await self._connection.send([Tokens(request.id, ids, _logprobs(request, ids))])
            if emitted >= request.max_tokens:
                reason = "length"
            if script.dies:
                await self._connection.close()
                return
            if script.hangs:
                await asyncio.sleep(3600)
            if reason == "stop":
                emitted += 1
                await self._connection.send([Tokens(request.id, [EOS], _logprobs(request, [EOS]))])
        except asyncio.CancelledError:
            reason = "cancelled"
        self.running.discard(request.id)
        del self._tasks[request.id]
        await self._connection.send([Finished(request.id, reason, _stats(request, script, emitted), script.message)])


def _cut(steps: list[list[int]], max_tokens: int) -> list[list[int]]:
    kept: list[list[int]] = []
    for ids in steps:
        ids = ids[:max_tokens]
        if ids:
            kept.append(ids)
        max_tokens -= len(ids)
    return kept


def _logprobs(request: Request, ids: list[int]) -> list[TokenLogprobs] | None:
    wanted = request.sampling.logprobs
    if wanted is None:
        return None
    return [TokenLogprobs(-0.5, [(token, -0.5), (token + 1, float("-inf"))][:wanted]) for token in ids]


def _stats(request: Request, script: Script, emitted: int) -> Stats:
    decode_steps = max(len(script.steps) - 1, 0)
    return Stats(
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=script.cached_tokens,
        completion_tokens=emitted,
        iterations=decode_steps,
        drafted_tokens=5 * decode_steps,
        accepted_histogram=_histogram(script.steps[1:]),
        prefill_s=script.prefill_s,
        decode_s=decode_steps * 0.004,
    )


def _histogram(steps: list[list[int]]) -> list[int]:
    lengths = [len(ids) for ids in steps if ids]
    return [lengths.count(n) for n in range(1, max(lengths, default=0) + 1)]
