"""Checks and times the decode kernels at the real widths on one GPU, with the read ceiling of the same run.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_kernels.py .kernels OUT.json [--rows 1,6]

Needs numpy, ml_dtypes, cuda-core and cuda-bindings; nothing of Numba. Each case is captured in a graph of launches that
rotate over more memory than the L2 holds, with dependent launch, and replayed; the figure is the median over replays
divided by the launches. Prints one line a case: microseconds, GB/s, floor, time over floor.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf import formats
from dsuf.kernels import attend, ceiling, experts, latents, mixes, pack, project, rope
from dsuf.kernels.launch import Loaded
from dsuf.kernels.stream import scale_stride
from dsuf.layout import PageLayout
from dsuf.ops import qdq
from dsuf.spec import Spec

COLD = 400 << 20  # bytes that a rotation covers
SPEC = Spec.load(Path(project.__file__).parents[1] / "configs" / "h200x1.json")


class Gpu:
    """Buffers, copies and timed graphs on the current device."""

    def __init__(self) -> None:
        from cuda.core import Device

        self.device = Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.kept: list[Any] = []
        self.rng = np.random.default_rng(0)

    def empty(self, size: int) -> int:
        buffer = self.device.allocate(max(size, 256), stream=self.stream)
        self.kept.append(buffer)
        return int(buffer.handle)

    def put(self, array: np.ndarray) -> int:
        from cuda.bindings import driver

        array = np.ascontiguousarray(array)
        at = self.empty(array.nbytes)
        self.stream.sync()
        check(driver.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes))
        return at

    def get(self, at: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        from cuda.bindings import driver

        out = np.empty(shape, dtype)
        self.stream.sync()
        check(driver.cuMemcpyDtoH(out.ctypes.data, at, out.nbytes))
        return out

    def repeated(self, block: np.ndarray, size: int) -> int:
        """`size` bytes filled with copies of a block, each copy doubling what is there."""
        from cuda.bindings import driver

        raw = block.reshape(-1).view(np.uint8)
        at = self.empty(size)
        self.stream.sync()
        done = min(raw.size, size)
        check(driver.cuMemcpyHtoD(at, raw.ctypes.data, done))
        while done < size:
            step = min(done, size - done)
            check(driver.cuMemcpyDtoD(at + done, at, step))
            done += step
        return at

    def free(self) -> None:
        for buffer in self.kept:
            buffer.close(self.stream)
        self.kept.clear()

    def timed(self, launches: list[Any], replays: int = 15) -> list[float]:
        """Microseconds of a launch in each replay of a graph of all of them."""
        from cuda.core import EventOptions

        builder = self.stream.create_graph_builder()
        builder.begin_building()
        for one in launches:
            one(builder)
        graph = builder.end_building().complete()
        options = EventOptions(timing_enabled=True)
        times = []
        for i in range(replays + 3):
            before = self.stream.record(options=options)
            graph.launch(self.stream)
            after = self.stream.record(options=options)
            after.sync()
            if i >= 3:
                times.append((after - before) * 1e3 / len(launches))
        return times


def check(result: tuple) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0].name}")


@dataclass
class Report:
    """Lines of the table."""

    read_gb_per_s: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, rows: int, times: list[float], nbytes: int, error: float | None = None) -> None:
        us, floor = float(np.median(times)), nbytes / self.read_gb_per_s / 1e3 if self.read_gb_per_s else 0.0
        rate = nbytes / us / 1e3
        row = {
            "kernel": name,
            "rows": rows,
            "us": us,
            "spread": [min(times), max(times)],
            "bytes": nbytes,
            "gb_per_s": rate,
            "floor_us": floor,
            "time_over_floor": us / floor if floor else None,
            "error": error,
        }
        self.rows.append(row)
        over = f"{us / floor:5.2f}x" if floor > 0.05 else "    -"
        mark = "" if error is None else f"  error {error:.1e}"
        print(f"{name:28s} r{rows:<2d} {us:8.2f} us {rate:7.0f} GB/s  floor {floor:7.2f}  {over}{mark}", flush=True)


def measure_ceiling(gpu: Gpu, kernels: Loaded, report: Report) -> None:
    size = 4 << 30
    at = gpu.repeated(gpu.rng.integers(0, 256, 1 << 26, dtype=np.uint8), size)
    out = gpu.empty(4096)
    kernel = kernels["ceiling.read"]
    best = 0.0
    for blocks in (132 * 4, 132 * 8, 132 * 16):
        times = gpu.timed([lambda s, b=blocks: kernel.launch(s, at, size // ceiling.PIECE, out, grid=(b, 1))], 7)
        best = max(best, size / float(np.median(times)) / 1e3)
    report.read_gb_per_s = best
    print(f"read ceiling {best:.0f} GB/s")
    gpu.free()


def q8_input(gpu: Gpu, rows: int, tile: int, k: int) -> tuple[int, int, np.ndarray]:
    x = gpu.rng.standard_normal((tile, k)).astype(np.float32)
    codes, scales = qdq.q8_encode(x)
    padded = np.zeros((tile, scale_stride(k)), np.uint8)
    padded[:, : k // 32] = scales
    return gpu.put(codes), gpu.put(padded), qdq.q8_decode(codes, scales)[:rows].astype(np.float64)


def measure_projections(gpu: Gpu, kernels: Loaded, report: Report, rows: int) -> None:
    tile = next(t for t in (8, 16, 24, 48) if t >= rows)
    for name, one in project.projections(SPEC).items():
        entry = f"{one.kernel}/v41/r{tile}"
        if entry not in kernels:
            continue
        kernel, n = kernels[entry], one.groups * one.n
        if one.kind == "bf16":
            weight = formats.float32_to_bf16(gpu.rng.standard_normal((min(n, 4096), one.k)).astype(np.float32))
            packed, dense = pack.pack_bf16(weight), formats.bf16_to_float32(weight)
        else:
            raw = formats.quantise_fp8_blocks(gpu.rng.standard_normal((min(n, 4096), one.k)).astype(np.float32))
            packed, dense = pack.pack_fp8(*raw), formats.dequantise_fp8_blocks(*raw)
        size = -(-n // 16) * packed[0].nbytes
        sets = [gpu.repeated(packed, size) for _ in range(max(2, min(40, COLD // size + 1)))]
        if one.kind == "q8":
            x, sx, exact = q8_input(gpu, rows, tile, one.k)
        else:
            bits = formats.float32_to_bf16(gpu.rng.standard_normal((tile, one.groups * one.k)).astype(np.float32))
            x, sx, exact = gpu.put(bits), 0, formats.bf16_to_float32(bits)[:rows].astype(np.float64)
        width = 4 if one.kind == "bf16" else 2
        y = gpu.put(np.full(tile * n * width, 0xFF, np.uint8))
        warps = kernel.cubin.threads // 32
        team = next(e for e in project_entries() if e.name == entry).shape["team"]
        grid = (one.blocks(warps, team), 1)

        def go(s: Any, w: int) -> None:
            kernel.launch(s, w, x, sx, y, rows, one.n, grid=grid, dependent=True)  # noqa: B023

        times = gpu.timed([lambda s, w=w: go(s, w) for w in sets * max(1, 20 // len(sets))])
        got = gpu.get(y, (tile, n), np.float32 if width == 4 else np.uint16)[:rows]
        got = got if width == 4 else formats.bf16_to_float32(got)
        some = min(one.n, 512, len(dense))
        want = exact[:, : one.k] @ dense[:some].T.astype(np.float64)
        error = float(np.linalg.norm(got[:, :some] - want) / np.linalg.norm(want))
        report.add(name, rows, times, one.floor(rows)[0], error)
        gpu.free()


def project_entries() -> list[Any]:
    from dsuf.kernels.catalogue import widths

    return [e for width in widths() for e in project.entries(width)]


def plan_of(chosen: np.ndarray, pairs: int) -> np.ndarray:
    out = np.zeros(experts.plan_bytes(pairs) // 4, np.int32)
    records, flat, used = out[experts.PLAN_HEAD :].reshape(-1, experts.PLAN_RECORD), chosen.ravel(), 0
    for expert in sorted(set(flat.tolist())):
        mine = np.flatnonzero(flat == expert)
        for at in range(0, len(mine), 8):
            group = mine[at : at + 8]
            records[used, : 2 + len(group)] = [expert, len(group), *group]
            used += 1
    out[0] = used
    return out


def measure_experts(gpu: Gpu, kernels: Loaded, report: Report, rows: int) -> None:
    tile = next(t for t in (8, 16, 24, 48) if t >= rows)
    d, i, count, topk = SPEC.hidden_size, SPEC.moe_intermediate_size, SPEC.n_routed_experts, SPEC.num_experts_per_tok
    some, chip = 3, "sm_90a"

    def weight(n: int, k: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            gpu.rng.integers(0, 256, (number, n, k // 2), dtype=np.uint8),
            gpu.rng.integers(118, 122, (number, n, k // 32), dtype=np.uint8),
        )

    w1, w3, w2 = weight(i, d, some), weight(i, d, some), weight(d, i, some)
    w13 = [
        pack.interleave(*(pack.pack_fp4(w[0][e], w[1][e], chip, experts.GATE_UP_CHUNK) for w in (w1, w3)), 2)
        for e in range(some)
    ]
    packed2 = [pack.pack_fp4(w2[0][e], w2[1][e], chip) for e in range(some)]
    at13 = gpu.repeated(np.stack(w13), w13[0].nbytes * count)  # expert e is a copy of expert e mod 3
    at2 = gpu.repeated(np.stack(packed2), packed2[0].nbytes * count)
    x, sx, exact = q8_input(gpu, rows, tile, d)
    pairs, sets, distinct = tile * topk, [], []
    weights = gpu.rng.uniform(0.1, 0.5, pairs).astype(np.float32)
    at_weights = gpu.put(weights)
    h, sh = gpu.empty(pairs * i), gpu.empty(pairs * scale_stride(i))
    y = gpu.put(np.full(pairs * d, 0x7FC0, np.uint16))
    for _ in range(8):
        chosen = np.sort(np.argsort(gpu.rng.random((rows, count)), axis=1)[:, :topk], axis=1)
        sets.append((chosen, gpu.put(plan_of(chosen, pairs))))
        distinct.append(len(np.unique(chosen)))
    gate_up, down = kernels[f"experts.gate_up/v41/r{tile}"], kernels[f"experts.down/v41/r{tile}"]

    def up(s: Any, plan: int) -> None:
        gate_up.launch(s, at13, x, sx, plan, at_weights, h, sh, rows, topk, dependent=True)

    def finish(s: Any, plan: int) -> None:
        down.launch(s, at2, h, sh, plan, y, rows, topk, dependent=True)

    one = d * i // 2 + d * i // 32
    hit = float(np.mean(distinct))
    report.add(
        f"experts.gate_up ({hit:.0f})", rows, gpu.timed([lambda s, p=p: up(s, p) for _, p in sets]), int(2 * one * hit)
    )
    report.add(
        f"experts.down ({hit:.0f})", rows, gpu.timed([lambda s, p=p: finish(s, p) for _, p in sets]), int(one * hit)
    )

    def both(s: Any, plan: int) -> None:
        up(s, plan)
        finish(s, plan)

    times = gpu.timed([lambda s, p=p: both(s, p) for _, p in sets])
    chosen, got = sets[-1][0], formats.bf16_to_float32(gpu.get(y, (pairs, d), np.uint16)).astype(np.float64)
    worst = 0.0
    for pair in range(min(rows * topk, 4)):
        e = int(chosen[pair // topk, pair % topk]) % some
        dense = [formats.dequantise_fp4_rows(w[0][e], w[1][e]).astype(np.float64) for w in (w1, w3, w2)]
        gate, upper = (formats.round_bf16(m @ exact[pair // topk]).astype(np.float64) for m in dense[:2])
        limit = SPEC.swiglu_limit
        gate = np.minimum(gate, limit)
        hidden = gate / (1 + np.exp(-gate)) * np.clip(upper, -limit, limit) * weights[pair]
        want = dense[2] @ qdq.q8(formats.round_bf16(hidden).astype(np.float64))
        worst = max(worst, float(np.linalg.norm(got[pair] - want) / np.linalg.norm(want)))
    report.add(f"experts whole ({hit:.0f})", rows, times, int(3 * one * hit), worst)
    gpu.free()


def measure_small(gpu: Gpu, kernels: Loaded, report: Report, rows: int) -> None:
    """Seam, latents, activation: launches whose time is latency; that they are right is the tests' business."""
    d, q, hd, topk = SPEC.hidden_size, SPEC.q_lora_rank, SPEC.head_dim, SPEC.num_experts_per_tok

    def floats(*shape: int) -> int:
        return gpu.put(gpu.rng.standard_normal(shape).astype(np.float32))

    def normal(*shape: int) -> int:
        return gpu.put(formats.float32_to_bf16(gpu.rng.standard_normal(shape).astype(np.float32)))

    sequence, position = gpu.put(np.zeros(rows, np.int32)), gpu.put(np.arange(1000, 1000 + rows, dtype=np.int32))
    table = gpu.put(rope.tables(10000.0 ** (-np.arange(0, SPEC.qk_rope_head_dim, 2) / SPEC.qk_rope_head_dim), 1 << 17))
    for name, slots in (("after_attention", 0), ("after_experts", topk)):
        kernel, fns = kernels[f"seam.{name}/v41"], [floats(24, 4 * d) for _ in range(60)]
        args = [normal(rows * max(slots, 1), d), normal(rows, d), normal(rows, 4, d), floats(rows, mixes.SUMS),
                floats(3), floats(24)]  # fmt: skip
        tail = [normal(d), gpu.empty(rows * d * 2), gpu.empty(rows * d), gpu.empty(rows * 160),
                gpu.empty(rows * mixes.SUMS * 4), gpu.empty(rows * d * 2)]  # fmt: skip
        grid = (kernel.cubin.cluster * rows, 1)

        def seam(s: Any, fn: int) -> None:
            kernel.launch(s, *args, fn, *tail, grid=grid, dependent=True)  # noqa: B023

        times = gpu.timed([lambda s, f=f: seam(s, f) for f in fns])
        report.add(f"seam.{name}", rows, times, 4 * 24 * 4 * d + rows * d * (16 + 2 * slots + 5))
    y, ring = normal(rows, q + hd), SPEC.sliding_window + latents.RING_EXTRA
    windows = gpu.empty(ring * latents.window_row_bytes(hd))
    kernel = kernels["latents/v41"]
    args = [y, normal(q), normal(hd), table, sequence, position, gpu.empty(rows * q), gpu.empty(rows * scale_stride(q)),
            windows, ring * latents.window_row_bytes(hd)]  # fmt: skip
    report.add("latents", rows, gpu.timed([lambda s: kernel.launch(s, *args, grid=(rows, 2), dependent=True)] * 40),
               rows * 3 * (q + hd))  # fmt: skip
    i = SPEC.moe_intermediate_size
    hidden, codes, scales = normal(rows, 2 * i), gpu.empty(rows * i), gpu.empty(rows * scale_stride(i))
    kernel2 = kernels["swiglu/v41"]
    grid2 = (kernel2.cubin.grid[0], rows)
    report.add(
        "swiglu",
        rows,
        gpu.timed([lambda s: kernel2.launch(s, hidden, codes, scales, grid=grid2, dependent=True)] * 40),
        rows * 5 * i,
    )
    gpu.free()


