"""Several ranks on one device against one rank, from equal inputs: what tests run on the stand-in and on a GPU.

Everything by which something is chosen must be alike on all ranks, and what a layer gives within the bounds by which it
is held against the reference (tests/engine/gpu/test_step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsuf import formats
from dsuf.engine.gpu import step_walk
from dsuf.engine.gpu.buffers import sizes_of
from dsuf.engine.gpu.machine import LOOKAHEAD, Machine
from dsuf.engine.gpu.prefill_buffers import sizes_of as sizes_of_chunk
from dsuf.engine.gpu.prefill_pass import PrefillPass
from dsuf.engine.gpu.prefill_walk import Chunk
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.gpu.ranks import in_turns
from dsuf.engine.gpu.step_graph import Entry
from dsuf.kernels.slots import MOST_ROWS, Record, slot_record
from tests.support.in_turns import CONTEXT, SEQUENCES, Together

OWN = {"q", "o", "y", "y_codes", "y_scales", "h", "parts", "plan"}  # of a rank's heads and experts: not alike
OWN_CHUNK = {"q", "o", "y", "y_rows", "expanded", "hidden", "parts", "offsets", "order"}
WRITTEN_WHOLE = ("last", "logits", "draft_logits")  # in tiles of rows, of which the others keep a rank's own part

Buffers = dict[str, tuple[int, int]]  # (address, bytes)


def buffers(machine: Machine, rows: int) -> Buffers:
    """Workspace and caches that every rank has alike after `rows` rows."""
    found: Buffers = {}
    for name, size in sizes_of(machine.spec, CONTEXT + LOOKAHEAD).items():
        address = getattr(machine.model.work, name)
        if isinstance(address, tuple):
            found |= {f"{name} {i}": part for i, part in enumerate(zip(address, size, strict=True))}
        elif name not in OWN:
            found[name] = (address, size // MOST_ROWS * rows if name in WRITTEN_WHOLE else size)
    p = machine.pages
    found["pages"] = (p.pool, p.count * p.page_bytes)
    found["windows"] = (p.windows, p.slots * p.window_pitch)
    found["history"] = (p.history, p.slots * p.sizes.history)
    pairs = p.slots * p.sizes.pairs // max(len(p.pairs), 1)
    return found | {f"pair {layer}": (at, pairs) for layer, at in p.pairs.items()}


def clear(together: Together, of: Callable[[Machine], Buffers]) -> None:
    """Zeros where nobody has written yet."""
    for machine in together.machines:
        for at, size in of(machine).values():
            machine.device.zero(at, size)
    together.play()


def values(machine: Machine, address: int, *shape: int) -> np.ndarray:
    """bf16 at an address, as float64."""
    raw = machine.device.download(address, 2 * int(np.prod(shape))).view(np.uint16)
    return formats.bf16_to_float32(raw).astype(np.float64).reshape(shape)


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Two programs that round at the same points, from equal inputs."""
    error, scale = np.abs(got - want), np.sqrt((want**2).mean(axis=-1, keepdims=True))
    assert np.sqrt((error**2).mean()) < 2.0**-8 * np.sqrt((want**2).mean())
    assert (error <= 2.0**-6 * np.abs(want) + 2.0**-5 * scale).all()


def assert_alike(together: Together, of: Callable[[Machine], Buffers]) -> None:
    """All ranks hold the same bits."""
    for name in of(together.machines[0]):
        first, *others = (machine.device.download(*of(machine)[name]) for machine in together.machines)
        assert all(np.array_equal(first, other) for other in others), f"{name} is not alike on all ranks"


