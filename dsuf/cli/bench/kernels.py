"""`dsuf bench kernels`: each kernel at the real widths on this GPU: right, then microseconds beside its floor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsuf.cli import options
from dsuf.cli.bench.result import BenchResult, check_thresholds, new_result, write_result
from dsuf.cli.live import say
from dsuf.config import BenchOptions, parse_thresholds, read_environment
from dsuf.errors import CheckFailed, ConfigError, DsufError

if TYPE_CHECKING:
    from dsuf.cli.bench.kernel_bench import Bench, Measured
    from dsuf.engine.gpu.device import Device

CONFIG = "h200x1"  # full widths, 128 experts: what one card holds
MEMORY_BYTES = 6 << 30
MOST_ROWS = 48


def kernels(
    only: Annotated[
        str, typer.Option("--only", help="Only these: names, or their beginnings, separated by commas.")
    ] = "",
    rows: Annotated[str, typer.Option("--rows", help="Rows of a step, such as 1,6,16.")] = "1,6",
    folder: Annotated[
        Path | None, typer.Option("--kernels", help="What `dsuf build --out` wrote. Default: DSUF_KERNELS, the cache.")
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time torch, cuBLAS and Triton at the same shapes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the bench object instead of the table.")] = False,
    gpu: Annotated[int, typer.Option("--gpu", help="Number of the device.")] = 0,
    repeat: options.Repeat = 15,
    seed: Annotated[int, typer.Option("--seed", help="Key of the random numbers.")] = 0,
    label: options.Label = "",
    output: options.Output = None,
    ci_json: options.CiJson = None,
    fail_below: options.FailBelow = None,
    fail_above: options.FailAbove = None,
) -> None:
    """Check and time the kernels on this machine's GPU."""
    bench = BenchOptions(repeat, 0, seed, label, output, ci_json, parse_thresholds(fail_below or [], fail_above or []))
    counts, names = parse_rows(rows), tuple(part.strip() for part in only.split(",") if part.strip())
    result, problems = run(counts, names, folder, peers, gpu, bench, say if as_json else print)
    write_result(result, bench.output, bench.ci_json)
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")
    check_thresholds(result.metrics, bench.thresholds)
    if problems:
        raise CheckFailed("; ".join(problems))


def parse_rows(text: str) -> tuple[int, ...]:
    """Row counts 1..48. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdigit() or not 1 <= int(part) <= MOST_ROWS]
    if wrong or not parts:
        raise ConfigError(f"--rows is {text!r}; expected numbers from 1 to {MOST_ROWS}, such as 1,6,16.")
    return tuple(int(part) for part in parts)


def run(
    counts: tuple[int, ...],
    only: tuple[str, ...],
    folder: Path | None,
    with_peers: bool,
    gpu: int,
    options: BenchOptions,
    show: Callable[[str], None],
) -> tuple[BenchResult, list[str]]:
    """Measure; the bench object and what was wrong. Raises DeviceError without a GPU."""
    from dsuf.cli.bench import kernel_cases, kernel_peers
    from dsuf.cli.bench.kernel_bench import Bench, matching
    from dsuf.engine.gpu.device import Device
    from dsuf.kernels.project import projections
    from dsuf.model.synthetic import load_config
    from dsuf.spec import Spec

    spec = Spec.from_config(load_config(CONFIG))
    families = kernel_cases.families(tuple(projections(spec)))
    names = matching(families, only)
    if not names:
        raise ConfigError(f"--only {','.join(only)} names nothing; known are {', '.join(families)}.")
    peer = kernel_peers.measure if with_peers else None
    if with_peers:
        kernel_peers.need()
    with Device.open(gpu) as device:
        device.add_kernels(_cubins(device.chip, folder))
        bench = Bench(device, spec, MEMORY_BYTES, options.seed)
        show(f"{device.name}: read ceiling {bench.measure_ceiling():,.0f} GB/s")
        found = []
        for count in counts:
            for name in names:
                one = _measured(bench, name, families[name], count, options.repeat, peer)
                found.append(one)
                show(line(one))
        return _result(device, bench, found, counts, options), [
            f"{one.case.metric}: {one.problem}" for one in found if one.problem
        ]


def _cubins(chip: str, folder: Path | None) -> Any:
    from dsuf.engine.gpu import cubins

    environment = read_environment()
    return cubins.find(chip, "v41", environment.cache_dir, folder or environment.kernels)


def _measured(
    bench: Bench, name: str, family: Any, rows: int, repeat: int, peer: Callable[..., dict[str, float]] | None
) -> Measured:
    from dsuf.cli.bench.kernel_bench import Case, Measured

    try:
        return bench.measure(lambda b: family(b, rows), repeat, peer or (lambda case: {}))
    except Exception as error:  # of one case: said beside it, and the others go on
        if bench.device.lost is not None:
            raise
        problem = str(error) if isinstance(error, DsufError) else f"{type(error).__name__}: {error}"
        return Measured(Case(name, rows, [], lambda: 0.0, 0.0, 0), (), 0.0, 0.0, problem=problem)


def line(one: Measured) -> str:
    """`wq_b r6  12.57 us  3,371 GB/s  floor 9.07 (bytes)  1.39x  error 1.7e-03`, then the peers."""
    case = one.case
    head = f"{case.name:20} r{case.rows:<3}"
    if one.problem:
        return f"{head} WRONG: {one.problem}"
    us, floor = one.median_us, one.floor_us
    over = f"{us / floor:6.2f}x" if floor >= 0.05 else "      -"  # below a launch's own time the ratio says nothing
    moved = f"{case.nbytes / us / 1e3:7,.0f} GB/s"
    text = f"{head}{us:9.2f} us {moved}  floor {floor:8.2f} ({one.floor_of}) {over}  error {one.error:.1e}"
    return text + "".join(f"  {name} {peer:.2f}" for name, peer in one.peers.items())


def _result(
    device: Device, bench: Bench, found: list[Measured], counts: tuple[int, ...], options: BenchOptions
) -> BenchResult:
    import msgspec

    from dsuf.cli.bench.gpu_decode import DENSE_BF16_GFLOPS
    from dsuf.cli.bench.kernel_bench import row_of

    right = [one for one in found if one.us]
    samples = [
        {f"{one.case.metric}_us": one.us[i] for one in right}
        | {f"{one.case.metric}_time_over_floor": one.us[i] / one.floor_us for one in right if one.floor_us}
        for i in range(options.repeat)
    ]
    for sample in samples:
        sample |= {f"{one.case.metric}_peer_{name}_us": us for one in right for name, us in one.peers.items()}
    result = new_result(
        "kernels", options.label, backend="gpu", model={"name": CONFIG},
        params={"rows": list(counts), "seed": options.seed, "cases": {one.case.metric: row_of(one) for one in found}},
        samples=samples, ceilings={"read_gb_per_s": bench.read_gb_per_s, "bf16_gflops": DENSE_BF16_GFLOPS},
        floor={one.case.metric: one.floor_us for one in right},
    )  # fmt: skip
    return msgspec.structs.replace(result, gpu={"name": device.name, "index": device.index, "sm": device.chip})
