"""One measurement of `bench serve`: warm-up, repeats, and the server's own counters around each."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsuf.cli.bench.serve_client import Record, Target
from dsuf.cli.bench.serve_data import Conversation, Shape, make_dataset
from dsuf.cli.bench.serve_load import Arrivals, Mix, run_conversations, run_mix
from dsuf.cli.bench.serve_report import load_metrics, mix_metrics, per_position, read_totals, step_metrics
from dsuf.cli.bench.serve_view import View
from dsuf.cli.live import say
from dsuf.config import BenchOptions, read_environment
from dsuf.errors import EnvironmentProblem

_ROOM = 64  # tokens of a prompt beside its words


@dataclass(frozen=True)
class Plan:
    """One run as asked for, checked."""

    dataset: str
    path: Path | None
    num_prompts: int
    shape: Shape
    arrivals: Arrivals
    mix: Mix
    goodput: dict[str, float]
    fields: dict[str, Any]  # of every request
    seed: int

    def conversations(self, number: int) -> list[Conversation]:
        """Those of one repeat; none for the mix. Raises ConfigError for what cannot be made."""
        if self.dataset == "mix":
            return []
        rng = random.Random(f"{self.seed} {number} prompts")
        return make_dataset(self.dataset, self.num_prompts, self.shape, rng, self.path, self.fields)


@dataclass(frozen=True)
class Run:
    """What one repeat gave."""

    metrics: dict[str, float]
    records: list[Record]
    positions: list[float]


def measure(plan: Plan, bench: BenchOptions, address: str) -> tuple[list[Run], str, Plan]:
    """(runs, model, the plan as it fits the server) of the server at `address`. Raises EnvironmentProblem."""
    target = Target(address, read_environment().api_key)
    model = _first_model(target)
    mix = _fit(plan.mix, model.get("max_model_len")) if plan.dataset == "mix" else plan.mix
    plan = replace(plan, fields={"model": model["id"], **plan.fields}, mix=mix)
    return asyncio.run(_all_runs(target, plan, bench)), model["id"], plan


async def _all_runs(target: Target, plan: Plan, bench: BenchOptions) -> list[Run]:
    for _ in range(bench.warmup):
        body = {**plan.fields, "max_tokens": 8, "messages": [{"role": "user", "content": "warm up"}]}
        record = await target.send(body, Record("warmup"))
        if record.error:
            raise EnvironmentProblem(f"{target.url} does not answer as it should: {record.error}")
    return [await _one_run(target, plan, number) for number in range(bench.repeat)]


async def _one_run(target: Target, plan: Plan, number: int) -> Run:
    rng = random.Random(f"{plan.seed} {number}")
    before = await asyncio.to_thread(read_totals, target.base)
    view = View(None if plan.dataset == "mix" else plan.num_prompts)
    showing = asyncio.create_task(view.show())
    begin = time.perf_counter()
    try:
        if plan.dataset == "mix":
            mixed = await run_mix(target, plan.mix, plan.fields, rng, view.started)
            records, metrics = mixed.records, mix_metrics(mixed)
        else:
            conversations = plan.conversations(number)
            records = await run_conversations(target, conversations, plan.arrivals, rng, view.started)
            metrics = load_metrics(records, time.perf_counter() - begin, plan.goodput)
    finally:
        showing.cancel()
    _check_some_answered(records, target)
    await asyncio.sleep(0.3)  # the server counts a call just after its last byte
    after = await asyncio.to_thread(read_totals, target.base)
    return Run(metrics | step_metrics(before, after), records, per_position(before, after))


def _check_some_answered(records: list[Record], target: Target) -> None:
    errors = [record.error for record in records if record.error]
    if errors and len(errors) == len(records):
        raise EnvironmentProblem(f"None of {len(records)} calls to {target.url} was answered; the first: {errors[0]}")
    if errors:
        say(f"{len(errors)} of {len(records)} calls failed; the first: {errors[0]}")


def _first_model(target: Target) -> dict[str, Any]:
    key = read_environment().api_key
    request = urllib.request.Request(
        f"{target.base}/v1/models", headers={"authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["data"][0]
    except (OSError, urllib.error.URLError, ValueError, LookupError) as error:
        raise EnvironmentProblem(f"{request.full_url} does not list a model: {error}. Is the server running?") from None


def _fit(mix: Mix, most: int | None) -> Mix:
    """The mix with long prompts and streams that fit the server's context."""
    if most is None:
        return mix
    longest = most - _ROOM - mix.long_output
    if mix.long_len > longest:
        say(f"long prompts of {mix.long_len:,} tokens do not fit the server's context of {most:,}: {longest:,} instead")
    return replace(mix, long_len=min(mix.long_len, longest), stream_output=min(mix.stream_output, most - _ROOM))
