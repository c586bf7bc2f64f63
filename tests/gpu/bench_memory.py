"""Measures what engine/gpu's memory side does on one GPU, and checks it: loading, filling, host tables, faults.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_memory.py .kernels OUT.json [section ...]

Needs numpy, ml_dtypes, cuda-core and cuda-bindings. Every section prints a line; one that fails does not stop the rest.
The exit code is the number of sections that failed or found wrong bytes.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.engine.gpu import engram_tables, memory, weight_fill, weights
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.weight_load import Loader
from dsuf.errors import DeviceError
from dsuf.kernels.catalogue import CONFIGS
from dsuf.kernels.launch import Cubin, read_folder
from dsuf.kernels.stream import scale_stride
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.ops.engram import hashes
from dsuf.spec import Spec

GIB, MIB = 1 << 30, 1 << 20
SPEC = Spec.load(CONFIGS / "h200x1.json")
NEEDED = ("fill", "pack.", "engram.gather")
Result = dict[str, Any]


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def bandwidth(device: Device) -> Result:
    """Copies over PCIe, and the host's cost of a launch."""
    size, host = 256 * MIB, device.pinned(256 * MIB)
    there, out = device.allocate(size, "bench"), {}
    for name, target, source in (("h2d", there, host.ctypes.data), ("d2h", host.ctypes.data, there)):
        device.copy_async(target, source, size)
        device.synchronize()
        begun = time.perf_counter()
        for _ in range(4):
            device.copy_async(target, source, size)
        device.synchronize()
        out[f"{name}_gb_per_s"] = 4 * size / (time.perf_counter() - begun) / 1e9
    begun = time.perf_counter()
    for _ in range(300):
        device.launch("fill", there, 4096, 16, 16, 0, 0, 0, 1, 2, grid=(1, 1))
    out["launch_host_us"] = (time.perf_counter() - begun) / 300 * 1e6
    device.synchronize()
    return out


