"""Train the built-in checkpoint: the target for --seconds, then the drafter on its taps for --draft-seconds.

`python -m recipes.toy.train DATASET.npz OUT` with a CUDA GPU; --small takes tiny batches for a look on a CPU. Time is the
budget: the learning rate follows the clock, so a run always ends with a usable checkpoint. OUT gets target.pt,
drafter.pt (float32 masters, for export.py) and log.txt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dsuf.spec import Spec
from recipes.toy.batches import FULL, SMALL, Arrays, Corpus, Sampler
from recipes.toy.drafter import Drafter
from recipes.toy.judge import judge, table
from recipes.toy.model import Backbone, prepare, release
from recipes.toy.steps import Captured, DraftStep, Inputs, Optimiser, TargetStep, first_inputs

DENSE_SHARE = 0.25  # of the time, before the selection acts
TARGET_RATE, DRAFT_RATE = 2e-3, 2e-3
ROWS, ANCHORS = 6144, 1536


class Feed:
    """Batches from worker processes."""

    def __init__(self, make: list[Sampler]) -> None:
        context = multiprocessing.get_context("fork")
        self.queue = context.Queue(maxsize=24)
        self.workers = [context.Process(target=_produce, args=(s, self.queue), daemon=True) for s in make]
        for worker in self.workers:
            worker.start()

    def get(self) -> Arrays:
        return self.queue.get()

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()


def _produce(sampler: Sampler, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    while True:
        queue.put(sampler.batch())


class Log:
    """Lines to the terminal and to a file, with seconds since the start."""

    def __init__(self, path: Path) -> None:
        self.file, self.start = path.open("w", encoding="utf-8"), time.perf_counter()

    def __call__(self, line: str) -> None:
        for part in line.splitlines():
            text = f"{time.perf_counter() - self.start:7.1f} {part}"
            print(text, flush=True)
            print(text, file=self.file, flush=True)


def turns(seconds: float, device: torch.device) -> Iterator[tuple[int, float]]:
    """(step, share of the time used) until the time is used up; the host stays at most 8 steps ahead of the GPU."""
    begin, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - begin) / seconds) < 1:
        yield step, done
        step += 1
        if device.type == "cuda" and step % 8 == 0:
            torch.cuda.synchronize()


def train_target(backbone: Backbone, feed: Feed, inputs: Inputs, names: list[str], seconds: float, eager: bool, log: Log) -> None:
    device = inputs.weights.device
    optimiser = Optimiser(backbone, TARGET_RATE, device)
    optimiser.schedule(0.0)
    step, run = None, None
    for number, done in turns(seconds, device):
        sparse = done > DENSE_SHARE
        if step is None or step.sparse != sparse:
            run = None  # gives the dense graph's memory back before the sparse one is captured
            torch.cuda.empty_cache()
            step = TargetStep(backbone, optimiser, inputs, len(names), sparse)
            run = Captured(step, device, eager)
            log(f"step {number}: {'sparse' if sparse else 'dense'} selection, captured")
        optimiser.schedule(done)
        inputs.fill(feed.get())
        run()
        if number % 250 == 0 or (number < 50 and number % 10 == 0):
            loss, kl, recall, share = step.scalars.tolist()
            groups = " ".join(
                f"{name} {right / rows:.3f}/{low:.1f}" for name, (rows, right, low) in zip(names, step.by_group.tolist(), strict=True) if rows
            )
            log(f"target {number:6d} {done:.3f} loss {loss:.3f} index kl {kl:.3f} recall {recall:.3f} share {share:.3f} | {groups}")


def train_drafter(backbone: Backbone, drafter: Drafter, feed: Feed, inputs: Inputs, seconds: float, eager: bool, log: Log) -> None:
    device = inputs.weights.device
    optimiser = Optimiser(drafter, DRAFT_RATE, device)
    optimiser.schedule(0.0)
    inputs.batch.probes = ()
    with torch.no_grad():
        prepare(backbone)
    step = DraftStep(backbone, drafter, optimiser, inputs)
    run = Captured(step, device, eager)
    for number, done in turns(seconds, device):
        optimiser.schedule(done)
        arrays = feed.get()
        arrays.probes = ()
        inputs.fill(arrays)
        run()
        if number % 250 == 0 or (number < 50 and number % 10 == 0):
            loss, *slots, accepted = step.scalars.tolist()
            log(f"drafter {number:6d} {done:.3f} loss {loss:.3f} slots {' '.join(f'{s:.3f}' for s in slots)} accepted {accepted:.3f}")


def report(backbone: Backbone, drafter: Drafter, corpus: Corpus, log: Log) -> None:
    with torch.no_grad():
        prepare(backbone)
        prepare(drafter)
    backbone.eval()
    for truncated in (True, False):
        log(f"--- {'truncated' if truncated else 'exact'} prefill")
        log(table(judge(backbone, drafter, corpus.fixed + corpus.held_out[:-16], truncated)))
    release(backbone)
    release(drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--draft-seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="tiny batches, no compilation")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / "log.txt")
    spec = Spec.from_config(json.loads((Path(__file__).parent / "config.json").read_text()))
    corpus = Corpus(arguments.dataset)
    slots = SMALL if arguments.small else FULL
    make = [Sampler(corpus, spec, slots, ROWS // (8 if arguments.small else 1), ANCHORS // (8 if arguments.small else 1), arguments.seed * 1000 + i) for i in range(arguments.workers)]
    feed = Feed(make)  # before CUDA starts
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        from recipes.toy import fused  # needs Triton, which comes with PyTorch for GPUs only

        fused.install()
    backbone = Backbone(spec, corpus.class_map)
    drafter = Drafter(spec)
    log(f"{device}, {sum(p.numel() for p in backbone.parameters()):,} + {sum(p.numel() for p in drafter.parameters()):,} parameters, {make[0].tokens} tokens a step")
    backbone.to(device)
    drafter.to(device)
    inputs = first_inputs(make[0], device)
    train_target(backbone, feed, inputs, corpus.group_names, arguments.seconds, arguments.eager, log)
    torch.save(backbone.state_dict(), arguments.out / "target.pt")
    train_drafter(backbone, drafter, feed, inputs, arguments.draft_seconds, arguments.eager, log)
    torch.save(drafter.state_dict(), arguments.out / "drafter.pt")
    feed.close()
    report(backbone, drafter, corpus, log)


if __name__ == "__main__":
    main()
