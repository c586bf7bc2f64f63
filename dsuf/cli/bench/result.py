"""The bench object `dsuf.bench/1`: what every benchmark writes, on a CPU as on a GPU.

`metrics` is flat; each measured quantity appears as its median under its own name (unit last: `step_ms`) and as
`min_`, `max_` and `std_` of the repeats. `samples` holds one row of raw values a repeat. `ceilings` are rates measured
on this machine in the same run, `floor` is what a step must move or compute, `time_over_floor` the ratio to it.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from dsuf import __version__
from dsuf.cli.machine import cpu_cores, cpu_name, git_commit, memory_bytes
from dsuf.config import Threshold
from dsuf.errors import CheckFailed, ConfigError

SCHEMA = "dsuf.bench/1"
STATISTICS = ("min", "max", "std")


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark run, as written by --output."""

    schema: str = SCHEMA
    kind: str  # "decode", "prefill", "repro.tetris"
    label: str
    date: str  # ISO 8601, UTC
    dsuf_version: str
    git_commit: str | None
    backend: str  # "cpu", "gpu"
    machine: dict[str, str | int]  # cpu, cores, ram (bytes)
    gpu: dict[str, str | int] | None
    model: dict[str, str | int]
    params: dict[str, Any]
    ceilings: dict[str, float]
    floor: dict[str, float] | None  # None: nothing that this kind of run could be held against
    metrics: dict[str, float]
    samples: list[dict[str, float]]


def new_result(
    kind: str,
    label: str,
    *,
    backend: str,
    model: dict[str, str | int],
    params: dict[str, Any],
    samples: list[dict[str, float]],
    ceilings: dict[str, float] | None = None,
    floor: dict[str, float] | None = None,
    gpu: dict[str, str | int] | None = None,
) -> BenchResult:
    """A bench object of this moment and this machine; `gpu` is the card, or cards, of a GPU backend."""
    return BenchResult(
        kind=kind,
        label=label,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dsuf_version=__version__,
        git_commit=git_commit(Path(__file__).parents[3]),
        backend=backend,
        machine={"cpu": cpu_name(), "cores": cpu_cores(), "ram": memory_bytes()[0]},
        gpu=gpu,
        model=model,
        params=params,
        ceilings=ceilings or {},
        floor=floor,
        metrics=summarise(samples),
        samples=samples,
    )


def summarise(samples: list[dict[str, float]]) -> dict[str, float]:
    """Median under each name, then min_, max_ and std_ of the repeats. Every sample has the same names."""
    metrics: dict[str, float] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        metrics[name] = statistics.median(values)
        metrics[f"min_{name}"], metrics[f"max_{name}"] = min(values), max(values)
        metrics[f"std_{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return metrics


def bigger_is_better(name: str) -> bool | None:
    """Direction of a metric by its unit; None for one that describes the run (a count of tokens, a histogram)."""
    if name.startswith(tuple(f"{statistic}_" for statistic in STATISTICS)):
        return None
    if name.endswith(("_per_s", "_throughput", "_goodput")) or name == "accept_length":
        return True
    return False if name.endswith(("_us", "_ms", "_s", "_bytes", "time_over_floor")) else None


def unit(name: str) -> str:
    """Unit of a metric, from the end of its name."""
    for suffix, text in (
        ("tokens_per_s", "tokens/s"),
        ("_gb_per_s", "GB/s"),
        ("_us", "us"),
        ("_ms", "ms"),
        ("_s", "s"),
        ("_bytes", "B"),
    ):
        if name.endswith(suffix):
            return text
    known = {"accept_length": "tokens/step", "time_over_floor": "x floor"}
    throughput = "requests/s" if name.startswith("request_") else "tokens/s"
    return throughput if name.endswith(("_throughput", "_goodput")) else known.get(name, "")


def read_result(path: Path) -> BenchResult:
    """Read one bench object. Raises ConfigError for a file that is none."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a file that `--output` wrote.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a {SCHEMA} object: {error}. Give a file that `--output` wrote.") from None
    if result.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {result.schema!r}; expected {SCHEMA!r}.")
    return result


def write_result(result: BenchResult, output: Path | None, ci_json: Path | None) -> None:
    """Write the object to `output`, and bigger.json and smaller.json for CI charts into the folder `ci_json`."""
    if output is not None:
        write_whole(output, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if ci_json is not None:
        try:
            ci_json.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--ci-json {ci_json} cannot be made: {error.strerror}.") from None
        for name, bigger in (("bigger.json", True), ("smaller.json", False)):
            rows = [_ci_row(result, metric) for metric in result.metrics if bigger_is_better(metric) is bigger]
            write_whole(ci_json / name, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or an interrupt, finds all of it or nothing; a pipe or device is written to."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path = path.resolve()  # what a link points to is replaced, not the link
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as part:
            try:
                part.write(content)
                part.close()
                Path(part.name).chmod(0o644)
                Path(part.name).replace(path)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _ci_row(result: BenchResult, metric: str) -> dict[str, Any]:
    # one entry of github-action-benchmark's custom formats (serving.md 8.2)
    return {
        "name": f"{result.kind}/{metric}",
        "unit": unit(metric),
        "value": result.metrics[metric],
        "range": f"{result.metrics[f'min_{metric}']:.6g} to {result.metrics[f'max_{metric}']:.6g}",
        "extra": f"{result.backend}, {result.machine['cpu']}, dsuf {result.dsuf_version}",
    }


def check_thresholds(metrics: dict[str, float], thresholds: tuple[Threshold, ...]) -> None:
    """Raise CheckFailed naming every threshold missed, ConfigError for a metric that the run does not have."""
    missed = []
    for threshold in thresholds:
        if threshold.metric not in metrics:
            known = ", ".join(name for name in metrics if bigger_is_better(name) is not None)
            raise ConfigError(f"There is no metric {threshold.metric!r} in this run; it has {known}.")
        value = metrics[threshold.metric]
        if value < threshold.value if threshold.below else value > threshold.value:
            side = "below" if threshold.below else "above"
            missed.append(f"{threshold.metric} is {value:.6g}, {side} the threshold {threshold.value:.6g}")
    if missed:
        raise CheckFailed("; ".join(missed))
