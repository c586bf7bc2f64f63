"""The measured part of `bench prefill`: prompts of given lengths on an engine in this process, from a cold cache."""

from __future__ import annotations

import time
from pathlib import Path

from dsuf.cli.bench.ceilings import engine_ceilings
from dsuf.cli.bench.floor import prefill_floor, weight_costs
from dsuf.cli.live import progress
from dsuf.cli.run import generate
from dsuf.cli.session import Session
from dsuf.config import BenchOptions
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Trace
from dsuf.errors import PromptError

FILLER = "The quick brown fox jumps over the lazy dog while 12 engineers count 345 tokens. "
CHARACTERS_A_TOKEN = 8  # more than this text has


def prefill_samples(session: Session, lengths: tuple[int, ...], bench: BenchOptions) -> list[dict[str, float]]:
    """One sample a repeat: for each length the prefill's time and rate, the time to encode such a text, peak memory.

    Raises PromptError for a length that the checkpoint's context does not hold.
    """
    longest = session.engine.limits.max_context - 1
    if max(lengths) > longest:
        raise PromptError(f"--tokens has {max(lengths):,}; this checkpoint takes prompts of up to {longest:,} tokens.")
    prompts = {length: prompt_ids(session, length) for length in lengths}
    samples, done, repeats = [], 0, bench.warmup + bench.repeat
    with progress("bench prefill", "prompts") as update:
        for repeat in range(repeats):
            sample: dict[str, float] = {}
            for length, (ids, tokenize_s) in prompts.items():
                measured = _measure(session, ids, bench.seed) | tokenize_s
                sample |= {f"prefill_{length}_{name}": value for name, value in measured.items()}
                done += 1
                update(done, repeats * len(lengths))
            if repeat >= bench.warmup:
                samples.append(sample)
    return samples


def prefill_floors(session: Session, lengths: tuple[int, ...]) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    """(ceilings measured now, floor of each length)."""
    options, checkpoint = session.engine.options, session.checkpoint
    read_bytes = sum(layer.nbytes for layer in weight_costs(checkpoint).layers)
    ceilings = engine_ceilings(session.engine, int(read_bytes))
    return ceilings, {length: prefill_floor(checkpoint, length, options.prefill, ceilings) for length in lengths}


def _measure(session: Session, ids: list[int], seed: int) -> dict[str, float]:
    request = Request(id="bench", prompt_ids=ids, max_tokens=1, sampling=Sampling(temperature=0.0, seed=seed))
    _reset_peak()
    _, finished = generate(session, request, Trace(), lambda event: None)
    took_s = finished.stats.prefill_s
    return {"s": took_s, "tokens_per_s": len(ids) / took_s, "peak_bytes": _peak_bytes()}


def prompt_ids(session: Session, length: int) -> tuple[list[int], dict[str, float]]:
    """`length` ids of plain text and {tokenize_s}; without a tokenizer, ids that walk the vocabulary and nothing."""
    if session.checkpoint.tokenizer_path is None:
        vocabulary = session.checkpoint.spec.vocab_size
        return [(7919 * position + 3) % vocabulary for position in range(length)], {}
    tokenizer = session.tokenizer()
    text = FILLER * (length * CHARACTERS_A_TOKEN // len(FILLER) + 1)
    begin = time.perf_counter()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    took_s = time.perf_counter() - begin
    return ids[:length], {"tokenize_s": took_s * length / len(ids)}


def _reset_peak() -> None:
    """Start to measure the peak of resident memory anew; a kernel that refuses leaves the process's own peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def _peak_bytes() -> int:
    """Peak of this process's resident memory since `_reset_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0
