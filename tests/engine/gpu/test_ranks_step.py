"""Two and four ranks on the stand-in against one rank: the same choices bit for bit, sums within a layer's bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.gpu.small import few_score_blocks
from tests.support.in_turns import four_groups, written
from tests.support.rank_checks import check_chunk, check_layers, check_step
from tests.support.simt_device import SimtDevice

IDS = np.random.default_rng(3).integers(3, 250, 13)  # 13 entries, of which 8 are selected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with four_groups(), few_score_blocks():
        yield written(tmp_path_factory.mktemp("ranks") / "ckpt")


@pytest.mark.parametrize("count", [2, 4])
def test_every_layer_of_a_step_is_that_of_one_rank(folder: Path, count: int):
    check_layers(folder, SimtDevice, count, *np.split(IDS, [8]))


def test_a_step_with_drafts_is_alike_on_all_ranks(folder: Path):
    check_step(folder, SimtDevice, 2, IDS[:8])


def test_layers_of_a_chunk_are_those_of_one_rank(folder: Path):
    """Window, Engram and ratio 2, candidate source; the others cost a minute here, and run on a GPU."""
    check_chunk(folder, SimtDevice, 2, IDS, layers=3)
