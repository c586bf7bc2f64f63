"""`dsuf bench decode`: the engine alone, in this process; how fast tokens come after the prompt is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsuf.cli import options
from dsuf.cli.bench.flags import measured
from dsuf.cli.bench.result import check_thresholds, new_result, write_result
from dsuf.cli.bench.table import print_table
from dsuf.cli.live import say
from dsuf.cli.session import engine_options, open_session, shared_out
from dsuf.config import MAX_NEW_TOKENS, BenchOptions, SamplingFlags, check_number

if TYPE_CHECKING:
    from dsuf.engine.options import EngineOptions

DEFAULT_TOKENS = 128


@measured(repeat=5, warmup=2)
def decode(
    prompt: Annotated[
        Path | None, typer.Option("--prompt", help="Text file with the prompt. Default: the demo's.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="JSON file with a list of token ids.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new", help="Most tokens to emit in each repeat.")
    ] = DEFAULT_TOKENS,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that run at once.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    config: Annotated[
        str | None,
        typer.Option("--config", help="Random weights of this config (h200x1, FILE) on a GPU, no checkpoint."),
    ] = None,
    context: Annotated[int, typer.Option("--context", help="With --config: tokens before each sequence.")] = 1024,
    steps: Annotated[int, typer.Option("--steps", help="With --config: steps of a repeat.")] = 20,
    inject_accept: Annotated[
        float | None, typer.Option("--inject-accept", help="With --config: drafts are kept with this probability.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="With --config: time by kernel.")] = False,
    twins: Annotated[
        bool, typer.Option("--twins", help="With --config: also without graphs and without dependent launch.")
    ] = False,
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    draft: options.Draft = "on",
    verify: options.Verify = "auto",
    numerics: options.Numerics = None,
    prefill: options.Prefill = "truncated",
    *,
    bench: BenchOptions,
) -> None:
    """Measure decode steps: tokens a second, time, tokens a step."""
    from dsuf.cli.bench.decoding import decode_floor, decode_request, decode_samples
    from dsuf.cli.bench.floor import expected_distinct_experts
    from dsuf.cli.bench.gpu_decode import card_of

    check_number("--batch", batch, 1, 256, whole=True)
    check_number("--max-tokens", max_tokens, 1, MAX_NEW_TOKENS, whole=True)
    prompted = {
        "--prompt": prompt, "--tokens": tokens, "--max-tokens": max_tokens != DEFAULT_TOKENS,
        "--ignore-eos": ignore_eos, "--temperature": temperature, "--ckpt": ckpt != options.DEFAULT_CKPT,
    }  # fmt: skip
    of_config = {"--context": context != 1024, "--steps": steps != 20, "--inject-accept": inject_accept is not None}
    if config is None:
        options.refuse({**of_config, "--profile": profile, "--twins": twins}, "for a --config")
    else:
        options.refuse(prompted, "not for a --config, which has random weights and contexts")
    sampling = SamplingFlags(temperature=temperature, seed=bench.seed, max_tokens=max_tokens)
    engine = engine_options(gpus, numerics, prefill, draft, verify, None, max_sequences=batch)
    if config is not None:
        plan = {"context": context, "steps": steps, "accept": inject_accept, "profile": profile, "twins": twins}
        decode_config(config, engine, batch, bench, plan)
        return
    session = open_session(ckpt, engine)
    request = decode_request(session, prompt, tokens, sampling, ignore_eos)
    samples, shape = decode_samples(session, request, batch, bench)
    ceilings, floor = decode_floor(session, shape)
    for sample in samples:
        sample["time_over_floor"] = sample["step_ms"] * 1e3 / floor["us"]
    params = {
        "max_tokens": max_tokens, "batch": batch, "ignore_eos": ignore_eos, "temperature": temperature, "draft": draft,
        "verify": verify, "numerics": session.engine.options.numerics, "prefill": prefill, "repeat": bench.repeat,
        "warmup": bench.warmup, "seed": bench.seed, "gpus": gpus, "prompt": str(prompt or tokens or "recipe tetris"),
    }  # fmt: skip
    result = new_result(
        "decode", bench.label, backend=session.engine.limits.backend, model=session.model(), params=params,
        samples=samples, ceilings=ceilings, floor=floor, gpu=card_of(session.engine),
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    spec = session.checkpoint.spec
    even = expected_distinct_experts(spec.n_routed_experts, spec.num_experts_per_tok, shape.rows)
    say(f"distinct experts a layer: {floor['distinct_experts']:.1f} counted, {even:.1f} if rows chose evenly")
    print(headline(result.metrics), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def decode_config(config: str, engine: EngineOptions, batch: int, bench: BenchOptions, plan: dict[str, Any]) -> None:
    """The same for a config with random weights on a GPU, over a context of random pages."""
    from dsuf.cli.bench import gpu_decode
    from dsuf.model.synthetic import load_config
    from dsuf.spec import Spec

    check_number("--context", plan["context"], 1, 1 << 20, whole=True)
    check_number("--steps", plan["steps"], 1, 10_000, whole=True)
    if plan["accept"] is not None:
        check_number("--inject-accept", plan["accept"], 0.0, 1.0)
    verify = None if engine.verify == "auto" else engine.verify
    chosen = gpu_decode.StepPlan(batch=batch, draft=engine.draft, verify=verify, **plan)
    loaded = load_config(config)
    engine = shared_out(engine, Spec.from_config(loaded))
    found = gpu_decode.measure(loaded, gpu_decode.options_for(engine, chosen), chosen, bench.repeat, bench.warmup)
    params = {
        "config": config, "batch": batch, "draft": engine.draft, "verify": engine.verify, **plan,
        "context_kind": "synthetic", "router_bias": 0, "accept_injected": plan["accept"] is not None,
        "seed": bench.seed,
        "kernels": {name: {"launches": count, "us": us} for name, (count, us) in found.kernels.items()},
        "memory": found.ledger,
    }  # fmt: skip
    model = {"name": config, "path": "", "revision": "random", "quant": "fp8 with fp4 experts", "bytes": 0}
    result = new_result(
        "decode", bench.label, backend="gpu", model=model, params=params, samples=found.samples,
        ceilings=found.ceilings, floor=found.floor, gpu=found.gpu,
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    for line in gpu_decode.profile_lines(found) if found.kernels else ():
        say(line)
    print(headline(result.metrics), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def headline(metrics: dict[str, float]) -> str:
    """`decode: 1,717 tokens/s, 3.30 ms/step, 5.6 tokens/step`."""
    return (
        f"decode: {metrics['decode_tokens_per_s']:,.0f} tokens/s, {metrics['step_ms']:.2f} ms/step, "
        f"{metrics['accept_length']:.1f} tokens/step"
    )
