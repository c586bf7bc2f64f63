"""`dsuf bench prefill`: how long the engine takes to read prompts of given lengths, from a cold cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsuf.cli import options
from dsuf.cli.bench.flags import measured
from dsuf.cli.bench.result import check_thresholds, new_result, write_result
from dsuf.cli.bench.table import print_table
from dsuf.cli.live import say
from dsuf.cli.session import engine_options, open_session, shared_out
from dsuf.config import BenchOptions, parse_token_counts

if TYPE_CHECKING:
    from dsuf.engine.options import EngineOptions


@measured()
def prefill(
    tokens: Annotated[str, typer.Option("--tokens", help="Prompt lengths, such as 512,8k,1m.")] = "256,1k",
    config: Annotated[
        str | None,
        typer.Option("--config", help="Random weights of this config (h200x1, FILE) on a GPU, no checkpoint."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="With --config: time by kernel.")] = False,
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    numerics: options.Numerics = None,
    prefill_mode: options.Prefill = "truncated",
    *,
    bench: BenchOptions,
) -> None:
    """Measure prefill: the time to read a prompt, for several lengths."""
    from dsuf.cli.bench.gpu_decode import card_of
    from dsuf.cli.bench.prefilling import prefill_floors, prefill_samples

    lengths = parse_token_counts(tokens)
    if config is None:
        options.refuse({"--profile": profile}, "for a --config")
    engine = engine_options(gpus, numerics, prefill_mode, "on", "auto", None)
    if config is not None:
        prefill_config(config, engine, lengths, bench, profile=profile)
        return
    session = open_session(ckpt, engine)
    samples = prefill_samples(session, lengths, bench)
    ceilings, floors = prefill_floors(session, lengths)
    for sample in samples:
        for length in lengths:
            sample[f"prefill_{length}_time_over_floor"] = sample[f"prefill_{length}_s"] * 1e6 / floors[length]["us"]
    params = {
        "tokens": list(lengths), "numerics": session.engine.options.numerics, "prefill": prefill_mode,
        "repeat": bench.repeat, "warmup": bench.warmup, "seed": bench.seed, "gpus": gpus,
    }  # fmt: skip
    result = new_result(
        "prefill", bench.label, backend=session.engine.limits.backend, model=session.model(), params=params,
        samples=samples, ceilings=ceilings, floor=floors[max(lengths)], gpu=card_of(session.engine),
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    print(headline(result.metrics, max(lengths)), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def prefill_config(
    config: str, engine: EngineOptions, lengths: tuple[int, ...], bench: BenchOptions, *, profile: bool
) -> None:
    """The same for a config with random weights on a GPU."""
    from dsuf.cli.bench import gpu_prefill
    from dsuf.model.synthetic import load_config
    from dsuf.spec import Spec

    loaded = load_config(config)
    chosen = gpu_prefill.options_for(shared_out(engine, Spec.from_config(loaded)), lengths)
    found = gpu_prefill.measure(loaded, chosen, lengths, bench.repeat, bench.warmup, profile=profile)
    params = {
        "config": config, "tokens": list(lengths), "prefill": engine.prefill, "chunk": chosen.prefill_chunk,
        "resume_every": chosen.resume_every, "repeat": bench.repeat, "warmup": bench.warmup, "memory": found.memory,
        "floors": {str(length): floor for length, floor in found.floors.items()}, "families": found.families,
        "kernels": {name: {"launches": count, "us": us} for name, (count, us) in found.kernels.items()},
    }  # fmt: skip
    model = {"name": config, "path": "", "revision": "random", "quant": "fp8 with fp4 experts", "bytes": 0}
    result = new_result(
        "prefill", bench.label, backend="gpu", model=model, params=params, samples=found.samples,
        ceilings=found.ceilings, floor=found.floors[max(lengths)], gpu=found.gpu,
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    for line in gpu_prefill.profile_lines(found) if found.kernels else ():
        say(line)
    print(headline(result.metrics, max(lengths)), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def headline(metrics: dict[str, float], length: int) -> str:
    """`prefill: 1,000,000 tokens in 13.2 s (76,000 tokens/s)`, for the longest prompt."""
    return (
        f"prefill: {length:,} tokens in {metrics[f'prefill_{length}_s']:.3g} s "
        f"({metrics[f'prefill_{length}_tokens_per_s']:,.0f} tokens/s)"
    )
