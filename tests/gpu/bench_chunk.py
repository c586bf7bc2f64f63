"""Times the kernels of a prefill chunk at the real widths on one GPU, and checks a few rows at long contexts.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_chunk.py .kernels OUT.json [--rows 4096] [--only attend,index,seam]

Needs numpy, ml_dtypes, cuda-core and cuda-bindings; nothing of Numba. A case is launched back to back between two
events; its figure is nanoseconds a row of the chunk. Buffers of a 4,096-row chunk are larger than the L2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.engine.gpu.prefill_walk import segments_of
from dsuf.kernels import chunk_index, chunk_rows, chunk_seam, rope
from dsuf.kernels.launch import Loaded
from dsuf.layout import PAGE_TOKENS, PageLayout
from dsuf.ops import qdq
from dsuf.ops.index import index_scores
from dsuf.spec import Spec
from tests.gpu.timing import Gpu, check

SPEC = Spec.load(Path(chunk_rows.__file__).parents[1] / "configs" / "h200x1.json")
D, H, WIDTH, TOPK, W = SPEC.hidden_size, SPEC.num_attention_heads, SPEC.head_dim, SPEC.index_topk, SPEC.sliding_window
HEADS, DI = SPEC.index_n_heads, SPEC.index_head_dim
LAYOUT = PageLayout.of(SPEC)
SOURCE = LAYOUT.sources[0]  # of ratio 2
SCORES_ROOM = 1 << 30  # bytes of scores at once
TENSOR, READ = 780e12, 4.6e12  # operations and bytes a second, for the floors that are printed


class Bench:
    """Random pages and rows of a chunk, and the table of what took how long."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.gpu, self.kernels, self.rows = Gpu(), Loaded.folder(folder, "sm_90a"), rows
        self.rng = np.random.default_rng(1)
        self.table: list[dict[str, Any]] = []
        self.row_owner = self.gpu.put(np.zeros(rows, np.int32))

    def launch(self, name: str, *args: Any, grid: tuple[int, int]) -> None:
        self.kernels[name].launch(self.gpu.stream, *args, grid=grid)

    def get(self, address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        from cuda.bindings import driver

        out = np.empty(shape, dtype)
        self.gpu.stream.sync()
        check(driver.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
        return out

    def time(self, name: str, work: Callable[[], None], rows: int, operations: float, nbytes: float, times: int = 3):
        from cuda.core import EventOptions

        options = EventOptions(timing_enabled=True)
        work()
        marks = [self.gpu.stream.record(options=options)]
        for _ in range(times):
            work()
            marks.append(self.gpu.stream.record(options=options))
        self.gpu.stream.sync()
        ns = min(b - a for a, b in itertools.pairwise(marks)) * 1e6 / rows
        floor = max(operations / TENSOR, nbytes / READ) * 1e9
        self.table.append({"case": name, "ns_a_row": ns, "floor_ns": floor})
        print(f"{name:34s} {ns:10.1f} ns a row   floor {floor:9.1f}   {ns / floor:6.2f}", flush=True)

    def bits(self, *shape: int) -> int:
        """bf16 values around one, on the device: one block of random rows repeated."""
        from cuda.bindings import driver

        size = int(np.prod(shape)) * 2
        block = (self.rng.integers(0x3E80, 0x3F80, min(size // 2, 1 << 23), np.uint16)
                 | (self.rng.integers(0, 2, min(size // 2, 1 << 23), np.uint16) << 15))  # fmt: skip
        at, done = self.gpu.empty(size), 0
        while done < size:
            part = min(block.nbytes, size - done)
            check(driver.cuMemcpyHtoDAsync(at + done, block.ctypes.data, part, self.gpu.stream.handle))
            done += part
        self.gpu.stream.sync()
        return at

    def pages(self, tokens: int) -> tuple[int, int, np.ndarray]:
        """Random valid pages of one sequence: pool, page table, and the first pages' bytes."""
        from cuda.bindings import driver

        count, distinct = -(-tokens // PAGE_TOKENS), 256
        raw = self.rng.integers(0, 256, (distinct, LAYOUT.page_bytes), np.uint8)
        for source in LAYOUT.sources:
            for plane, low, high in ((source.scales, 0x28, 0x38), (source.key_scales, 125, 129)):
                size = plane.end - plane.offset
                raw[:, plane.offset : plane.end] = self.rng.integers(low, high, (distinct, size), np.uint8)
        pool = self.gpu.empty(count * LAYOUT.page_bytes)
        for first in range(0, count, distinct):
            size = min(distinct, count - first) * LAYOUT.page_bytes
            at = pool + first * LAYOUT.page_bytes
            check(driver.cuMemcpyHtoDAsync(at, raw.ctypes.data, size, self.gpu.stream.handle))
        self.gpu.stream.sync()
        return pool, self.gpu.put(np.arange(count, dtype=np.uint32)), raw

    # ---- cases

    def attend(self) -> None:
        rows, context = self.rows, 131072
        position = np.arange(context - rows, context, dtype=np.int32)
        pool, table, _ = self.pages(context)
        selected = np.stack([np.sort(self.rng.choice(context // 2 - rows, TOPK, replace=False)) for _ in range(64)])
        selected = np.tile(selected.astype(np.int32), (rows // 64, 1))
        ring = rows + W
        windows = self.rng.integers(0, 126, (ring, WIDTH + WIDTH // 32), np.uint8)
        windows[:, WIDTH:] = self.rng.integers(118, 121, (ring, WIDTH // 32), np.uint8)
        q, out, put = self.bits(rows, H, WIDTH), self.gpu.empty(rows * H * WIDTH * 2), self.gpu.put
        phases = put(rope.tables(160000.0 ** (-np.arange(0, 64, 2) / 64), context))
        where = [put(position), put(position - W + 1), put(position)]
        chosen, sink = put(np.full(rows, TOPK, np.int32)), put(np.zeros(H, np.float32))
        pick, at_windows = put(selected), put(windows)
        for topk in (TOPK, 0):
            args = [q, at_windows, 0, ring, pick, chosen, topk, table, context // PAGE_TOKENS,
                    pool + SOURCE.codes.offset, pool + SOURCE.scales.offset, LAYOUT.page_bytes, SOURCE.ratio,
                    self.row_owner, *where, phases, sink, out, rows]  # fmt: skip
            operations, nbytes = 4 * H * WIDTH * (W + topk), 4 * H * WIDTH + topk * 288
            one = ("chunk.attend/v41", *args)
            self.time(
                f"attend {W + topk} keys", lambda a=one: self.launch(*a, grid=(rows, 1)), rows, operations, nbytes
            )

    def index(self) -> None:
        for context in (8192, 131072, 1 << 20):
            self.index_at(context)

    def index_at(self, context: int) -> None:
        rows = self.rows
        entries = context // SOURCE.ratio
        piece = min(rows, SCORES_ROOM // (4 * entries))
        position = np.arange(context - rows, context, dtype=np.int32)
        pool, table, raw = self.pages(context)
        values = qdq.q4p(self.rng.standard_normal((256, HEADS, DI))).astype(np.float32)
        q = np.tile((values.view(np.uint32) >> 16).astype(np.uint16), (rows // 256, 1, 1))
        weights = self.rng.standard_normal((rows, HEADS)).astype(np.float32)
        put = self.gpu.put
        at_q, at_w, at_p = put(q), put(weights), put(position)
        scores, out = self.gpu.empty(piece * entries * 4), self.gpu.empty(rows * TOPK * 4)
        number, tiles = self.gpu.empty(rows * 4), chunk_index.rows_of_block(HEADS)
        segments = segments_of(piece // tiles)

        def score(first: int) -> None:
            self.launch("chunk.scores/v41", at_q + first * HEADS * DI * 2, at_w + first * HEADS * 4, table,
                        context // PAGE_TOKENS, pool + SOURCE.key_codes.offset, pool + SOURCE.key_scales.offset,
                        LAYOUT.page_bytes, 0, at_p + first * 4, SOURCE.ratio, scores, entries, piece,
                        grid=(segments, piece // tiles))  # fmt: skip

        def select(first: int) -> None:
            self.launch("chunk.select", scores, entries, at_p + first * 4, SOURCE.ratio, out + first * TOPK * 4,
                        number + first * 4, TOPK, grid=(piece, 1))  # fmt: skip

        pieces = range(0, rows, piece)
        name = f"{context >> 10} K"
        self.time(f"scores at {name}", lambda: [score(first) for first in pieces], rows, 2 * entries * HEADS * DI, 0)
        self.time(f"select at {name}", lambda: [select(first) for first in pieces], rows, 0, 4 * entries)
        self.check_index(
            context, q[-1], weights[-1], raw, scores + (piece - 1) * entries * 4, out + (rows - 1) * TOPK * 4
        )

    def check_index(self, context: int, q: np.ndarray, weights: np.ndarray, raw: np.ndarray, scores: int, out: int):
        """The last row: scores against float64, the selection against NumPy's of the same scores."""
        n = context // SOURCE.ratio
        got, picked = self.get(scores, (n,), np.float32), self.get(out, (TOPK,), np.int32)
        order = np.lexsort((np.arange(n), -got))[:TOPK]
        same = np.array_equal(np.sort(order), picked)
        codes = raw[:, SOURCE.key_codes.offset : SOURCE.key_codes.end].reshape(-1, DI // 2)
        scales = raw[:, SOURCE.key_scales.offset : SOURCE.key_scales.end].reshape(-1, DI // 32)
        keys = qdq.q4p_decode(codes, scales).astype(np.float64)
        values = (q.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        want = index_scores(values[None], weights[None].astype(float) * (DI * HEADS) ** -0.5, keys)[0]
        want = np.resize(want, n) if n > len(want) else want[:n]
        error = float(np.abs(got - want).max() / np.abs(want).max())
        self.table.append({"case": f"check at {context}", "score_error": error, "selection_equal": bool(same)})
        print(
            f"  check: largest score error {error:.1e} of the largest score, selection {'equal' if same else 'DIFFERS'}"
        )

    def seam(self) -> None:
        rows, slots, empty = self.rows, SPEC.num_experts_per_tok, self.gpu.empty
        streams, parts, last, g = self.bits(rows, 4, D), self.bits(rows, slots, D), self.bits(rows, D), self.bits(D)
        fn = self.gpu.put((self.rng.standard_normal((24, 4 * D)) * 0.01).astype(np.float32))
        sums, coefficients = empty(chunk_seam.SPLITS * rows * 104), empty(rows * 96)
        scale, base = self.gpu.put(np.full(3, 0.1, np.float32)), self.gpu.put(np.zeros(24, np.float32))
        q8, x = empty(rows * D * 2), empty(rows * D * 2)
        mix_grid = (chunk_seam.SPLITS, -(-rows // chunk_seam.MIX_ROWS))
        mix = ("chunk.mix", streams, fn, sums, 4 * D, rows)
        self.time("mix", lambda: self.launch(*mix, grid=mix_grid), rows, 2 * 72 * 4 * D, 8 * D)
        made = ("chunk.coefficients", sums, scale, base, coefficients, 1 / (4 * D), rows)
        grid = (-(-rows // chunk_seam.COEFFICIENT_ROWS), 1)
        self.time("coefficients", lambda: self.launch(*made, grid=grid), rows, 0, 1000)
        for count in (0, slots):
            args = ("chunk.seam", parts, count, last, streams, coefficients, g, q8, x, 0, D, 1 / D)
            nbytes = D * (16 + 2 * count + 2 + 4)
            self.time(f"seam, {count} experts", lambda a=args: self.launch(*a, grid=(rows, 1)), rows, 0, nbytes)

    def rest(self) -> None:
        rows, empty, experts = self.rows, self.gpu.empty, SPEC.n_routed_experts
        k, i = SPEC.o_groups * SPEC.o_lora_rank, SPEC.moe_intermediate_size
        x, y, out = self.bits(rows, k), self.bits(rows, 2 * i), empty(rows * k * 2)
        span = chunk_rows.SPAN
        self.time("q8 of 8192", lambda: self.launch("chunk.q8", x, out, k, grid=(-(-k // span), rows)), rows, 0, 4 * k)
        self.time("swiglu", lambda: self.launch("chunk.swiglu", y, out, i, 10.0, grid=(-(-i // span), rows)),
                  rows, 0, 6 * i)  # fmt: skip
        z = self.gpu.put(self.rng.standard_normal((rows, experts)).astype(np.float32))
        args = (z, self.gpu.put(np.zeros((2, experts), np.float32)), self.row_owner, out, out + rows * 64, rows)
        self.time("route", lambda: self.launch("chunk.route", *args, experts, 6, 1.5, grid=(-(-rows // 8), 1)),
                  rows, 0, 4 * experts)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--only", default="attend,index,seam,rest")
    options = parser.parse_args()
    bench, failed = Bench(options.folder, options.rows), False
    for name in options.only.split(","):
        try:
            getattr(bench, name)()
        except Exception as error:  # one family must not stop the others
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    options.out.write_text(json.dumps(bench.table, indent=1), encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
