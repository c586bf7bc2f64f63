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
from recipes.toy import dataset

pytestmark = pytest.mark.system  # needs the extra `train`: PyTorch

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/tiny.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    write_checkpoint(load_config("tiny"), folder)
    return Checkpoint.open(folder)


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
def test_pytorch_model_equals_the_goldens(tiny, numerics, tolerance):
    import torch

    from recipes.toy.drafter import Anchors

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


def test_a_short_training_exports_the_model_that_it_trained(tmp_path):
    import torch

    from recipes.toy.export import load_masters
    from recipes.toy.model import Backbone

    few = {"needles": 300, "harness": 20, "strangers": 20, "dressed": 20}
    dataset.write(tmp_path / "data", few, 1)
    masters, out = tmp_path / "masters", tmp_path / "toy"
    train = ["train", tmp_path / "data/dataset.npz", masters, "--small", "--workers", "1"]
    for command in ([*train, "--seconds", "10", "--draft-seconds", "3"], ["export", masters, tmp_path / "data", out]):
        module, *arguments = map(str, command)
        subprocess.run([sys.executable, "-m", f"recipes.toy.{module}", *arguments], cwd=ROOT, check=True)
    checkpoint = Checkpoint.open(out)
    backbone = Backbone(checkpoint.spec, checkpoint.class_map())
    load_masters(backbone, masters, "target")
    backbone.to(torch.float64).eval()
    example = next(e for e in dataset.load(dataset.Text((out / "tokenizer.json").read_text())) if e.group == "needle")
    start = example.prompt_len - checkpoint.spec.sliding_window
    expected = run(backbone, example.ids, start)[0][example.prompt_len - 1 : -1]
    model = ReferenceModel.load(checkpoint, "qdq64")
    caches = model.new_caches()
    first = model.prefill(caches, example.ids[: example.prompt_len], final=True, mode="truncated").logits
    rest = model.forward([Block(caches, example.ids[example.prompt_len : -1])])[0]
    assert np.abs(np.concatenate([first[None], rest]) - expected.numpy()).max() < 1e-6
