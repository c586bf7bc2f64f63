"""Two and four ranks on one device against one rank: the same choices bit for bit, and sums within a layer's bounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dsuf import formats
from dsuf.engine.gpu import launches, step_walk
from dsuf.engine.gpu.buffers import sizes_of
from dsuf.engine.gpu.machine import Machine
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.gpu.step_graph import Entry
from dsuf.kernels.slots import MOST_ROWS, slot_record
from dsuf.model.synthetic import write_checkpoint
from tests.engine.gpu.small import small_config
from tests.support.in_turns import Together
from tests.support.simt_device import SimtDevice

OWN = {"q", "o", "y", "y_codes", "y_scales", "h", "parts", "plan"}  # of a rank's heads and experts: not alike
BEFORE, IDS = np.split(np.random.default_rng(3).integers(3, 250, 13), [8])  # 13 entries, of which 8 are selected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups of one head, so that four ranks share them."""
    folder = tmp_path_factory.mktemp("ranks") / "ckpt"
    write_checkpoint(small_config(o_groups=4), folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def four_groups():
    """Kernels do not hold the number of groups; that of a width says how much shared memory they may need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "FIXED", tuple(name for name in launches.FIXED if name != "o_groups"))
        yield


def buffers(machine: Machine, rows: int = len(IDS)) -> dict[str, tuple[int, int]]:
    """(address, bytes) of what every rank has: workspace and caches. Products write whole tiles of rows, so that where
    a rank's part is summed, other rows hold what it left there.
    """
    found, sizes = {}, sizes_of(machine.spec, 256 + 64)
    few = {name: sizes[name] // MOST_ROWS * rows for name in ("last", "logits", "draft_logits")}
    for name, size in (sizes | few).items():
        address = getattr(machine.model.work, name)
        parts = zip(address, size, strict=True) if isinstance(address, tuple) else [(address, size)]
        found |= {f"{name} {i}" if isinstance(address, tuple) else name: part for i, part in enumerate(parts)}
    p = machine.pages
    found["pages"] = (p.pool, p.count * p.page_bytes)
    found["windows"] = (p.windows, p.slots * p.window_pitch)
    found["history"] = (p.history, p.slots * p.sizes.history)
    return found | {f"pair {layer}": (at, p.slots * p.sizes.pairs) for layer, at in p.pairs.items()}


def cleared(folder: Path, count: int) -> Together:
    together = Together(folder, SimtDevice(), count)
    for machine in together.machines:
        for name, (at, size) in buffers(machine).items():
            if name in ("windows", "history") or name.startswith("pair"):
                machine.device.zero(at, size)
    together.play()
    return together


def read(machine: Machine, name: str) -> np.ndarray:
    return machine.device.download(*buffers(machine)[name])


def bf16(machine: Machine, name: str, *shape: int) -> np.ndarray:
    raw = read(machine, name).view(np.uint16)[: int(np.prod(shape))]
    return formats.bf16_to_float32(raw).astype(np.float64).reshape(shape)


def assert_alike(together: Together) -> None:
    """All ranks hold the same bits, but for what is their own part."""
    for name in buffers(together.machines[0]):
        if name not in OWN:
            first, *others = (read(machine, name) for machine in together.machines)
            assert all(np.array_equal(first, other) for other in others), name


def close(got: np.ndarray, want: np.ndarray) -> None:
    """As a layer is held against the reference (test_step.py)."""
    error, scale = np.abs(got - want), np.sqrt((want**2).mean(axis=-1, keepdims=True))
    assert np.sqrt((error**2).mean()) < 2.0**-8 * np.sqrt((want**2).mean())
    assert (error <= 2.0**-6 * np.abs(want) + 2.0**-5 * scale).all()


class Beside:
    """One rank and several, whose memory is made the same before every step that is compared."""

    def __init__(self, folder: Path, count: int) -> None:
        self.alone, self.ranks = cleared(folder, 1), cleared(folder, count)
        self.one = self.alone.machines[0]

    def run(self, do: Callable[[Machine, int], object]) -> None:
        """The same from equal inputs."""
        for name, (at, size) in buffers(self.one).items():
            for machine in self.ranks.machines:
                here = buffers(machine)[name]
                assert here[1] == size
                machine.device.upload(here[0], self.one.device.download(at, size))
        self.ranks.play()
        for together in (self.alone, self.ranks):
            together.each(do)

    def close(self, name: str, *shape: int) -> None:
        close(bf16(self.ranks.machines[0], name, *shape), bf16(self.one, name, *shape))

    def same(self, *names: str) -> None:
        """Bit for bit those of one rank."""
        for name in names:
            assert np.array_equal(read(self.ranks.machines[0], name), read(self.one, name)), name


def prompt(machine: Machine, slot: int, ids: np.ndarray) -> None:
    PromptRows(machine.device, machine.model, machine.steps.rows, 2).exact(slot, 0, ids, 0)


@pytest.mark.parametrize("count", [2, 4])
def test_every_layer_is_that_of_one_rank_from_equal_inputs(folder: Path, count: int):
    beside, n = Beside(folder, count), len(IDS)
    spec, rows = beside.one.spec, {}

    def begin(machine: Machine, slot: int) -> None:
        prompts = PromptRows(machine.device, machine.model, machine.steps.rows, 2)
        k = prompts._rows_of(slot, len(BEFORE), IDS, 0)
        rows[id(machine)] = k, step_walk.enter(k, machine.model)

    def attend(layer: int, machine: Machine, slot: int) -> None:
        k, _ = rows[id(machine)]
        step_walk.attention(k, machine.model, spec.layers[layer])

    def experts(layer: int, machine: Machine, slot: int) -> None:
        (k, residual), m = rows[id(machine)], machine.model
        weights = m.weights.layers[layer]
        residual.after_attention(weights)
        parts = step_walk.moe(k, m, weights, spec.n_routed_experts, spec.num_experts_per_tok, 0)
        if layer + 1 < spec.num_hidden_layers:
            step_walk.to_next(k, m, residual, layer + 1, parts)
        else:
            residual.after_experts(parts, weights, m.weights.norm)

    beside.alone.each(lambda machine, slot: prompt(machine, slot, BEFORE))
    beside.run(begin)
    for layer in range(spec.num_hidden_layers):
        beside.run(partial(attend, layer))
        assert_alike(beside.ranks)
        beside.close("last", n, spec.hidden_size)
        beside.same("selected", "chosen", "candidates", "kept_of", "windows", "pages")
        heads = spec.num_attention_heads // count
        whole = bf16(beside.one, "o", n, spec.num_attention_heads, spec.head_dim)
        for rank, machine in enumerate(beside.ranks.machines):
            mine = bf16(machine, "o", n, heads, spec.head_dim)
            assert np.array_equal(mine, whole[:, rank * heads : (rank + 1) * heads])
        beside.run(partial(experts, layer))
        assert_alike(beside.ranks)
        beside.same("experts", "shares")
        at = beside.one.model.work.streams.index(rows[id(beside.one)][1].streams)
        beside.close(f"streams {at}", n, spec.hc_mult, spec.hidden_size)
        beside.close("x", n, spec.hidden_size)
    beside.run(lambda machine, slot: step_walk.head(rows[id(machine)][0], machine.model, machine.model.work.logits))
    assert_alike(beside.ranks)
    beside.same("logits")


@pytest.mark.parametrize("count", [2, 4])
def test_a_step_with_drafts_is_alike_on_all_ranks(folder: Path, count: int):
    together = cleared(folder, count)

    def step(machine: Machine, slot: int) -> int:
        prompt(machine, slot, BEFORE)
        where = {"token": 7, "position": len(BEFORE), "emitted": 1, "budget": 40}
        machine.steps.admit(slot, slot_record(**where, drafts=True, verify=5, temperature=0.8, seed=5))
        return machine.steps.queue([Entry(slot, 6, drafts=True)], sampled=True)

    numbers = together.each(step)
    results = [machine.steps.result(number) for machine, number in zip(together.machines, numbers, strict=True)]
    assert results[0] and len(results[0][0].drafted) == 5 and results[0][0].emitted
    assert all(result == results[0] for result in results)
    assert_alike(together)
