"""`dsuf bench prefill`: how long the engine takes to read prompts of given lengths, from a cold cache."""

from __future__ import annotations

from typing import Annotated

import typer

from dsuf.cli import options
from dsuf.cli.bench.flags import measured
from dsuf.cli.bench.result import check_thresholds, new_result, write_result
from dsuf.cli.bench.table import print_table
from dsuf.cli.session import engine_options, open_session
from dsuf.config import BenchOptions, parse_token_counts


@measured()
def prefill(
    tokens: Annotated[str, typer.Option("--tokens", help="Prompt lengths, such as 512,8k,1m.")] = "256,1k",
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    numerics: options.Numerics = "qdq64",
    prefill_mode: options.Prefill = "truncated",
    *,
    bench: BenchOptions,
) -> None:
    """Measure prefill: the time to read a prompt, for several lengths."""
    from dsuf.cli.bench.prefilling import prefill_floors, prefill_samples

    lengths = parse_token_counts(tokens)
    session = open_session(ckpt, engine_options(gpus, numerics, prefill_mode, "on", "auto", None))
    samples = prefill_samples(session, lengths, bench)
    ceilings, floors = prefill_floors(session, lengths)
    for sample in samples:
        for length in lengths:
            sample[f"prefill_{length}_time_over_floor"] = sample[f"prefill_{length}_s"] * 1e6 / floors[length]["us"]
    params = {
        "tokens": list(lengths), "numerics": numerics, "prefill": prefill_mode, "repeat": bench.repeat,
        "warmup": bench.warmup, "seed": bench.seed, "gpus": gpus,
    }  # fmt: skip
    result = new_result(
        "prefill", bench.label, backend=session.engine.limits.backend, model=session.model(), params=params,
        samples=samples, ceilings=ceilings, floor=floors[max(lengths)],
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    print(headline(result.metrics, max(lengths)), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def headline(metrics: dict[str, float], length: int) -> str:
    """`prefill: 1,000,000 tokens in 13.2 s (76,000 tokens/s)`, for the longest prompt."""
    return (
        f"prefill: {length:,} tokens in {metrics[f'prefill_{length}_s']:.3g} s "
        f"({metrics[f'prefill_{length}_tokens_per_s']:,.0f} tokens/s)"
    )