def measure_attention(gpu: Gpu, kernels: Loaded, report: Report, rows: int, context: int = 32768) -> None:
    h, d, topk, window = SPEC.num_attention_heads, SPEC.head_dim, SPEC.index_topk, SPEC.sliding_window
    layout = PageLayout.of(SPEC)
    source, pages = layout.sources[0], context // 128 + 1
    cache = gpu.repeated(gpu.rng.integers(0, 127, 1 << 24, dtype=np.uint8), layout.page_bytes * pages)
    order = gpu.put(gpu.rng.permutation(pages).astype(np.uint32))
    sequence, at = gpu.put(np.zeros(rows, np.int32)), np.arange(context - rows, context, dtype=np.int32)
    position, first = gpu.put(at), gpu.put(at - window + 1)
    w = 10000.0 ** (-np.arange(0, SPEC.qk_rope_head_dim, 2) / SPEC.qk_rope_head_dim)
    table = gpu.put(rope.tables(w, 1 << 17))
    ring = window + latents.RING_EXTRA
    rows_bytes = np.full((ring, latents.window_row_bytes(d)), 120, np.uint8)
    rows_bytes[:, :d] = gpu.rng.integers(0, 126, (ring, d))
    windows, pitch = gpu.put(rows_bytes), rows_bytes.nbytes
    q = gpu.put(formats.float32_to_bf16(gpu.rng.standard_normal((rows, h, d)).astype(np.float32)))
    picked = [np.sort(gpu.rng.permutation(context // 2 - 8)[:topk]) for _ in range(rows)]
    selected, chosen = gpu.put(np.array(picked, np.int32)), gpu.put(np.full(rows, topk, np.int32))
    tiles = attend.tiles(window, topk)
    partials, stats = gpu.empty(rows * tiles * h * d * 4), gpu.empty(rows * tiles * h * 8)
    out = gpu.empty(rows * h * d * 2)
    sink = gpu.put(gpu.rng.standard_normal(h).astype(np.float32))
    partial, combine = kernels["attend.ratio2/v41"], kernels["attend_combine.sparse/v41"]

    def go(s: Any) -> None:
        partial.launch(s, q, windows, pitch, selected, chosen, order, pages, cache + source.codes.offset,
                       cache + source.scales.offset, layout.page_bytes, sequence, position, first, position, table,
                       partials, stats, grid=(rows * tiles, 1), dependent=True)  # fmt: skip
        combine.launch(s, partials, stats, sink, sequence, position, first, position, chosen, table, out,
                       grid=(h, rows), dependent=True)  # fmt: skip

    report.add("attention 640 keys", rows, gpu.timed([go] * 20), rows * (window * 528 + topk * 288))
    heads, di = SPEC.index_n_heads, SPEC.index_head_dim
    iq = gpu.put(formats.float32_to_bf16(gpu.rng.standard_normal((rows, heads, di)).astype(np.float32)))
    weights, entries = gpu.put(gpu.rng.standard_normal((rows, heads)).astype(np.float32)), context // 2
    scores, picks, number = gpu.empty(rows * entries * 4), gpu.empty(rows * topk * 4), gpu.empty(rows * 4)
    score, select = kernels["index.scores_ratio2/v41"], kernels["select.entries"]

    def scored(s: Any) -> None:
        score.launch(s, iq, weights, order, pages, cache + source.key_codes.offset, cache + source.key_scales.offset,
                     layout.page_bytes, sequence, position, 0, 1, 0, scores, entries, 0, rows,
                     dependent=True)  # fmt: skip

    def chose(s: Any) -> None:
        select.launch(s, scores, entries, sequence, position, 0, 1, 0, picks, number, topk, 2,
                      grid=(rows, 1), dependent=True)  # fmt: skip

    def both(s: Any) -> None:
        scored(s)
        chose(s)

    report.add("index scores 16K", rows, gpu.timed([scored] * 20), entries * 68)
    report.add("select 512 of 16K", rows, gpu.timed([chose] * 20), rows * entries * 4)
    report.add("scores + select 16K", rows, gpu.timed([both] * 20), entries * 68)
    gpu.free()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="1,6")
    arguments = parser.parse_args()
    gpu, report = Gpu(), Report()
    kernels = Loaded.folder(arguments.kernels, "sm_90a")
    print(f"{len(kernels)} kernels loaded")
    measure_ceiling(gpu, kernels, report)
    failed = []
    for rows in (int(r) for r in arguments.rows.split(",")):
        for part in (measure_projections, measure_experts, measure_small, measure_attention):
            try:
                part(gpu, kernels, report, rows)
            except Exception as error:
                failed.append(f"{part.__name__} r{rows}: {error!r}")
                print("FAILED", failed[-1], flush=True)
                gpu.free()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"read_gb_per_s": report.read_gb_per_s, "rows": report.rows, "failed": failed}))


if __name__ == "__main__":
    main()
