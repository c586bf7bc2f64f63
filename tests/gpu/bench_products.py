"""Checks and times the prefill products on one GPU, beside cuBLAS (torch) in the same run.

    here    python tests/gpu/bench_products.py build DIR
    there   python3 tests/gpu/bench_products.py run DIR OUT.json [--only dense,grouped] [--rows 4096]

The GPU machine needs torch, numpy, ml_dtypes, cuda-core and cuda-bindings; nothing of Numba. Correct first: fresh
random operands, poisoned outputs, float64 products of decoded operands. A figure is the median of groups of launches;
ours and cuBLAS's alternate, so that both meet the same clocks.
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

from dsuf import __version__, formats
from dsuf.kernels import dense, grouped, pack, plan
from dsuf.kernels.gate_up import GATE_UP_CHUNK
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


def variants() -> dict[str, Any]:
    """Kernels to compare, by name."""
    found: dict[str, Any] = {}
    for kind, shape in dense.SHAPES.items():
        found[f"dense.{kind}"] = dense.make(kind=kind, chip=CHIP, **shape)
    plain = {"kind": "bf16", "wide": False, "columns": 256, "stages": 4, "span": 8, "chip": CHIP}
    found["dense.plain"] = dense.make(**plain)
    found["grouped.plan"] = plan.make()
    found["grouped.gate_up"] = grouped.make_gate_up(widths=grouped.WIDTHS, stages=grouped.STAGES, chip=CHIP)
    found["grouped.down"] = grouped.make_down(widths=grouped.WIDTHS, stages=grouped.STAGES, chip=CHIP)
    return found


def build(folder: Path) -> None:
    """Compile every variant."""
    from dsuf.kernels.build import build as compile_kernel

    made = []
    for name, kernel in variants().items():
        built = compile_kernel(kernel, CHIP, None)
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

    def compare(self, calls: dict[str, Any], flops: dict[str, float], groups: int = 7) -> dict[str, list[float]]:
        """Milliseconds of several calls, taken in turn."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(groups):
            for name, call in calls.items():
                taken[name].append(self.milliseconds(call, max(2, min(20, int(6e-3 * 700e12 / flops[name])))))
        return taken


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


