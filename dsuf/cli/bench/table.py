"""The human side of a bench object: a table on stderr, so that stdout keeps the headline."""

from __future__ import annotations

from dsuf.cli.bench.result import BenchResult, unit
from dsuf.cli.live import say


def print_table(result: BenchResult) -> None:
    """Median, least, most and standard deviation of each metric; then floor and ceilings."""
    machine = f"{result.machine['cpu']}, {result.machine['cores']} cores"
    count = len(result.samples)
    repeats = "1 repeat" if count == 1 else f"{count} repeats"
    say(f"{result.kind} of {result.model['name']} on {result.backend}: {machine}, {repeats}")
    say(f"{'':28}{'median':>12}{'min':>12}{'max':>12}{'std':>12}")
    for name in result.samples[0]:
        values = (result.metrics[f"{prefix}{name}"] for prefix in ("", "min_", "max_", "std_"))
        say(f"{name:28}" + "".join(f"{_number(value):>12}" for value in values) + f"  {unit(name)}")
    if result.floor:
        floor = result.floor
        what = "a step" if result.kind == "decode" else "the longest prompt"
        amounts = f"{floor['bytes'] / 1e6:,.1f} MB and {floor['flops'] / 1e9:,.2f} GFLOP"
        say(f"floor of {what}: {amounts} in {floor['us'] / 1e3:,.2f} ms at the ceilings")
    if result.ceilings:
        say("ceilings measured here: " + ", ".join(f"{name} {value:,.1f}" for name, value in result.ceilings.items()))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
