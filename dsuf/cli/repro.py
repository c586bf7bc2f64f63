"""`dsuf repro NAME`: run a recipe's published request and print our figures beside the published ones."""

from __future__ import annotations

import inspect
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from dsuf.cli import options
from dsuf.cli.bench.result import check_thresholds, new_result, write_result, write_whole
from dsuf.cli.browser import show_in_browser
from dsuf.cli.client import StreamTimes, chat_url, read_counters, steps_since, stream_chat
from dsuf.cli.live import say
from dsuf.cli.own_server import own_server, serve_flags
from dsuf.cli.page import extract_page, failed_checks
from dsuf.cli.recipe import BENCH_DECODE, BENCH_SERVE, Recipe, load_recipe
from dsuf.config import BenchOptions, check_output, parse_thresholds, read_environment
from dsuf.errors import CheckFailed, ConfigError

TITLES = {
    "tokens_per_s": "tokens/s",
    "unbiased_tokens_per_s": "tokens/s without the first event",
    "average_iteration_ms": "ms a step",
    "average_accept_length": "tokens a step",
    "first_token_s": "first token after, s",
}


def repro(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe: tetris, mix or h200.")],
    url: Annotated[str | None, typer.Option("--url", help="A running server. Default: start one and stop it.")] = None,
    runs: Annotated[
        int | None,
        typer.Option("--runs", help="How often to send the request, or to measure. Default: once, or the recipe's."),
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the page of the first answer here.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the page; exit 1 when it is not what was asked.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print the answer's text.")] = False,
    open_page: Annotated[
        bool,
        typer.Option("--open", help="Show it in a browser instead: the server's page with its speedometer."),
    ] = False,
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    draft: options.Draft = "on",
    verify: options.Verify = "auto",
    label: options.Label = "",
    output: options.Output = None,
    ci_json: options.CiJson = None,
    fail_below: options.FailBelow = None,
    fail_above: options.FailAbove = None,
) -> None:
    """Run a recipe: our figures beside the published ones.

    A recipe sends its published request to a server, or measures.
    """
    recipe = load_recipe(name)
    page_flags = {"--save": save, "--check": check, "--quiet": quiet, "--open": open_page}
    server_flags = {
        "--url": url,
        "--ckpt": ckpt != options.DEFAULT_CKPT,
        "--draft": draft != "on",
        "--verify": verify != "auto",
    }
    if recipe.command in (BENCH_SERVE, BENCH_DECODE):
        options.refuse(page_flags, f"for recipes that ask for a page; {name} measures")
    if recipe.command == BENCH_DECODE:
        options.refuse(server_flags | {"--ci-json": ci_json}, f"not for {name}, which measures in this process")
    if open_page:
        kept = {"--output": output, "--ci-json": ci_json, "--fail-below": fail_below, "--fail-above": fail_above}
        options.refuse(
            {"--save": save, "--check": check, "--runs": runs} | kept,
            "not for --open: the page sends the request by itself",
        )
    repeats = {} if runs is None else {"repeat": runs}
    if recipe.command == BENCH_DECODE:
        shared = {"gpus": gpus, "label": label, "output": output, "fail_below": fail_below, "fail_above": fail_above}
        _run_decode(recipe, **{flag: value for flag, value in shared.items() if value}, **repeats)
        return
    if recipe.command == BENCH_SERVE:
        shared = {
            "url": url, "ckpt": ckpt, "gpus": gpus, "draft": draft, "verify": verify, "label": label or f"repro {name}",
            "output": output, "ci_json": ci_json, "fail_below": fail_below, "fail_above": fail_above,
        }  # fmt: skip
        _run_bench(recipe, **shared, **repeats)
        return
    runs = 1 if runs is None else runs
    bench = BenchOptions(
        repeat=runs, warmup=0, label=label, output=output, ci_json=ci_json,
        thresholds=parse_thresholds(fail_below or [], fail_above or []),
    )  # fmt: skip
    check_output("--save", save)
    flags = serve_flags(url, ckpt, gpus, draft, verify)
    if open_page:
        show_in_browser(name, url, flags)
        return
    with nullcontext(url) if url else own_server(flags) as address:
        answers, samples = _send(recipe, chat_url(address), runs, quiet)
    page = extract_page(answers[0].text)
    if save is not None:
        write_whole(save, page.encode())
        say(f"saved {save} ({len(page):,} characters)")
    _print_table(recipe, samples)
    result = new_result(
        f"repro.{name}", label, backend="server", model={"name": str(recipe.request["model"])},
        params={"url": url, "runs": runs, "serve_flags": [] if url else flags}, samples=samples,
    )  # fmt: skip
    write_result(result, bench.output, bench.ci_json)
    print(_typical(answers).headline(), flush=True)
    if check and (failed := failed_checks(page, recipe.checks)):
        raise CheckFailed(f"The page does not pass: {'; '.join(failed)}")
    check_thresholds(result.metrics, bench.thresholds)


def _run_bench(recipe: Recipe, **flags: Any) -> None:
    """`dsuf bench serve` with the recipe's flags. Raises ConfigError for a flag that it does not have."""
    from dsuf.cli.bench.serve import serve

    known = set(inspect.signature(serve).parameters) - set(flags)
    if unknown := sorted(set(recipe.flags) - known):
        raise ConfigError(
            f"The recipe {recipe.name} has args {', '.join(unknown)}; expected {', '.join(sorted(known))}."
        )
    serve(**recipe.flags, **flags)


def _run_decode(recipe: Recipe, output: Path | None = None, label: str = "", **flags: Any) -> None:
    """`dsuf bench decode` for each run of the recipe; `output` NAME.json becomes NAME-RUN.json.

    Raises ConfigError for a flag that it does not have.
    """
    from dsuf.cli.bench.decode import decode

    known = set(inspect.signature(decode).parameters)
    for run in recipe.runs:
        name, given = run["name"], {**recipe.flags, **{flag: value for flag, value in run.items() if flag != "name"}}
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"The recipe {recipe.name} has {', '.join(unknown)}; expected {', '.join(sorted(known))}."
            )
        file = None if output is None else output.with_stem(f"{output.stem}-{name}")
        say(f"{recipe.name}: {name}")
        decode(**{**given, **flags, "output": file, "label": f"{label or recipe.name} {name}"})


