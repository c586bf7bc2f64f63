"""The backbone's walk on the interpreter against the reference, layer by layer from equal inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsuf import formats
from dsuf.engine.gpu import step_walk
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.options import EngineOptions
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.block import Stream
from dsuf.model.reference.model import ReferenceModel
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.ops.mixes import mixes_of
from tests.engine.gpu.small import machine_on
from tests.support.simt_device import SimtDevice

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/tiny.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "ckpt"
    write_checkpoint(load_config("tiny"), folder)
    return folder


class Walked:
    """Prompt rows of tiny, walked layer by layer on the stand-in and by the reference in bf16."""

    def __init__(self, folder: Path, ids: list[int], device=None):
        self.ids, self.rows = ids, len(ids)
        self.device = device or SimtDevice()
        options = EngineOptions(folder, prefill="exact", max_context=128, max_sequences=2, cache_tokens=256)
        self.machine = machine_on(self.device, options)
        machine = self.machine
        slot = machine.pages.open()
        machine.pages.reserve(slot, 64)
        prompts = PromptRows(self.device, machine.model, machine.steps.rows, 2)
        self.k = prompts._rows_of(slot, 0, np.array(ids), 0)
        self.reference = ReferenceModel.load(Checkpoint.open(folder), "bf16")
        _, self.layers = self.reference.enter([(self.reference.new_caches(), np.array(ids))])

    def read(self, address: int, *shape: int) -> np.ndarray:
        """bf16 values."""
        raw = self.device.download(address, 2 * int(np.prod(shape))).view(np.uint16)
        return formats.bf16_to_float32(raw).astype(np.float64).reshape(shape)

    def stream(self, residual: step_walk.Residual, layer: int) -> Stream:
        """What stands before a block, as the kernels have it; `pre` from the sums of the sublayer before."""
        spec = self.machine.spec
        x = self.read(residual.streams, self.rows, spec.hc_mult, spec.hidden_size)
        if layer == 0:
            return Stream(x.astype(np.float32), Stream.of(x[:, 0].astype(np.float32), spec).pre)
        work = self.machine.model.work
        address = work.sums[1 - work.sums.index(residual.sums)]
        sums = self.device.download(address, 4 * 26 * self.rows).view(np.float32).reshape(self.rows, 26)
        width = spec.hc_mult * spec.hidden_size
        m = sums[:, :24] / np.sqrt(sums[:, 24:25] / width + spec.rms_norm_eps)
        before = self.reference.weights.layers[layer - 1].hc_ffn
        mixed = mixes_of(m.astype(np.float64), before.scale, before.base, 4, spec.hc_sinkhorn_iters, spec.hc_eps)
        return Stream(x.astype(np.float32), mixed.pre.astype(np.float32))


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Streams in bf16 after a block: two programs that round at the same points, from equal inputs."""
    error = np.abs(got - want)
    scale = np.sqrt((want**2).mean(axis=-1, keepdims=True))
    assert np.sqrt((error**2).mean()) < 2.0**-8 * np.sqrt((want**2).mean())
    assert (error <= 2.0**-6 * np.abs(want) + 2.0**-5 * scale).all()


def test_every_layer_agrees_with_the_reference_from_equal_inputs(tiny):
    walked = Walked(tiny, GOLDEN["prompt"][:5])
    model, k, spec = walked.machine.model, walked.k, walked.machine.spec
    residual = step_walk.enter(k, model)
    for layer in range(spec.num_hidden_layers):
        stream = walked.stream(residual, layer)
        want = walked.layers.run(layer, stream)
        if layer + 1 < spec.num_hidden_layers and spec.layers[layer + 1].engram is not None:
            want = walked.layers.enter(layer + 1, want)
        step_walk.layer_walk(k, model, residual, layer)
        close(walked.read(residual.streams, *want.x.shape), want.x.astype(np.float64))
