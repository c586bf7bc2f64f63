"""Tables about the built-in checkpoint, made with the reference model and written into README.md.

`python -m recipes.toy.evaluate` measures the packed checkpoint of the package; --ckpt FOLDER another one, whose tables
go to --readme FILE. --quick takes a few exchanges of each group. Exit code 1 if a demand of `findings` is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dsuf.config import read_environment
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.model import Block, ReferenceModel
from dsuf.ops.accept import verify_length
from dsuf.ops.sample import filtered_probabilities, pick
from dsuf.text.builtin import resolve
from recipes.toy import dataset
from recipes.toy.dataset import Example, Text
from recipes.toy.measure import Measured, ablations, measure, reversed_sums

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- made by evaluate.py: begin -->", "<!-- made by evaluate.py: end -->"
LEAST_MARGIN, LEAST_PACE = 1.0, 4.5
FRESH = (150, 400, 900, 1800, 2600)  # filler tokens of the needles drawn for the evaluation
FAR = (2500, 8000, 17000)  # the same of tool calls; a little less is made of it, as long as a harness' prompt
Row = list[object]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def by_group(runs: Iterable[Measured]) -> dict[str, list[Measured]]:
    """In the order in which the groups appear."""
    groups: dict[str, list[Measured]] = defaultdict(list)
    for run in runs:
        groups[run.example.group].append(run)
    return dict(groups)


def examples(text: Text, quick: bool) -> list[Example]:
    """All fixed exchanges, the frozen draws, needles and tool calls drawn with a seed of this evaluation's own."""
    chosen = dataset.load(text)
    rng = random.Random(20260)
    for tokens in FRESH[: 1 if quick else None]:
        chosen += [dataset.needle(rng, text, tokens) for _ in range(8)]
    for tokens in FAR[: 1 if quick else None]:
        chosen += [dataset.listing(rng, text, tokens, turn) for turn in ("call", "done")]
    return few(chosen, 3) if quick else chosen


def few(chosen: list[Example], count: int) -> list[Example]:
    """The first `count` of each group."""
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for example in chosen:
        seen[example.group] += 1
        if seen[example.group] <= count:
            kept.append(example)
    return kept


def known_table(runs: list[Measured]) -> str:
    """Loss, exact answers and smallest margin of each group."""
    rows = []
    for group, part in by_group(runs).items():
        loss = np.concatenate([run.losses for run in part]).mean()
        exact = sum(run.exact for run in part)
        worst = min(run.margins.min() for run in part)
        rows.append(
            [group, len(part), sum(len(r.margins) for r in part), f"{loss:.5f}", f"{exact}/{len(part)}", f"{worst:.2f}"]
        )
    return table(["group", "exchanges", "answer tokens", "loss (nats a token)", "exact", "smallest margin"], rows)


def pace(runs: list[Measured], length: Callable[[np.ndarray], int]) -> tuple[float, float]:
    """Tokens emitted and drafts verified per step."""
    steps = [step for run in runs for step in run.steps(length)]
    verified, emitted = np.mean(steps, axis=0)
    return float(emitted), float(verified)


def acceptance_table(runs: list[Measured]) -> str:
    """Conditional acceptance of each slot: of the rows where all drafts before it stand."""
    rows = []
    for group, part in by_group(runs).items():
        hit = np.concatenate([run.drafts == run.ahead for run in part])
        there = np.concatenate([run.ahead >= 0 for run in part])
        stood = np.concatenate([np.ones((len(hit), 1), bool), np.cumprod(hit, axis=1)[:, :-1].astype(bool)], axis=1)
        asked = stood & there
        slots = (hit & asked).sum(0) / np.maximum(asked.sum(0), 1)
        rows.append([group, f"{pace(part, lambda _: 5)[0]:.2f}", *(f"{slot:.3f}" for slot in slots)])
    return table(["group", "tokens a step", *(f"slot {i}" for i in range(1, 6))], rows)