def loaded(device: Device) -> Result:
    """The tiny checkpoint, packed on the device and on the host."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(load_config("tiny"), Path(folder) / "tiny")
        with Checkpoint.open(Path(folder) / "tiny") as checkpoint:
            held = weights.Weights.allocate(device, checkpoint.spec, checkpoint.class_map(), positions=4096)
            engram_tables.place_on_device(held)
            spent = seconds(lambda: Loader(held, checkpoint, buffer=MIB).run())
            wrong = [
                f"{part.owner}.{part.name}"
                for part in held.loaded
                if not np.array_equal(
                    device.download(held.address(part), part.nbytes), weights.packed(part, checkpoint, device.chip)
                )
            ]
    return {"seconds": spent, "parts": len(held.loaded), "wrong": wrong}


def load_rate(device: Device) -> Result:
    """Full width, 16 experts, from a sparse file: first with its pages absent, then from the page cache."""
    config = copy.deepcopy(load_config("h200x1"))
    config["text_config"] |= {"n_routed_experts": 16, "dspark_n_routed_experts": 8}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(config, Path(folder) / "sparse", sparse=True)
        with Checkpoint.open(Path(folder) / "sparse") as checkpoint:
            classes = np.zeros(checkpoint.spec.vocab_size, np.int32)
            held = weights.Weights.allocate(device, checkpoint.spec, classes, positions=4096)
            loader, total = Loader(held, checkpoint), sum(part.nbytes for part in held.loaded)
            absent, cached = seconds(loader.run), seconds(loader.run)
    return {"bytes": total, "absent_gb_per_s": total / absent / 1e9, "cached_gb_per_s": total / cached / 1e9}


def filled(device: Device) -> Result:
    """h200x1 made on the device; what was planned and what is taken."""
    config, before = load_config("h200x1"), device.memory()[0]
    ledger = memory.plan_memory(SPEC, *device.memory(), max_context=None, max_sequences=8, engram="device")
    classes = (np.arange(SPEC.vocab_size) % SPEC.engram_compressed_vocab_size).astype(np.int32)
    begun = time.perf_counter()
    held = weights.Weights.allocate(device, SPEC, classes, positions=1 << 20)
    engram_tables.place_on_device(held)
    total = weight_fill.fill(held, config)
    spent, taken = time.perf_counter() - begun, before - device.memory()[0]
    planned = sum(count for kind, count in ledger.entries.items() if kind.startswith("weights"))
    off = taken / planned - 1
    wrong = ["more than 2 % from the plan"] if abs(off) > 0.02 else []
    return {"seconds": spent, "bytes": total, "taken": taken, "planned": planned, "wrong": wrong}


def gather(device: Device) -> Result:
    """The gather of one Engram layer, cold: from mapped host memory and from the device, microseconds a launch."""
    launches, primes, slots = 16, 1_200_000, 64
    table_bytes = SPEC.engram_columns * primes * SPEC.engram_head_dim
    size = -(-table_bytes * 33 // 32 // GIB) * GIB
    area = mmap.mmap(-1, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    np.frombuffer(area, np.uint8)[::4096] = 1
    one = hashes(SPEC)[0]
    columns = SPEC.engram_columns
    numbers = [one.multipliers, np.full(columns, primes - 3), np.arange(columns) * primes]
    constants = device.allocate(4096, "bench")
    device.upload(constants, np.concatenate(numbers).astype(np.int64))
    history, sequence = device.allocate(launches * slots * slots * 4, "bench"), device.allocate(4 * slots, "bench")
    position, codes = device.allocate(4 * slots, "bench"), device.allocate(48 * columns * 256, "bench")
    scales, cold = device.allocate(48 * scale_stride(columns * 256), "bench"), device.allocate(256 * MIB, "bench")
    device.upload(sequence, np.arange(slots, dtype=np.int32))
    device.upload(position, np.full(slots, 40, np.int32))
    device.register(base, size)
    there, out, rng = device.allocate(size, "bench"), {}, np.random.default_rng(0)
    device.zero(there, size)
    for place, at in (("host", base), ("device", there)):
        for rows in (1, 6, 48):
            with device.capture() as graph:
                for i in range(launches):
                    device.launch(
                        "engram.gather", history + i * slots * slots * 4, slots, sequence, position, constants, at,
                        at + table_bytes, codes, scales, SPEC.engram_n_heads, SPEC.engram_head_dim, 2,
                        grid=(columns, rows),
                    )  # fmt: skip
            times = []
            for _ in range(7):
                device.upload(history, rng.integers(0, 99092, (launches * slots, slots)).astype(np.int32))
                device.zero(cold, 256 * MIB)
                first = device.record(timing=True)
                graph.launch()
                last = device.record(timing=True)
                last.wait()
                times.append(last.since(first) * 1e6 / launches)
            out[f"{place}_{rows}_rows_us"] = statistics.median(times[2:])
    device.unregister(base)
    return out


def registration(device: Device) -> Result:
    """First touch and page-locking of host memory: 4 KiB pages, and 2 MiB pages where the machine grants them."""
    out: Result = {}
    out["4k"] = _registered(device, os.memfd_create("small"), 32)
    try:
        pool = Path("/proc/sys/vm/nr_hugepages")
        pool.write_text(str(16 << 9))
        granted = int(pool.read_text()) >> 9
        out["huge_pages_granted_gib"] = granted
        if granted:
            out["2m"] = _registered(device, os.memfd_create("huge", os.MFD_HUGETLB), granted)
    except OSError as error:
        out["2m"] = f"not run: {error}"
    return out


def _registered(device: Device, fd: int, gib: int) -> Result:
    os.ftruncate(fd, gib * GIB)
    area = mmap.mmap(fd, gib * GIB, flags=mmap.MAP_SHARED)
    base, view = ctypes.addressof(ctypes.c_char.from_buffer(area)), np.frombuffer(area, np.uint8)

    def touch() -> None:
        view[::4096] = 1

    touched = seconds(touch)
    times = [seconds(lambda i=i: device.register(base + i * GIB, GIB)) for i in range(gib)]
    for i in range(gib):
        device.unregister(base + i * GIB)
    os.close(fd)
    return {"gib": gib, "touch_s_per_gib": touched / gib, "register_s_per_gib": statistics.median(times)}


FAULTS = {
    "no GPU": "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; device = Device.open(0)",
    "no such GPU": "device = Device.open(17)",
    "absent kernel": "device = Device.open(0); device.launch('embed', 1)",
    "out of memory": "device = Device.open(0); device.allocate(60 << 30, 'weights'); device.allocate(1 << 40, 'pages')",
    "sticky": (
        "device = Device.open(0, read_folder(Path(sys.argv[1]), 'sm_90a'))\n"
        "device.launch('fill', 1 << 46, 4096, 16, 16, 0, 0, 0, 1, 2)\ndevice.record().wait()"
    ),
    "withheld flag of a rank": (
        "device = Device.open(0, read_folder(Path(sys.argv[1]), 'sm_90a'))\n"
        "ranks, part = Ranks([device] * 2, bound_us=200_000), device.allocate(2048, 'part')\n"
        "device.zero(part, 2048)\ntotal = Exchange(ranks, 1024)\ntotal.push(0, part)\n"
        "total.join(0, part, ranks.code('the output of layer 2'))\ndevice.synchronize()\nranks.check()"
    ),
}
PROLOGUE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.ranks import Exchange, Ranks
from dsuf.errors import DeviceError
from dsuf.kernels.launch import read_folder
try:
"""


