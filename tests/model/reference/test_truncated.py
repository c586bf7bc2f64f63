"""Truncated prefill: chunks do not matter, short prompts are exact, resumed ones go on over the windows they find."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from dsuf.errors import NotSupported, UsageError
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.model import ReferenceModel
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import TINY
from tests.model.reference.forwards import assert_goes_on_alike, assert_same_bits, one_row, prefilled


@pytest.fixture(scope="module", params=["tiny-exact32", "tiny-qdq64", "other-exact32", "other-qdq64"])
def model(request, model_of):
    return model_of(*request.param.split("-"))


def ids_of(model, seed, count):
    return [int(i) for i in np.random.default_rng(seed).integers(0, model.spec.vocab_size, count)]


def truncated(model, caches, ids, cuts=()):
    """Prefill in truncated mode, cut at the given places; Prefilled of the end."""
    start = 0
    for end in (*cuts, len(ids)):
        found = model.prefill(caches, ids[start:end], final=end == len(ids), mode="truncated")
        start = end
    return found


@pytest.mark.parametrize("cuts", [(1,), (30,), (45, 46, 47), tuple(range(1, 50)), (7, 20, 49)])
def test_chunks_do_not_matter(model, cuts):
    ids = ids_of(model, 1, 50)
    whole, pieces = model.new_caches(), model.new_caches()
    expected = truncated(model, whole, ids)
    assert_same_bits(truncated(model, pieces, ids, cuts).logits, expected.logits, "logits")
    assert pieces.decoder_start == 50 - model.spec.sliding_window
    assert_goes_on_alike(model, pieces, whole, ids_of(model, 2, 6))


def test_prompts_longer_than_a_pass(model, monkeypatch):
    ids = ids_of(model, 3, 70)
    whole = model.new_caches()
    expected = truncated(model, whole, ids)
    monkeypatch.setattr(model, "piece_rows", 5)
    small = model.new_caches()
    assert_same_bits(truncated(model, small, ids).logits, expected.logits, "logits")
    monkeypatch.undo()
    assert_goes_on_alike(model, small, whole, ids_of(model, 4, 3))


def test_a_prompt_within_the_window_is_exact(model):
    for length in (1, model.spec.sliding_window - 1, model.spec.sliding_window):
        ids = ids_of(model, length, length)
        exact, short = prefilled(model, ids), model.new_caches()
        truncated(model, short, ids)
        assert short.decoder_start == 0
        assert_goes_on_alike(model, short, exact, ids_of(model, 5, 4))


def test_a_longer_prompt_is_an_approximation(model):
    ids = ids_of(model, 6, 40)
    exact = model.prefill(model.new_caches(), ids, final=True).logits
    near = truncated(model, model.new_caches(), ids).logits
    assert not np.array_equal(exact, near)


@pytest.mark.parametrize("beyond", [1, 5, 8])
def test_a_resumed_prompt_close_to_its_end_goes_on_over_the_windows_it_finds(model, beyond):
    ids = ids_of(model, 7, 40 + beyond)
    exact, resumed = prefilled(model, ids), prefilled(model, ids[:40])
    truncated(model, resumed, ids[40:], cuts=(beyond // 2,) if beyond > 1 else ())
    assert_goes_on_alike(model, resumed, exact, ids_of(model, 8, 4))


def test_a_resumed_prompt_far_from_its_end_drops_the_windows_it_finds(model):
    ids = ids_of(model, 9, 60)
    cold, resumed = model.new_caches(), prefilled(model, ids[:40])
    truncated(model, cold, ids)
    truncated(model, resumed, ids[40:], cuts=(11,))
    assert_goes_on_alike(model, resumed, cold, ids_of(model, 10, 4))


def test_a_truncated_sequence_can_take_another_prompt(model):
    ids = ids_of(model, 11, 90)
    caches = model.new_caches()
    truncated(model, caches, ids[:40], cuts=(13,))
    one_row(model, caches, 5)
    again = copy.deepcopy(caches)
    first = truncated(model, caches, ids[40:], cuts=(3, 44))
    assert_same_bits(truncated(model, again, ids[40:]).logits, first.logits, "logits")
    assert_goes_on_alike(model, caches, again, ids_of(model, 12, 3))


def test_an_unfinished_prompt_refuses_rows_rewinds_and_the_other_mode(model):
    caches = model.new_caches()
    model.prefill(caches, ids_of(model, 13, 20), final=False, mode="truncated")
    with pytest.raises(UsageError, match="final=True"):
        one_row(model, caches, 1)
    with pytest.raises(UsageError, match="inside its prefill"):
        model.rewind(caches, 19)
    with pytest.raises(UsageError, match="truncated mode"):
        model.prefill(caches, [1], final=True, mode="exact")


def test_a_kv_source_after_the_candidate_source_is_refused(tmp_path):
    config = copy.deepcopy(TINY)
    config["text_config"].update(kv_source_layer_ids=[2, 4, 6, 10])
    write_checkpoint(config, tmp_path / "late", sparse=True)
    model = ReferenceModel.load(Checkpoint.open(tmp_path / "late"), "exact32")
    with pytest.raises(NotSupported, match="exact prefill"):
        model.prefill(model.new_caches(), [1, 2], final=True, mode="truncated")
