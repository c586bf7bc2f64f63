"""The peer column of `dsuf bench kernels`: torch (cuBLAS) and plain Triton at a case's shape, cold, in a CUDA graph.

    q8          torch bf16 (2 bytes a weight); torch._scaled_mm with one scale (unlike work: no block scales);
                Triton with block scales, written plainly
    wo_a        torch bf16
    bf16        torch bf16, and for the head its argmax
    experts     torch._grouped_mm in bf16, both products with gather and activation

torch is no dependency of dsuf: where it is not installed --peers is refused. Peers use the same device and context.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dsuf.cli.live import say
from dsuf.errors import EnvironmentProblem

if TYPE_CHECKING:
    from dsuf.cli.bench.kernel_bench import Case

COLD = 400 << 20
REPLAYS, WARMUP = 9, 2
SCALED_ROWS = 16  # the least that _scaled_mm takes
HEAD_ROWS = 4096  # outputs from which a bf16 weight is the head


def need() -> None:
    """Raise EnvironmentProblem where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("--peers needs torch, which is not installed. Install it, or leave the flag out.")


def measure(case: Case) -> dict[str, float]:
    """Microseconds by peer; empty where there is none."""
    import torch

    made: dict[str, Callable[[], list[Callable[[], Any]]]] = {}
    if case.peer in ("q8", "wo_a", "bf16"):
        made = _dense(torch, case)
    elif case.peer == "experts":
        made = {"grouped_mm_bf16": lambda: _experts(torch, case.peer_shape)}
    found = {}
    for name, make in made.items():
        try:
            found[name] = _timed(torch, make())
        except Exception as error:  # a peer of another version: said, and left out
            say(f"peer {name} of {case.name} does not run: {type(error).__name__}: {str(error).splitlines()[:1]}")
        finally:
            torch.cuda.empty_cache()
    return found


def _timed(torch: Any, calls: Sequence[Callable[[], Any]]) -> float:
    """Median microseconds of a call in replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for i in range(WARMUP + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= WARMUP:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    del kept, graph
    return statistics.median(times)


def _random(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def _dense(torch: Any, case: Case) -> dict[str, Callable[[], list[Callable[[], Any]]]]:
    rows, n, k, groups = case.peer_shape
    copies = max(2, min(24, COLD // (groups * n * k) + 1))

    def plain() -> list[Callable[[], Any]]:
        weights = [_random(torch, groups, n, k) for _ in range(copies)]
        x = _random(torch, groups, rows, k)
        if groups > 1:
            return [lambda w=w: torch.bmm(x, w.transpose(1, 2)) for w in weights]
        return [lambda w=w: torch.nn.functional.linear(x[0], w[0]) for w in weights]

    def argmax() -> list[Callable[[], Any]]:
        return [lambda f=f: f().argmax(-1) for f in plain()]

    def scaled() -> list[Callable[[], Any]]:
        kind, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
        weights = [_random(torch, n, k).to(kind) for _ in range(copies)]
        x = _random(torch, max(rows, SCALED_ROWS), k).to(kind)
        return [
            lambda w=w: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
            for w in weights
        ]

    def written() -> list[Callable[[], Any]]:
        from dsuf.cli.bench.kernel_peers_triton import products

        return products(rows, n, k, copies)

    made = {"torch_bf16": plain}
    if case.peer == "q8":
        made["torch_fp8_one_scale"] = scaled
    if case.peer == "q8" and rows <= SCALED_ROWS and importlib.util.find_spec("triton") is not None:
        made["triton_fp8_blocks"] = written
    if case.peer == "bf16" and n >= HEAD_ROWS:
        made["torch_bf16_argmax"] = argmax
    return made


def _experts(torch: Any, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    rows, d, i, count, topk = shape
    w13, w2, x = _random(torch, count, d, 2 * i), _random(torch, count, i, d), _random(torch, rows, d)
    routings = []
    for _ in range(4):
        chosen = torch.rand(rows, count, device="cuda").argsort(1)[:, :topk].reshape(-1)
        order = chosen.argsort()
        ends = torch.bincount(chosen, minlength=count).cumsum(0).to(torch.int32)
        routings.append((order // topk, ends))

    def run(row: Any, ends: Any) -> Any:
        both = torch._grouped_mm(x[row], w13, offs=ends)
        hidden = torch.nn.functional.silu(both[:, :i]) * both[:, i:]
        out = torch._grouped_mm(hidden, w2, offs=ends)
        return torch.zeros_like(x).index_add_(0, row, out)

    return [lambda r=r: run(*r) for r in routings]
