"""`dsuf doctor`: look at this machine and say, for each finding, what it means and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from dsuf.cli import doctor_gpu, machine
from dsuf.cli.finding import Finding
from dsuf.config import Environment, private_folder, read_environment
from dsuf.errors import DsufError, EnvironmentProblem, UsageError

MEMORY_NEEDED = 2 * 1024**3  # the built-in checkpoint, its tokenizer, engine and web process
CACHE_NEEDED = 512 * 1024**2  # the built-in checkpoint with room to write it beside an older one
SUPPORTED_PYTHON = ((3, 11), (3, 14))  # first, and first no longer


def doctor(
    ckpt: Annotated[
        str | None,
        typer.Option(
            "--ckpt", help="Also say what loading takes: a folder, or a name (v41-flash).", metavar="NAME|DIR"
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="GPUs that share it. Default: 1.")] = None,
) -> None:
    """Check this machine; each finding with its fix. Exit 3 when something must be mended."""
    if ckpt is None and ranks is not None:
        raise UsageError("--ranks says over how many GPUs a checkpoint goes; name one with --ckpt, or leave it out.")
    findings = list(examine(read_environment()))
    if ckpt is not None:
        findings += doctor_gpu.loading(ckpt, 1 if ranks is None else ranks)
    for finding in findings:
        print(f"{finding.mark:4}  {finding.what}")
        if finding.fix:
            print(f"      fix: {finding.fix}")
    failed = sum(finding.mark == "FAIL" for finding in findings)
    print(f"{len(findings)} checks, {failed} to mend" if failed else f"{len(findings)} checks, all usable")
    if failed:
        raise typer.Exit(EnvironmentProblem.exit_code)


def examine(environment: Environment) -> Iterator[Finding]:
    """Every finding, in the order in which a person would mend them."""
    yield _python()
    packages = _dependencies()
    yield packages
    if packages.mark == "FAIL":
        return  # what follows uses them
    yield _guarded("tokenizer", _tokenizer)
    yield _cache(environment.cache_dir)
    yield _guarded("runtime folder", lambda: _runtime(environment.runtime_dir))
    yield _memory()
    yield _cores()
    yield _blas(environment.blas_threads)
    yield from doctor_gpu.examine(environment)
    yield from _rdma()
    for name in environment.unknown:
        yield Finding("note", f"{name} is set, and nothing reads it", "unset it, or check the spelling")


def _python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    first, beyond = SUPPORTED_PYTHON
    if not first <= sys.version_info[:2] < beyond:
        return Finding("FAIL", found, "use Python 3.11, 3.12 or 3.13")
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return Finding("note", found, "Linux on x86-64 or aarch64 is what dsuf is built for")
    return Finding("ok", found)


def _dependencies() -> Finding:
    try:
        requirements = importlib.metadata.requires("dsuf") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("FAIL", "dsuf runs from a folder and is not installed", "pip install . in the checkout")
    absent = [name for name in map(_needed_distribution, requirements) if name and not _installed(name)]
    if absent:
        return Finding("FAIL", f"packages missing: {', '.join(absent)}", f"pip install {' '.join(absent)}")
    return Finding("ok", f"dsuf {importlib.metadata.version('dsuf')} and all packages that it names")


def _needed_distribution(requirement: str) -> str | None:
    if "extra ==" in requirement or ("sys_platform" in requirement and sys.platform not in requirement):
        return None
    return re.match(r"[A-Za-z0-9._-]+", requirement).group(0)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tokenizer() -> Finding:
    from dsuf.text.tokenizer import v41_tokenizer_json

    return Finding("ok", f"V4.1's tokenizer, {len(v41_tokenizer_json()) / 1e6:.1f} MB, its digest is right")


def _guarded(what: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except DsufError as error:
        return Finding("FAIL", f"{what}: {error}", "see the message")


def _cache(folder: Path) -> Finding:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        return Finding("FAIL", f"cache folder {folder} cannot be written", "set DSUF_CACHE to a folder of yours")
    free = shutil.disk_usage(there).free
    what = f"cache folder {folder}, {free / 1e9:.1f} GB free"
    if free < CACHE_NEEDED:
        return Finding("FAIL", what, f"free {CACHE_NEEDED / 1e9:.1f} GB there or set DSUF_CACHE")
    return Finding("ok", what)


def _runtime(folder: Path) -> Finding:
    return Finding("ok", f"runtime folder {private_folder(folder)}, mode 0700")


def _memory() -> Finding:
    total, available = machine.memory_bytes()
    what = f"memory {total / 1e9:.1f} GB, {available / 1e9:.1f} GB available"
    if available < MEMORY_NEEDED:
        return Finding("note", what, f"the built-in checkpoint wants {MEMORY_NEEDED / 1e9:.1f} GB; end other programs")
    return Finding("ok", what)


def _cores() -> Finding:
    cores = machine.cpu_cores()
    what = f"{machine.cpu_name()}, {cores} core{'s' * (cores > 1)} usable"
    if cores == 1:
        return Finding("note", what, "the server and the engine share one core; two or more are faster")
    return Finding("ok", what)


def _blas(threads: str | None) -> Finding:
    import numpy as np

    library = np.show_config(mode="dicts")["Build Dependencies"]["blas"].get("name", "an unnamed BLAS")
    what = f"NumPy {np.__version__} with {library}, threads: {threads or 'one a core'}"
    if threads is not None and threads.isdigit() and int(threads) > machine.cpu_cores():
        return Finding("note", what, "set OPENBLAS_NUM_THREADS to at most the number of usable cores, or unset it")
    return Finding("ok", what)


def _rdma() -> Iterator[Finding]:
    try:
        from dsuf.kv.transport import rdma
    except ModuleNotFoundError as error:
        yield Finding("note", f"RDMA was not looked at: {error}", "install the packages that are missing")
        return
    for fact in rdma.describe():
        yield Finding("note" if fact.fix else "ok", fact.text, fact.fix)
