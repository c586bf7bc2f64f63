"""The toy's PyTorch model computes what the goldens say, trains on a CPU, and exports what it trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.model import Block, ReferenceModel
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from recipes.toy import dataset

pytestmark = pytest.mark.system  # needs the extra `train`: PyTorch

ROOT = Path(__file__).parents[2]
CONFIG = json.loads((ROOT / "recipes/toy/config.json").read_text())
GOLDEN = json.loads((ROOT / "tests/golden/tiny.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    write_checkpoint(load_config("tiny"), folder)
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    dataset.write(folder, {"needles": 300, "harness": 20, "listings": 20, "strangers": 20, "dressed": 20}, 1)
    return folder


def models(checkpoint, activations, dtype):
    from recipes.toy.drafter import Drafter
    from recipes.toy.export import load_checkpoint
    from recipes.toy.layers import Mode
    from recipes.toy.model import Backbone

    mode = Mode(weights=True, activations=activations)
    found = Backbone(checkpoint.spec, checkpoint.class_map(), mode), Drafter(checkpoint.spec, mode)
    for model in found:
        load_checkpoint(model, checkpoint)
        model.to(dtype).eval()
    return found


def run(backbone, ids, start=0):
    """Logits and taps of every position; decoder windows are real from `start` on."""
    import torch

    from recipes.toy.attention import Group
    from recipes.toy.model import Batch

    length = -(-len(ids) // backbone.spec.sliding_window) * backbone.spec.sliding_window
    padded = torch.tensor([*ids, *[2] * (length - len(ids))])
    first = torch.zeros(length, dtype=torch.long)
    first[start:] = start
    with torch.no_grad():
        x, taps, _ = backbone(Batch((Group(0, 1, length),), padded, torch.arange(length), first))
        return backbone.logits(x)[: len(ids)], taps


@pytest.mark.parametrize(("numerics", "tolerance"), [("exact32", 1e-3), ("qdq64", 1e-6)])
def test_pytorch_model_equals_the_goldens(tiny, numerics, tolerance, monkeypatch):
    import torch

    from recipes.toy import attention
    from recipes.toy.drafter import Anchors

    monkeypatch.setattr(attention, "SCORED_ROWS", 16)  # in parts, as long sequences are
    backbone, drafter = models(tiny, numerics != "exact32", torch.float64 if numerics == "qdq64" else torch.float32)
    golden, prompt = GOLDEN[numerics], GOLDEN["prompt"]
    logits, _ = run(backbone, prompt)
    assert logits.argmax(-1).tolist() == golden["argmax_prompt"]
    assert np.abs(logits[-1].numpy() - golden["logits_last_prompt"]).max() < tolerance
    tail, _ = run(backbone, prompt, len(prompt) - tiny.spec.sliding_window)
    assert np.abs(tail[-1].numpy() - golden["logits_last_prompt_decoder_tail"]).max() < tolerance
    ids = prompt + golden["greedy"]
    logits, taps = run(backbone, ids)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == golden["greedy"]
    rows = torch.arange(len(prompt), len(prompt) + len(golden["drafts"]))
    zero, tokens = torch.zeros_like(rows), torch.tensor(ids)[rows + 1].unsqueeze(1).expand(-1, 6)
    drafts, confidence = drafter.draft(backbone, taps, torch.arange(len(taps)), Anchors(rows, zero, zero, tokens))
    assert drafts.tolist() == [draft["tokens"] for draft in golden["drafts"]]
    assert np.abs(confidence.numpy() - [draft["confidence"] for draft in golden["drafts"]]).max() < 1e-4


@pytest.mark.parametrize("tokens", [0, 40, 2000])
def test_text_before_a_task_is_cut_or_drawn_out(data, tokens):
    from recipes.toy.batches import SMALL, Corpus, Sampler

    corpus = Corpus(data / "dataset.npz")
    sampler = Sampler(corpus, Spec.from_config(CONFIG), SMALL, 64, 16, 1)
    asked = next(s for s in corpus.fixed if s.name == "listing.call")
    other = sampler.with_idle_text(asked, tokens)
    own = min(tokens, asked.task - 1)
    assert len(other.ids) == asked.least + tokens and other.ids[0] == asked.ids[0]
    assert other.ids[other.task - own :].tolist() == asked.ids[asked.task - own :].tolist()
    assert other.ids[other.prompt :].tolist() == asked.ids[asked.prompt :].tolist()
    longest = max(len(sampler._draw("tools", 576).ids) for _ in range(100))
    assert 300 < longest <= 576


def test_a_short_training_exports_the_model_that_it_trained(data, tmp_path):
    import torch

    from recipes.toy.drafter import Drafter
    from recipes.toy.export import load_masters
    from recipes.toy.model import Backbone
    from recipes.toy.train import resume

    masters, out = tmp_path / "masters", tmp_path / "toy"
    train = ["train", data / "dataset.npz", masters, "--small", "--workers", "1"]
    for command in ([*train, "--seconds", "10", "--draft-seconds", "3"], ["export", masters, data, out]):
        module, *arguments = map(str, command)
        subprocess.run([sys.executable, "-m", f"recipes.toy.{module}", *arguments], cwd=ROOT, check=True)
    checkpoint = Checkpoint.open(out)
    backbone = Backbone(checkpoint.spec, checkpoint.class_map())
    load_masters(backbone, masters, "target")
    backbone.to(torch.float64).eval()
    example = next(e for e in dataset.load(dataset.Text((out / "tokenizer.json").read_text())) if e.group == "needle")
    start = example.prompt_len - checkpoint.spec.sliding_window
    expected = run(backbone, example.ids, start)[0][example.prompt_len - 1 : -1]
    again = Backbone(checkpoint.spec, checkpoint.class_map())
    resume(again, Drafter(checkpoint.spec), out)
    resumed = run(again.to(torch.float64).eval(), example.ids, start)[0][example.prompt_len - 1 : -1]
    assert np.abs(resumed.numpy() - expected.numpy()).max() < 1e-9
    model = ReferenceModel.load(checkpoint, "qdq64")
    caches = model.new_caches()
    first = model.prefill(caches, example.ids[: example.prompt_len], final=True, mode="truncated").logits
    rest = model.forward([Block(caches, example.ids[example.prompt_len : -1])])[0]
    assert np.abs(np.concatenate([first[None], rest]) - expected.numpy()).max() < 1e-6
