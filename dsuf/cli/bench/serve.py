"""`dsuf bench serve`: load a running server over HTTP, or one of our own, and report what its clients saw."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsuf.cli import options
from dsuf.cli.bench.flags import measured
from dsuf.cli.bench.result import check_thresholds, new_result, write_result, write_whole
from dsuf.cli.live import say
from dsuf.cli.own_server import own_server, serve_flags
from dsuf.config import BenchOptions, check_number

if TYPE_CHECKING:
    from dsuf.cli.bench.serve_run import Run


@measured(repeat=1)
def serve(
    url: Annotated[str | None, typer.Option("--url", help="A running server. Default: start one and stop it.")] = None,
    dataset: Annotated[str, typer.Option("--dataset", help="random, tetris, jsonl, prefix, chat or mix.")] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option("--dataset-path", help="jsonl: lines with prompt or messages, max_tokens, body.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Conversations to send.")] = 100,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="Conversations that begin in a second; inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="1: Poisson arrivals; below: bursts; above: more even.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", help="Calls at once; others wait in the client.")
    ] = None,
    input_len: Annotated[
        int, typer.Option("--input-len", help="Tokens of a prompt, or of a turn, by DeepSeek's tokenizer.")
    ] = 512,
    output_len: Annotated[
        int, typer.Option("--output-len", help="Tokens of an answer; at most, with --heed-eos.")
    ] = 128,
    range_ratio: Annotated[float, typer.Option("--range-ratio", help="Lengths vary by up to this share.")] = 0.0,
    prefix_len: Annotated[int, typer.Option("--prefix-len", help="prefix: tokens that prompts share.")] = 1024,
    prefixes: Annotated[int, typer.Option("--prefixes", help="prefix: different shared parts.")] = 4,
    turns: Annotated[int, typer.Option("--turns", help="chat: turns of a conversation.")] = 4,
    mix_streams: Annotated[int, typer.Option("--mix-streams", help="mix: streams that run all the time.")] = 4,
    mix_short_len: Annotated[int, typer.Option("--mix-short-len", help="mix: tokens of the short prompts.")] = 200,
    mix_short_rate: Annotated[float, typer.Option("--mix-short-rate", help="mix: short prompts a second.")] = 1.0,
    mix_long_len: Annotated[int, typer.Option("--mix-long-len", help="mix: tokens of the long prompts.")] = 131_072,
    mix_alone: Annotated[float, typer.Option("--mix-alone", help="mix: seconds of the streams alone.")] = 20.0,
    mix_mixed: Annotated[float, typer.Option("--mix-mixed", help="mix: seconds of all together.")] = 60.0,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--heed-eos", help="Full length answers. Default: for made up prompts.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Default: the server's for this checkpoint.")
    ] = None,
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Limits in ms that a good request keeps: ttft:500 tpot:2.")
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Keep times and texts of every call in the vLLM layout.")
    ] = False,
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    draft: options.Draft = "on",
    verify: options.Verify = "auto",
    *,
    bench: BenchOptions,
) -> None:
    """Load a server: first tokens, gaps, throughput, goodput.

    It is one that runs (--url), or one of our own, started for this.
    """
    given = {name: value for name, value in locals().items() if name != "bench"}
    from dsuf.cli.bench.serve_data import Shape
    from dsuf.cli.bench.serve_load import Arrivals, Mix
    from dsuf.cli.bench.serve_report import parse_goodput
    from dsuf.cli.bench.serve_run import Plan, measure

    params = {**given, "repeat": bench.repeat, "warmup": bench.warmup, "seed": bench.seed, "label": bench.label}
    check_number("--num-prompts", num_prompts, 1, 10_000_000, whole=True)
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    fields["thinking"] = {"type": "disabled"}
    if dataset != "tetris" if ignore_eos is None else ignore_eos:
        fields["ignore_eos"] = True
    if temperature is not None:
        fields["temperature"] = temperature
    plan = Plan(
        dataset, dataset_path, num_prompts,
        Shape(input_len, output_len, range_ratio, prefix_len, prefixes, turns),
        Arrivals(request_rate, burstiness, max_concurrency),
        Mix(mix_streams, mix_short_len, mix_short_rate, long_len=mix_long_len, alone_s=mix_alone, mixed_s=mix_mixed),
        parse_goodput(goodput or []), fields, bench.seed,
    )  # fmt: skip
    plan.conversations(0)  # what cannot be made is told before a server is started
    flags = serve_flags(url, ckpt, gpus, draft, verify)
    with nullcontext(url) if url else own_server(flags) as address:
        runs, model, plan = measure(plan, bench, address)
    params |= {"model": model, "mix_long_len": plan.mix.long_len, "goodput": plan.goodput}
    _report(runs, params, bench, save_detailed)


def _report(runs: list[Run], params: dict[str, Any], bench: BenchOptions, save_detailed: bool) -> None:
    from dsuf.cli.bench.serve_report import table, vllm_layout

    shared = set.intersection(*(set(run.metrics) for run in runs))
    samples = [{name: value for name, value in run.metrics.items() if name in shared} for run in runs]
    rate = params["request_rate"]
    result = new_result(
        "serve", bench.label, backend="server", model={"name": params["model"]},
        params={**params, "request_rate": "inf" if rate == math.inf else rate,
                "dataset_path": str(params["dataset_path"]) if params["dataset_path"] else None},
        samples=samples,
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    if bench.output is not None:
        last = runs[-1]
        document = vllm_layout(samples[-1], params, last.records if save_detailed else None, last.positions)
        write_whole(bench.output.with_suffix(".vllm.json"), json.dumps(document).encode() + b"\n")
    middle = {name: result.metrics[name] for name in samples[0]}
    for line in table(middle):
        say(line)
    print(headline(middle), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def headline(metrics: dict[str, float]) -> str:
    """One line: throughput and times, or what the mix is asked for."""
    if "mixed_gap" in " ".join(metrics):
        return (
            f"mix: gap p50/p99 {metrics['p50_mixed_gap_ms']:,.1f}/{metrics['p99_mixed_gap_ms']:,.1f} ms "
            f"(alone {metrics['p50_alone_gap_ms']:,.1f}/{metrics['p99_alone_gap_ms']:,.1f}), "
            f"short ttft p50/p99 {metrics['p50_short_ttft_ms']:,.0f}/{metrics['p99_short_ttft_ms']:,.0f} ms, "
            f"long prompts {metrics['long_prompt_tokens_per_s']:,.0f} tokens/s"
        )
    return (
        f"serve: {metrics['output_throughput']:,.0f} tokens/s, {metrics['request_throughput']:.2f} requests/s, "
        f"ttft p50/p99 {metrics['p50_ttft_ms']:,.0f}/{metrics['p99_ttft_ms']:,.0f} ms, "
        f"tpot p50 {metrics['p50_tpot_ms']:.2f} ms"
    )
