"""Two and four ranks on one GPU, in turns, against one rank: a step's layers, whole steps, a chunk's layers.

Needs a GPU, and kernels of its chip: DSUF_KERNELS (a folder of `dsuf build --out`) or the build cache.

    pytest -m gpu tests/gpu/test_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dsuf.config import read_environment
from dsuf.engine.gpu.cubins import find
from dsuf.engine.gpu.device import Device, look
from dsuf.model.synthetic import load_config, write_checkpoint
from tests.support.in_turns import ROWS, four_groups, written
from tests.support.rank_checks import check_chunk, check_layers, check_step

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("count", [2, 4])]
IDS = np.random.default_rng(3).integers(3, 250, ROWS)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    environment = read_environment()
    with Device.open(0, find(look(0)[0], "small", environment.cache_dir, environment.kernels)) as device:
        yield device


@pytest.fixture(scope="module", params=["four groups", "tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four groups of heads, which four ranks share; and two, of which four ranks each have both."""
    folder = tmp_path_factory.mktemp("ranks") / "ckpt"
    if request.param == "tiny":
        write_checkpoint(load_config("tiny"), folder)
        yield folder
    else:
        with four_groups():
            yield written(folder)


@pytest.fixture
def make_device(device: Device) -> Callable[[], Device]:
    return lambda: device


@pytest.mark.parametrize("rows", [1, 48])
def test_every_layer_of_a_step_is_that_of_one_rank(
    folder: Path, make_device: Callable[[], Device], count: int, rows: int
) -> None:
    check_layers(folder, make_device, count, IDS[:40], IDS[40 : 40 + rows])


def test_steps_with_drafts_are_alike_on_all_ranks(folder: Path, make_device: Callable[[], Device], count: int) -> None:
    check_step(folder, make_device, count, IDS[:40], steps=8)


def test_every_layer_of_a_chunk_is_that_of_one_rank(
    folder: Path, make_device: Callable[[], Device], count: int
) -> None:
    check_chunk(folder, make_device, count, IDS)
