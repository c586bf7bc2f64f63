"""Finds the compiled kernels that a checkpoint needs on a chip, and builds those that are missing before `ready`.

They come from a folder that `dsuf build --out` wrote (DSUF_KERNELS), or from the user's build cache, where an index
says which files belong to the kernel sources as they are now. Only names of the checkpoint's width and of none count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dsuf.errors import CheckFailed, DeviceError
from dsuf.kernels.launch import Cubin, read_folder

Progress = Callable[[int, int], None]  # kernels built, to build


def wanted(name: str, width: str) -> bool:
    """Whether an entry of that name serves a width: `family/width/...`, or a family without one."""
    parts = name.split("/")
    return len(parts) == 1 or parts[1] == width


def find(
    chip: str, width: str, cache: Path, folder: Path | None = None, progress: Progress | None = None
) -> list[Cubin]:
    """Cubins of a width ("v41", "small") for a chip. Raises DeviceError, with what to run, where some cannot be had."""
    if folder is not None:
        found = [cubin for cubin in read_folder(folder, chip) if wanted(cubin.name, width)]
        if not found:
            raise DeviceError(
                f"{folder} holds no kernels of width {width}. Run `dsuf build --sm {chip} --out {folder}`."
            )
        return found
    return _from_cache(chip, width, cache, progress)


def _from_cache(chip: str, width: str, cache: Path, progress: Progress | None) -> list[Cubin]:
    from dsuf.kernels import build_all  # the catalogue's modules are imported with it

    work = [(name, at) for name, at in build_all.selected([chip]) if wanted(name, width)]
    done, problems = 0, []

    def count(row: build_all.Row) -> None:
        nonlocal done
        done += 1
        problems.extend([f"{row.name}: {row.problem}"] if row.problem else [])
        if progress is not None and not row.cached:
            progress(done, len(work))

    try:
        built = build_all.build_catalogue(work, cache, os.cpu_count() or 1, count)
    except (ImportError, CheckFailed) as error:
        raise DeviceError(
            f"kernels for {chip} are not built, and cannot be built here ({error}). Run `dsuf build --sm {chip} --out "
            "DIR` where numba-cuda is installed, and set DSUF_KERNELS=DIR."
        ) from None
    if problems:
        raise DeviceError(f"{len(problems)} kernels for {chip} cannot be used: {problems[0]}. Run `dsuf build`.")
    return [Cubin.of(name, built[name, at]) for name, at in work]
