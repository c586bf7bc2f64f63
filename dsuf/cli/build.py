"""`dsuf build`: compile the kernel catalogue for one or more chips; no machine needs a GPU for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsuf.cli.live import progress
from dsuf.cli.machine import cpu_cores
from dsuf.config import read_environment
from dsuf.engine.gpu.chips import NOT_RUN
from dsuf.errors import CheckFailed, ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from dsuf.kernels.build_all import Row


def build(
    sm: Annotated[
        str | None,
        typer.Option("--sm", help="Chips, such as sm_90a,sm_103a. Default: DSUF_SM, else sm_90a,sm_100a,sm_103a."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the kernels and a manifest here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a kernel.")] = False,
) -> None:
    """Compile the GPU kernels; a second run finds them in the cache."""
    if sys.platform != "linux":
        raise EnvironmentProblem("The compiler (numba-cuda) is installed on Linux only. Build on a Linux machine.")
    from dsuf.kernels.build_all import build_catalogue, selected
    from dsuf.kernels.launch import Cubin, write_folder
    from dsuf.kernels.ptx.op import ALL_CHIPS

    environment = read_environment()
    chips = _chips(sm or environment.sm or ",".join(ALL_CHIPS), ALL_CHIPS)
    work, rows = selected(chips), []
    with progress("compiling", "kernels") as update:

        def done(row: Row) -> None:
            rows.append(row)
            update(len(rows), len(work))

        built = build_catalogue(work, environment.cache_dir, cpu_cores(), done)
    if out is not None:
        write_folder(out, [Cubin.of(name, kernel) for (name, _), kernel in sorted(built.items())])
    rows.sort(key=lambda row: (row.chip, row.name))
    _print_rows(rows, as_json)
    failed = [row for row in rows if row.problem]
    if failed:
        raise CheckFailed("\n".join(f"{row.name} for {row.chip}: {row.problem}" for row in failed))


def _chips(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chips = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    wrong = [chip for chip in chips if chip not in known]
    if wrong:
        raise ConfigError(f"--sm has {', '.join(map(repr, wrong))}; expected chips among {', '.join(known)}.")
    return chips


def _print_rows(rows: list[Row], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(msgspec.json.encode(row).decode())
        return
    width = max((len(row.name) for row in rows), default=0)
    print(f"{'kernel':{width}}  {'chip':8}{'registers':>10}{'shared B':>10}{'spills':>8}{'s':>7}")
    for row in rows:
        numbers = f"{row.registers:>10}{row.shared:>10,}{row.spills:>8}{row.seconds:>7.1f}"
        print(f"{row.name:{width}}  {row.chip:8}{numbers}  {row.problem or ('cached' if row.cached else '')}".rstrip())
    cached, failed = sum(row.cached for row in rows), sum(bool(row.problem) for row in rows)
    print(f"{len(rows)} kernels: {len(rows) - cached} compiled, {cached} from the cache, {failed} with a problem")
    unseen = sorted({row.chip for row in rows} & set(NOT_RUN))
    if unseen:
        print(f"{' and '.join(unseen)}: compiled, but no such GPU has run these kernels yet")
