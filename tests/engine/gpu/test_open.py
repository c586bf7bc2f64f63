"""GPUs that one engine is to run on: which may share a checkpoint, and what each of them takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dsuf.engine.gpu.device import Device
from dsuf.engine.gpu.engram_tables import place
from dsuf.engine.gpu.launches import width_of
from dsuf.engine.gpu.machine import ledgers_of
from dsuf.engine.gpu.open import check_shares, open_devices
from dsuf.engine.gpu.ranks import Ranks
from dsuf.engine.gpu.weights import Weights
from dsuf.engine.options import EngineOptions
from dsuf.errors import ConfigError
from dsuf.kernels.catalogue import CONFIGS
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.support.simt_device import SimtDevice

TINY = Spec.load(CONFIGS / "tiny.json")


@pytest.mark.parametrize(("count", "fits"), [(1, True), (2, True), (3, False), (4, True), (5, False), (8, False)])
def test_gpus_that_cannot_share_a_checkpoint_are_refused_with_numbers_that_can(count, fits):
    spec = Spec.from_config(load_config("h200x2"))
    if fits:
        check_shares(spec, width_of(spec), count)
        return
    with pytest.raises(ConfigError, match=rf"{count} GPUs cannot share .*64 heads, 256 experts.*Name 1, 2, 4 GPUs"):
        check_shares(spec, width_of(spec), count)


def test_gpus_of_different_kinds_are_refused(monkeypatch):
    chips = {0: ("sm_90a", "NVIDIA H200"), 1: ("sm_100a", "NVIDIA B200")}

    def found(index, dependent):
        return SimpleNamespace(index=index, chip=chips[index][0], name=chips[index][1])

    monkeypatch.setattr(Device, "open", found)
    options = EngineOptions(Path(), gpus=(0, 1), cache=Path())
    with pytest.raises(ConfigError, match=r"GPU 0 is NVIDIA H200 \(sm_90a\) and GPU 1 NVIDIA B200 \(sm_100a\)"):
        open_devices(options, TINY)


def test_every_rank_gets_what_the_fullest_has_room_for(capsys):
    options = EngineOptions(Path(), max_sequences=4)
    roomy = ledgers_of(options, TINY, Ranks([SimtDevice(), SimtDevice(index=1)]))[1]
    less = int((roomy.planned - roomy.entries["pages"] / 2) / 0.995)
    first, second = ledgers_of(options, TINY, Ranks([SimtDevice(), SimtDevice(less, index=1)]))
    assert (first.pages, first.max_context) == (second.pages, second.max_context) and first.pages < roomy.pages
    assert first.entries["pages"] == second.entries["pages"] and first.entries["exchange"] > 0
    assert "memory of GPU 1 (interpreter)" in capsys.readouterr().err


def test_tables_in_host_memory_are_the_same_for_all_ranks(tmp_path):
    write_checkpoint(load_config("tiny"), tmp_path / "tiny")
    with Checkpoint.open(tmp_path / "tiny") as checkpoint:
        every = [
            Weights.allocate(SimtDevice(), TINY, checkpoint.class_map(), positions=256, rank=rank, ranks=2)
            for rank in range(2)
        ]
        assert place(every, checkpoint, "host").result(10) is False
        layers = TINY.engram_layer_ids
        at = [[weights.layers[layer].engram_table for layer in layers] for weights in every]
        assert at[0] == at[1] and all(at[0])
