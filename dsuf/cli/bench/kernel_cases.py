"""What `dsuf bench kernels` measures of the products: projections, routed experts, router, activation, at a real width.

A family is a name and a function (bench, rows) -> Case | None that sets up operands; None: nothing to measure there.
Weights are random and repeat every few thousand rows, so that the reference needs only those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dsuf import formats
from dsuf.cli.bench.kernel_bench import BF16_ERROR, Bench, Case, relative_error
from dsuf.kernels import engram, experts, pack, project, route, swiglu
from dsuf.kernels.catalogue import tile_of
from dsuf.kernels.stream import scale_stride
from dsuf.ops import engram as engram_op
from dsuf.ops import expert as expert_op
from dsuf.ops import qdq
from dsuf.ops.route import route as route_op

Family = Callable[[Bench, int], Case | None]
LABEL = "v41"
PATTERN_ROWS = 4096  # of a weight, before it repeats
CHECKED = 512  # outputs compared a row
PATTERN_EXPERTS = 3
ROUTINGS = 8  # choices of experts that launches take turns with


def families(spec_names: tuple[str, ...]) -> dict[str, Family]:
    """Every family of this file by name; `spec_names` are those of project.projections."""
    found: dict[str, Family] = {name: partial(projection, name) for name in spec_names}
    return found | {
        "experts_gate_up": partial(routed, "gate_up"), "experts_down": partial(routed, "down"),
        "experts": partial(routed, "whole"), "shared_expert": shared, "router": router, "swiglu": activation,
        "embed": embed, "engram_gather": gather, "engram_gate": gate,
    }  # fmt: skip


def projection(name: str, bench: Bench, rows: int) -> Case:
    """One dense projection; logits and scores in float32, the rest in bf16."""
    one = project.projections(bench.spec)[name]
    launch, outputs = project.launch_of(LABEL, one, rows), one.groups * one.n
    packed, dense = _weight(bench, one.kind, min(outputs, PATTERN_ROWS), one.k)
    places = bench.copies(packed, -(-outputs // pack.ROWS) * packed[0].nbytes)
    tile = tile_of(LABEL, rows)
    if one.kind == "q8":
        x, sx, exact = bench.quantised(tile, one.k)
    else:
        bits = formats.float32_to_bf16(bench.rng.standard_normal((tile, one.groups * one.k)).astype(np.float32))
        x, sx, exact = bench.put(bits), 0, formats.bf16_to_float32(bits).astype(np.float64)
    dtype = np.float32 if one.kind == "bf16" else np.uint16
    y = bench.poisoned(tile * outputs * np.dtype(dtype).itemsize)

    def go(w: int) -> None:
        bench.device.launch(launch.name, w, x, sx, y, rows, *launch.arguments, grid=launch.grid, shared=launch.shared)

    def error() -> float:
        got = bench.get(y, (tile, outputs), dtype)[:rows]
        got = got if dtype is np.float32 else formats.bf16_to_float32(got)
        if not np.isfinite(got).all():
            return float("nan")
        count = min(one.n, CHECKED, len(dense))
        return relative_error(got[:, :count], exact[:rows, : one.k] @ dense[:count].T.astype(np.float64))

    nbytes, operations = one.floor(rows)
    bound = 1e-4 if dtype is np.float32 else BF16_ERROR
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
    """Routed experts of a layer: a few random ones, repeated, with inputs, buffers and plans of several routings."""

    def __init__(self, bench: Bench, rows: int) -> None:
        spec, chip, rng = bench.spec, bench.device.chip, bench.rng
        self.bench, self.rows, self.limit = bench, rows, spec.swiglu_limit
        self.d, self.i, self.topk = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts_per_tok
        self.count = spec.n_routed_experts
        shapes = ((self.i, self.d), (self.i, self.d), (self.d, self.i))
        raw = [[self._fp4(n, k) for n, k in shapes] for _ in range(PATTERN_EXPERTS)]
        self.dense = [[formats.dequantise_fp4_rows(*w).astype(np.float64) for w in one] for one in raw]
        w13 = np.stack([experts.pack_gate_up(one[0], one[1], chip) for one in raw])
        w2 = np.stack([experts.pack_down(one[2], chip) for one in raw])
        self.w13 = bench.repeated(w13, w13[0].nbytes * self.count)
        self.w2 = bench.repeated(w2, w2[0].nbytes * self.count)
        self.tile = experts.tile_for(LABEL, rows)
        self.pairs = self.tile * self.topk
        self.x, self.sx, self.exact = bench.quantised(self.tile, self.d)
        self.weights = rng.uniform(0.1, 0.5, self.pairs).astype(np.float32)
        self.at_weights = bench.put(self.weights)
        self.h = bench.poisoned(self.pairs * self.i)
        self.sh = bench.poisoned(self.pairs * scale_stride(self.i))
        self.y = bench.poisoned(self.pairs * self.d * 2)
        self.chosen = [self._choice() for _ in range(ROUTINGS)]
        self.plans = [bench.put(experts.plan_of(chosen, self.pairs)) for chosen in self.chosen]
        self.hit = float(np.mean([len(np.unique(chosen)) for chosen in self.chosen]))

    def _fp4(self, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        rng = self.bench.rng
        return rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(118, 122, (n, k // 32), dtype=np.uint8)

    def _choice(self) -> np.ndarray:
        order = np.argsort(self.bench.rng.random((self.rows, self.count)), axis=1)
        return np.sort(order[:, : self.topk], axis=1)

    def gate_up(self, plan: int) -> None:
        self.bench.device.launch(f"experts.gate_up/{LABEL}/r{self.tile}", self.w13, self.x, self.sx, plan,
                                 self.at_weights, self.h, self.sh, self.rows, self.topk, self.limit)  # fmt: skip

    def down(self, plan: int) -> None:
        self.bench.device.launch(f"experts.down/{LABEL}/r{self.tile}", self.w2, self.h, self.sh, plan, self.y,
                                 self.rows, self.topk)  # fmt: skip

    def whole(self, plan: int) -> None:
        self.gate_up(plan)
        self.down(plan)

    def error(self, pairs: int = 4) -> float:
        """Of the first pairs of the first routing, after a launch of both parts."""
        got = formats.bf16_to_float32(self.bench.get(self.y, (self.pairs, self.d), np.uint16)).astype(np.float64)
        want = np.zeros((min(self.rows * self.topk, pairs), self.d))
        for pair in range(len(want)):
            row, slot = divmod(pair, self.topk)
            w1, w3, w2 = self.dense[int(self.chosen[0][row, slot]) % PATTERN_EXPERTS]
            both = formats.round_bf16(np.concatenate([w1 @ self.exact[row], w3 @ self.exact[row]])).astype(np.float64)
            hidden = formats.round_bf16(expert_op.swiglu(both, self.limit) * self.weights[pair])
            want[pair] = w2 @ qdq.q8(hidden.astype(np.float64))
        live = got[: self.rows * self.topk]
        return relative_error(got[: len(want)], want) if np.isfinite(live).all() else float("nan")


def routed(part: str, bench: Bench, rows: int) -> Case:
    """Gate and up, down, or both launches of the experts that random rows choose."""
    layer = _Layer(bench, rows)
    matrix = layer.hit * (layer.d * layer.i // 2 + layer.d * layer.i // 32)
    matrices = {"gate_up": 2, "down": 1, "whole": 3}[part]
    run = {"gate_up": layer.gate_up, "down": layer.down, "whole": layer.whole}[part]

    def error() -> float:
        layer.whole(layer.plans[0])
        return layer.error()

    operations = 2 * matrices * rows * layer.topk * layer.d * layer.i
    name = "experts" if part == "whole" else f"experts_{part}"
    peer = "experts" if part == "whole" else ""
    return Case(name, rows, [partial(run, plan) for plan in layer.plans], error, 4 * BF16_ERROR,
                int(matrices * matrix), operations, peer=peer, notes={"distinct_experts": layer.hit},
                peer_shape=(rows, layer.d, layer.i, layer.count, layer.topk))  # fmt: skip


def shared(bench: Bench, rows: int) -> Case:
    """The shared expert: gate and up, activation, down."""
    ones, tile = project.projections(bench.spec), tile_of(LABEL, rows)
    up, down, i = ones["shared_gate_up"], ones["shared_down"], bench.spec.moe_intermediate_size
    launches = [project.launch_of(LABEL, one, rows) for one in (up, down)]
    (packed, dense), (packed2, dense2) = (_weight(bench, "q8", one.n, one.k) for one in (up, down))
    places = list(zip(bench.copies(packed, packed.nbytes), bench.copies(packed2, packed2.nbytes), strict=False))
    x, sx, exact = bench.quantised(tile, up.k)
    y, out = bench.poisoned(tile * up.n * 2), bench.poisoned(tile * down.n * 2)
    codes, scales = bench.poisoned(tile * i), bench.poisoned(tile * scale_stride(i))

    def go(at: tuple[int, int]) -> None:
        first, second = launches
        launch = bench.device.launch
        launch(first.name, at[0], x, sx, y, rows, *first.arguments, grid=first.grid, shared=first.shared)
        launch("swiglu", y, codes, scales, i, bench.spec.swiglu_limit, grid=(-(-i // swiglu.SPAN), rows))
        launch(second.name, at[1], codes, scales, out, rows, *second.arguments, grid=second.grid, shared=second.shared)

    def error() -> float:
        got = formats.bf16_to_float32(bench.get(out, (tile, down.n), np.uint16))[:rows].astype(np.float64)
        both = formats.round_bf16(exact[:rows] @ dense.T.astype(np.float64)).astype(np.float64)
        hidden = formats.round_bf16(expert_op.swiglu(both, bench.spec.swiglu_limit)).astype(np.float64)
        return relative_error(got, qdq.q8(hidden) @ dense2.T.astype(np.float64))

    nbytes = up.floor(rows)[0] + down.floor(rows)[0]
    return Case("shared_expert", rows, [partial(go, at) for at in places], error, 4 * BF16_ERROR, nbytes,
                up.floor(rows)[1] + down.floor(rows)[1])  # fmt: skip


def router(bench: Bench, rows: int) -> Case:
    """The gate's product and the choice of experts: two launches."""
    spec, one = bench.spec, project.projections(bench.spec)["gate"]
    launch, tile = project.launch_of(LABEL, one, rows), tile_of(LABEL, rows)
    packed, dense = _weight(bench, "bf16", one.n, one.k)
    places = bench.copies(packed, packed.nbytes)
    bits = formats.float32_to_bf16(0.02 * bench.rng.standard_normal((tile, one.k)).astype(np.float32))
    x, exact = bench.put(bits), formats.bf16_to_float32(bits).astype(np.float64)
    topk, scaling = spec.num_experts_per_tok, spec.routed_scaling_factor
    bias = bench.rng.standard_normal((2, one.n)).astype(np.float32)
    at_bias, image = bench.put(bias), bench.put(np.zeros(tile, np.int32))
    sequence, z = bench.put(np.zeros(tile, np.int32)), bench.poisoned(tile * one.n * 4)
    chosen, weights = bench.poisoned(tile * topk * 4), bench.poisoned(tile * topk * 4)
    plan = bench.poisoned(experts.plan_bytes(tile * topk))

    def go(w: int) -> None:
        bench.device.launch(launch.name, w, x, 0, z, rows, *launch.arguments, grid=launch.grid, shared=launch.shared)
        bench.device.launch("route", z, at_bias, image, sequence, chosen, weights, plan, 0, rows, one.n, topk, scaling)

    def error() -> float:
        picked, got = (bench.get(at, (tile, topk), t)[:rows] for at, t in ((chosen, np.int32), (weights, np.float32)))
        want, factors = route_op(exact[:rows] @ dense.T.astype(np.float64), bias[0].astype(np.float64), topk, scaling)
        return relative_error(got, factors) if (picked == want).all() else float("nan")

    nbytes, operations = one.floor(rows)
    return Case("router", rows, [partial(go, w) for w in places], error, 1e-4, nbytes, operations)


# ---- small kernels


def activation(bench: Bench, rows: int) -> Case:
    """The shared expert's activation."""
    i, limit = bench.spec.moe_intermediate_size, bench.spec.swiglu_limit
    bits = formats.float32_to_bf16(4 * bench.rng.standard_normal((rows, 2 * i)).astype(np.float32))
    y, codes, scales = bench.put(bits), bench.poisoned(rows * i), bench.poisoned(rows * scale_stride(i))
    grid = (-(-i // swiglu.SPAN), rows)

    def error() -> float:
        got = bench.get(codes, (rows, i), np.uint8), bench.get(scales, (rows, scale_stride(i)), np.uint8)
        want = expert_op.swiglu(formats.bf16_to_float32(bits).astype(np.float64), limit)
        return relative_error(qdq.q8_decode(got[0], got[1][:, : i // 32]).astype(np.float64), want)

    go = partial(bench.device.launch, "swiglu", y, codes, scales, i, limit, grid=grid)
    return Case("swiglu", rows, [go], error, 2.0**-4, 5 * rows * i, 12 * rows * i)


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
