"""The inventory of tensors: the published totals, and configs that make none."""

from __future__ import annotations

import pytest

from dsuf.errors import ConfigError
from dsuf.model.inventory import inventory
from dsuf.model.synthetic import load_config
from dsuf.spec import Spec


def tensors_of(name: str):
    config = load_config(name)
    return inventory(Spec.from_config(config), config)


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("v41-flash", 96_085, 510_286_023_000),
        ("h200x1", None, 110_547_546_792),
        ("h200x2", None, 218_359_378_536),
        ("tiny", 1_797, 7_050_850),
    ],
)
def test_totals_are_the_published_ones(name, count, total):
    tensors = tensors_of(name)
    assert count in (None, len(tensors))
    assert sum(info.nbytes for info in tensors.values()) == total


def part_of(name: str) -> str:
    stage = name.startswith("mtp.")
    if "markov_head" in name:
        return "markov head"
    if ".ffn.experts." in name:
        return "drafter experts" if stage else "experts"
    if ".engram.embed." in name:
        return "engram tables"
    if stage:
        return "drafter rest"
    if name in ("embed.weight", "head.weight"):
        return name
    return "vision" if name.startswith(("vision.", "aligner.", "image_")) else "dense"


def test_parts_of_the_released_model_have_the_published_bytes():
    parts: dict[str, int] = {}
    for info in tensors_of("v41-flash").values():
        parts[part_of(info.name)] = parts.get(part_of(info.name), 0) + info.nbytes
    assert parts == {  # reference document 1.2
        "experts": 288_777_830_400,
        "engram tables": 202_758_032_400,
        "dense": 7_199_094_208,
        "embed.weight": 1_323_827_200,
        "head.weight": 1_323_827_200,
        "drafter experts": 7_219_445_760,
        "drafter rest": 581_046_152,
        "markov head": 132_382_720,
        "vision": 970_536_960,
    }


def test_a_plain_layer_has_the_published_bytes():
    plain = [
        i for i in tensors_of("v41-flash").values() if i.name.startswith("layers.5.") and ".experts." not in i.name
    ]
    assert sum(info.nbytes for info in plain) == 170_055_128


def test_drafter_of_the_released_model_has_2401_tensors():
    assert sum(name.startswith("mtp.") for name in tensors_of("v41-flash")) == 2_401


def test_a_broken_vision_config_is_refused():
    config = load_config("v41-flash")
    config["vision_config"]["patch_size"] = "14"
    with pytest.raises(ConfigError, match="patch_size is '14'"):
        inventory(Spec.from_config(config), config)
