"""What this machine has: processor, memory, GPUs and RDMA devices; looked up, never assumed."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dsuf.config import parse_gpus
from dsuf.engine.gpu.chips import CHIPS, OLDEST_DRIVER
from dsuf.errors import DeviceError


@dataclass(frozen=True)
class Gpu:
    """One GPU that the driver shows to this process."""

    index: int
    name: str
    sm: str  # sm_90a spelling without the letter: "sm_90"
    memory_bytes: int


@dataclass(frozen=True)
class Gpus:
    """Every visible GPU, or the reason why none can be used."""

    devices: tuple[Gpu, ...]
    driver: str | None = None  # highest CUDA version that the driver serves, "13.0"
    problem: str | None = None
    apart: tuple[tuple[int, int], ...] = ()  # pairs of which one does not reach the other's memory


def cpu_name() -> str:
    """The processor's marketing name, or its architecture where the kernel does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def cpu_cores() -> int:
    """Cores that this process may use (its affinity, cut by the cgroup's quota)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of memory for this process, cut by the cgroup's limit."""
    fields = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


MOST_GPUS = 8  # that one engine runs on
DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # one of them is there where a CUDA driver works


def find_gpus() -> Gpus:
    """Ask the CUDA driver; without one, or without cuda-python, the result says which is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return Gpus((), problem=f"cuda-python cannot be imported ({error})")
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # cuda.pathfinder: libcuda.so.1 was not found
        return Gpus((), problem="no NVIDIA driver on this machine (libcuda.so.1 was not found)")
    if status != driver.CUresult.CUDA_SUCCESS:
        return Gpus((), problem=f"the NVIDIA driver does not start: {status.name}")
    version = driver.cuDriverGetVersion()[1]
    count = driver.cuDeviceGetCount()[1]
    attribute = driver.CUdevice_attribute
    found, handles = [], [driver.cuDeviceGet(index)[1] for index in range(count)]
    for index, device in enumerate(handles):
        major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)[1]
        minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)[1]
        name = driver.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode()
        found.append(Gpu(index, name, f"sm_{major}{minor}", driver.cuDeviceTotalMem(device)[1]))
    problem = None if found else "the NVIDIA driver shows no GPU to this process (is CUDA_VISIBLE_DEVICES empty?)"
    apart = tuple(
        (one, other)
        for one, other in itertools.combinations(range(count), 2)
        if not driver.cuDeviceCanAccessPeer(handles[one], handles[other])[1]
        or not driver.cuDeviceCanAccessPeer(handles[other], handles[one])[1]
    )
    return Gpus(tuple(found), f"{version // 1000}.{version % 1000 // 10}", problem, apart)


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that holds `folder`, or None for an installed copy."""
    if not (folder / ".git").exists():
        return None
    found = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
    )
    return found.stdout.strip() or None


def choose_gpus(flag: str | None) -> tuple[int, ...]:
    """Devices to use for --gpus `flag`; () is the CPU backend.

    Raises DeviceError, with what was found, when more is asked for than there is or than the engine runs on: fewer are
    never taken in silence. Without the flag: all of one kind that the engine runs on, else the CPU.
    """
    if flag is None:
        return _usable_gpus()
    wanted = parse_gpus(flag)
    if wanted in (0, ()):
        return ()
    found = find_gpus()
    names = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.sm})" for gpu in found.devices) or found.problem
    present = [gpu.index for gpu in found.devices]
    missing = wanted > len(present) if isinstance(wanted, int) else not set(wanted) <= set(present)
    if missing:
        raise DeviceError(f"--gpus {flag} is more than this machine has. Found: {names}. Use --gpus 0 for the CPU.")
    chosen = tuple(present[:wanted]) if isinstance(wanted, int) else wanted
    if len(chosen) > MOST_GPUS:
        raise DeviceError(f"--gpus {flag}: an engine runs on {MOST_GPUS} GPUs at most (found {names}). Name fewer.")
    return chosen


def _usable_gpus() -> tuple[int, ...]:
    """The first GPU that the engine runs on, and others of its kind that reach it and each other; no driver is asked
    where no device file is.
    """
    if not any(path.exists() for path in DEVICE_FILES):
        return ()
    found = find_gpus()
    major, _, minor = (found.driver or "0.0").partition(".")
    if 1000 * int(major) + 10 * int(minor) < OLDEST_DRIVER:
        return ()
    usable = [gpu for gpu in found.devices if gpu.sm in {f"sm_{a}{b}" for a, b in CHIPS}]
    chosen: list[int] = []
    for gpu in usable:
        alike = gpu.name == usable[0].name and not any((one, gpu.index) in found.apart for one in chosen)
        if alike and len(chosen) < MOST_GPUS:
            chosen.append(gpu.index)
    return tuple(chosen)
