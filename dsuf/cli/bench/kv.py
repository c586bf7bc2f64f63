"""`dsuf bench kv`: what keeping caches is worth here: restore against recompute, paths against plain copies, Redis."""

from __future__ import annotations

from typing import Annotated

import typer

from dsuf.cli import options
from dsuf.cli.bench.flags import measured
from dsuf.cli.bench.result import check_thresholds, new_result, write_result
from dsuf.cli.bench.table import print_table
from dsuf.cli.session import engine_options, prepare
from dsuf.config import BenchOptions, parse_token_counts


@measured()
def kv(
    tokens: Annotated[str, typer.Option("--tokens", help="Prompt lengths, such as 1k,4k,16k.")] = "256,1k",
    size: Annotated[str, typer.Option("--size", help="Bytes of one transfer between two servers.")] = "64m",
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    numerics: options.Numerics = None,
    prefill_mode: options.Prefill = "truncated",
    *,
    bench: BenchOptions,
) -> None:
    """Measure saved caches: first token, transfers, look-ups.

    The first token of a prompt whose prefix is saved beside that of one whose is not, and transfers by each path.
    """
    from dsuf.cli.bench.saving import look_ups, path_rates, restored_and_computed
    from dsuf.cli.kv import parse_bytes

    lengths, nbytes = parse_token_counts(tokens), parse_bytes("--size", size)
    engine = prepare(ckpt, engine_options(gpus, numerics, prefill_mode, "on", "auto", None))
    samples, model, backend, gpu = restored_and_computed(ckpt, engine, lengths, bench)
    for sample in samples:
        sample |= path_rates(nbytes) | look_ups()
    params = {
        "tokens": list(lengths), "size": nbytes, "numerics": engine.numerics, "prefill": prefill_mode,
        "seed": bench.seed,
    }  # fmt: skip
    result = new_result("kv", bench.label, backend=backend, model=model, params=params, samples=samples, gpu=gpu)
    write_result(result, bench.output, bench.ci_json)
    print_table(result)
    print(headline(result.metrics, max(lengths)), flush=True)
    check_thresholds(result.metrics, bench.thresholds)


def headline(metrics: dict[str, float], length: int) -> str:
    """`kv: first token of 16,384 tokens in 0.05 s from a saved prefix, 12 s without (0.4 %)`, then the paths."""
    hit, miss = metrics[f"hit_{length}_s"], metrics[f"miss_{length}_s"]
    return (
        f"kv: first token of {length:,} tokens in {hit:.3g} s from a saved prefix, {miss:.3g} s without "
        f"({hit / miss:.2%}); tcp {metrics['tcp_over_raw_socket']:.0%} of a plain socket, "
        f"shm {metrics['shm_over_memcpy']:.0%} of a plain copy"
    )
