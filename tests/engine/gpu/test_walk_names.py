"""Every kernel that a walk launches at the released width is in the catalogue, for every chip of that width."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsuf.engine.gpu import launches
from dsuf.engine.gpu.launches import width_of
from dsuf.engine.gpu.machine import LOOKAHEAD, Machine, ledger_of
from dsuf.engine.gpu.prefill_pass import PrefillPass
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.gpu.ranks import ALONE, Rank, Ranks, in_turns
from dsuf.engine.gpu.step_graph import Bucket
from dsuf.engine.gpu.weights import Weights
from dsuf.engine.options import EngineOptions
from dsuf.kernels import catalogue
from dsuf.kernels.ptx.op import ALL_CHIPS
from dsuf.spec import Spec

CONTEXT, ROWS = 4096, 512


class Listener:
    """A device that keeps the names of launches; its addresses are numbers, its memory is endless."""

    index, name, chip = 0, "none", "none"

    def __init__(self) -> None:
        self.launched: set[str] = set()
        self._at = 1 << 40

    def memory(self) -> tuple[int, int]:
        return 1 << 50, 1 << 50

    def allocate(self, nbytes: int, what: str) -> int:
        self._at += -(-max(nbytes, 1) // 256) * 256
        return self._at

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def launch(self, name: str, *args: float, **how: Any) -> None:
        self.launched.add(name)

    def nothing(self, *args: Any, **how: Any) -> None:
        """Whatever else a device does."""

    upload = zero = copy_async = copy_many = record = synchronize = nothing


def machine_of(spec: Spec, device: Listener, rank: Rank) -> Machine:
    """Everything but the weights' values."""
    options = EngineOptions(Path("none"), max_context=CONTEXT, max_sequences=2, cache_tokens=4 * CONTEXT)
    ledger = ledger_of(options, spec, device, rank, CONTEXT)
    share = {"rank": rank.index, "ranks": rank.count}
    classes = np.zeros(spec.vocab_size, np.int32)
    weights = Weights.allocate(device, spec, classes, positions=CONTEXT + LOOKAHEAD, **share)
    return Machine.over(device, ledger, weights, 0, rank=rank)


def walk_everything(machine: Machine, device: Listener) -> None:
    """Steps of all row tiles, with and without drafts, and prompts through both kinds of passes."""
    block = machine.spec.dspark_block_size
    for rows, groups in ((1, 0), (12, 0), (48, 0), (block + 1, 1), (4 * (block + 1), 4), (8 * (block + 1), 8)):
        for sampled, logprobs in itertools.product((False, True), repeat=2):
            machine.steps.walk(Bucket(rows, groups, max(groups, 1), sampled, sampled, logprobs), device.launch)
    chunk = PrefillPass(device, machine.model, machine.slots, ROWS, CONTEXT)
    rows = PromptRows(device, machine.model, machine.steps.rows, machine.slots)
    for run, most in ((chunk, 301), (rows, 48)):
        ids = np.zeros(most, np.int64)
        in_turns([run.exact(0, 0, ids, 0)])
        in_turns([run.encode(0, 2048, ids)])
        in_turns([run.decode(0, 2048, most, 2048)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("config", ["v41-flash", "h200x1"])
def test_no_walk_launches_what_a_chip_does_not_have(config: str, ranks: int):
    spec, device = Spec.load(catalogue.CONFIGS / f"{config}.json"), Listener()
    together = Ranks([device] * ranks)
    together.prepare(spec, ROWS)
    walk_everything(machine_of(spec, device, together.rank(0) if ranks > 1 else ALONE), device)
    assert len(device.launched) > 40
    for chip in width_of(spec).chips:
        known = {entry.name for entry in catalogue.entries() if chip in entry.chips}
        assert not device.launched - known, chip
    assert set(width_of(spec).chips) == set(ALL_CHIPS)


def test_every_name_that_the_engine_spells_out_is_a_kernel_of_every_chip():
    named = {
        call.args[0].value
        for file in sorted(Path(launches.__file__).parent.glob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("launch") and call.args
        and isinstance(call.args[0], ast.Constant)
    }  # fmt: skip
    assert {"rows.set", "inject", "chunk.move"} <= named
    for chip in ALL_CHIPS:
        assert not named - {entry.name for entry in catalogue.entries() if chip in entry.chips}, chip
