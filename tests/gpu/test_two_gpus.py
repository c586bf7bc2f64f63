"""One engine over two GPUs, and the toy's text.

Needs two GPUs that reach each other's memory, and kernels of their chip: DSUF_KERNELS (a folder of `dsuf build --out`)
or the build cache.

    pytest -m gpu tests/gpu/test_two_gpus.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsuf.engine.engine import Engine, open_engine
from dsuf.engine.messages import Request, Sampling
from tests.gpu.same_text import Examples, SameText, options_of
from tests.toy.test_same_tokens import FEW, PAGE, answer_of, request_of, run

pytestmark = pytest.mark.gpu


class TestTwoGpus(SameText):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path) -> Iterator[Engine]:
        engine = open_engine(options_of(folder, (0, 1)))
        yield engine
        engine.backend._copies.close()

    def test_a_long_prompt_is_read_in_chunks(self, engine: Engine, examples: Examples) -> None:
        ids = examples[PAGE].ids
        long = Request("long", ids[:1500], 100, Sampling(temperature=0))
        assert run(engine, [long]) == {"long": ids[1500:1600]}


def test_a_server_warms_up_and_then_says_the_same(folder: Path, examples: Examples) -> None:
    engine = open_engine(options_of(folder, (0, 1), max_sequences=1))
    engine.backend.warm_up()
    assert run(engine, [request_of(examples[FEW[0]])]) == {FEW[0]: answer_of(examples[FEW[0]])}
