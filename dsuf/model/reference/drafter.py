"""DSpark: drafts a block of tokens in one pass of three stages, then one after the other through the Markov head.

    M = rms(main_proj taps; main_norm);  each stage's window row of a kept position is Q8(rope(rms(wkv M; kv_norm)))
    block [y, noise, ...] at the next positions; every query sees the window and the whole block
    e_i = markov.embed[t_i],  l_i = head rms(x_i; norm) + markov.head e_i,  c_i = proj . [x_i ; e_i]
    t_0 = y, draft t_{i+1} is chosen from l_i

Source: reference model.md 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsuf.model.reference.attention import output, quantised, queries, window_latent
from dsuf.model.reference.batch import Phases, bias_of
from dsuf.model.reference.block import Stream, block
from dsuf.model.reference.caches import Caches
from dsuf.model.reference.weights import BlockWeights, ModelWeights
from dsuf.ops.attend import attend
from dsuf.ops.mixes import fold
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import Numerics
from dsuf.ops.product import product, row_product
from dsuf.ops.rope import PhaseTable
from dsuf.spec import Spec

Choose = Callable[[np.ndarray, int], int]


@dataclass(frozen=True)
class DraftRequest:
    """Draft after `token`, which stands at position caches.length and has not been run.

    `choose(logits [V], slot)` picks each draft; argmax if None.
    """

    caches: Caches
    token: int
    choose: Choose | None = None


@dataclass(frozen=True)
class Draft:
    """tokens: block_size drafts; confidence_logits [block_size]; logits [block_size, V], Markov-corrected."""

    tokens: list[int]
    confidence_logits: np.ndarray
    logits: np.ndarray


class Drafter:
    """The drafter of one model; embedding and head are the backbone's."""

    def __init__(self, weights: ModelWeights, spec: Spec, numerics: Numerics, rope: PhaseTable) -> None:
        self.weights, self.spec, self.numerics, self.rope = weights, spec, numerics, rope

    def write_windows(self, caches: Caches, start: int, taps: np.ndarray) -> None:
        """Window rows of all stages for positions start, start+1, ... from their taps [rows, taps * D]."""
        spec, numerics = self.spec, self.numerics
        phases = Phases.of(self.rope, np.arange(start, start + taps.shape[0]))
        m = numerics.round(product(quantised(taps, numerics), self.weights.main_proj_t))
        m = numerics.round(rms_norm(m, self.weights.main_norm, spec.rms_norm_eps))
        projected = product(quantised(m, numerics), self.weights.stages_wkv_t)
        projected = projected.reshape(taps.shape[0], -1, spec.head_dim)
        latents = window_latent(projected, self.weights.stages_kv_norm, phases, spec, numerics)
        windows = caches.windows.rows(start, start + taps.shape[0])
        windows[spec.num_hidden_layers :] = latents.swapaxes(0, 1)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One block for each request."""
        spec, size = self.spec, self.spec.dspark_block_size
        ids = np.full((len(requests), size), spec.dspark_noise_token_id, np.int64)
        ids[:, 0] = [request.token for request in requests]
        positions = np.concatenate([np.arange(r.caches.length, r.caches.length + size) for r in requests])
        phases = Phases.of(self.rope, positions)
        stream = Stream.of(self.numerics.round(self.weights.embed(ids.reshape(-1))), spec)
        bias = self._bias(requests)
        for number, stage in enumerate(self.weights.stages):
            stream = self._stage(number, stage, stream, phases, bias, requests)
        x = self.numerics.round(fold(stream.x, stream.pre))
        normed = self.numerics.round(rms_norm(x, self.weights.draft_norm, spec.rms_norm_eps))
        logits = product(normed, self.weights.head_t).reshape(len(requests), size, -1)
        return self._chain(requests, x.reshape(len(requests), size, -1), logits)

    def _bias(self, requests: Sequence[DraftRequest]) -> np.ndarray:
        """[requests, W + block]: which of the last W positions have a drafter row; the block is always seen."""
        spec = self.spec
        real = np.ones((len(requests), spec.sliding_window + spec.dspark_block_size), bool)
        for row, request in zip(real, requests, strict=True):
            slots = np.arange(request.caches.length - spec.sliding_window, request.caches.length)
            row[: spec.sliding_window] = slots >= max(0, request.caches.decoder_start)
        return bias_of(real, self.numerics.dtype)

    def _stage(
        self,
        number: int,
        stage: BlockWeights,
        stream: Stream,
        phases: Phases,
        bias: np.ndarray,
        requests: Sequence[DraftRequest],
    ) -> Stream:
        spec, numerics, size = self.spec, self.numerics, self.spec.dspark_block_size
        window, layer = spec.sliding_window, spec.num_hidden_layers + number

        def attend_rows(x: np.ndarray) -> np.ndarray:
            q, k, _ = queries(x, stage, phases, spec, numerics)
            keys = np.empty((len(requests), window + size, spec.head_dim), numerics.dtype)
            for row, request in zip(keys, requests, strict=True):
                end = request.caches.length
                row[:window] = request.caches.windows.rows(end - window, end)[layer]
            keys[:, window:] = k.reshape(len(requests), size, -1)
            o = attend(q, np.repeat(keys, size, axis=0), np.repeat(bias, size, axis=0), stage.attn_sink, numerics)
            return output(o, stage, phases, spec, numerics)

        return block(stream, stage, attend_rows, spec.dspark_num_experts_per_tok, spec, numerics)

    def _chain(self, requests: Sequence[DraftRequest], x: np.ndarray, logits: np.ndarray) -> list[Draft]:
        """The Markov head, slot by slot: x [requests, slots, D], logits [requests, slots, V] changed in place."""
        slots = logits.shape[1]
        tokens = np.empty((len(requests), slots + 1), np.int64)
        tokens[:, 0] = [request.token for request in requests]
        confidence = np.empty((len(requests), slots), np.float64)
        for slot in range(slots):
            e = self.weights.markov_embed(tokens[:, slot])
            logits[:, slot] += row_product(e, self.weights.markov_head_t)
            confidence[:, slot] = product(np.concatenate([x[:, slot], e], axis=1), self.weights.confidence_t)[:, 0]
            for number, request in enumerate(requests):
                row = logits[number, slot]
                tokens[number, slot + 1] = request.choose(row, slot) if request.choose else np.argmax(row)
        return [Draft([int(t) for t in tokens[i, 1:]], confidence[i], logits[i]) for i in range(len(requests))]
