"""The GPU part of `dsuf doctor`: devices, driver, kernels, host memory for Engram's tables, what a checkpoint takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsuf.cli import machine
from dsuf.cli.finding import Finding
from dsuf.config import Environment, check_number, read_environment
from dsuf.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from dsuf.kernels.catalogue import Width
    from dsuf.spec import Spec

REAL = "v41-flash"
MOST_RANKS = 64


def examine(environment: Environment) -> Iterator[Finding]:
    """Every GPU, its kernels, and the host memory that the released checkpoint's tables would take."""
    found = machine.find_gpus()
    if not found.devices:
        yield Finding("ok", f"no GPU: {found.problem}; the CPU backend runs everything")
        return
    yield _driver(found)
    chips = set()
    for gpu in found.devices:
        finding, chip = _device(gpu)
        chips |= {chip} - {None}
        yield finding
    if len(found.devices) > 1:
        yield _together(found)
    for chip in sorted(chips):
        yield _kernels(chip, environment)
    yield _tables()


def _driver(found: machine.Gpus) -> Finding:
    from dsuf.engine.gpu.chips import check_driver

    major, _, minor = (found.driver or "0.0").partition(".")
    try:
        check_driver(1000 * int(major) + 10 * int(minor))
    except DeviceError as error:
        return Finding("FAIL", str(error), "install a newer NVIDIA driver, or use --gpus 0")
    return Finding("ok", f"NVIDIA driver for CUDA {found.driver}")


def _device(gpu: machine.Gpu) -> tuple[Finding, str | None]:
    from dsuf.engine.gpu.chips import NOT_RUN, chip_of

    what = f"GPU {gpu.index}: {gpu.name} ({gpu.sm}, {gpu.memory_bytes / 1e9:.0f} GB)"
    number = int(gpu.sm.removeprefix("sm_"))
    try:
        chip = chip_of(number // 10, number % 10, gpu.name)
    except DeviceError as error:
        return Finding("note", f"{what}: {error}", "the CPU backend runs everything"), None
    if chip in NOT_RUN:
        what = f"{what}: kernels for {chip} compile, no such GPU has run them yet"
        return Finding("note", what, "`dsuf bench kernels` compares each with its reference"), chip
    return Finding("ok", what), chip


def _together(found: machine.Gpus) -> Finding:
    if found.apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in found.apart)
        what = f"GPUs that do not reach each other's memory, so that no engine runs over both: {pairs}"
        return Finding("note", what, "name GPUs of one NVLink or PCIe fabric with --gpus, or one alone")
    return Finding("ok", f"all {len(found.devices)} GPUs reach each other's memory: an engine can run over several")


def _kernels(chip: str, environment: Environment) -> Finding:
    from dsuf.kernels import build_all
    from dsuf.kernels.launch import read_folder

    if environment.kernels is not None:
        try:
            return Finding("ok", f"{len(read_folder(environment.kernels, chip))} kernels for {chip} in DSUF_KERNELS")
        except DeviceError as error:
            return Finding("FAIL", str(error), "unset DSUF_KERNELS, or build into that folder")
    needed = {name for name, _ in build_all.selected([chip])}
    built = len(needed & build_all.built_names(chip, environment.cache_dir))
    what = f"{built} of {len(needed)} kernels for {chip} are built"
    if built < len(needed):
        return Finding("note", what, f"dsuf build --sm {chip} now, or the first start builds what it needs")
    return Finding("ok", what)


def _tables() -> Finding:
    from dsuf.engine.gpu import engram_tables
    from dsuf.model.synthetic import load_config
    from dsuf.spec import Spec

    spec = Spec.from_config(load_config(REAL))
    seen = engram_tables.forecast(spec)
    pages = "2 MiB pages" if seen.page_bytes == engram_tables.HUGE_PAGE else "4 KiB pages"
    what = (
        f"Engram tables of the released checkpoint, {seen.nbytes / 1e9:.0f} GB, in host memory on {pages}: "
        f"{seen.touch_s:.0f} s to touch with one thread, {seen.register_s:.0f} s to page-lock; "
        f"{seen.free_bytes / 1e9:.0f} GB are free, {seen.huge_bytes / 1e9:.0f} GB of them in 2 MiB pages"
    )
    if seen.free_bytes < seen.nbytes:
        return Finding("note", what, "share them over several GPUs, or use a machine with more memory")
    if seen.page_bytes != engram_tables.HUGE_PAGE:
        count = -(-seen.nbytes // engram_tables.HUGE_PAGE)
        return Finding("note", what, f"sysctl vm.nr_hugepages={count} makes loading faster")
    return Finding("ok", what)


def loading(ckpt: str, ranks: int) -> Iterator[Finding]:
    """What loading a checkpoint (folder, config.json, built-in name) onto so many GPUs takes, by phase."""
    from dsuf.engine.gpu import engram_tables
    from dsuf.engine.gpu.launches import width_of
    from dsuf.engine.gpu.load_plan import phases
    from dsuf.model.synthetic import load_config
    from dsuf.spec import Spec
    from dsuf.text.builtin import TOY, resolve

    check_number("--ranks", ranks, 1, MOST_RANKS, whole=True)
    found = str(resolve(ckpt, cache_dir=read_environment().cache_dir)) if ckpt == TOY else ckpt
    spec = Spec.from_config(load_config(found))
    try:
        width = width_of(spec)
    except ConfigError as error:
        yield Finding("note", f"{ckpt} on a GPU: {error}", "--gpus 0 is the CPU backend, which runs any checkpoint")
        return
    yield from _refused(spec, width, ranks)
    gpus = machine.find_gpus().devices
    memory = min((gpu.memory_bytes for gpu in gpus), default=H200_BYTES)
    weights = max(sum(phase.device[rank] for phase in phases(spec, ranks, "host")) for rank in range(ranks))
    placement = engram_tables.choose(spec, memory - weights - REST_BYTES, ranks)
    gpu = f"{gpus[0].name}" if gpus else "H200 (as an example, this machine has no GPU)"
    fits = weights + REST_BYTES < memory
    yield Finding(
        "ok" if fits else "note",
        f"{ckpt} on {ranks} x {gpu}: {weights / 1e9:.1f} GB of weights a GPU beside Engram's tables ({placement}), "
        f"{memory / 1e9:.1f} GB there",
        "" if fits else "use more GPUs: --ranks",
    )
    for phase in phases(spec, ranks, placement, engram_tables.forecast(spec).page_bytes):
        yield Finding("ok", phase.line())


def _refused(spec: Spec, width: Width, ranks: int) -> Iterator[Finding]:
    """Why an engine would not start over so many GPUs; what loading would take is told all the same."""
    from dsuf.engine.gpu.open import check_shares

    try:
        check_shares(spec, width, ranks)
    except ConfigError as error:
        yield Finding("note", f"an engine would refuse to start: {error}", "give --ranks, and --gpus, such a number")


H200_BYTES = 150_109_880_320
REST_BYTES = 3 << 30  # workspace, windows, graphs and a first context
