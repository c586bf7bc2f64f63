"""Run the reference model over exchanges whose answers are known, and break it on purpose.

An answer is what greedy decoding gives if and only if each of its tokens is the argmax after the true tokens before it,
so exchanges are run in blocks of true tokens. In qdq64 a row has the same bits in any block, so that drafts, acceptance
and text are those of the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np

from dsuf.model.reference.batch import bias_of
from dsuf.model.reference.block import Layers, Stream
from dsuf.model.reference.drafter import Drafter
from dsuf.model.reference.model import Block, DraftRequest, ReferenceModel
from dsuf.ops.sample import log_probabilities
from recipes.toy.dataset import Example

DRAFT_CHUNK = 24  # rows that can be rewound, so that every row's drafter window is still there


@dataclass
class Measured:
    """One example. Row i stands for answer token i: margin and loss of predicting it, drafts made after it.

    margins, losses [answer]; drafts int [answer - 1, 5] and confidence [answer - 1, 5] (logits), made when the answer
    token of that row has been emitted and not yet run; ahead int [answer - 1, 5] the true tokens, -1 past the end.
    """

    example: Example
    margins: np.ndarray
    losses: np.ndarray
    drafts: np.ndarray
    confidence: np.ndarray
    ahead: np.ndarray

    @property
    def exact(self) -> bool:
        """Greedy decoding gives the answer."""
        return bool(self.margins.min() > 0)

    def accepted(self) -> np.ndarray:
        """Drafts that would be accepted after each row, int [answer - 1]."""
        return np.cumprod(self.drafts == self.ahead, axis=1).sum(1)

    def steps(self, length: Callable[[np.ndarray], int]) -> Iterator[tuple[int, int]]:
        """(drafts verified, tokens emitted) of each step when `length(confidence)` drafts are verified."""
        accepted, row, total = self.accepted(), 0, len(self.margins)
        while row < total - 1:
            verified = length(self.confidence[row])
            emitted = min(int(min(accepted[row], verified)) + 1, total - 1 - row)
            yield verified, emitted
            row += emitted


def measure(
    model: ReferenceModel, example: Example, *, mode: str = "truncated", drafts: bool = True, chunk: int = DRAFT_CHUNK
) -> Measured:
    """Prefill the prompt, then run the answer in blocks of `chunk` true tokens."""
    ids, prompt, size = example.ids, example.prompt_len, model.spec.dspark_block_size
    caches = model.new_caches()
    logits = [model.prefill(caches, ids[:prompt], final=True, mode=mode).logits[None]]
    found_drafts, found_confidence = [], []
    for at in range(prompt, len(ids) - 1, chunk):
        block = ids[at : min(at + chunk, len(ids) - 1)]
        logits.append(model.forward([Block(caches, block)])[0])
        model.commit(caches, len(block))
        if drafts:
            made = model.draft([DraftRequest(_as_of(caches, at + i), token) for i, token in enumerate(block)])
            found_drafts += [draft.tokens for draft in made]
            found_confidence += [draft.confidence_logits for draft in made]
    every = np.concatenate(logits)
    answer = np.array(ids[prompt:])
    padded = np.concatenate([answer, np.full(size, -1)])
    ahead = np.stack([padded[i : i + size] for i in range(1, len(answer))])
    return Measured(
        example,
        _margins(every, answer),
        -np.take_along_axis(log_probabilities(every), answer[:, None], 1)[:, 0],
        np.array(found_drafts, int).reshape(-1, size),
        np.array(found_confidence).reshape(-1, size),
        ahead,
    )


def _as_of(caches: object, length: int) -> object:
    """The caches as they were at an earlier length, for drafting: the rows behind it are simply not looked at."""
    earlier = copy.copy(caches)
    earlier.length = length
    return earlier


def _margins(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Logit of the target less the largest other logit: [n, V], [n] -> [n]."""
    rows = np.arange(len(targets))
    others = logits.copy()
    others[rows, targets] = -np.inf
    return logits[rows, targets] - others.max(1)


@contextmanager
def reversed_sums() -> Iterator[None]:
    """Every matrix product adds its K terms in the opposite order."""

    def tile_product(tiles: np.ndarray, weight_t: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        flipped = np.ascontiguousarray(tiles[..., ::-1]), np.ascontiguousarray(weight_t[::-1])
        return np.matmul(*flipped, out=out)

    with (
        mock.patch("dsuf.ops.product.tile_product", tile_product),
        mock.patch("dsuf.ops.expert.tile_product", tile_product),
    ):
        yield


def ablations(model: ReferenceModel) -> dict[str, Callable[[], ExitStack]]:
    """Name -> context in which the part is broken."""
    table: dict[str, Callable[[], ExitStack]] = {
        "compressed KV zeroed": lambda: _zero_entries(model),
        "selection random": _random_selection,
        "Engram gate 0": lambda: _no_engram(model),
        "drafter window emptied": _no_drafter_window,
    }
    for layer in range(model.spec.num_hidden_layers):
        table[f"experts of layer {layer} shuffled"] = lambda layer=layer: _shuffled_experts(model, layer)
    for stream in range(model.spec.hc_mult):
        table[f"stream {stream} dropped"] = lambda stream=stream: _dropped_stream(stream)
    return table


def _zero_entries(model: ReferenceModel) -> ExitStack:
    stack = ExitStack()
    for weights in model.weights.layers:
        if weights.role.is_kv_source:
            stack.enter_context(mock.patch.object(weights, "compressor_norm", np.zeros_like(weights.compressor_norm)))
    return stack


def _random_selection() -> ExitStack:
    rng = np.random.default_rng(0)

    def scores(q: np.ndarray, head_weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return rng.random((q.shape[0], keys.shape[0]))

    stack = ExitStack()
    stack.enter_context(mock.patch("dsuf.model.reference.sparse.index_scores", scores))
    return stack


def _no_engram(model: ReferenceModel) -> ExitStack:
    """The value is zeroed, which is what a gate of 0 makes of it."""
    stack, values = ExitStack(), model.spec.hc_mult * model.spec.hidden_size
    for weights in model.weights.layers:
        if weights.role.engram is not None:
            matrix = weights.engram_wkv_t.copy()
            matrix[:, values:] = 0
            stack.enter_context(mock.patch.object(weights, "engram_wkv_t", matrix))
    return stack


def _shuffled_experts(model: ReferenceModel, layer: int) -> ExitStack:
    """Expert e computes what expert e + 1 should."""
    weights, stack = model.weights.layers[layer], ExitStack()
    count = weights.routed_experts
    for name in ("w13_t", "w2_t"):
        read = getattr(weights, name)
        moved = lambda e, read=read: read((e + 1) % count if e < count else e)  # noqa: E731
        stack.enter_context(mock.patch.object(weights, name, moved))
    return stack


def _dropped_stream(number: int) -> ExitStack:
    """One residual stream is zero at the entry of every backbone layer."""
    enter, stack = Layers.enter, ExitStack()

    def without(self: Layers, layer: int, stream: Stream) -> Stream:
        x = stream.x.copy()
        x[:, number] = 0
        return enter(self, layer, Stream(x, stream.pre))

    stack.enter_context(mock.patch.object(Layers, "enter", without))
    return stack


def _no_drafter_window() -> ExitStack:
    def bias(self: Drafter, requests: list[DraftRequest]) -> np.ndarray:
        real = np.zeros((len(requests), self.spec.sliding_window + self.spec.dspark_block_size), bool)
        real[:, self.spec.sliding_window :] = True
        return bias_of(real, self.numerics.dtype)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Drafter, "_bias", bias))
    return stack
