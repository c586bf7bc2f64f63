"""`dsuf bench decode`: the engine alone, in this process; how fast tokens come after the prompt is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsuf.cli import options
from dsuf.cli.bench.flags import measured
from dsuf.cli.bench.result import check_thresholds, new_result, write_result
from dsuf.cli.bench.table import print_table
from dsuf.cli.live import say
from dsuf.cli.session import engine_options, open_session
from dsuf.config import BenchOptions, SamplingFlags, check_number

PROMPT_RECIPE = "tetris"  # the prompt when none is given: that of the published demo


@measured(repeat=5, warmup=2)
def decode(
    prompt: Annotated[Path | None, typer.Option("--prompt", help="Text file. Default: the demo's prompt.")] = None,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="JSON file with a list of token ids.")] = None,
    max_new: Annotated[int, typer.Option("--max-new", help="Tokens to emit in each repeat.")] = 128,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that run at once.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    draft: options.Draft = "on",
    verify: options.Verify = "auto",
    numerics: options.Numerics = "qdq64",
    prefill: options.Prefill = "truncated",
    *,
    bench: BenchOptions,
) -> None:
    """Measure decode speed: tokens per second, time of a step, tokens a step emits."""
    from dsuf.cli.bench.decoding import decode_floor, decode_request, decode_samples
    from dsuf.cli.bench.floor import expected_distinct_experts

    check_number("--batch", batch, 1, 256, whole=True)
    sampling = SamplingFlags(temperature=temperature, seed=bench.seed, max_tokens=max_new)
    engine = engine_options(gpus, numerics, prefill, draft, verify, None, max_sequences=batch)
    session = open_session(ckpt, engine)
    request = decode_request(session, prompt, tokens, sampling, ignore_eos)
    samples, shape = decode_samples(session, request, batch, bench)
    ceilings, floor = decode_floor(session, shape)
    for sample in samples:
        sample["time_over_floor"] = sample["step_ms"] * 1e3 / floor["us"]
    params = {
        "max_new": max_new, "batch": batch, "ignore_eos": ignore_eos, "temperature": temperature, "draft": draft,
        "verify": verify, "numerics": numerics, "prefill": prefill, "repeat": bench.repeat, "warmup": bench.warmup,
        "seed": bench.seed, "gpus": gpus, "prompt": str(prompt or tokens or "recipe tetris"),
    }  # fmt: skip
    result = new_result(
        "decode", bench.label, backend=session.engine.limits.backend, model=session.model(), params=params,
        samples=samples, ceilings=ceilings, floor=floor,
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    spec = session.checkpoint.spec
    even = expected_distinct_experts(spec.n_routed_experts, spec.num_experts_per_tok, shape.rows)
    say(f"distinct experts a layer: {floor['distinct_experts']:.1f} counted, {even:.1f} if rows chose evenly")
    print(headline(result.metrics), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def headline(metrics: dict[str, float]) -> str:
    """`decode: 1,717 tokens/s, 3.30 ms/step, 5.6 tokens/step`."""
    return (
        f"decode: {metrics['decode_tokens_per_s']:,.0f} tokens/s, {metrics['step_ms']:.2f} ms/step, "
        f"{metrics['accept_length']:.1f} tokens/step"
    )
