"""Train the built-in checkpoint: the target for --seconds, then the drafter on its taps for --draft-seconds.

`python -m recipes.toy.train DATASET.npz OUT` with a CUDA GPU; --small takes tiny batches for a look on a CPU. Time is
the budget: the learning rate follows the clock, so a run always ends with a usable checkpoint. OUT gets target.*.pt,
drafter.*.pt (float32 masters, for export.py) and log.txt. --resume goes on from a checkpoint or from the masters of
another run; with --seconds 0 the target stays as it is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dsuf.model.checkpoint import CONFIG, Checkpoint
from dsuf.spec import Spec
from recipes.toy.batches import AGENT, FAR, LONG, SHORT, SMALL, Arrays, Corpus, Sampler
from recipes.toy.drafter import Drafter
from recipes.toy.export import load_checkpoint, load_masters
from recipes.toy.judge import judge, table
from recipes.toy.model import Backbone, prepare, release
from recipes.toy.steps import Captured, DraftStep, Inputs, Optimiser, TargetStep, first_inputs

DENSE_SHARE = 0.5  # of the time, at the latest, before the selection acts
COPIED = 0.99  # share of needle tokens right at which it acts earlier
TARGET_RATE, DRAFT_RATE = 2e-3, 2e-3
ROWS, ANCHORS = 2816, 1536
LOG_EVERY = 400  # steps


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


@dataclass
class Course:
    """Batches of one shape and the device tensors they are copied into."""

    name: str
    feed: Feed
    inputs: Inputs


def turns(seconds: float, courses: dict[str, Course], every: dict[str, int]) -> Iterator[tuple[int, float, Course]]:
    """(step, share of the time used, course) until the time is used up.

    `every` may be changed on the way: a course has each so-manieth step, the rarest first; the others are short.
    """
    begin, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - begin) / seconds) < 1:
        due = [name for name, period in every.items() if name in courses and step % period == period - 1]
        yield step, done, courses[max(due, key=every.__getitem__) if due else "short"]
        step += 1
        if torch.cuda.is_available() and step % 8 == 0:
            torch.cuda.synchronize()  # the host stays close to the GPU, so that the clock means something


def train_target(
    backbone: Backbone, courses: dict[str, Course], names: list[str], seconds: float, resumed: bool, log: Log
) -> None:
    """Dense selection until short needles are copied (or DENSE_SHARE of the time is gone), then the real selection."""
    device = backbone.norm.weight.device
    optimiser = Optimiser(backbone, TARGET_RATE / (2 if resumed else 1), device)
    optimiser.schedule(0.0)
    sparse, copied, runs, logged = False, float(resumed), {}, {}
    every = {"long": 8}
    for number, done, course in turns(seconds, courses, every):
        if not sparse and (copied > COPIED or done > DENSE_SHARE):
            log(f"selection acts from step {number}, {done:.3f} of the time, {copied:.3f} of needle tokens right")
            every.update(long=4, far=16)
            sparse, runs = True, {}  # the dense graphs' memory goes back before the sparse ones are captured
            torch.cuda.empty_cache()
        if course.name not in runs:
            step = TargetStep(backbone, optimiser, course.inputs, len(names), sparse)
            runs[course.name] = step, Captured(step, device)
        step, run = runs[course.name]
        optimiser.schedule(done)
        course.inputs.fill(course.feed.get())
        run()
        if course.name == "short" and number % 20 == 0:
            rows, right, _ = step.by_group[names.index("needle")].tolist()
            copied = 0.8 * copied + 0.2 * right / max(rows, 1)
        if number >= logged.get(course.name, 0):
            logged[course.name] = number + LOG_EVERY
            loss, kl, recall, share = step.scalars.tolist()
            groups = " ".join(
                f"{name} {right / rows:.3f}/{low:.1f}"
                for name, (rows, right, low) in zip(names, step.by_group.tolist(), strict=True)
                if rows
            )
            index = f"index kl {kl:.3f} recall {recall:.3f} share {share:.3f}"
            log(f"{course.name} {number:6d} {done:.3f} loss {loss:.3f} {index} | {groups}")


def train_drafter(backbone: Backbone, drafter: Drafter, courses: dict[str, Course], seconds: float, log: Log) -> None:
    """The backbone is frozen; its taps are computed anew for every batch."""
    device = backbone.norm.weight.device
    optimiser = Optimiser(drafter, DRAFT_RATE, device)
    optimiser.schedule(0.0)
    with torch.no_grad():
        prepare(backbone)
    runs, logged = {}, {}
    for number, done, course in turns(seconds, courses, {"long": 4}):
        if course.name not in runs:
            course.inputs.batch.probes = ()
            step = DraftStep(backbone, drafter, optimiser, course.inputs)
            runs[course.name] = step, Captured(step, device)
        step, run = runs[course.name]
        optimiser.schedule(done)
        arrays = course.feed.get()
        arrays.probes = ()
        course.inputs.fill(arrays)
        run()
        if number >= logged.get(course.name, 0):
            logged[course.name] = number + LOG_EVERY
            loss, *slots, accepted = step.scalars.tolist()
            each = " ".join(f"{slot:.3f}" for slot in slots)
            log(f"drafter {course.name} {number:6d} {done:.3f} loss {loss:.3f} slots {each} accepted {accepted:.3f}")


def save(module: torch.nn.Module, out: Path, name: str) -> None:
    """state_dict in files of at most 12 MB, NAME.0.pt, NAME.1.pt, ..."""
    part: dict[str, torch.Tensor] = {}
    number = size = 0
    for key, value in module.state_dict().items():
        if size + value.nbytes > 12e6:
            torch.save(part, out / f"{name}.{number}.pt")
            part, number, size = {}, number + 1, 0
        part[key] = value.cpu().clone()
        size += value.nbytes
    torch.save(part, out / f"{name}.{number}.pt")


def resume(backbone: Backbone, drafter: Drafter, folder: Path) -> None:
    """Go on from a checkpoint or from the masters of another run."""
    if (folder / CONFIG).exists():
        with Checkpoint.open(folder) as checkpoint:
            load_checkpoint(backbone, checkpoint)
            load_checkpoint(drafter, checkpoint)
        return
    load_masters(backbone, folder, "target")
    load_masters(drafter, folder, "drafter")


def report(backbone: Backbone, drafter: Drafter, corpus: Corpus, far: Sampler, log: Log) -> None:
    """What was learnt, in both prefill modes; tasks also behind as much idle text as the longest batches have."""
    with torch.no_grad():
        prepare(backbone)
        prepare(drafter)
    backbone.eval()
    for truncated in (True, False):
        log(f"--- {'truncated' if truncated else 'exact'} prefill")
        log(table(judge(backbone, drafter, corpus.fixed + (corpus.held_out if truncated else []), truncated)))
    log(f"--- truncated prefill, {far.tokens} tokens")
    tasks = [s for s in corpus.fixed if s.kind in AGENT]
    distant = [far.with_idle_text(s, far.tokens - s.least) for s in tasks]
    log(table(judge(backbone, drafter, distant, True, far.tokens)))
    release(backbone)
    release(drafter)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--draft-seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint, or with masters of an earlier run")
    parser.add_argument("--small", action="store_true", help="tiny batches")
    parser.add_argument("--workers", type=int, default=6, help="processes that make batches, for each shape")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / "log.txt")
    spec = Spec.from_config(json.loads((Path(__file__).parent / "config.json").read_text()))
    corpus = Corpus(arguments.dataset)
    shapes = {"short": SMALL} if arguments.small else {"short": SHORT, "long": LONG, "far": FAR}
    scale = 8 if arguments.small else 1
    samplers = {
        name: [
            Sampler(corpus, spec, shape, ROWS // scale, ANCHORS // scale, 1000 * arguments.seed + i)
            for i in range(arguments.workers)
        ]
        for name, shape in shapes.items()
    }
    feeds = {name: Feed(make) for name, make in samplers.items()}  # forked before CUDA starts
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        from recipes.toy import fused  # needs Triton, which comes with PyTorch for GPUs only

        fused.install()
    backbone = Backbone(spec, corpus.class_map)
    drafter = Drafter(spec)
    if arguments.resume:
        resume(backbone, drafter, arguments.resume)
    backbone.to(device)
    drafter.to(device)
    courses = {name: Course(name, feeds[name], first_inputs(make[0], device)) for name, make in samplers.items()}
    counts = [sum(p.numel() for p in module.parameters()) for module in (backbone, drafter)]
    tokens = [make[0].tokens for make in samplers.values()]
    log(f"{device}, {counts[0]:,} + {counts[1]:,} parameters, {tokens} tokens a step")
    if arguments.seconds:
        train_target(backbone, courses, corpus.group_names, arguments.seconds, arguments.resume is not None, log)
    save(backbone, arguments.out, "target")
    train_drafter(backbone, drafter, courses, arguments.draft_seconds, log)
    save(drafter, arguments.out, "drafter")
    for feed in feeds.values():
        feed.close()
    if not arguments.small:
        report(backbone, drafter, corpus, samplers["far"][0], log)


if __name__ == "__main__":
    main()