class Beside:
    """One rank and several, whose memory is made the same before everything that is compared."""

    def __init__(self, folder: Path, make_device: Callable[[], Any], count: int, rows: int) -> None:
        self.of: Callable[[Machine], Buffers] = lambda machine: buffers(machine, rows)
        self.alone, self.ranks = (Together(folder, make_device(), ranks) for ranks in (1, count))
        self.one = self.alone.machines[0]
        for together in (self.alone, self.ranks):
            clear(together, self.of)

    def run(self, do: Callable[[Machine, int], object]) -> None:
        """The same from equal inputs; afterwards all ranks are alike."""
        for name, (at, size) in self.of(self.one).items():
            for machine in self.ranks.machines:
                machine.device.upload(self.of(machine)[name][0], self.one.device.download(at, size))
        self.ranks.play()
        for together in (self.alone, self.ranks):
            together.each(do)
        assert_alike(self.ranks, self.of)

    def close(self, name: str, *shape: int) -> None:
        """bf16 of a buffer against that of one rank."""
        got, want = (
            values(machine, self.of(machine)[name][0], *shape) for machine in (self.ranks.machines[0], self.one)
        )
        assert_close(got, want)

    def same(self, *names: str) -> None:
        """Bit for bit those of one rank."""
        for name in names:
            got, want = (m.device.download(*self.of(m)[name]) for m in (self.ranks.machines[0], self.one))
            assert np.array_equal(got, want), f"{name} is not that of one rank"

    def same_heads(self, o: Callable[[Machine], int], rows: int) -> None:
        """Each rank's heads are those of one rank, bit for bit."""
        spec = self.one.spec
        whole = values(self.one, o(self.one), rows, spec.num_attention_heads, spec.head_dim)
        for machine in self.ranks.machines:
            rank = machine.model.rank
            heads = rank.share(spec).num_attention_heads
            first = rank.index * heads if heads < spec.num_attention_heads else 0
            mine = values(machine, o(machine), rows, heads, spec.head_dim)
            assert np.array_equal(mine, whole[:, first : first + heads])


def prompt(ids: np.ndarray, machine: Machine, slot: int) -> None:
    """The first rows of a sequence, through the decode walk."""
    rows = PromptRows(machine.device, machine.model, machine.steps.rows, SEQUENCES)
    in_turns([rows.exact(slot, 0, ids, 0)])


def check_layers(folder: Path, make_device: Callable[[], Any], count: int, before: np.ndarray, ids: np.ndarray) -> None:
    """Every layer of the decode walk on rows `ids`, after those `before`, and the head."""
    beside, n = Beside(folder, make_device, count, len(ids)), len(ids)
    spec, walks = beside.one.spec, {}

    def begin(machine: Machine, slot: int) -> None:
        prompts = PromptRows(machine.device, machine.model, machine.steps.rows, SEQUENCES)
        k = prompts._rows_of(slot, len(before), ids, 0)
        walks[id(machine)] = k, step_walk.enter(k, machine.model)

    def attend(layer: int, machine: Machine, slot: int) -> None:
        step_walk.attention(walks[id(machine)][0], machine.model, spec.layers[layer])

    def experts(layer: int, machine: Machine, slot: int) -> None:
        (k, residual), m = walks[id(machine)], machine.model
        weights = m.weights.layers[layer]
        residual.after_attention(weights)
        parts = step_walk.moe(k, m, weights, spec.n_routed_experts, spec.num_experts_per_tok, 0)
        if layer + 1 < spec.num_hidden_layers:
            step_walk.to_next(k, m, residual, layer + 1, parts)
        else:
            residual.after_experts(parts, weights, m.weights.norm)

    def head(machine: Machine, slot: int) -> None:
        step_walk.head(walks[id(machine)][0], machine.model, machine.model.work.logits)

    beside.alone.each(partial(prompt, before))
    beside.run(begin)
    for layer in range(spec.num_hidden_layers):
        beside.run(partial(attend, layer))
        beside.close("last", n, spec.hidden_size)
        beside.same("selected", "chosen", "candidates", "kept_of", "windows", "pages")
        beside.same_heads(lambda machine: machine.model.work.o, n)
        beside.run(partial(experts, layer))
        beside.same("experts", "shares")
        at = beside.one.model.work.streams.index(walks[id(beside.one)][1].streams)
        beside.close(f"streams {at}", n, spec.hc_mult, spec.hidden_size)
        beside.close("x", n, spec.hidden_size)
    beside.run(head)
    beside.same("logits")


