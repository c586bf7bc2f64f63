"""The measured part of `bench decode`: one request, or several at once, on an engine in this process."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import msgspec

from dsuf.cli.bench.ceilings import engine_ceilings
from dsuf.cli.bench.floor import StepShape, step_floor, weight_costs
from dsuf.cli.live import progress
from dsuf.cli.recipe import load_recipe
from dsuf.cli.run import ids_request, read_ids, text_prompt
from dsuf.cli.session import Session
from dsuf.config import BenchOptions, SamplingFlags
from dsuf.engine.backend import StepCounts
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Finished, Request, Stats
from dsuf.errors import ConfigError, EngineGone, UsageError

PROMPT_RECIPE = "tetris"  # the prompt when none is given: that of the published demo


def decode_request(
    session: Session, prompt: Path | None, tokens: Path | None, sampling: SamplingFlags, ignore_eos: bool
) -> Request:
    """The request of --tokens, --prompt or else of the published demo."""
    if tokens is not None and prompt is not None:
        raise UsageError("Give --prompt or --tokens, not both.")
    if tokens is not None:
        request = ids_request(session, read_ids(tokens), sampling)
    else:
        messages = [{"role": "user", "content": _read_text(prompt)}] if prompt else _demo_messages()
        request = text_prompt(session.text(), messages, False, sampling).request("bench")
    return msgspec.structs.replace(request, ignore_eos=ignore_eos)


def _demo_messages() -> list[dict[str, str]]:
    return load_recipe(PROMPT_RECIPE).request["messages"]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt {path} cannot be read as UTF-8 text: {error}") from None


def decode_samples(
    session: Session, request: Request, batch: int, bench: BenchOptions
) -> tuple[list[dict[str, float]], StepShape]:
    """Run the warm-up and the measured repeats; one sample a repeat and the mean shape of their steps."""
    samples, engine = [], session.engine
    total = bench.warmup + bench.repeat
    with progress("bench decode", "repeats") as update:
        for done in range(total):
            if done == bench.warmup:
                before = engine.backend.counts()
            finished = run_batch(engine, request, batch)
            if done >= bench.warmup:
                samples.append(sample_of([event.stats for event in finished]))
            update(done + 1, total)
    return _same_names(samples), _mean_shape(before, engine.backend.counts())


def _mean_shape(before: StepCounts, after: StepCounts) -> StepShape:
    steps = after.steps - before.steps
    return StepShape(
        rows=(after.rows - before.rows) / steps,
        slots=(after.slots - before.slots) / steps,
        experts=(after.experts - before.experts) / steps,
        drafter_experts=(after.drafter_experts - before.drafter_experts) / steps,
    )


def run_batch(engine: Engine, request: Request, batch: int) -> list[Finished]:
    """The same request `batch` times at once, each under a seed of its own, to the end of all."""
    names = [f"bench-{number}" for number in range(batch)]
    finished: list[Finished] = []
    try:
        for number, name in enumerate(names):
            sampling = msgspec.structs.replace(request.sampling, seed=request.sampling.seed + number)
            engine.submit(msgspec.structs.replace(request, id=name, sampling=sampling))
        while not engine.idle:
            finished += [event for event in engine.step() if isinstance(event, Finished)]
    finally:
        for name in names:
            engine.cancel(name)
        engine.step()
    failed = next((event for event in finished if event.reason == "error"), None)
    if failed:
        raise EngineGone(f"The engine failed: {failed.message}")
    return finished


def decode_floor(session: Session, shape: StepShape) -> tuple[dict[str, float], dict[str, float]]:
    """(ceilings, floor) of a mean step; the ceilings are measured here and now."""
    costs = weight_costs(session.checkpoint)
    read_bytes = sum(layer.nbytes for layer in costs.layers) + costs.head.nbytes
    ceilings = engine_ceilings(session.engine, int(read_bytes))
    return ceilings, step_floor(session.checkpoint, shape, ceilings)


def sample_of(stats: list[Stats]) -> dict[str, float]:
    """One repeat's values; tokens per second are of all sequences together, the first token of each left out."""
    iterations = sum(item.iterations for item in stats)
    if not iterations:
        raise ConfigError(
            "Nothing was decoded: the answer ended with its first token. Use --ignore-eos or --max-tokens."
        )
    decoded = sum(item.completion_tokens - 1 for item in stats)
    histogram = [sum(counts) for counts in zip_longest(*(item.accepted_histogram for item in stats), fillvalue=0)]
    return {
        "decode_tokens_per_s": decoded / max(item.decode_s for item in stats),
        "step_ms": sum(item.decode_s for item in stats) / iterations * 1e3,
        "accept_length": decoded / iterations,
        "ttft_ms": max(item.ttft_s for item in stats) * 1e3,
        "context_tokens": max(item.prompt_tokens + item.completion_tokens for item in stats),
        "emitted_tokens": decoded + len(stats),
        **{f"accept_histogram_{accepted}": count for accepted, count in enumerate(histogram)},
    }


def _same_names(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    # a histogram may be longer in one repeat than in another
    names = dict.fromkeys(name for sample in samples for name in sample)
    return [{name: sample.get(name, 0) for name in names} for sample in samples]
