"""What `dsuf bench kernels` measures of the products: projections, routed experts, router, activation, at a real width.

A family is a name and a function (bench, rows) -> Case that sets up operands.
Weights are random and repeat every few thousand rows, so that the reference needs only those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dsuf import formats
from dsuf.cli.bench import kernel_cases_mixing as mixing
from dsuf.cli.bench.kernel_bench import BF16_ERROR, Bench, Case, relative_error
from dsuf.cli.bench.kernel_cases_attention import CONTEXT, LONG_CONTEXT, attention, queries_of, selection
from dsuf.kernels import engram, expert_plan, experts, gate_up, pack, project, route
from dsuf.kernels.catalogue import tile_of
from dsuf.kernels.stream import scale_stride
from dsuf.ops import engram as engram_op
from dsuf.ops import expert as expert_op
from dsuf.ops import qdq
from dsuf.ops.route import route as route_op

Family = Callable[[Bench, int], Case]
PATTERN_ROWS = 4096  # of a weight, before it repeats
CHECKED = 512  # outputs compared a row
PATTERN_EXPERTS = 3
ROUTINGS = 8  # choices of experts that launches take turns with


def families(spec_names: tuple[str, ...], tokens: int = CONTEXT, long_tokens: int = LONG_CONTEXT) -> dict[str, Family]:
    """Every family by name; `spec_names` are those of project.projections, `tokens` are of the contexts."""
    found: dict[str, Family] = {name: partial(projection, name) for name in spec_names if name != "index_wq_b"}
    many, most = {"tokens": tokens}, {"tokens": long_tokens, "ratio": 1}
    return found | {
        "wq_b": partial(queries_of, False), "wq_b_index": partial(queries_of, True),
        "experts_gate_up": partial(routed, "gate_up"), "experts_down": partial(routed, "down"),
        "experts": partial(routed, "whole"), "router": router, "embed": embed, "engram_gather": gather,
        "engram_gate": gate, "seam_after_attention": partial(mixing.seam, "attention"),
        "seam_after_experts": partial(mixing.seam, "experts"), "compress_ratio1": partial(mixing.compressor, 1),
        "compress_ratio2": partial(mixing.compressor, 2), "window_rows": mixing.window_rows,
        "index_query": mixing.queries_of_index, "taps_join": mixing.join_taps, "q8_norm": mixing.norm_rows,
        "attention_640": partial(attention, **many), "index_scores_16k": partial(selection, "scores", **many),
        "select_512_of_16k": partial(selection, "select", **many),
        "index_and_select_16k": partial(selection, "both", **many),
        "index_scores_1m": partial(selection, "scores", **most),
        "index_and_select_1m": partial(selection, "both", **most),
    }  # fmt: skip


def projection(name: str, bench: Bench, rows: int) -> Case:
    """One dense projection; logits and scores in float32, wo_a as codes, the rest in bf16."""
    one = project.projections(bench.spec)[name]
    launch, outputs = project.launch_of(bench.label, one, rows), one.groups * one.n
    packed, dense = _weight(bench, one.kind, min(outputs, PATTERN_ROWS), one.k)
    places = bench.copies(packed, -(-outputs // pack.ROWS) * packed[0].nbytes)
    tile = tile_of(bench.label, rows)
    if one.kind == "q8":
        x, sx, exact = bench.quantised(tile, one.k)
    else:
        bits = formats.float32_to_bf16(bench.rng.standard_normal((tile, one.groups * one.k)).astype(np.float32))
        exact = formats.bf16_to_float32(bits).astype(np.float64)
        x, sx = bench.put(exact.astype(np.float16) if one.kind == "wo_a" else bits), 0
    dtype = np.float32 if one.kind == "bf16" else np.uint16
    y = bench.poisoned(tile * outputs * np.dtype(dtype).itemsize)
    scales = bench.poisoned(tile * scale_stride(outputs)) if one.kind == "wo_a" else sx

    def go(w: int) -> None:
        arguments = (w, x, scales, y, rows, *launch.arguments)
        bench.device.launch(launch.name, *arguments, grid=launch.grid, shared=launch.shared)

    def error() -> float:
        count = min(one.n, CHECKED, len(dense))
        want = exact[:rows, : one.k] @ dense[:count].T.astype(np.float64)
        if one.kind == "wo_a":
            codes = bench.get(y, (tile, outputs), np.uint8)[:rows]
            got = qdq.q8_decode(codes, bench.get(scales, (tile, outputs // pack.GROUP), np.uint8)[:rows])
            want = qdq.q8(formats.round_bf16(want.astype(np.float32)).astype(np.float64))
        else:
            got = bench.get(y, (tile, outputs), dtype)[:rows]
            got = got if dtype is np.float32 else formats.bf16_to_float32(got)
        return relative_error(got[:, :count], want) if np.isfinite(got).all() else float("nan")

    nbytes, operations = one.floor(rows)
    bound = {"bf16": 1e-4, "q8": BF16_ERROR, "wo_a": 4 * BF16_ERROR}[one.kind]
    return Case(name, rows, [partial(go, w) for w in places], error, bound, nbytes, operations,
                peer=one.kind, peer_shape=(rows, one.n, one.k, one.groups))  # fmt: skip


def _weight(bench: Bench, kind: str, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    values = bench.rng.standard_normal((n, k)).astype(np.float32)
    if kind == "bf16":
        bits = formats.float32_to_bf16(values)
        return pack.pack_bf16(bits), formats.bf16_to_float32(bits)
    raw = formats.quantise_fp8_blocks(values)
    return pack.pack_fp8(*raw), formats.dequantise_fp8_blocks(*raw)


# ---- experts


class _Layer:
    """Experts of a layer: a few random ones, repeated, and a shared one, with inputs, buffers and several routings."""

    def __init__(self, bench: Bench, rows: int) -> None:
        spec, chip = bench.spec, bench.device.chip
        self.bench, self.rows, self.limit = bench, rows, spec.swiglu_limit
        self.d, self.i, self.topk = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts_per_tok
        self.count = spec.n_routed_experts
        shapes = ((self.i, self.d), (self.i, self.d), (self.d, self.i))
        raw = [[self._fp4(n, k) for n, k in shapes] for _ in range(PATTERN_EXPERTS)]
        self.dense = [[formats.dequantise_fp4_rows(*w).astype(np.float64) for w in one] for one in raw]
        w13 = np.stack([gate_up.pack_gate_up(one[0], one[1], chip) for one in raw])
        w2 = np.stack([experts.pack_down(one[2], chip) for one in raw])
        self.w13 = bench.repeated(w13, w13[0].nbytes * self.count)
        self.w2 = bench.repeated(w2, w2[0].nbytes * self.count)
        (shared13, both), (shared2, down) = (_weight(bench, "q8", n, k) for n, k in ((2 * self.i, self.d), shapes[2]))
        self.shared_dense = [both[: self.i], both[self.i :], down]
        self.shared = [(bench.put(shared13), bench.put(shared2)) for _ in range(ROUTINGS)]
        self.shared_bytes = shared13.nbytes, shared2.nbytes
        self.exact = self._input(rows)
        self.weights = bench.rng.uniform(0.1, 0.5, rows * self.topk).astype(np.float32)
        self.at_weights = bench.put(self.weights)
        self.h = bench.poisoned((self.topk + 1) * rows * self.i * 2)
        self.y, self.last = bench.poisoned(rows * self.topk * self.d * 2), bench.poisoned(rows * self.d * 2)
        self.chosen = [self._choice() for _ in range(ROUTINGS)]
        self.plans = [bench.put(expert_plan.plan_of(chosen, chosen.size)) for chosen in self.chosen]
        self.hit = float(np.mean([len(np.unique(chosen)) for chosen in self.chosen]))

    def _fp4(self, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        rng = self.bench.rng
        return rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(118, 122, (n, k // 32), dtype=np.uint8)

    def _input(self, rows: int) -> np.ndarray:
        exact = qdq.q8(self.bench.rng.standard_normal((rows, self.d)))
        self.x = self.bench.put((exact * 2.0**experts.SHIFT).astype(np.float16))
        return exact

    def _choice(self) -> np.ndarray:
        order = np.argsort(self.bench.rng.random((self.rows, self.count)), axis=1)
        return np.sort(order[:, : self.topk], axis=1)

    def gate_up(self, n: int) -> None:
        """First launch of routing n."""
        self.bench.device.launch(f"experts.gate_up/{self.bench.label}", self.w13, self.shared[n][0], self.x,
                                 self.plans[n], self.at_weights, self.h, self.rows, self.topk, self.limit,
                                 grid=(experts.blocks(self.bench.label), 1))  # fmt: skip

    def down(self, n: int) -> None:
        """Second launch."""
        self.bench.device.launch(f"experts.down/{self.bench.label}", self.w2, self.shared[n][1], self.h, self.plans[n],
                                 self.y, self.last, self.rows, self.topk,
                                 grid=(experts.blocks(self.bench.label), 1))  # fmt: skip

    def whole(self, n: int) -> None:
        """Both."""
        self.gate_up(n)
        self.down(n)

    def error(self, pairs: int = 4) -> float:
        """Of the first pairs of the first routing and of the shared expert's first row, after both launches."""
        bench, rows = self.bench, self.rows
        y, last = (bench.get(at, (n, self.d), np.uint16) for at, n in ((self.y, rows * self.topk), (self.last, rows)))
        got = formats.bf16_to_float32(np.concatenate([y[: min(len(y), pairs)], last[:1]])).astype(np.float64)
        if not np.isfinite(formats.bf16_to_float32(np.concatenate([y, last]))).all():
            return float("nan")
        want = np.zeros_like(got)
        for pair in range(len(want) - 1):
            row, slot = divmod(pair, self.topk)
            dense = self.dense[int(self.chosen[0][row, slot]) % PATTERN_EXPERTS]
            want[pair] = self._expert(dense, self.exact[row], self.weights[pair])
        want[-1] = self._expert(self.shared_dense, self.exact[0], 1.0)
        return relative_error(got, want)

    def _expert(self, dense: list[np.ndarray], x: np.ndarray, weight: float) -> np.ndarray:
        both = formats.round_bf16(np.concatenate([dense[0] @ x, dense[1] @ x])).astype(np.float64)
        hidden = formats.round_bf16(expert_op.swiglu(both, self.limit) * weight).astype(np.float64)
        return dense[2] @ qdq.q8(hidden)


