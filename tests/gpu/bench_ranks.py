"""Measures push and join between two GPUs of one machine: an exchange of 61 KB (6 rows), and a round trip.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_ranks.py .kernels OUT.json

An exchange is what a layer does twice: every rank pushes its part and joins all. In a round trip the second rank pushes
only after it has joined what the first one pushed. Both are graphs of ROUNDS rounds on each GPU, started together; the
figure is a round's share of the first GPU's time, and the sums are compared with those of the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf import formats
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.ranks import Exchange, Ranks
from dsuf.kernels.launch import read_folder

HIDDEN, ROUNDS, REPEATS = 5120, 50, 9
Round = Callable[[int, "Pair"], None]


class Pair:
    """Two ranks, two sums of one size, and random parts."""

    def __init__(self, ranks: Ranks, rows: int) -> None:
        self.ranks, elements = ranks, rows * HIDDEN
        self.sums = [Exchange(ranks, elements) for _ in range(2)]
        rng = np.random.default_rng(rows)
        self.parts = [formats.float32_to_bf16(rng.standard_normal(elements).astype(np.float32)) for _ in range(2)]
        self.at, self.out = [], []
        for rank, part in enumerate(self.parts):
            device = ranks.device(rank)
            self.at.append(device.allocate(part.nbytes, "bench"))
            self.out.append(device.allocate(part.nbytes, "bench"))
            device.upload(self.at[rank], part)

    def wrong(self) -> int:
        """Elements of the last sum that are not what the host adds up, on both ranks."""
        want = formats.float32_to_bf16(sum(formats.bf16_to_float32(part) for part in self.parts))
        found = [self.ranks.device(rank).download(self.out[rank], want.nbytes).view(np.uint16) for rank in range(2)]
        return sum(int((got != want).sum()) for got in found)


def exchange(rank: int, pair: Pair) -> None:
    pair.sums[0].push(rank, pair.at[rank])
    pair.sums[0].join(rank, pair.out[rank])


def round_trip(rank: int, pair: Pair) -> None:
    there, back = pair.sums
    there.push(rank, pair.at[rank])
    if rank == 0:
        back.push(rank, pair.at[rank])
    there.join(rank, pair.out[rank])
    if rank == 1:
        back.push(rank, pair.at[rank])
    back.join(rank, pair.out[rank])


def timed(pair: Pair, one: Round) -> dict[str, float]:
    """Microseconds of a round, median and best."""
    ranks, graphs = pair.ranks, []
    for rank in range(2):
        with ranks.device(rank).capture() as graph:
            for _ in range(ROUNDS):
                one(rank, pair)
        graphs.append(graph)
    times = []
    for _ in range(REPEATS):
        ends = []
        for rank in (1, 0):  # the first rank last, so that its clock starts when both are there
            device = ranks.device(rank)
            first = device.record(timing=True)
            graphs[rank].launch()
            ends.append((first, device.record(timing=True)))
        for rank in range(2):
            ranks.device(rank).synchronize()
        first, last = ends[-1]
        times.append(last.since(first) * 1e6 / ROUNDS)
    return {"median_us": statistics.median(times[2:]), "best_us": min(times[2:]), "wrong": pair.wrong()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    cubins = [c for c in read_folder(given.cubins, "sm_90a") if c.name.startswith("reduce.")]
    devices = []
    for index in range(2):
        devices.append(Device.open(index, cubins))
    ranks, results = Ranks(devices), {}
    for rows in (1, 6, 48):
        pair = Pair(ranks, rows)
        for one in (exchange, round_trip):
            results[f"{one.__name__}_{rows}_rows"] = timed(pair, one) | {"bytes": rows * HIDDEN * 2}
            print(f"{one.__name__} {rows} rows: {results[f'{one.__name__}_{rows}_rows']}", flush=True)
    ranks.check()
    bench = {
        "schema": "dsuf.bench/1", "kind": "ranks", "label": "push and join between two GPUs", "backend": "gpu",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "gpu": {"name": devices[0].name, "count": 2},
        "params": {"rounds": ROUNDS}, "metrics": results, "samples": [],
    }  # fmt: skip
    given.output.write_text(json.dumps(bench, indent=1))
    return sum(int(result["wrong"] > 0) for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
