"""Engram hashing against the constants and rows recorded for the real and the tiny checkpoint."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from dsuf.layout import BLOCKED
from dsuf.ops import engram
from dsuf.spec import Spec

GOLDEN = Path(__file__).parents[1] / "golden"
REAL_GOLDEN = json.loads((GOLDEN / "engram.v41-flash.json").read_text())
TINY_GOLDEN = json.loads((GOLDEN / "tiny.json").read_text())


def spec_of(name: str) -> Spec:
    return Spec.from_config(json.loads(resources.files("dsuf").joinpath(f"configs/{name}.json").read_text()))


@pytest.fixture(scope="module")
def real():
    spec = spec_of("v41-flash")
    return spec, dict(zip(spec.engram_layer_ids, engram.hashes(spec), strict=True))


def test_multipliers_and_primes_of_the_real_config(real):
    spec, hashes = real
    for layer, constants in hashes.items():
        assert constants.multipliers.tolist() == REAL_GOLDEN["multipliers"][str(layer)]
        assert constants.primes.tolist() == REAL_GOLDEN["primes"][str(layer)]
    assert tuple(int(h.primes.sum()) for h in hashes.values()) == spec.engram_num_embeddings


@pytest.mark.parametrize("example", ["example_text", "example_image_barrier"])
def test_table_rows_of_the_real_config(real, example):
    spec, hashes = real
    golden = REAL_GOLDEN[example]
    is_text = golden.get("is_text", [True] * len(golden["ids"]))
    classes = [c if text else BLOCKED for c, text in zip(golden["compressed"], is_text, strict=True)]
    history = np.array([BLOCKED] * (spec.engram_max_ngram_size - 1) + classes)
    t = engram.ngram_classes(history, spec.engram_max_ngram_size, REAL_GOLDEN["pad_token_compressed"])
    for layer, rows in golden["rows"].items():
        assert engram.table_rows(t, hashes[int(layer)]).tolist() == rows


def test_table_rows_of_the_tiny_prompt():
    spec = spec_of("tiny")
    classes = np.array([BLOCKED] * 3 + [i % 700 for i in TINY_GOLDEN["prompt"][:4]])
    t = engram.ngram_classes(classes, 4, spec.engram_pad_token_id % 700)
    for layer, constants in zip(spec.engram_layer_ids, engram.hashes(spec), strict=True):
        assert engram.table_rows(t, constants).tolist() == TINY_GOLDEN["engram_rows_first4"][str(layer)]


def test_a_blocked_token_hides_everything_before_it():
    t = engram.ngram_classes(np.array([5, 6, 7, BLOCKED, 8, 9]), 4, pad_class=2)
    assert t.tolist() == [[2, 2, 2, 2], [8, 2, 2, 2], [9, 8, 2, 2]]


def test_the_gate_by_its_formula():
    rng = np.random.default_rng(1)
    x, keys, weight = rng.normal(size=(3, 4, 16)), rng.normal(size=(3, 4, 16)), rng.normal(size=(4, 16))
    gate = engram.gate(x, keys, weight, 1e-20)
    dot = (x * weight * keys).sum(-1) / np.sqrt((x**2).mean(-1)) / np.sqrt((keys**2).mean(-1)) / 4
    expected = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6))))
    np.testing.assert_allclose(gate[..., 0], expected, rtol=1e-12)
