"""`dsuf bench compare OLD NEW`: two bench objects side by side; a loss beyond the noise of the repeats ends with 1.

    noise = max(2 * sqrt(std_old^2 + std_new^2), 1 % of the old median)

A metric is lost when its median moved the wrong way by more than the noise. One repeat has no spread, so that only the
1 % stands; give at least three repeats to both runs.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dsuf.cli.bench.result import BenchResult, bigger_is_better, read_result
from dsuf.errors import CheckFailed, ConfigError

LEAST_NOISE = 0.01  # of the old median: below this two runs of one program differ anyway


@dataclass(frozen=True)
class Change:
    """One metric in both runs; `verdict` is "better", "worse" or "same"."""

    metric: str
    old: float
    new: float
    noise: float
    verdict: str


def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Bench object of the earlier run (written by --output).")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Bench object of the later run.")],
) -> None:
    """Compare two bench objects; exit 1 on a loss beyond the noise."""
    before, after = read_result(old), read_result(new)
    if before.kind != after.kind:
        raise ConfigError(f"{old} is a {before.kind} run and {new} a {after.kind} run; compare two of the same kind.")
    for line in differences(before, after):
        print(f"note: {line}", file=sys.stderr)
    changes = changes_between(before, after)
    if not changes:
        raise ConfigError(f"{old} and {new} have no metric in common that could be compared.")
    for change in changes:
        percent = (change.new / change.old - 1) * 100 if change.old else 0.0
        print(
            f"{change.metric:32} {change.old:>12.5g} -> {change.new:<12.5g} {percent:+7.2f} %  "
            f"(noise {change.noise:.3g})  {change.verdict}"
        )
    worse = [change.metric for change in changes if change.verdict == "worse"]
    better = sum(change.verdict == "better" for change in changes)
    print(f"{before.kind}: {better} better, {len(worse)} worse, {len(changes) - better - len(worse)} the same")
    if worse:
        raise CheckFailed(f"worse beyond the noise: {', '.join(worse)}")


def changes_between(before: BenchResult, after: BenchResult) -> list[Change]:
    """The metrics that both runs have and that have a better and a worse side."""
    found = []
    for metric, old in before.metrics.items():
        bigger = bigger_is_better(metric)
        if bigger is None or metric not in after.metrics:
            continue
        new = after.metrics[metric]
        spread = math.hypot(before.metrics.get(f"std_{metric}", 0.0), after.metrics.get(f"std_{metric}", 0.0))
        noise = max(2 * spread, LEAST_NOISE * abs(old))
        gain = new - old if bigger else old - new
        verdict = "worse" if gain < -noise else "better" if gain > noise else "same"
        found.append(Change(metric, old, new, noise, verdict))
    return found


def differences(before: BenchResult, after: BenchResult) -> list[str]:
    """What else differs between the runs, so that a change is not blamed on the code alone."""
    lines = []
    for part in ("backend", "machine", "gpu", "model", "params"):
        one, other = getattr(before, part), getattr(after, part)
        if isinstance(one, dict) and isinstance(other, dict):
            keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
            lines += [f"{part}.{key} differs: {one.get(key)!r} and {other.get(key)!r}" for key in keys]
        elif one != other:
            lines.append(f"{part} differs: {one!r} and {other!r}")
    return lines
