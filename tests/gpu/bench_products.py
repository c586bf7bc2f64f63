"""Checks and times the prefill products on one GPU, beside cuBLAS (torch) in the same run.

    here    python tests/gpu/bench_products.py build DIR
    there   python3 tests/gpu/bench_products.py run DIR OUT.json [--only dense,grouped] [--rows 4096]

The GPU machine needs torch, numpy, ml_dtypes, cuda-core and cuda-bindings; nothing of Numba. Correct first: fresh
random operands, poisoned outputs, float64 products of decoded operands. A figure is the median of groups of launches; ours and
cuBLAS's alternate, so that both meet the same clocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.kernels import dense, pack
from dsuf.kernels.launch import Cubin, Launcher, read_folder, write_folder

CHIP = "sm_90a"
ORDER = np.array([8 * t + 4 * m + 2 * h + j for m in (0, 1) for h in (0, 1) for t in range(4) for j in (0, 1)])
# name: n, k, groups
SHAPES = {
    "wq_a_wkv": (1792, 5120, 1), "wq_b": (32768, 1280, 1), "wo_a": (1024, 4096, 8), "wo_b": (5120, 8192, 1),
    "shared_gate_up": (4608, 5120, 1), "shared_down": (5120, 2304, 1), "engram_wkv": (25600, 6144, 1),
    "main_proj": (5120, 15360, 1), "square": (4096, 4096, 1),
}  # fmt: skip
SMALL = {"gate": (384, 5120), "compressor": (1024, 5120), "index_weights": (32, 5120), "square_bf16": (4096, 4096)}


def dense_variants() -> dict[str, dict[str, Any]]:
    """Kernels to compare, by name."""
    found = {f"dense.{kind}": {"kind": kind, **shape} for kind, shape in dense.SHAPES.items()}
    base = found["dense.fp8"]
    found["dense.fp8/s4"] = {**base, "stages": 4}
    found["dense.fp8/g4"] = {**base, "span": 4}
    found["dense.fp8/g16"] = {**base, "span": 16}
    found["dense.fp8/c192"] = {**base, "columns": 192}
    found["dense.plain"] = {"kind": "bf16", "wide": False, "columns": 256, "stages": 4, "span": 8}
    return found


def build(folder: Path) -> None:
    """Compile every variant."""
    from dsuf.kernels.build import build as compile_kernel

    made = []
    for name, shape in dense_variants().items():
        built = compile_kernel(dense.make(**shape), CHIP, None)
        made.append(Cubin.of(name, built))
        print(name, built.facts.registers, built.facts.seconds)
    write_folder(folder, made)


class Gpu:
    """Kernels and buffers beside torch on one stream."""

    def __init__(self, folder: Path) -> None:
        import torch
        from cuda.core import Device, Stream

        self.torch = torch
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        Device(0).set_current()
        self.side = torch.cuda.Stream()
        torch.cuda.set_stream(self.side)
        self.stream = Stream.from_handle(self.side.cuda_stream)
        self.kernels = {cubin.name: Launcher(cubin) for cubin in read_folder(folder, CHIP)}
        torch.manual_seed(int(time.time()))

    def put(self, array: np.ndarray) -> Any:
        """A tensor of bytes."""
        return self.torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).cuda()

    def launch(self, name: str, *args: Any, grid: tuple[int, int] | None = None) -> None:
        """Tensors stand for their addresses."""
        values = [a.data_ptr() if self.torch.is_tensor(a) else a for a in args]
        self.kernels[name].launch(self.stream, *values, grid=grid)

    def ordered(self, x: Any) -> Any:
        """bf16 [rows, K] in product order."""
        index = self.torch.from_numpy(ORDER).cuda()
        return x.reshape(x.shape[0], -1, 32)[:, :, index].reshape(x.shape).contiguous()

    def milliseconds(self, call: Any, launches: int) -> float:
        """Of one launch, in a run of them."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(launches):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / launches

    def compare(self, calls: dict[str, Any], flops: float, groups: int = 5) -> dict[str, float]:
        """TFLOP/s of several calls, in turn."""
        launches = max(2, min(20, int(6e-3 / (flops / 700e12))))
        for call in calls.values():
            call()
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(groups):
            for name, call in calls.items():
                taken[name].append(self.milliseconds(call, launches))
        return {name: flops / (sorted(ms)[len(ms) // 2] * 1e-3) / 1e12 for name, ms in taken.items()}


def q8_rows(gpu: Gpu, rows: int, k: int) -> Any:
    """Rows as Q8 leaves them: bf16 values with 4 significant bits."""
    torch = gpu.torch
    x = torch.randn(rows, k, device="cuda")
    scale = torch.exp2(torch.ceil(torch.log2(x.reshape(rows, -1, 32).abs().amax(2, keepdim=True) / 448)))
    codes = (x.reshape(rows, -1, 32) / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).reshape(rows, k).to(torch.bfloat16)


def fp8_weight(gpu: Gpu, n: int, k: int) -> tuple[Any, Any]:
    """Packed weight and its values in bf16 [n, k]."""
    rng = np.random.default_rng()
    codes = rng.integers(0, 256, (n, k), np.uint8)
    codes[codes & 127 > 118] = 40  # no NaN, and no outliers beyond 2^8
    scales = rng.integers(114, 119, (-(-n // 32), k // 32), np.uint8)
    packed = gpu.put(pack.pack_fp8(codes, scales))
    torch = gpu.torch
    value = gpu.put(codes).view(torch.float8_e4m3fn).reshape(n, k).to(torch.bfloat16)
    factor = torch.exp2(torch.from_numpy(scales.astype(np.float32) - 127)).cuda()
    factor = factor.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)
    return packed, (value.float() * factor).to(torch.bfloat16)


def error(gpu: Gpu, y: Any, expected: Any) -> float:
    """Largest difference over the value or a hundredth of the root mean square."""
    floor = expected.square().mean().sqrt() * 0.01
    return float(((y.double() - expected).abs() / (expected.abs() + floor)).max())


def show(row: dict[str, Any]) -> None:
    """One line."""
    print({key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()}, flush=True)


def run_dense(gpu: Gpu, rows: int, only: str) -> list[dict[str, Any]]:
    """The FP8 products."""
    torch, out = gpu.torch, []
    for name, (n, k, groups) in SHAPES.items():
        if only and only not in name:
            continue
        x = q8_rows(gpu, rows, k * groups)
        packed, weight = fp8_weight(gpu, n * groups, k)
        ordered = gpu.ordered(x)
        chunk = pack.chunk_width(k)
        check, some = rows - 37, min(rows, 512)
        part = x[:some].double().reshape(some, groups, k).transpose(0, 1)
        expected = torch.bmm(part, weight.double().reshape(groups, n, k).transpose(1, 2))
        expected = expected.transpose(0, 1).reshape(some, groups * n)
        row: dict[str, Any] = {"product": name, "n": n, "k": k, "groups": groups, "rows": rows}
        calls: dict[str, Any] = {}
        for kernel in (v for v in gpu.kernels if v.startswith("dense.fp8")):
            y = torch.full((rows, groups * n), float("nan"), device="cuda", dtype=torch.bfloat16)
            arguments = (packed, ordered, y, rows, n, k, groups, chunk)
            gpu.launch(kernel, *arguments)
            fewer = torch.full((check, groups * n), float("nan"), device="cuda", dtype=torch.bfloat16)
            gpu.launch(kernel, packed, ordered, fewer, check, n, k, groups, chunk)
            torch.cuda.synchronize()
            row[f"{kernel} error"] = error(gpu, y[:some], expected)
            row[f"{kernel} same"] = bool((y[:check] == fewer).all()) and not bool(y.isnan().any())
            calls[kernel] = lambda kernel=kernel, arguments=arguments: gpu.launch(kernel, *arguments)
            del fewer
        left = x.reshape(rows, groups, k).transpose(0, 1)
        right = weight.reshape(groups, n, k).transpose(1, 2)
        if groups == 1:
            left, right = left[0], right[0]
        calls["cublas"] = lambda left=left, right=right: torch.matmul(left, right)
        row |= gpu.compare(calls, 2.0 * rows * groups * n * k)
        out.append(row)
        show(row)
        del calls, expected, weight, packed, x, ordered
        torch.cuda.empty_cache()
    return out


def run_plain(gpu: Gpu, rows: int) -> list[dict[str, Any]]:
    """bf16 weights."""
    torch, out = gpu.torch, []
    for name, (n, k) in SMALL.items():
        x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)
        weight = torch.randn(n, k, device="cuda").to(torch.bfloat16)
        bits = weight.view(torch.int16).cpu().numpy().view(np.uint16)
        packed, ordered = gpu.put(pack.pack_bf16(bits)), gpu.ordered(x)
        expected = x[:256].double() @ weight.double().T
        row: dict[str, Any] = {"product": name, "n": n, "k": k, "groups": 1, "rows": rows}
        calls: dict[str, Any] = {}
        for kernel, kind in (("dense.bf16", torch.float32), ("dense.plain", torch.bfloat16)):
            y = torch.full((rows, n), float("nan"), device="cuda", dtype=kind)
            arguments = (packed, ordered, y, rows, n, k, 1, pack.chunk_width(k, pack.BF16_CHUNK))
            gpu.launch(kernel, *arguments)
            torch.cuda.synchronize()
            row[f"{kernel} error"] = error(gpu, y[:256], expected)
            calls[kernel] = lambda kernel=kernel, arguments=arguments: gpu.launch(kernel, *arguments)
        calls["cublas"] = lambda x=x, weight=weight: torch.matmul(x, weight.T)
        row |= gpu.compare(calls, 2.0 * rows * n * k)
        out.append(row)
        show(row)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--only", default="")
    parser.add_argument("--parts", default="dense,plain")
    options = parser.parse_args()
    if options.what == "build":
        build(options.folder)
        return
    gpu = Gpu(options.folder)
    found: list[dict[str, Any]] = []
    for part in options.parts.split(","):
        try:
            if part == "dense":
                found += run_dense(gpu, options.rows, options.only)
            if part == "plain":
                found += run_plain(gpu, options.rows)
        finally:
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
