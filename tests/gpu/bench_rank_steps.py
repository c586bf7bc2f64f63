"""Decode steps of a config over all GPUs of one machine: every rank's graphs, started from one thread.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_rank_steps.py .kernels OUT.json --config h200x2 [--gpus 2] [--context 1024]

Weights are made on the devices, without bias in the routers. Each step drafts, verifies six rows a sequence and
accepts; the first GPU's clock counts. Ranks must agree in every record, and no join may have given up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsuf.cli.bench.gpu_decode import even_router
from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.engram_tables import join_shares
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.measure import StepRun
from dsuf.engine.gpu.ranks import ALONE, Ranks
from dsuf.engine.gpu.step_graph import Entry
from dsuf.engine.options import EngineOptions
from dsuf.kernels.launch import read_folder
from dsuf.kernels.slots import MOST_ROWS, slot_record
from dsuf.model.synthetic import load_config

BATCHES, STEPS, REPEATS, ROOM = (1, 8), 10, 5, 2048  # ROOM: tokens of all steps together


class Steps:
    """Machines of all ranks, with up to 8 sequences at a made-up context."""

    def __init__(self, config: dict[str, Any], devices: list[Any], context: int) -> None:
        self.devices, self.context = devices, context
        self.ranks = Ranks(devices)
        room = {"max_context": context + ROOM, "max_sequences": BATCHES[-1], "prefill_chunk": MOST_ROWS}
        options = EngineOptions(Path(), **room, cache_tokens=BATCHES[-1] * (context + ROOM + 256))
        self.machines = []
        for index in range(len(devices)):
            rank = self.ranks.rank(index) if len(devices) > 1 else ALONE
            self.machines.append(Machine.synthetic(config, options, self.ranks.device(index), rank=rank))
            machine = self.machines[-1]
            even_router(SimpleNamespace(machine=machine))
            machine.device.zero(machine.pages.history, machine.pages.slots * machine.pages.sizes.history)
        if len(devices) > 1:
            join_shares([machine.model.weights for machine in self.machines])
            self.ranks.prepare(self.machines[0].spec, MOST_ROWS)
        self.slots = [self._open(number) for number in range(BATCHES[-1])]

    def _open(self, number: int) -> int:
        """The same slot, pages and contents on every rank."""
        slots = set()
        for index, machine in enumerate(self.machines):
            self.ranks.device(index)
            slot = machine.pages.open()
            machine.pages.reserve(slot, self.context + ROOM)
            StepRun._fill(SimpleNamespace(machine=machine, context=self.context), slot, np.random.default_rng(number))
            record = slot_record(
                token=7 + number, position=self.context, emitted=1, budget=ROOM, drafts=True, verify=5, ignore_eos=True
            )
            machine.steps.admit(slot, record)
            slots.add(slot)
        assert len(slots) == 1
        return slots.pop()

    def queue(self, batch: int) -> int:
        """One step on every rank; its number."""
        entries = [Entry(slot, 6, drafts=True) for slot in self.slots[:batch]]
        numbers = set()
        for index, machine in enumerate(self.machines):
            self.ranks.device(index)
            numbers.add(machine.steps.queue(entries))
        return numbers.pop()

    def wait(self) -> None:
        """Until every rank has done what is queued."""
        for index in range(len(self.devices)):
            self.ranks.device(index).synchronize()
        self.ranks.check()

    def timed(self, batch: int) -> list[float]:
        """Microseconds of a step, from each repeat."""
        times = []
        for _ in range(REPEATS):
            first = self.ranks.device(0).record(timing=True)
            for _ in range(STEPS):
                number = self.queue(batch)
            last = self.ranks.device(0).record(timing=True)
            self.wait()
            times.append(last.since(first) * 1e6 / STEPS)
            results = [machine.steps.result(number) for machine in self.machines]
            if not results[0] or any(result != results[0] for result in results):
                raise SystemExit(f"ranks do not agree in step {number}: {results}")
        return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--config", default="h200x2")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    cubins = read_folder(given.cubins, "sm_90a")
    devices = [Device.open(index, cubins) for index in range(given.gpus)]
    steps, metrics = Steps(load_config(given.config), devices, given.context), {}
    for batch in BATCHES:
        for _ in range(2):
            steps.queue(batch)
        steps.wait()
        times = steps.timed(batch)
        metrics[f"step_{6 * batch}_rows_us"] = statistics.median(times)
        print(
            f"{given.config} on {given.gpus} GPUs, {6 * batch} rows: {statistics.median(times):.0f} us a step",
            flush=True,
        )
    bench = {
        "schema": "dsuf.bench/1", "kind": "rank steps", "label": f"{given.config} over {given.gpus} GPUs",
        "backend": "gpu", "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": {"name": devices[0].name, "count": given.gpus},
        "params": {"config": given.config, "context": given.context, "context_kind": "synthetic", "steps": STEPS},
        "metrics": metrics, "samples": [],
    }  # fmt: skip
    given.output.write_text(json.dumps(bench, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
