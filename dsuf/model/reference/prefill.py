"""The two prefill modes, piece by piece so that memory does not grow with the prompt.

exact      every layer on every token
truncated  layers before the candidate source on every token, and that layer's compressed entries; the rest of the
           decoder only on the last sliding_window tokens of the prompt. Until the prompt ends, the decoder's input of
           the last window is carried along, so that the chunks in which a prompt comes do not matter.

With N tokens after the prompt, P before it and window W, the truncated tail starts at max(P, N - W). At P >= N - W it
goes on over the decoder windows that are there; otherwise these are dropped, and queries see decoder rows from N - W.
Source: reference model.md 4.2; DESIGN.md 4, prefill modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsuf.errors import NotSupported, UsageError
from dsuf.model.reference.block import Layers, Stream
from dsuf.model.reference.caches import REWIND_TOKENS, Caches, RecentRows

if TYPE_CHECKING:
    from dsuf.model.reference.model import ReferenceModel


@dataclass(frozen=True)
class Prefilled:
    """logits [V] of the last position; argmax int [rows] of every position of the call, if asked for."""

    logits: np.ndarray
    argmax: np.ndarray | None = None


def prefill_exact(
    model: ReferenceModel, caches: Caches, ids: np.ndarray, *, final: bool, every_logit: bool
) -> Prefilled | None:
    """All layers on all of ids [rows]."""
    if caches.tail_from is not None:
        raise UsageError("this prompt's prefill began in truncated mode; finish it with final=True in that mode.")
    argmax, logits = [], None
    for at in range(0, ids.size, model.piece_rows):
        piece = ids[at : at + model.piece_rows]
        stream, layers = model.enter([(caches, piece)])
        for layer in range(model.spec.num_hidden_layers):
            stream = layers.run(layer, layers.enter(layer, stream))
        _write_drafter_rows(model, caches, layers, caches.length)
        caches.keep(piece.size)
        if every_logit:
            every = model.logits(stream)
            argmax.append(np.argmax(every, axis=-1))
            logits = every[-1]
    if not every_logit and final:
        logits = model.logits(Stream(stream.x[-1:], stream.pre[-1:]))[0]
    return Prefilled(logits, np.concatenate(argmax) if every_logit else None) if logits is not None else None


def prefill_truncated(model: ReferenceModel, caches: Caches, ids: np.ndarray, *, final: bool) -> Prefilled | None:
    """Encoder and entries for all of ids [rows]; the decoder's tail if this is the prompt's end."""
    spec, first = model.spec, model.spec.decoder_start_layer
    later = [role.index for role in spec.layers[first + 1 :] if role.is_kv_source]
    if later:
        raise NotSupported(
            f"truncated prefill needs the candidate source (layer {first}) to be the last kv source, "
            f"found {later} after it; use exact prefill."
        )
    if caches.tail_from is None:
        caches.tail_from, caches.tail = caches.length, _new_tail(model, caches)
    for at in range(0, ids.size, model.piece_rows):
        _encode_piece(model, caches, ids[at : at + model.piece_rows])
    return _run_tail(model, caches) if final else None


def _tail_widths(model: ReferenceModel) -> list[int]:
    """Parts of a carried row: streams, pre, taps of encoder layers."""
    spec = model.spec
    taps = sum(layer < spec.decoder_start_layer for layer in spec.dspark_target_layer_ids)
    return [spec.hc_mult * spec.hidden_size, spec.hc_mult, taps * spec.hidden_size]


def _new_tail(model: ReferenceModel, caches: Caches) -> RecentRows:
    tail = RecentRows(1, (sum(_tail_widths(model)),), model.spec.sliding_window, caches.room, model.numerics.dtype)
    tail.first = caches.length - tail.keep
    return tail


def _encode_piece(model: ReferenceModel, caches: Caches, ids: np.ndarray) -> None:
    """Encoder layers on ids [rows], the candidate source's entries, and the decoder's input into the carried tail."""
    first = model.spec.decoder_start_layer
    stream, layers = model.enter([(caches, ids)])
    for layer in range(first):
        stream = layers.run(layer, layers.enter(layer, stream))
    taps = layers.taps.copy()
    # The carried row is the stream before the decoder's first layer is entered: Engram and tap there run in the tail.
    caches.tail.make_room(caches.length, ids.size)
    row = np.concatenate([stream.x.reshape(ids.size, -1), stream.pre, *taps], axis=1)
    caches.tail.rows(caches.length, caches.length + ids.size)[0] = row
    layers.compress(first, layers.enter(first, stream))
    caches.keep(ids.size)


def _run_tail(model: ReferenceModel, caches: Caches) -> Prefilled:
    """The decoder on the last window of the prompt."""
    spec, end = model.spec, caches.length
    start = max(caches.tail_from, end - spec.sliding_window)
    if start > caches.tail_from:
        caches.decoder_start = start
    x_width, pre_width, _ = _tail_widths(model)
    for at in range(start, end, model.piece_rows):
        stop = min(at + model.piece_rows, end)
        rows = caches.tail.rows(at, stop)[0]
        x = rows[:, :x_width].reshape(stop - at, spec.hc_mult, spec.hidden_size).copy()
        stream = Stream(x, rows[:, x_width : x_width + pre_width].copy())
        layers = model.layers_of([(caches, at, stop - at)])
        layers.taps = [rows[:, x_width + pre_width :]]
        for layer in range(spec.decoder_start_layer, spec.num_hidden_layers):
            compress = layer != spec.decoder_start_layer  # its entries are there; no later layer is a kv source
            stream = layers.run(layer, layers.enter(layer, stream), compress=compress)
        _write_drafter_rows(model, caches, layers, at)
    caches.tail_from = caches.tail = None
    return Prefilled(model.logits(Stream(stream.x[-1:], stream.pre[-1:]))[0])


def _write_drafter_rows(model: ReferenceModel, caches: Caches, layers: Layers, start: int) -> None:
    """Drafter rows of the piece that starts at `start`; only those that a later query can see."""
    taps = model.joined_taps(layers)
    seen = min(taps.shape[0], model.spec.sliding_window + REWIND_TOKENS)
    model.drafter.write_windows(caches, start + taps.shape[0] - seen, taps[-seen:])
