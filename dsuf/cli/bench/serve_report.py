"""From records to numbers: every top-level key of `vllm bench serve` under its own name, and ours beside them.

ttft   sent to the first output                 itl   gap between outputs, each of which may hold several tokens
tpot   first to last output / (tokens - 1)      e2el  sent to the last output

Times of a failed call count nowhere but in `failed`.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dsuf.cli.bench.serve_client import Record
from dsuf.cli.bench.serve_load import LONG, SHORT, STREAM, MixRun
from dsuf.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
GOODPUT = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}
_SPEC_DECODE = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:2` as limits in milliseconds. Raises ConfigError for anything else."""
    limits: dict[str, float] = {}
    for pair in " ".join(texts).replace(",", " ").split():
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in GOODPUT or not limits[name] >= 0:
            raise ConfigError(f"--goodput is {pair!r}; expected {', '.join(GOODPUT)} with milliseconds: ttft:500")
    return limits


def load_metrics(records: Sequence[Record], duration_s: float, goodput: dict[str, float]) -> dict[str, float]:
    """One run's numbers."""
    good = [record for record in records if not record.error]
    output = sum(record.output_tokens for record in good)
    given = sum(record.prompt_tokens for record in good)
    metrics: dict[str, float] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": given,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (given + output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_concurrency(good),
        "cache_hit_tokens": sum(record.cached_tokens for record in good),
    }
    if goodput:
        kept = sum(_keeps(record, goodput) for record in good)
        metrics["request_goodput"] = kept / duration_s
    metrics |= spread("ttft", [record.ttft_s for record in good])
    metrics |= spread("tpot", [record.tpot_s for record in good if record.output_tokens > 1])
    metrics |= spread("itl", [gap for record in good for gap in record.gaps_s])
    metrics |= spread("e2el", [record.e2e_s for record in good])
    return metrics | spread("client_queue_time", [record.queued_s for record in good])


def mix_metrics(run: MixRun) -> dict[str, float]:
    """The mix: gaps of the running streams alone and beside the others, and the others' times to first token.

    A gap is that of one step; `silence` counts those too in which tokens came that show no text. Times to first token
    are those of answers whose first token shows; `late_texts` counts the others.
    """
    streams = [record for record in run.records if record.group == STREAM]
    metrics: dict[str, float] = {}
    for phase, begin, end in (("alone", run.began, run.mixed), ("mixed", run.mixed, run.ended)):
        gaps = [gap for record in streams for gap in _gaps(record, begin, end)]
        single = [seconds for seconds, steps in gaps if steps == 1]
        metrics |= spread(f"{phase}_gap", single)
        metrics[f"{phase}_steps_per_s"] = sum(steps for _, steps in gaps) / (end - begin)
        metrics[f"{phase}_gaps_of_more_steps"] = len(gaps) - len(single)
        metrics[f"max_{phase}_gap_ms"] = max(single, default=0.0) * 1e3
        metrics[f"max_{phase}_silence_ms"] = max((seconds for seconds, _ in gaps), default=0.0) * 1e3
    for group in (SHORT, LONG):
        good = [record for record in run.records if record.group == group and not record.error]
        failed = [record for record in run.records if record.group == group and record.error]
        shown = [record for record in good if _shows_at_once(record)]
        metrics |= spread(f"{group}_ttft", [record.ttft_s for record in shown])
        metrics[f"{group}_late_texts"] = len(good) - len(shown)
        metrics[f"{group}_completed"], metrics[f"{group}_failed"] = len(good), len(failed)
    # of every one that was answered; the phase lasts until the last of them
    taken = sum(record.prompt_tokens for record in run.records if record.group == LONG and not record.error)
    metrics["long_prompt_tokens_per_s"] = taken / (run.ended - run.mixed)
    return metrics


def _shows_at_once(record: Record) -> bool:
    """Whether the first output came with the first token, as far as the server tells of steps."""
    told = record.steps[0] >= 0
    return record.steps[0] == 0 if told else bool(record.text) or record.output_tokens <= 1


def _gaps(record: Record, begin: float, end: float) -> list[tuple[float, int]]:
    """(seconds, decode steps) between outputs: a token that shows no text comes with the next one. One step each where
    the server tells nothing of steps.
    """
    found = []
    for i, (earlier, later) in enumerate(itertools.pairwise(record.events)):
        if begin <= later < end:
            told = record.steps[i] >= 0
            found.append((later - earlier, max(record.steps[i + 1] - record.steps[i], 1) if told else 1))
    return found


def spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds; zeros where there is nothing."""
    values = sorted(value * 1e3 for value in values_s) or [0.0]
    found = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    return found | {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, with a line between neighbours."""
    at = (len(values) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def _keeps(record: Record, goodput: dict[str, float]) -> bool:
    return all(getattr(record, GOODPUT[name]) * 1e3 <= limit for name, limit in goodput.items())


def _peak_concurrency(records: Sequence[Record]) -> int:
    edges = sorted([(record.sent, 1) for record in records] + [(record.events[-1], -1) for record in records])
    running = peak = 0
    for _, change in edges:
        running += change
        peak = max(peak, running)
    return peak


def _peak_tokens(records: Sequence[Record]) -> float:
    """Most tokens of one second; an answer's tokens are spread evenly over its outputs."""
    buckets: Counter[int] = Counter()
    for record in records:
        for at in record.events:
            buckets[int(at)] += record.output_tokens / len(record.events)
    return max(buckets.values(), default=0.0)


def read_totals(base: str) -> dict[str, float]:
    """Sums of the server's counters by name without prefix and labels; positions as `...per_pos/N`. {} if none."""
    totals: dict[str, float] = {}
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return {}
    for line in lines:
        if line.startswith(("dsuf_", "vllm:")):
            series, _, value = line.rpartition(" ")
            name, _, labels = series[5:].partition("{")
            if 'position="' in labels:
                name += "/" + labels.partition('position="')[2].partition('"')[0]
            totals[line[:5] + name] = totals.get(line[:5] + name, 0.0) + float(value)
    theirs = {name[5:]: value for name, value in totals.items() if name.startswith("vllm:")}
    return theirs | {name[5:]: value for name, value in totals.items() if name.startswith("dsuf_")}


def step_metrics(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Tokens a step, and the acceptance of drafts in vLLM's words, from two readings of the counters."""
    found: dict[str, float] = {}

    def more(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    if (steps := more("accept_length_count")) > 0:
        found["accept_length"] = more("accept_length_sum") / steps
    drafts, drafted, accepted = (more(f"spec_decode_{name}_total") for name in _SPEC_DECODE)
    if drafts > 0 and drafted > 0:
        found |= {
            "spec_decode_acceptance_rate": accepted / drafted * 100,
            "spec_decode_acceptance_length": 1 + accepted / drafts,
            "spec_decode_num_drafts": drafts,
            "spec_decode_draft_tokens": drafted,
            "spec_decode_accepted_tokens": accepted,
        }
    return found


def per_position(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """Share of drafts accepted at each place of the block."""
    drafts = after.get("spec_decode_num_drafts_total", 0.0) - before.get("spec_decode_num_drafts_total", 0.0)
    stem = "spec_decode_num_accepted_tokens_per_pos_total/"
    places = sorted((int(name.removeprefix(stem)), name) for name in after if name.startswith(stem))
    return [(after[name] - before.get(name, 0.0)) / drafts for _, name in places] if drafts > 0 else []


def vllm_layout(
    metrics: dict[str, float], params: dict[str, Any], records: Sequence[Record] | None, positions: list[float]
) -> dict[str, Any]:
    """The same run as `vllm bench serve` would write it, so that its plotting tools read it."""
    rate = params["request_rate"]
    document: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": params["label"],
        "model_id": params["model"],
        "tokenizer_id": params["model"],
        "num_prompts": params["num_prompts"],
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": params["burstiness"],
        "max_concurrency": params["max_concurrency"],
        "request_goodput": None,
        "rtfx": 0.0,
        **{name: int(value) if value == int(value) else value for name, value in metrics.items()},
    }
    if "spec_decode_num_drafts" in metrics:
        document["spec_decode_per_position_acceptance_rates"] = positions
    if records is not None:
        document |= {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.output_tokens for record in records],
            "start_times": [record.sent for record in records],
            "ttfts": [record.ttft_s if record.events else 0.0 for record in records],
            "itls": [record.gaps_s for record in records],
            "generated_texts": [record.text for record in records],
            "errors": [record.error for record in records],
        }
    return document


_ROWS = (
    ("Successful requests", "completed"), ("Failed requests", "failed"), ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"), ("Total generated tokens", "total_output_tokens"),
    ("Cached input tokens", "cache_hit_tokens"), ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"), ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"), ("Tokens a decode step", "accept_length"),
    ("Acceptance rate of drafts (%)", "spec_decode_acceptance_rate"),
    ("Steps/s of the streams alone", "alone_steps_per_s"), ("Steps/s of the streams, mixed", "mixed_steps_per_s"),
    ("Short prompts answered", "short_completed"), ("Their first token shows no text", "short_late_texts"),
    ("Long prompts answered", "long_completed"),
    ("Long prompts (tok/s)", "long_prompt_tokens_per_s"),
)  # fmt: skip
_COUNTS = frozenset((
    "completed", "failed", "total_input_tokens", "total_output_tokens", "cache_hit_tokens", "max_concurrent_requests",
    "short_completed", "short_late_texts", "long_completed",
))  # fmt: skip
_TIMES = ("ttft", "tpot", "itl", "e2el", "alone_gap", "mixed_gap", "short_ttft", "long_ttft")


def table(metrics: dict[str, float]) -> list[str]:
    """Lines for people, in the order that users of vLLM know."""
    lines = [f"{' Serving benchmark ':=^72}"]
    for title, name in _ROWS:
        if name in metrics:
            whole = name in _COUNTS and float(metrics[name]).is_integer()  # the median of two runs may not be
            lines.append(f"{title + ':':42}{metrics[name]:>12,.{0 if whole else 2}f}")
    lines.append(f"{'ms':18}" + "".join(f"{head:>9}" for head in ("mean", "std", *(f"p{p}" for p in PERCENTILES))))
    for name in _TIMES:
        if f"mean_{name}_ms" in metrics:
            columns = ("mean", "std", *(f"p{p}" for p in PERCENTILES))
            lines.append(f"{name:18}" + "".join(f"{metrics[f'{one}_{name}_ms']:>9,.2f}" for one in columns))
    return [*lines, "=" * 72]
