"""How `bench serve` sends: conversations at a rate or so many at once; the mix of streams, short and long prompts."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from dsuf.cli.bench.serve_client import Record, Target
from dsuf.cli.bench.serve_data import Conversation, words
from dsuf.config import check_number
from dsuf.errors import EnvironmentProblem

STREAM, SHORT, LONG = "stream", "short", "long"  # groups of the mix


@dataclass(frozen=True)
class Arrivals:
    """When conversations begin. Raises ConfigError for a value out of range.

    Gaps are gamma distributed: `burstiness` is the shape, 1 a Poisson process, below 1 bursts, above 1 more even; an
    infinite rate sends all at once. `max_concurrency` holds calls back, which is a closed loop at an infinite rate.
    """

    rate: float = math.inf  # conversations a second
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.rate != math.inf:
            check_number("--request-rate", self.rate, 0, above=True)
        check_number("--burstiness", self.burstiness, 0, above=True)
        if self.max_concurrency is not None:
            check_number("--max-concurrency", self.max_concurrency, 1, 100_000, whole=True)

    def offsets_s(self, count: int, rng: random.Random) -> list[float]:
        """Seconds after the start at which each of `count` begins; the first one at once."""
        if self.rate == math.inf:
            return [0.0] * count
        at, offsets = 0.0, []
        for _ in range(count):
            offsets.append(at)
            at += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
        return offsets


async def run_conversations(
    target: Target,
    conversations: list[Conversation],
    arrivals: Arrivals,
    rng: random.Random,
    started: Callable[[Record], None],
) -> list[Record]:
    """Send them all; one record a call in the order of conversations. `started` hears of each call when it is sent."""
    gate = asyncio.Semaphore(arrivals.max_concurrency) if arrivals.max_concurrency else nullcontext()
    begin = time.perf_counter()

    async def one(conversation: Conversation, offset_s: float) -> list[Record]:
        await asyncio.sleep(begin + offset_s - time.perf_counter())
        bodies, records = conversation.bodies(), []
        for turn in range(len(conversation.turns)):
            due = time.perf_counter()
            async with gate:
                record = Record("", queued_s=time.perf_counter() - due)
                started(record)
                records.append(await target.send(bodies.body(turn), record))
            if record.error:
                break
            bodies.answer(record.text)
        return records

    offsets = arrivals.offsets_s(len(conversations), rng)
    calls = [one(conversation, offset) for conversation, offset in zip(conversations, offsets, strict=True)]
    return [record for records in await asyncio.gather(*calls) for record in records]


@dataclass(frozen=True)
class Mix:
    """Running streams alone for a while, then beside short prompts at a rate and long ones back to back.

    Raises ConfigError for a value out of range.
    """

    streams: int = 4
    short_len: int = 200
    short_rate: float = 1.0
    short_output: int = 16
    long_len: int = 131_072
    long_output: int = 1
    alone_s: float = 20.0
    mixed_s: float = 60.0
    stream_output: int = 8_192

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("streams", "short_len", "short_output", "long_len", "long_output", "stream_output"):
            check_number(f"--mix-{name.replace('_', '-')}", getattr(self, name), 1, 2**21, whole=True)
        for name in ("short_rate", "alone_s", "mixed_s"):
            check_number(f"--mix-{name.removesuffix('_s').replace('_', '-')}", getattr(self, name), 0, above=True)


@dataclass(frozen=True)
class MixRun:
    """Records by group, and the times that part the two phases."""

    records: list[Record]
    began: float  # every stream runs
    mixed: float  # the others begin
    ended: float  # the last of the others has its first token


async def run_mix(
    target: Target, mix: Mix, base: dict[str, Any], rng: random.Random, started: Callable[[Record], None]
) -> MixRun:
    """Both phases. The prompts are all different, so that nothing is in a cache. Raises EnvironmentProblem."""
    records: list[Record] = []

    async def call(group: str, length: int, output: int) -> Record:
        record = Record(group)
        records.append(record)
        started(record)
        content = words(rng, length)
        body = {**base, "max_tokens": output, "messages": [{"role": "user", "content": content}]}
        if group == STREAM:  # a token that shows no text is no gap of two steps; servers that do not know it tell none
            body["stream_options"] = {**body.get("stream_options", {}), "include_steps": True}
        return await target.send(body, record)

    async def again(group: str, length: int, output: int, until: float) -> None:
        while time.perf_counter() < until:
            if (await call(group, length, output)).error:
                await asyncio.sleep(0.1)  # busy or gone: no hammering

    async def at_rate(until: float) -> None:
        calls = []
        while time.perf_counter() < until:
            calls.append(asyncio.create_task(call(SHORT, mix.short_len, mix.short_output)))
            await asyncio.sleep(1 / mix.short_rate)
        await asyncio.gather(*calls)

    streams = [asyncio.create_task(again(STREAM, 16, mix.stream_output, math.inf)) for _ in range(mix.streams)]
    try:
        await _wait_for_first_tokens(records, mix.streams)
        began = time.perf_counter()
        await asyncio.sleep(mix.alone_s)
        mixed = time.perf_counter()
        until = mixed + mix.mixed_s
        await asyncio.gather(at_rate(until), again(LONG, mix.long_len, mix.long_output, until))
        ended = time.perf_counter()
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return MixRun(records, began, mixed, ended)


async def _wait_for_first_tokens(records: list[Record], streams: int) -> None:
    while sum(bool(record.events) for record in records) < streams:
        failed = next((record for record in records if record.error), None)
        if failed is not None:
            raise EnvironmentProblem(f"A stream of the mix failed before it began: {failed.error}")
        await asyncio.sleep(0.01)
