"""The reference model: prefill, forward, commit, draft and rewind over caches, composed of the ops.

caches = model.new_caches()
first = model.prefill(caches, prompt_ids, final=True)     # logits of the last prompt position
draft, = model.draft([DraftRequest(caches, y)])           # y = chosen token, not run yet
logits, = model.forward([Block(caches, [y, *draft.tokens])])
model.commit(caches, 1 + accepted)                        # keeps y and the accepted drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsuf.errors import CheckpointError, UsageError
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.batch import Batch, checked_ids
from dsuf.model.reference.blas import use_one_thread
from dsuf.model.reference.block import Layers, Stream
from dsuf.model.reference.caches import Caches
from dsuf.model.reference.drafter import Draft, Drafter, DraftRequest
from dsuf.model.reference.prefill import Prefilled, prefill_exact, prefill_truncated
from dsuf.model.reference.weights import ModelWeights
from dsuf.ops import engram as engram_op
from dsuf.ops.mixes import fold
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import NUMERICS, Numerics
from dsuf.ops.product import product
from dsuf.ops.rope import PhaseTable, frequencies
from dsuf.spec import Spec

_KEYS_AT_ONCE = 1 << 25  # attention key values held for one piece of a prompt
_LEAST_ROWS, _MOST_ROWS = 64, 256
_SATURATING = np.errstate(over="ignore")  # in 1 / (1 + e^-x) an infinite e^-x gives the right 0


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of one sequence: ids stand at positions caches.length, caches.length + 1, ..."""

    caches: Caches
    ids: Sequence[int]


