"""What the model refuses, what it reads, and what its caches hold."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from dsuf.errors import CheckpointError, PromptError, UsageError
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.model import Block, DraftRequest, ReferenceModel
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config
from tests.model.reference.forwards import prefilled


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("micro") / "checkpoint"
    write_checkpoint(micro_config(), out)
    return out


def test_unknown_numerics_are_refused(folder):
    with pytest.raises(UsageError, match="exact32, qdq32, qdq64, bf16"):
        ReferenceModel.load(Checkpoint.open(folder), "fp8")


def test_a_class_map_is_needed_and_must_cover_the_vocabulary(folder):
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="9 tokens, expected 64"):
        ReferenceModel.load(checkpoint, "exact32", np.arange(9))
    checkpoint._class_map = None
    with pytest.raises(CheckpointError, match=r"engram_token_map\.json"):
        ReferenceModel.load(checkpoint, "exact32")


def test_tables_of_another_hash_are_refused(tmp_path):
    write_checkpoint(micro_config(engram_num_embeddings=[210]), tmp_path / "wrong", sparse=True)
    with pytest.raises(CheckpointError, match=r"\[210\] found, expected \[204\]"):
        ReferenceModel.load(Checkpoint.open(tmp_path / "wrong"), "exact32")


@pytest.mark.parametrize("token", [-1, 64])
def test_token_ids_outside_the_vocabulary_are_refused(model_of, token):
    model = model_of("micro", "exact32")
    caches = prefilled(model, [1, 2])
    for attempt in (
        lambda: model.prefill(caches, [3, token], final=True),
        lambda: model.forward([Block(caches, [token])]),
        lambda: model.draft([DraftRequest(caches, token)]),
    ):
        with pytest.raises(PromptError, match=f"token id {token} found, expected 0 to 63"):
            attempt()
    assert caches.length == 2


def test_calls_that_make_no_sense_are_refused(model_of):
    model = model_of("micro", "exact32")
    caches = prefilled(model, [1, 2])
    with pytest.raises(UsageError, match="expected at least one"):
        model.prefill(caches, [], final=True)
    with pytest.raises(UsageError, match="exact or truncated"):
        model.prefill(caches, [1], final=True, mode="fast")
    with pytest.raises(UsageError, match="use exact"):
        model.prefill(caches, [1], final=True, mode="truncated", every_logit=True)
    with pytest.raises(UsageError, match="commit of 1 rows, expected 1 to 0"):
        model.commit(caches, 1)
    model.forward([Block(caches, [1, 2, 3])])
    with pytest.raises(UsageError, match="commit of 4 rows, expected 1 to 3"):
        model.commit(caches, 4)


def test_only_experts_that_were_chosen_are_dequantised(folder):
    model = ReferenceModel.load(Checkpoint.open(folder), "exact32")
    prefilled(model, [1])
    for layer in model.weights.layers:
        assert len(layer._w13_t) == 2  # the chosen one and the shared one


def test_memory_of_caches_grows_with_the_sequence(model_of):
    model = model_of("micro", "qdq64")
    caches = model.new_caches()
    empty = caches.nbytes
    model.prefill(caches, [i % 60 for i in range(600)], final=True)
    assert caches.nbytes > empty + 4 * caches.pages.layout.page_bytes


@pytest.mark.parametrize(("engram", "taps"), [([], [2]), ([0, 2], [0, 1, 2])])
def test_models_without_engram_or_with_many_taps(tmp_path, engram, taps):
    config = micro_config(
        engram_layer_ids=engram, engram_num_embeddings=[204, 358][: len(engram)], dspark_target_layer_ids=taps
    )
    write_checkpoint(copy.deepcopy(config), tmp_path / "variant")
    model = ReferenceModel.load(Checkpoint.open(tmp_path / "variant"), "qdq64")
    ids = [i * 7 % 60 for i in range(40)]
    for mode in ("exact", "truncated"):
        whole, pieces = model.new_caches(), model.new_caches()
        expected = model.prefill(whole, ids, final=True, mode=mode).logits
        model.prefill(pieces, ids[:13], final=False, mode=mode)
        np.testing.assert_array_equal(model.prefill(pieces, ids[13:], final=True, mode=mode).logits, expected)
        one, other = model.draft([DraftRequest(whole, 1), DraftRequest(pieces, 1)])
        np.testing.assert_array_equal(one.logits, other.logits)


def test_gates_that_saturate_neither_warn_nor_turn_into_nan(folder, recwarn):
    model = ReferenceModel.load(Checkpoint.open(folder), "exact32")
    for layer in model.weights.layers:
        layer.ffn_norm[:] *= 1e4  # expert inputs of thousands: e^-x overflows where a gate is closed
    logits = model.prefill(model.new_caches(), list(range(30)), final=True).logits
    assert np.isfinite(logits).all() and not recwarn.list
