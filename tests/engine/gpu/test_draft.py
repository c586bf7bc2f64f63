"""The drafter's walk on the interpreter against the reference: window rows from taps, and a block over them."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.engine.gpu import draft_walk
from dsuf.engine.gpu.launches import Launches
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.gpu.step_graph import Entry, batch_table
from dsuf.engine.options import EngineOptions
from dsuf.kernels.slots import MOST_ROWS, slot_record
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.drafter import DraftRequest
from dsuf.model.reference.model import ReferenceModel
from dsuf.ops.qdq import q8_decode
from tests.engine.gpu.small import machine_on, written
from tests.support.simt_device import SimtDevice

KEPT, Y = 6, 77  # positions with drafter rows, token that the block follows


class Drafted:
    """The same taps given to both, then a block after token Y."""

    def __init__(self, folder):
        self.device = SimtDevice()
        options = EngineOptions(folder, max_context=128, max_sequences=2, cache_tokens=256)
        self.machine = machine_on(self.device, options)
        self.model, self.spec = self.machine.model, self.machine.spec
        self.slot = self.machine.pages.open()
        self.reference = ReferenceModel.load(Checkpoint.open(folder), "bf16")
        self.caches = self.reference.new_caches()
        rng, d = np.random.default_rng(4), self.spec.hidden_size
        self.taps = formats.round_bf16(rng.standard_normal((3, KEPT, d)).astype(np.float32))

    def windows(self):
        prompts = PromptRows(self.device, self.model, self.machine.steps.rows, 2)
        k = prompts._rows_of(self.slot, 0, np.zeros(KEPT, np.int64), 0)
        for address, tap in zip(self.model.work.taps, self.taps, strict=True):
            self.device.upload(address, formats.float32_to_bf16(tap))
        draft_walk.windows(k, self.model)
        self.caches.make_room(KEPT)
        self.reference.drafter.write_windows(self.caches, 0, np.concatenate(list(self.taps), axis=1))
        self.caches.length = KEPT

    def window_rows(self):
        pages, d = self.machine.pages, self.spec.head_dim
        at = pages.ring_of(self.spec.num_hidden_layers) + self.slot * pages.window_pitch
        raw = self.device.download(at, pages.ring * pages.row_bytes).reshape(pages.ring, pages.row_bytes)[:KEPT]
        return q8_decode(raw[:, :d], raw[:, d : d + d // 32])

    def block(self) -> Launches:
        steps = self.machine.steps
        steps.admit(self.slot, slot_record(token=Y, position=KEPT, emitted=1, budget=50, drafts=True))
        steps._send(batch_table([Entry(self.slot, 6, drafts=True)]))
        return Launches(self.device.launch, self.spec, steps.draft_rows, self.spec.dspark_block_size)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    one = Drafted(written(tmp_path_factory.mktemp("small") / "ckpt"))
    one.windows()
    return one


def test_window_rows_are_the_references(drafted):
    want = drafted.caches.windows.rows(0, KEPT)[drafted.spec.num_hidden_layers]
    got = drafted.window_rows()
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_a_block_drafts_as_the_reference_does(drafted):
    k, work, spec = drafted.block(), drafted.model.work, drafted.spec
    batch = draft_walk.Batch(drafted.machine.steps.slots, drafted.machine.steps._table, 1, 1, sampled=False)
    draft_walk.draft(k, drafted.model, batch)
    (want,) = drafted.reference.draft([DraftRequest(drafted.caches, Y)])
    block, vocabulary = spec.dspark_block_size, spec.vocab_size
    raw = drafted.device.download(work.draft_logits, 4 * block * vocabulary)
    logits = raw.view(np.float32).reshape(block, vocabulary)
    tokens = drafted.device.download(work.drafts, 4 * MOST_ROWS).view(np.int32)[:block]
    confidence = drafted.device.download(work.confidence, 4 * MOST_ROWS).view(np.float32)[:block]
    margins = np.sort(want.logits, axis=-1)
    decided = (margins[:, -1] - margins[:, -2] > 0.5).cumprod().astype(bool)  # from the first tie on all may differ
    for slot in range(block):
        if not decided[:slot].all():
            break
        assert np.linalg.norm(logits[slot] - want.logits[slot]) < 0.03 * np.linalg.norm(want.logits[slot])
        assert abs(confidence[slot] - want.confidence_logits[slot]) < 0.05
        if decided[slot]:
            assert tokens[slot] == want.tokens[slot]
    assert (tokens >= 0).all() and (tokens < vocabulary).all()