def verify_table(runs: list[Measured]) -> str:
    """Fixed verify lengths and the automatic one, over all groups and over the page."""
    policies: list[tuple[str, Callable[[np.ndarray], int]]] = [(f"fixed {n}", lambda _, n=n: n) for n in range(6)]
    policies += [(f"automatic, {t}", lambda c, t=t: verify_length(c, t)) for t in (0.3, 0.5, 0.7, 0.9)]
    page = [run for run in runs if run.example.group == "tetris"]
    rows = []
    for name, policy in policies:
        (all_pace, verified), (page_pace, _) = pace(runs, policy), pace(page, policy)
        accepted = (all_pace - 1) / verified if verified else 1.0
        rows.append([name, f"{all_pace:.2f}", f"{verified:.2f}", f"{accepted:.3f}", f"{page_pace:.2f}"])
    head = ["verify length", "tokens a step", "drafts verified a step", "share of them accepted", "tokens a step, page"]
    return table(head, rows)


def calibration_table(runs: list[Measured]) -> tuple[str, float]:
    """Confidence against acceptance, each given that all drafts before stand; and the expected calibration error."""
    said, held = [], []
    for run in runs:
        hit = run.drafts == run.ahead
        stood = np.concatenate([np.ones((len(hit), 1), bool), np.cumprod(hit, axis=1)[:, :-1].astype(bool)], axis=1)
        asked = stood & (run.ahead >= 0)
        said.append(1 / (1 + np.exp(-run.confidence[asked])))
        held.append(hit[asked])
    p, y = np.concatenate(said), np.concatenate(held)
    edges = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
    rows, error = [], 0.0
    for low, high in pairwise(edges):
        inside = (p >= low) & ((p < high) | (high == 1.0))
        if inside.any():
            rows.append([f"{low} to {high}", int(inside.sum()), f"{p[inside].mean():.3f}", f"{y[inside].mean():.3f}"])
            error += inside.mean() * abs(p[inside].mean() - y[inside].mean())
    return table(["confidence", "drafts", "mean confidence", "accepted"], rows), error


def numerics_rows(checkpoint: Checkpoint, chosen: list[Example], runs: list[Measured]) -> list[Row]:
    """Margins in the other numerics and prefill mode, next to those of `runs` (qdq64, truncated)."""
    rows = [_numerics_row("qdq64, truncated prefill", runs)]
    exact = ReferenceModel.load(checkpoint, "qdq64")
    rows.append(_numerics_row("qdq64, exact prefill", [measure(exact, e, mode="exact", drafts=False) for e in chosen]))
    bf16 = ReferenceModel.load(checkpoint, "bf16")
    rows.append(_numerics_row("bf16, truncated prefill", [measure(bf16, e, drafts=False, chunk=6) for e in chosen]))
    with reversed_sums():
        other = ReferenceModel.load(checkpoint, "qdq32")
        other_runs = [measure(other, e, drafts=False, chunk=6) for e in chosen]
    rows.append(_numerics_row("qdq32, truncated prefill, K summed backwards", other_runs))
    return rows


def _numerics_row(name: str, runs: list[Measured]) -> Row:
    worst = min(runs, key=lambda run: run.margins.min())
    same = sum(run.exact for run in runs)
    return [name, f"{same}/{len(runs)}", f"{worst.margins.min():.2f}", worst.example.name]


def ablation_table(model: ReferenceModel, chosen: list[Example]) -> tuple[str, list[str]]:
    """Exact matches and acceptance with one part broken; and the names of parts whose loss broke nothing."""
    names = list(dict.fromkeys(example.group for example in chosen))
    intact = _broken_row(model, chosen, names)
    rows, idle = [["none", *intact[0]]], []
    for name, broken in ablations(model).items():
        with broken():
            cells, exact, paces = _broken_row(model, chosen, names)
        rows.append([name, *cells])
        slower = any(paces[g] < 0.8 * intact[2][g] for g in names)
        if sum(exact.values()) == sum(intact[1].values()) and not slower:
            idle.append(name)
    return table(["broken part", *names], rows), idle


def _broken_row(
    model: ReferenceModel, chosen: list[Example], names: list[str]
) -> tuple[Row, dict[str, int], dict[str, float]]:
    with np.errstate(all="ignore"):
        groups = by_group(measure(model, example) for example in chosen)
    exact = {name: sum(run.exact for run in groups[name]) for name in names}
    paces = {name: pace(groups[name], lambda _: 5)[0] for name in names}
    return [f"{exact[n]}/{len(groups[n])}, {paces[n]:.2f}" for n in names], exact, paces