def routed(part: str, bench: Bench, rows: int) -> Case:
    """Gate and up, down, or both launches of the experts that random rows choose, and of the shared expert."""
    layer = _Layer(bench, rows)
    matrix = layer.hit * (layer.d * layer.i // 2 + layer.d * layer.i // 32)
    first, second = 2 * matrix + layer.shared_bytes[0], matrix + layer.shared_bytes[1]
    matrices, nbytes, run = {
        "gate_up": (2, first, layer.gate_up), "down": (1, second, layer.down), "whole": (3, first + second, layer.whole)
    }[part]  # fmt: skip

    def error() -> float:
        layer.whole(0)
        return layer.error()

    operations = 2 * matrices * rows * (layer.topk + 1) * layer.d * layer.i
    name = "experts" if part == "whole" else f"experts_{part}"
    return Case(name, rows, [partial(run, n) for n in range(ROUTINGS)], error, 4 * BF16_ERROR, int(nbytes), operations,
                peer="experts" if part == "whole" else "", notes={"distinct_experts": layer.hit},
                peer_shape=(rows, layer.d, layer.i, layer.count, layer.topk))  # fmt: skip


def router(bench: Bench, rows: int) -> Case:
    """The gate's scores, the choice of experts and their plan: one launch."""
    spec, one = bench.spec, project.projections(bench.spec)["gate"]
    packed, dense = _weight(bench, "bf16", one.n, one.k)
    places, count = bench.copies(packed, packed.nbytes), route.parts_of(one.k)
    bits = formats.float32_to_bf16(0.02 * bench.rng.standard_normal((rows, one.k)).astype(np.float32))
    x, exact = bench.put(bits), formats.bf16_to_float32(bits).astype(np.float64)
    topk, scaling = spec.num_experts_per_tok, spec.routed_scaling_factor
    bias = bench.rng.standard_normal((2, one.n)).astype(np.float32)
    at_bias, image = bench.put(bias), bench.put(np.zeros(rows, np.int32))
    sequence, parts = bench.put(np.zeros(rows, np.int32)), bench.poisoned(count * rows * one.n * 4)
    chosen, weights = bench.poisoned(rows * topk * 4), bench.poisoned(rows * topk * 4)
    plan = bench.put(np.zeros(expert_plan.plan_bytes(rows * topk), np.uint8))

    def go(w: int) -> None:
        bench.device.launch(f"route/{bench.label}", w, x, parts, at_bias, image, sequence, chosen, weights, plan, 0,
                            rows, one.n, topk, scaling, 0, one.n, grid=route.grid(one.k, one.n))  # fmt: skip

    def error() -> float:
        picked, got = (bench.get(at, (rows, topk), t) for at, t in ((chosen, np.int32), (weights, np.float32)))
        want, factors = route_op(exact @ dense.T.astype(np.float64), bias[0].astype(np.float64), topk, scaling)
        return relative_error(got, factors) if (picked == want).all() else float("nan")

    nbytes, operations = one.floor(rows)
    return Case("router", rows, [partial(go, w) for w in places], error, 1e-4, nbytes, operations)


# ---- small kernels


def embed(bench: Bench, rows: int) -> Case:
    """Embedding rows into four streams."""
    d, vocabulary, slots = bench.spec.hidden_size, 4096, engram.HISTORY
    table = bench.rng.integers(0, 1 << 15, (vocabulary, d), dtype=np.uint16)
    tokens = bench.rng.integers(0, vocabulary, rows).astype(np.int32)
    streams = bench.poisoned(rows * engram.STREAMS * d * 2)
    arguments = [bench.put(tokens), bench.put(np.zeros(rows, np.int32)), bench.put(np.arange(rows, dtype=np.int32)),
                 bench.put(table), streams, bench.put(np.arange(vocabulary, dtype=np.int32)),
                 bench.poisoned(slots * 4), slots, d]  # fmt: skip

    def error() -> float:
        got = bench.get(streams, (rows, engram.STREAMS, d), np.uint16)
        return float((got != table[tokens][:, None]).mean())

    go = partial(bench.device.launch, "embed", *arguments, grid=(-(-d // engram.EMBED_SPAN), rows))
    return Case("embed", rows, [go], error, 0.0, rows * d * 10)


def gather(bench: Bench, rows: int) -> Case:
    """N-gram rows from a table on the device (its first rows; the real one is far larger)."""
    spec, lines, pad = bench.spec, 1 << 19, bench.spec.engram_pad_token_id
    width, columns, heads = spec.engram_head_dim, spec.engram_columns, spec.engram_n_heads
    ngram = spec.engram_max_ngram_size
    raw = formats.quantise_fp8_rows(bench.rng.standard_normal((4096, width)).astype(np.float32))
    table, table_scales = bench.repeated(raw[0], lines * width), bench.repeated(raw[1], lines * width // 32)
    primes = np.full(columns, lines - 1, np.int64)
    constant = np.concatenate([bench.rng.integers(1, 1 << 40, ngram) | 1, primes, np.zeros(columns, np.int64)])
    classes = bench.rng.integers(0, spec.engram_compressed_vocab_size, engram.HISTORY).astype(np.int32)
    position = np.arange(20, 20 + rows, dtype=np.int32)
    codes, scales = bench.poisoned(rows * columns * width), bench.poisoned(rows * scale_stride(columns * width))
    arguments = [bench.put(classes), engram.HISTORY, bench.put(np.zeros(rows, np.int32)), bench.put(position),
                 bench.put(constant), table, table_scales, codes, scales, heads, width, pad]  # fmt: skip

    def error() -> float:
        got = bench.get(codes, (rows, columns, width), np.uint8)
        hashed = np.zeros((rows, columns), np.int64)
        for column in range(columns):
            for back in range(column // heads + 2):
                hashed[:, column] ^= classes[(position - back) % engram.HISTORY].astype(np.int64) * constant[back]
        line = hashed % (lines - 1) % 4096
        exact = formats.dequantise_fp8_rows(raw[0][line.ravel()], raw[1][line.ravel()]).reshape(rows, -1)
        return float((got.reshape(rows, -1) != qdq.q8_encode(exact.astype(np.float64))[0]).mean())

    go = partial(bench.device.launch, "engram.gather", *arguments, grid=(columns, rows))
    fetched = rows * columns * (width + width // 32)
    return Case("engram_gather", rows, [go], error, 0.0, 2 * fetched)


def gate(bench: Bench, rows: int) -> Case:
    """The gate that adds Engram's value to the streams (in place: checked before it is timed)."""
    d, rng = bench.spec.hidden_size, bench.rng
    streams = formats.float32_to_bf16(rng.standard_normal((rows, engram.STREAMS, d)).astype(np.float32))
    kv = formats.float32_to_bf16(rng.standard_normal((rows, 5 * d)).astype(np.float32))
    qk = rng.standard_normal((engram.STREAMS, d)).astype(np.float32)
    at = bench.put(streams)

    def error() -> float:
        x, both = (formats.bf16_to_float32(v).astype(np.float64) for v in (streams, kv))
        keys = both[:, : 4 * d].reshape(rows, 4, d)
        want = x + engram_op.gate(x, keys, qk.astype(np.float64), bench.spec.rms_norm_eps) * both[:, None, 4 * d :]
        got = formats.bf16_to_float32(bench.get(at, streams.shape, np.uint16)).astype(np.float64)
        return relative_error(got, want)

    sequence = bench.put(np.zeros(rows, np.int32))
    go = partial(bench.device.launch, "engram.gate", at, bench.put(kv), bench.put(qk), sequence, d, grid=(rows, 1))
    return Case("engram_gate", rows, [go], error, BF16_ERROR, rows * 26 * d, rows * 60 * d)
