"""Prefill in chunks on the interpreter: layers against the reference from equal inputs; chunk lengths that agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsuf.engine.gpu.prefill_buffers import KIND, workspace_bytes
from dsuf.engine.gpu.prefill_pass import PrefillPass
from dsuf.engine.gpu.ranks import in_turns
from dsuf.engine.options import EngineOptions
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.block import Stream
from dsuf.model.reference.model import ReferenceModel
from tests.engine.gpu.small import few_score_blocks, machine_on, written
from tests.support.simt_device import SimtDevice

CONTEXT, SLOTS = 320, 2


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Streams in bf16 after a block, from equal inputs. Probabilities are rounded relative to another maximum, which
    moves some of the values that are quantised to 3 bits afterwards.
    """
    error, scale = np.abs(got - want), np.sqrt((want**2).mean(axis=-1, keepdims=True))
    assert np.sqrt((error**2).mean()) < 2.0**-7 * np.sqrt((want**2).mean())
    assert (error <= 2.0**-6 * np.abs(want) + 2.0**-5 * scale).all()


class Prefill:
    """A machine on the stand-in, a slot of it, and the pass over them."""

    def __init__(self, folder: Path, rows: int):
        self.device = SimtDevice()
        options = EngineOptions(folder, max_context=CONTEXT, max_sequences=SLOTS, cache_tokens=2 * CONTEXT)
        self.machine = machine_on(self.device, options)
        self.slot = self.machine.pages.open()
        self.machine.pages.reserve(self.slot, CONTEXT)
        before = self.device.held().get(KIND, 0)
        self.run = PrefillPass(self.device, self.machine.model, self.machine.slots, rows, CONTEXT)
        self.allocated = self.device.held()[KIND] - before

    def floats(self, address: int, *shape: int) -> np.ndarray:
        """bf16 values."""
        raw = self.device.download(address, 2 * int(np.prod(shape))).view(np.uint16)
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(shape)

    def state(self, length: int) -> dict[str, np.ndarray]:
        """Bytes of what a sequence of `length` rows leaves: pages, encoder windows, history, open pairs."""
        pages, spec, device = self.machine.pages, self.machine.spec, self.device
        found = {"history": device.download(pages.history, 4 * 64).reshape(64, 4)}
        for number, page in enumerate(pages.pages_of(self.slot)):
            for source in pages.layout.sources:
                rows = min(max(length - 128 * number, 0), 128) // source.ratio
                for name in ("codes", "scales", "key_codes", "key_scales"):
                    plane = getattr(source, name)
                    raw = device.download(pages.pool + page * pages.page_bytes + plane.offset, plane.rows * plane.width)
                    found[f"{name} {source.layer} {number}"] = raw.reshape(plane.rows, -1)[:rows]
        places = np.arange(max(0, length - spec.sliding_window), length)
        for layer in range(spec.decoder_start_layer):
            raw = device.download(pages.ring_of(layer), pages.ring * pages.row_bytes).reshape(pages.ring, -1)
            found[f"window {layer}"] = raw[places % pages.ring]
        if length % 2:
            for layer, at in pages.pairs.items():
                size = 8 * spec.head_dim
                found[f"pair {layer}"] = device.download(at + (length - 1) % 64 * size, size)
        return found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with few_score_blocks():
        yield written(tmp_path_factory.mktemp("small") / "ckpt")


def test_every_layer_agrees_with_the_reference_from_equal_inputs(small):
    ids = np.random.default_rng(2).integers(0, 250, 37)  # without ties of bf16 scores
    prefill = Prefill(small, 40)
    spec, n = prefill.machine.spec, len(ids)
    chunk, buffers = prefill.run._chunk(prefill.slot, 0, ids, 0), prefill.run.buffers
    reference = ReferenceModel.load(Checkpoint.open(small), "bf16")
    _, layers = reference.enter([(reference.new_caches(), ids)])
    chunk.enter()
    pre = Stream.of(np.zeros((n, spec.hidden_size), np.float32), spec).pre
    for layer in range(spec.num_hidden_layers):
        x = prefill.floats(buffers.streams, n, spec.hc_mult, spec.hidden_size)
        want = layers.run(layer, Stream(x.astype(np.float32), pre))
        if layer + 1 < spec.num_hidden_layers and spec.layers[layer + 1].engram is not None:
            want = layers.enter(layer + 1, want)
        chunk.layer(layer, mix_next=False)
        if layer + 1 == spec.num_hidden_layers:
            break
        close(prefill.floats(buffers.streams, *want.x.shape), want.x.astype(np.float64))
        coefficients = prefill.device.download(buffers.coefficients, 96 * n).view(np.float32).reshape(n, 24)
        pre = coefficients[:, :4].copy()
        chunk._mix(prefill.machine.model.weights.layers[layer + 1], "attn")


def test_another_chunk_length_leaves_the_same_bits(small):
    ids = np.random.default_rng(1).integers(0, 250, 93)
    found = []
    for cuts in ([64, 29], [3, 50, 40]):
        prefill, at = Prefill(small, 64), 0
        for count in cuts:
            in_turns([prefill.run.encode(prefill.slot, at, ids[at : at + count])])
            at += count
        start = len(ids) - prefill.machine.spec.sliding_window
        in_turns([prefill.run.decode(prefill.slot, start, len(ids) - start, start)])
        found.append(prefill.state(len(ids)))
    assert found[0].keys() == found[1].keys()
    for name, held in found[0].items():
        assert np.array_equal(held, found[1][name]), name


def test_what_others_run_between_a_prompts_rows_and_its_tail_changes_nothing(small):
    """Streams and other prompts go on in between when the tail does not fit into the chunk of the last rows."""
    ids = np.random.default_rng(3).integers(0, 250, 8)
    prefill = Prefill(small, 16)
    pages, spec, slots = prefill.machine.pages, prefill.machine.spec, (prefill.slot, prefill.machine.pages.open())
    pages.reserve(slots[1], len(ids))
    for slot in slots:
        in_turns([prefill.run.encode(slot, 0, ids)])
    for slot in reversed(slots):  # the first one's rows lie before both passes of the other
        in_turns([prefill.run.decode(slot, 2, len(ids) - 2, 2)])
    layers = range(spec.decoder_start_layer, spec.num_hidden_layers + spec.num_nextn_predict_layers)
    for layer in layers:
        at, size = pages.ring_of(layer), pages.ring * pages.row_bytes
        raw = [prefill.device.download(at + slot * pages.window_pitch, size) for slot in slots]
        first, second = (ring.reshape(pages.ring, -1)[2 : len(ids)] for ring in raw)
        assert np.array_equal(first, second) and first.any(), layer


def test_the_ledger_knows_what_a_pass_takes(small):
    prefill = Prefill(small, 40)
    rows, slots = prefill.run.most_rows, prefill.machine.slots
    assert prefill.allocated == workspace_bytes(prefill.machine.spec, rows, slots, CONTEXT)