def check_step(
    folder: Path, make_device: Callable[[], Any], count: int, before: np.ndarray, *, steps: int = 1
) -> list[Record]:
    """Whole steps of a drafting, sampled sequence: every rank says the same. What they were."""
    together, block, found = Together(folder, make_device(), count), 5, []
    clear(together, lambda machine: buffers(machine, block + 1))
    together.each(partial(prompt, before))
    where = {"token": 7, "position": len(before), "emitted": 1, "budget": 100}
    record = slot_record(**where, drafts=True, verify=block, temperature=0.8, seed=5)
    together.each(lambda machine, slot: machine.steps.admit(slot, record))
    for _ in range(steps):
        entries = [Entry(together.slots[0], block + 1, drafts=True)]
        numbers = together.each(lambda machine, slot, entries=entries: machine.steps.queue(entries, sampled=True))
        results = [one.steps.result(number) for one, number in zip(together.machines, numbers, strict=True)]
        assert results[0] and len(results[0][0].drafted) == block and results[0][0].emitted
        assert all(result == results[0] for result in results)
        assert_alike(together, lambda machine: buffers(machine, block))
        found.append(results[0][0])
    return found


class Chunks(Beside):
    """A chunk of every rank."""

    def __init__(self, folder: Path, make_device: Callable[[], Any], count: int, rows: int) -> None:
        super().__init__(folder, make_device, count, 0)
        self._passes: dict[int, PrefillPass] = {}
        self.chunks: dict[int, Chunk] = {}
        for together in (self.alone, self.ranks):
            for machine in together.machines:
                run = PrefillPass(machine.device, machine.model, SEQUENCES, rows, CONTEXT)
                self._passes[id(machine)] = run
            clear(together, self._of_pass)
        caches = self.of
        self.of = lambda machine: {**caches(machine), **self._of_pass(machine)}

    def _of_pass(self, machine: Machine) -> Buffers:
        run = self._passes[id(machine)]
        sizes = sizes_of_chunk(machine.spec, run.most_rows, SEQUENCES, CONTEXT)
        return {
            f"chunk {name}": (getattr(run.buffers, name), size) for name, size in sizes.items() if name not in OWN_CHUNK
        }

    def begin(self, ids: np.ndarray, machine: Machine, slot: int) -> None:
        """A chunk of these rows, and layer 0's input."""
        self.chunks[id(machine)] = chunk = self._passes[id(machine)]._chunk(slot, 0, ids, 0)
        chunk.enter()

    def attend(self, layer: int, machine: Machine, slot: int) -> None:
        """A layer's attention."""
        self.chunks[id(machine)].attention(machine.spec.layers[layer], compress=True)

    def after_attention(self, layer: int, machine: Machine, slot: int) -> None:
        """The rest of it."""
        self.chunks[id(machine)].after_attention(layer)

    def end(self, machine: Machine, slot: int) -> None:
        """The drafter's windows."""
        self.chunks[id(machine)].drafter_windows()


def check_chunk(
    folder: Path, make_device: Callable[[], Any], count: int, ids: np.ndarray, layers: int | None = None
) -> None:
    """Every layer of a chunk of `ids`, or the first ones, and the drafter's windows."""
    beside, n = Chunks(folder, make_device, count, len(ids)), len(ids)
    spec = beside.one.spec
    beside.run(partial(beside.begin, ids))
    for layer in range(layers or spec.num_hidden_layers):
        beside.run(partial(beside.attend, layer))
        beside.close("chunk last", n, spec.hidden_size)
        beside.same("chunk selected", "chunk chosen", "chunk candidates", "chunk kept_of", "windows", "pages")
        beside.run(partial(beside.after_attention, layer))
        beside.same("chunk experts", "chunk shares")
        beside.close("chunk streams", n, spec.hc_mult, spec.hidden_size)
    beside.run(beside.end)
    beside.same("history")
