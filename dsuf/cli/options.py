"""Command-line options that several commands share, with one spelling and one help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dsuf.errors import UsageError

DEFAULT_CKPT = "toy"

Ckpt = Annotated[
    str, typer.Option("--ckpt", help="Checkpoint folder, or a built-in one: toy or noise.", metavar="NAME|DIR")
]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", help="A count (4), devices (0,1 or 3,), or 0 for the CPU. Default: all that can share."),
]
Numerics = Annotated[
    str | None,
    typer.Option("--numerics", help="How the CPU backend rounds: exact32, qdq32, qdq64 (default) or bf16, as a GPU."),
]
Prefill = Annotated[
    str, typer.Option("--prefill", help="exact: all layers on all prompt tokens; truncated: as deployed.")
]
PrefillBudget = Annotated[
    float | None,
    typer.Option(
        "--prefill-budget",
        help="Milliseconds of prefill between two steps of running streams: no stream waits longer for prompts, "
        "and less of it costs prompts throughput. Default: 120 on a GPU, 50 on a CPU.",
    ),
]
Draft = Annotated[str, typer.Option("--draft", help="on or off: draft a block each step and verify it.")]
Verify = Annotated[str, typer.Option("--verify", help="Drafts verified each step: a number, or auto by confidence.")]
MaxContext = Annotated[
    int | None, typer.Option("--max-context", help="Longest sequence in tokens. Default: the checkpoint's.")
]

Output = Annotated[Path | None, typer.Option("--output", help="Write the bench object (dsuf.bench/1) to this file.")]
CiJson = Annotated[
    Path | None, typer.Option("--ci-json", help="Write bigger.json and smaller.json for CI charts into this folder.")
]
Label = Annotated[str, typer.Option("--label", help="A name for this run, kept in the bench object.")]
FailBelow = Annotated[
    list[str] | None, typer.Option("--fail-below", help="METRIC=VALUE: exit 1 when the metric is below.")
]
FailAbove = Annotated[
    list[str] | None, typer.Option("--fail-above", help="METRIC=VALUE: exit 1 when the metric is above.")
]
Repeat = Annotated[int, typer.Option("--repeat", help="Measured repeats.")]
Warmup = Annotated[int, typer.Option("--warmup", help="Repeats before the measured ones.")]


def refuse(flags: dict[str, Any], why: str) -> None:
    """Raise UsageError for those of `flags` that are given: none may be without effect in silence."""
    given = [flag for flag, value in flags.items() if value]
    if given:
        are, them = ("is", "it") if len(given) == 1 else ("are", "them")
        raise UsageError(f"{', '.join(given)} {are} {why}. Leave {them} out.")