class ReferenceModel:
    """The text model and its drafter in one numerics."""

    def __init__(self, spec: Spec, numerics: Numerics, weights: ModelWeights, class_map: np.ndarray) -> None:
        self.spec, self.numerics, self.weights = spec, numerics, weights
        self.class_map = class_map
        self.ropes = tuple(PhaseTable(frequencies(spec, kind), numerics.dtype) for kind in (False, True))
        self.hashes = engram_op.hashes(spec)
        self.drafter = Drafter(weights, spec, numerics, self.ropes[0])
        row_keys = (spec.sliding_window + spec.index_topk) * spec.head_dim
        self.piece_rows = max(_LEAST_ROWS, min(_MOST_ROWS, _KEYS_AT_ONCE // row_keys))  # rows of one pass

    @classmethod
    def load(cls, checkpoint: Checkpoint, numerics: str, class_map: np.ndarray | None = None) -> ReferenceModel:
        """numerics is a name of NUMERICS; class_map (Engram class of each token id) defaults to the checkpoint's."""
        if numerics not in NUMERICS:
            raise UsageError(f"numerics {numerics!r} found, expected one of {', '.join(NUMERICS)}.")
        spec = checkpoint.spec
        _check_tables(spec)
        classes = checkpoint.class_map() if class_map is None else class_map
        if classes is None and spec.engram_layer_ids:
            raise CheckpointError(
                "no Engram class map: the checkpoint has Engram layers, expected engram_token_map.json in its folder "
                "or a tokenizer to derive the map from. Put one of them beside the weights."
            )
        if classes is not None and len(classes) < spec.vocab_size:
            raise CheckpointError(
                f"Engram class map has {len(classes)} tokens, expected {spec.vocab_size}; "
                "use this checkpoint's tokenizer."
            )
        use_one_thread()
        ids = np.zeros(spec.vocab_size, np.int64) if classes is None else np.asarray(classes, np.int64)
        chosen = NUMERICS[numerics]
        return cls(spec, chosen, ModelWeights(checkpoint, chosen), ids)

    def new_caches(self, packed: bool | None = None) -> Caches:
        """Empty caches; packed pages by default in quantised numerics, never in exact32."""
        packed = self.numerics.quantise if packed is None else packed and self.numerics.quantise
        return Caches(self.spec, self.numerics, packed=packed, room=self.piece_rows)

    @_SATURATING
    def prefill(
        self, caches: Caches, ids: Sequence[int], *, final: bool, mode: str = "exact", every_logit: bool = False
    ) -> Prefilled | None:
        """Append `ids`, any number of them, several calls a prompt, `final` on the last; its result is Prefilled.

        exact: all layers on all tokens; with every_logit each call gives Prefilled with the argmax of its rows.
        truncated: decoder layers only on the last sliding_window tokens of the prompt, when `final` comes.
        """
        if mode not in ("exact", "truncated"):
            raise UsageError(f"prefill mode {mode!r} found, expected exact or truncated.")
        if every_logit and mode == "truncated":
            raise UsageError("truncated prefill has no logits before the last token; use exact for argmax everywhere.")
        if not len(ids):
            raise UsageError("prefill of no tokens; expected at least one.")
        array = checked_ids(ids, self.spec)
        caches.pending = 0
        if mode == "truncated":
            return prefill_truncated(self, caches, array, final=final)
        return prefill_exact(self, caches, array, final=final, every_logit=every_logit)

    @_SATURATING
    def forward(self, blocks: Sequence[Block]) -> list[np.ndarray]:
        """Run all layers on the rows of several sequences: logits [rows, V] for each.

        Rows stay pending until `commit`; a later forward of the same sequence forgets them.
        """
        if any(block.caches.tail_from is not None for block in blocks):
            raise UsageError("a prompt's prefill is not finished; call it with final=True first.")
        ids = [checked_ids(block.ids, self.spec) for block in blocks]
        stream, layers = self.enter([(block.caches, array) for block, array in zip(blocks, ids, strict=True)])
        for layer in range(self.spec.num_hidden_layers):
            stream = layers.run(layer, layers.enter(layer, stream))
        logits, taps = self.logits(stream), self.joined_taps(layers)
        for span in layers.batch.spans:
            span.caches.pending = span.count
            span.caches.pending_taps = taps[span.rows]
        return [logits[span.rows] for span in layers.batch.spans]

    def commit(self, caches: Caches, rows: int) -> None:
        """Keep the first `rows` pending rows, 1 to caches.pending, and forget the rest."""
        if not 1 <= rows <= caches.pending:
            raise UsageError(f"commit of {rows} rows, expected 1 to {caches.pending} pending ones.")
        self.drafter.write_windows(caches, caches.length, caches.pending_taps[:rows])
        caches.keep(rows)

    @_SATURATING
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """dspark_block_size drafts after each request's token; the caches stay as they are."""
        for request in requests:
            checked_ids([request.token], self.spec)
        return self.drafter.draft(requests)

    def rewind(self, caches: Caches, length: int) -> None:
        """Go back to `length` positions, at most 24 fewer than now."""
        caches.rewind(length)

    def enter(self, runs: Sequence[tuple[Caches, np.ndarray]]) -> tuple[Stream, Layers]:
        """Streams of new tokens behind each sequence's length, and the layers to walk them through."""
        for caches, ids in runs:
            if not 1 <= ids.size <= caches.room:
                raise UsageError(f"{ids.size} rows of one sequence at once, expected 1 to {caches.room}.")
            caches.make_room(ids.size)
            caches.history.rows(caches.length, caches.length + ids.size)[0] = self.class_map[ids]
        layers = self.layers_of([(caches, caches.length, ids.size) for caches, ids in runs])
        embedded = self.weights.embed(np.concatenate([ids for _, ids in runs]))
        return Stream.of(self.numerics.round(embedded), self.spec), layers

    def layers_of(self, runs: Sequence[tuple[Caches, int, int]]) -> Layers:
        """The layers over given (caches, first position, rows), whose class ids are already in the history."""
        batch = Batch.of(runs, self.ropes, self.spec)
        return Layers(self.weights.layers, self.spec, self.numerics, batch, self._engram_rows(batch))

    def _engram_rows(self, batch: Batch) -> list[np.ndarray]:
        """Table rows int [rows, columns] of each Engram layer."""
        if not self.hashes:
            return []
        ngram, pad = self.spec.engram_max_ngram_size, int(self.class_map[self.spec.engram_pad_token_id])
        classes = [s.caches.history.rows(s.start - ngram + 1, s.end)[0] for s in batch.spans]
        t = np.concatenate([engram_op.ngram_classes(ids, ngram, pad) for ids in classes])
        return [engram_op.table_rows(t, constants) for constants in self.hashes]

    def logits(self, stream: Stream) -> np.ndarray:
        """Streams after the last layer -> logits [rows, V]."""
        x = self.numerics.round(fold(stream.x, stream.pre))
        return product(self.numerics.round(rms_norm(x, self.weights.norm, self.spec.rms_norm_eps)), self.weights.head_t)

    def joined_taps(self, layers: Layers) -> np.ndarray:
        """The drafter's input [rows, taps * D]."""
        return np.concatenate(layers.taps, axis=1)


def _check_tables(spec: Spec) -> None:
    """Raises CheckpointError where the Engram tables have other sizes than the hash addresses."""
    needed = tuple(int(primes.sum()) for primes in engram_op.primes_of(spec))
    if needed != spec.engram_num_embeddings:
        raise CheckpointError(
            f"engram_num_embeddings {list(spec.engram_num_embeddings)} found, expected {list(needed)}, the sums of the "
            "bucket primes that follow from engram_vocab_size; the tables belong to another hash. Correct the config."
        )
