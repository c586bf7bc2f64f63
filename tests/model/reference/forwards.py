"""Helpers over the reference model: states compared array by array, rows run one at a time, streams layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np

from dsuf.model.reference.caches import Caches
from dsuf.model.reference.model import Block, DraftRequest, ReferenceModel


def layer_streams(model: ReferenceModel, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """X [rows, n, D] after each layer of one exact pass over `ids`."""
    stream, layers = model.enter([(model.new_caches(), np.array(ids))])
    for layer in range(model.spec.num_hidden_layers):
        stream = layers.run(layer, layers.enter(layer, stream))
        yield stream.x


def prefilled(model: ReferenceModel, ids: Sequence[int], mode: str = "exact", packed: bool | None = None) -> Caches:
    """Caches after a prompt."""
    caches = model.new_caches(packed)
    model.prefill(caches, ids, final=True, mode=mode)
    return caches


def one_row(model: ReferenceModel, caches: Caches, token: int) -> np.ndarray:
    """Run and keep one token; logits [V]."""
    (logits,) = model.forward([Block(caches, [token])])
    model.commit(caches, 1)
    return logits[0]


def stepped(model: ReferenceModel, caches: Caches, ids: Sequence[int]) -> np.ndarray:
    """Run and keep tokens one at a time; logits [rows, V]."""
    return np.stack([one_row(model, caches, token) for token in ids])


def twin(caches: Caches) -> Caches:
    """An independent copy."""
    return copy.deepcopy(caches)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Equal arrays; names the first element that is not."""
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    wrong = np.argwhere(found != expected)
    if wrong.size:
        at = tuple(wrong[0])
        raise AssertionError(f"{name}: {len(wrong)} differ, first {at}: {found[at]!r}, expected {expected[at]!r}")


def assert_same_state(found: Caches, expected: Caches) -> None:
    """Every live array of two sequences is the same, bit for bit."""
    one, other = found.live_state(), expected.live_state()
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert_same_bits(array, other[name], name)


def assert_goes_on_alike(model: ReferenceModel, found: Caches, expected: Caches, ids: Sequence[int]) -> None:
    """Same states, same logits over further tokens, and the same drafts after them."""
    assert_same_state(found, expected)
    assert_same_bits(stepped(model, found, ids), stepped(model, expected, ids), "logits")
    assert_same_state(found, expected)
    one, other = model.draft([DraftRequest(found, 3), DraftRequest(expected, 3)])
    assert_same_bits(one.logits, other.logits, "draft logits")
    assert one.tokens == other.tokens