def faults(folder: Path) -> Result:
    """What a person reads, each fault in a process of its own."""
    out, wrong = {}, []
    for name, body in FAULTS.items():
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        code = f"{PROLOGUE}{lines}except DeviceError as error:\n    print(error)\n"
        root = str(Path(__file__).parents[2])
        ran = subprocess.run(
            [sys.executable, "-c", code, str(folder), root], capture_output=True, text=True, timeout=60, check=False
        )
        out[name] = ran.stdout.strip()
        if not out[name] or ran.returncode:
            wrong.append(f"{name}: {ran.stderr[-300:]}")
    return out | {"wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("sections", nargs="*")
    given = parser.parse_args()
    cubins = [c for c in read_folder(given.cubins, "sm_90a") if c.name.startswith(NEEDED)]
    all_sections = {f.__name__: f for f in (bandwidth, loaded, gather, load_rate, filled, registration)}
    results, failed, gpu = {}, 0, {}
    for name in given.sections or [*all_sections, "faults"]:
        begun = time.perf_counter()
        try:
            results[name] = faults(given.cubins) if name == "faults" else _on_device(all_sections[name], cubins, gpu)
            failed += bool(results[name].get("wrong"))
        except (DeviceError, OSError, AssertionError, RuntimeError, ValueError) as error:
            traceback.print_exc(limit=3)
            results[name], failed = {"error": str(error)}, failed + 1
        print(f"{time.perf_counter() - begun:6.1f} s {name}: {json.dumps(results[name])}", flush=True)
    given.output.write_text(
        json.dumps(bench("memory", "loading, copies, host tables and faults on one GPU", results, gpu), indent=1)
    )
    return failed


def _on_device(section: Callable[[Device], Result], cubins: list[Cubin], gpu: Result) -> Result:
    with Device.open(0, cubins) as device:
        gpu |= {"name": device.name, "count": 1, "sm": device.chip, "memory_bytes": device.memory()[1]}
        return section(device)


def bench(kind: str, label: str, results: Result, gpu: Result) -> Result:
    """The object that is kept."""
    return {
        "schema": "dsuf.bench/1",
        "kind": kind,
        "label": label,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "backend": "gpu",
        "gpu": gpu,
        "model": {"config": "h200x1"},
        "params": {},
        "metrics": results,
        "samples": [],
    }


if __name__ == "__main__":
    sys.exit(main())