def sampled(model: ReferenceModel, tokenizer: Tokenizer, chosen: list[Example], seeds: int) -> tuple[str, int, int]:
    """Answers at temperature 1: some of them as text, and how many equal the known answer."""
    same = total = 0
    shown = []
    for example in chosen:
        for seed in range(seeds):
            ids = _sample(model, example, np.random.default_rng(seed), len(example.ids) - example.prompt_len + 16)
            total += 1
            same += ids == example.ids[example.prompt_len :]
            if seed == 0 and len(shown) < 4:
                shown.append(f"> {tokenizer.decode(ids).strip()}".replace("\n", " ")[:300])
    return "\n>\n".join(shown), same, total


def _sample(model: ReferenceModel, example: Example, rng: np.random.Generator, most: int) -> list[int]:
    caches = model.new_caches()
    logits = model.prefill(caches, example.ids[: example.prompt_len], final=True, mode="truncated").logits
    ids: list[int] = []
    while len(ids) < most and dataset.EOS_ID not in ids:
        ids.append(pick(filtered_probabilities(logits, 1.0), rng.random()))
        logits = model.forward([Block(caches, ids[-1:])])[0][0]
        model.commit(caches, 1)
    return ids


def findings(runs: list[Measured], numerics: list[Row], idle: list[str]) -> list[str]:
    """What the checkpoint was to show and does not."""
    missed = [f"{run.example.name} is not exact" for run in runs if not run.exact]
    missed += [f"{row[0]}: margin {row[2]} at {row[3]}" for row in numerics if float(row[2]) < LEAST_MARGIN]
    page = pace([run for run in runs if run.example.group == "tetris"], lambda _: 5)[0]
    if page < LEAST_PACE:
        missed.append(f"the page takes {page:.2f} tokens a step")
    return missed + [f"nothing fails with {name}" for name in idle]


def report(checkpoint: Checkpoint, quick: bool) -> tuple[str, list[str]]:
    """The Markdown and what was missed."""
    tokenizer_json = checkpoint.tokenizer_path.read_text(encoding="utf-8")
    text, tokenizer = Text(tokenizer_json), Tokenizer.from_str(tokenizer_json)
    model, chosen = ReferenceModel.load(checkpoint, "qdq64"), examples(text, quick)
    runs = [measure(model, example) for example in chosen]
    numerics = numerics_rows(checkpoint, chosen, runs)
    broken, idle = ablation_table(model, few(chosen, 3 if quick else 8))
    calibration, error = calibration_table(runs)
    talk = [e for e in chosen if e.group in ("chat_en", "chat_zh", "thinking") and len(e.ids) < 500]
    texts, same, total = sampled(model, tokenizer, talk, 1 if quick else 3)
    missed = findings(runs, numerics, idle)
    parts = [
        "### What it knows (qdq64, truncated prefill)\n\n" + known_table(runs),
        "### The same text in every numerics\n\n"
        + table(["numerics", "exact", "smallest top-2 margin", "where"], numerics),
        "### Drafts (five verified, greedy)\n\n" + acceptance_table(runs),
        "### Verify length\n\n" + verify_table(runs),
        f"### Confidence head\n\nExpected calibration error {error:.4f}.\n\n" + calibration,
        f"### Temperature 1\n\n{same} of {total} sampled chat answers equal the known one. The first:\n\n{texts}",
        "### Parts broken on purpose (exact answers, tokens a step)\n\n" + broken,
        "Demands missed: " + ("; ".join(missed) if missed else "none") + ".",
    ]
    return "\n\n".join(parts), missed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ckpt", default="toy")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with Checkpoint.open(resolve(arguments.ckpt, cache_dir=read_environment().cache_dir)) as checkpoint:
        markdown, missed = report(checkpoint, arguments.quick)
    page = arguments.readme.read_text(encoding="utf-8") if arguments.readme.exists() else f"{BEGIN}\n{END}\n"
    head, _, rest = page.partition(BEGIN)
    arguments.readme.write_text(f"{head}{BEGIN}\n\n{markdown}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(markdown)
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