def _send(recipe: Recipe, url: str, runs: int, quiet: bool) -> tuple[list[StreamTimes], list[dict[str, float]]]:
    answers, samples = [], []
    api_key = read_environment().api_key
    for run in range(runs):
        before = read_counters(url)
        answer = stream_chat(url, recipe.request, _ignore if quiet else _print_text, api_key)
        if not quiet:
            print("\n", flush=True)
        sample = {
            "tokens_per_s": answer.tokens_per_s,
            "unbiased_tokens_per_s": answer.unbiased_tokens_per_s,
            "first_token_s": answer.first_s,
        }
        answers.append(answer)
        samples.append(sample | (steps_since(url, before) or {}))
        if runs > 1:
            say(f"run {run + 1} of {runs}: {answer.headline()}")
    shared = set.intersection(*(set(sample) for sample in samples))
    return answers, [{name: value for name, value in sample.items() if name in shared} for sample in samples]


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    pass


def _typical(answers: list[StreamTimes]) -> StreamTimes:
    middle = statistics.median_low(answer.tokens_per_s for answer in answers)
    return next(answer for answer in answers if answer.tokens_per_s == middle)


def _print_table(recipe: Recipe, samples: list[dict[str, float]]) -> None:
    machines = list(recipe.published)
    rows = []
    for metric, title in TITLES.items():
        values = [sample[metric] for sample in samples if metric in sample]
        cells = [_range(recipe.published[machine].get(metric)) for machine in machines]
        rows.append([title, _range((min(values), max(values))) if values else "not reported", *cells])
    header = ["", "here", *(f"published, {machine}" for machine in machines)]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=sys.stderr)
    sys.stderr.flush()


def _range(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return ""
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in pair)
    return low if low == high else f"{low} to {high}"