def add_times(row: dict[str, Any], taken: dict[str, list[float]], flops: dict[str, float]) -> None:
    """Milliseconds of every call, and TFLOP/s from their medians."""
    row["ms"] = taken
    row |= {name: flops[name] / sorted(ms)[len(ms) // 2] / 1e9 for name, ms in taken.items()}


def show(row: dict[str, Any]) -> None:
    """One line."""
    print({key: round(v, 5) if isinstance(v, float) else v for key, v in row.items() if key != "ms"}, flush=True)


def bench_object(gpu: Gpu, rows: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    """dsuf.bench/1: a case a product, the floor by operations at cuBLAS's best rate of the run, cuBLAS as peer."""
    rate = max(row.get(name, 0.0) for row in rows for name in ("cublas", "square"))
    cases: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    for row in rows:
        name = f"{row['product']} {row['rows']} rows" + (f" {row['experts']} experts" if "experts" in row else "")
        ours = "experts" if "experts" in row else "dense.bf16" if "dense.bf16" in row else "dense.fp8"
        if row["product"] == "square_bf16":
            ours = "dense.plain"  # the yardstick: bf16 in and out
        us = sorted(1e3 * ms for ms in row["ms"][ours])
        cases[name] = {"bytes": row["bytes"], "floor_us": row["flops"] / rate / 1e6, "error": row["error"]}
        metrics |= {f"{name}_us": us[len(us) // 2], f"min_{name}_us": us[0], f"max_{name}_us": us[-1]}
        if "cublas" in row["ms"]:
            peer = sorted(row["ms"]["cublas"])
            metrics[f"{name}_peer_cublas_bf16_us"] = 1e3 * peer[len(peer) // 2]
    name = gpu.torch.cuda.get_device_name(0)
    return {
        "schema": "dsuf.bench/1", "kind": "kernels", "label": "prefill products beside cuBLAS in bf16",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "dsuf_version": __version__,
        "git_commit": commit or None, "backend": "gpu", "machine": None,
        "gpu": {"name": name, "count": 1, "sm": CHIP}, "model": {"config": "v41-flash"},
        "params": {"cases": cases}, "ceilings": {"bf16_tflops": rate},
        "floor": {"by": "operations at the best rate of cuBLAS in bf16 in this run"}, "metrics": metrics, "samples": [],
    }  # fmt: skip


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
        row |= {"flops": 2.0 * rows * groups * n * k, "bytes": groups * n * k + 2 * rows * groups * (n + k)}
        calls: dict[str, Any] = {}
        for kernel in (v for v in gpu.kernels if v.startswith("dense.fp8")):
            y = torch.full((rows, groups * n), float("nan"), device="cuda", dtype=torch.bfloat16)
            arguments = (packed, ordered, y, rows, n, k, groups, chunk)
            gpu.launch(kernel, *arguments)
            fewer = torch.full((check, groups * n), float("nan"), device="cuda", dtype=torch.bfloat16)
            gpu.launch(kernel, packed, ordered, fewer, check, n, k, groups, chunk)
            torch.cuda.synchronize()
            wrong = error(gpu, y[:some], expected)
            row["error"] = max(row.get("error", 0.0), wrong)
            row["same"] = row.get("same", True) and bool((y[:check] == fewer).all()) and not bool(y.isnan().any())
            calls[kernel] = lambda kernel=kernel, arguments=arguments: gpu.launch(kernel, *arguments)
            del fewer
        left = x.reshape(rows, groups, k).transpose(0, 1)
        right = weight.reshape(groups, n, k).transpose(1, 2)
        if groups == 1:
            left, right = left[0], right[0]
        calls["cublas"] = lambda left=left, right=right: torch.matmul(left, right)
        add_times(row, gpu.compare(calls, dict.fromkeys(calls, row["flops"])), dict.fromkeys(calls, row["flops"]))
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
        row |= {"flops": 2.0 * rows * n * k, "bytes": 2 * n * k + rows * (4 * n + 2 * k)}
        calls: dict[str, Any] = {}
        for kernel, kind in (("dense.bf16", torch.float32), ("dense.plain", torch.bfloat16)):
            y = torch.full((rows, n), float("nan"), device="cuda", dtype=kind)
            arguments = (packed, ordered, y, rows, n, k, 1, pack.chunk_width(k, pack.BF16_CHUNK))
            gpu.launch(kernel, *arguments)
            torch.cuda.synchronize()
            row["error"] = max(row.get("error", 0.0), error(gpu, y[:256], expected))
            calls[kernel] = lambda kernel=kernel, arguments=arguments: gpu.launch(kernel, *arguments)
        calls["cublas"] = lambda x=x, weight=weight: torch.matmul(x, weight.T)
        add_times(row, gpu.compare(calls, dict.fromkeys(calls, row["flops"])), dict.fromkeys(calls, row["flops"]))
        out.append(row)
        show(row)
    return out


D, INNER, TOP, LIMIT = 5120, 2304, 6, 10.0
DISTINCT = 2  # experts with weights of their own; the others are copies, elsewhere in memory


def expert_weights(gpu: Gpu, experts: int) -> tuple[Any, Any, list[list[Any]]]:
    """Packed w13 and w2 of all experts, and the values of the distinct ones."""
    rng, first, second, values = np.random.default_rng(), [], [], []
    for _ in range(DISTINCT):
        raw = [
            (rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(118, 122, (n, k // 32), np.uint8))
            for n, k in ((INNER, D), (INNER, D), (D, INNER))
        ]
        first.append(pack.interleave(*(pack.pack_fp4(*w, CHIP, GATE_UP_CHUNK) for w in raw[:2]), 2))
        second.append(pack.pack_fp4(*raw[2], CHIP))
        values.append([gpu.torch.from_numpy(formats.dequantise_fp4_rows(*w)).cuda().double() for w in raw])
    packed = [gpu.put(np.stack(w)) for w in (first, second)]
    w13, w2 = (p.repeat(experts // DISTINCT) for p in packed)
    return w13, w2, values


def run_grouped(gpu: Gpu, rows: int, experts: int) -> list[dict[str, Any]]:
    """Routed experts with random routing; the products apart and together, beside cuBLAS's rate on a square."""
    torch, pairs = gpu.torch, rows * TOP
    w13, w2, values = expert_weights(gpu, experts)
    x = q8_rows(gpu, rows, D)
    ordered = gpu.ordered(x)
    chosen = torch.rand(rows, experts, device="cuda").topk(TOP).indices.sort(dim=1).values.to(torch.int32).contiguous()
    weights = torch.rand(pairs, device="cuda") + 0.1
    offsets = torch.zeros(experts + 1, device="cuda", dtype=torch.int32)
    order = torch.zeros(pairs, device="cuda", dtype=torch.int32)
    h = torch.full((pairs, INNER), float("nan"), device="cuda", dtype=torch.bfloat16)
    y = torch.full((pairs, D), float("nan"), device="cuda", dtype=torch.bfloat16)
    chunks = pack.chunk_width(D, GATE_UP_CHUNK), pack.chunk_width(INNER)
    make_plan = lambda: gpu.launch("grouped.plan", chosen, offsets, order, pairs, experts, 0, grid=(experts, 1))  # noqa: E731
    first = (w13, ordered, offsets, order, weights, h, experts, TOP, D, INNER, LIMIT, chunks[0])
    second = (w2, h, offsets, order, y, experts, D, INNER, chunks[1])
    make_plan()
    gpu.launch("grouped.gate_up", *first)
    gpu.launch("grouped.down", *second)
    torch.cuda.synchronize()
    flat = chosen.reshape(-1).long()
    row: dict[str, Any] = {"product": "experts", "rows": rows, "experts": experts}
    row["plan right"] = bool((order.long() == flat.sort(stable=True).indices).all())
    worst_h = worst_y = 0.0
    back = torch.empty(32, dtype=torch.long, device="cuda")
    back[torch.from_numpy(ORDER).cuda()] = torch.arange(32, device="cuda")
    for position in torch.randint(0, pairs, (200,)).tolist():
        pair = int(order[position])
        w1, w3, wd = values[int(flat[pair]) % DISTINCT]
        one = x[pair // TOP].double()
        gate, up = ((w @ one).to(torch.bfloat16).double() for w in (w1, w3))
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        expected = gate / (1 + torch.exp(-gate)) * up * weights[pair].double()
        got = h[position].reshape(-1, 32)[:, back].reshape(-1).double()
        step = expected.reshape(-1, 32).abs().amax(1).repeat_interleave(32) * 2.0**-8
        worst_h = max(worst_h, float(((got - expected).abs() / (2.0**-4 * expected.abs() * 1.02 + step)).max()))
        worst_y = max(worst_y, error(gpu, y[pair], wd @ got))
    row |= {"hidden error (1 is a step)": worst_h, "error": worst_y, "all written": not bool(y.isnan().any())}
    some = x[:4096, :].contiguous()
    calls = {
        "gate_up": lambda: gpu.launch("grouped.gate_up", *first), "down": lambda: gpu.launch("grouped.down", *second),
        "plan": make_plan, "square": lambda: torch.matmul(some, some.T),
    }  # fmt: skip
    flops = {
        "gate_up": 4.0 * pairs * D * INNER,
        "down": 2.0 * pairs * D * INNER,
        "plan": 1e9,
        "square": 2.0 * len(some) ** 2 * D,
    }
    matrix = experts * D * INNER // 32 * 17
    row |= {"flops": 6.0 * pairs * D * INNER, "bytes": 3 * matrix + 2 * (rows * D + pairs * (2 * INNER + D))}
    add_times(row, gpu.compare(calls, flops), flops)
    row["ms"]["experts"] = [
        sum(parts) for parts in zip(*(row["ms"][n] for n in ("plan", "gate_up", "down")), strict=True)
    ]
    row["experts tflops"] = row["flops"] / sorted(row["ms"]["experts"])[3] / 1e9
    row["of bf16 rate"] = row["experts tflops"] / row["square"]
    show(row)
    return [row]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--only", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--parts", default="plain,dense,grouped:4096x128,grouped:16384x384")
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
            if part.startswith("grouped"):
                rows, experts = part.removeprefix("grouped:").split("x")
                found += run_grouped(gpu, int(rows), int(experts))
        finally:
            options.out.write_text(json.dumps(bench_object(gpu, found, options.commit), indent=1))


if __name__ == "__main__":
    main()
