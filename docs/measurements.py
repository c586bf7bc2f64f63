"""Writes docs/measurements.md from the bench objects in docs/results: `python3 docs/measurements.py`.

Nothing in that file is typed by hand. A kernels result becomes a line a case: microseconds, floor, their ratio, error
and peers; any other result a line a metric. Needs nothing but Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
STATISTICS = ("min_", "max_", "std_")
SHORTEST_FLOOR_US = 0.05  # below it a ratio says more about a launch than about the kernel


def main() -> None:
    """Write the file."""
    (DOCS / "measurements.md").write_text(document(DOCS / "results"), encoding="utf-8")


def document(folder: Path) -> str:
    """The whole text, results in the order of their file names."""
    parts = [
        "# Measurements\n",
        "Made by `docs/measurements.py` from `docs/results/*.json`; do not edit. A figure stands for the card and the\n"
        "run it names, with the ceilings of that run; *floor* is what must move or be computed, at those ceilings.\n",
    ]
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        cases = result.get("params", {}).get("cases")
        parts += [heading(file, result), case_table(result, cases) if cases else metric_table(result)]
        parts += [kernel_table(result)] if (result.get("params") or {}).get("kernels") else []
    return "\n".join(parts)


def heading(file: Path, result: dict[str, Any]) -> str:
    """Title and where it was measured."""
    gpu, machine = result.get("gpu"), result.get("machine")
    where = []
    if gpu:
        where.append(f"{gpu['count']} x {gpu['name']}" if gpu.get("count") else gpu["name"])
    if machine:
        where.append(f"{machine['cpu']}, {machine['cores']} cores")
    model = ", ".join(str(value) for value in (result.get("model") or {}).values())
    facts = [
        f"`results/{file.name}`",
        *where,
        *([f"model {model}"] if model else []),
        result["date"][:16].replace("T", " "),
    ]
    if result.get("git_commit"):
        facts.append(f"commit {result['git_commit'][:10]}")
    ceilings = ", ".join(f"{name} {number(value)}" for name, value in (result.get("ceilings") or {}).items())
    lines = [f"## {result['kind']}: {result.get('label') or file.stem}\n", "; ".join(facts) + ".\n"]
    return "\n".join(lines + ([f"Ceilings of the run: {ceilings}.\n"] if ceilings else []))


def case_table(result: dict[str, Any], cases: dict[str, dict[str, Any]]) -> str:
    """A line a kernel case; peers in one column."""
    lines = [
        "| case | us | min .. max | MB | GB/s | floor us | time over floor | error | peers, us |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    metrics = result["metrics"]
    for name, case in cases.items():
        us = metrics.get(f"{name}_us")
        if us is None:
            lines.append(f"| {name} | wrong: {case.get('problem', 'not run')} | | | | | | | |")
            continue
        floor = case["floor_us"]
        over = f"{us / floor:.2f}" if floor >= SHORTEST_FLOOR_US else ""
        prefix = f"{name}_peer_"
        peers = ", ".join(
            f"{key.removeprefix(prefix).removesuffix('_us')} {number(value)}"
            for key, value in metrics.items()
            if key.startswith(prefix)
        )
        cells = [
            name, number(us), f"{number(metrics[f'min_{name}_us'])} .. {number(metrics[f'max_{name}_us'])}",
            number(case["bytes"] / 1e6), f"{case['bytes'] / us / 1e3:,.0f}",
            number(floor) + (" (operations)" if case.get("floor_of") == "operations" else ""), over,
            f"{case['error']:.1e}", peers,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kernel_table(result: dict[str, Any]) -> str:
    """A line a kernel of a profiled step, and the step's floor."""
    kernels = result["params"]["kernels"]
    total = sum(one["us"] for one in kernels.values())
    floor = result.get("floor") or {}
    lines = ["| kernel of a step, replayed alone | launches | us | share |", "| --- | --: | --: | --: |"]
    for name, one in sorted(kernels.items(), key=lambda item: -item[1]["us"]):
        lines.append(f"| {name} | {one['launches']} | {number(one['us'])} | {one['us'] / total:.1%} |")
    lines.append(f"| all of them; floor of the step {number(floor.get('us', 0))} us | | {number(total)} | |")
    return "\n".join(lines) + "\n"


def metric_table(result: dict[str, Any]) -> str:
    """A line a metric, with the spread of the repeats where there is one."""
    metrics = dict(flat(result.get("metrics") or {}))
    shown = [name for name in metrics if not name.startswith(STATISTICS) and metrics[name] != []]
    if not shown:
        return "No metrics.\n"
    if not any(f"min_{name}" in metrics for name in shown):
        lines = ["| metric | value |", "| --- | --: |"] + [f"| {name} | {number(metrics[name])} |" for name in shown]
        return "\n".join(lines) + "\n"
    lines = ["| metric | median | min .. max |", "| --- | --: | --: |"]
    for name in shown:
        least, most = metrics.get(f"min_{name}", ""), metrics.get(f"max_{name}", "")
        lines.append(f"| {name} | {number(metrics[name])} | {number(least)} .. {number(most)} |")
    return "\n".join(lines) + "\n"


def flat(metrics: dict[str, Any], stem: str = "") -> Iterator[tuple[str, Any]]:
    """Names of nested groups joined by a dot."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from flat(value, f"{stem}{name}.")
        else:
            yield stem + name, value


def number(value: Any) -> str:
    """Four significant digits, whole numbers whole, thousands apart; anything else as it is."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
