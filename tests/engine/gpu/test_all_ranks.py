"""A backend of two ranks, in turns on the stand-in, says what one rank says; pages and copies are the same on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Trace
from tests.support.in_turns import four_groups, written
from tests.support.rank_engine import assert_same_text, engine_in_turns, stop_and_resume
from tests.support.simt_device import SimtDevice

GREEDY = Sampling(temperature=0)
PROMPT = np.random.default_rng(3).integers(3, 250, 5).tolist()
ROOM = {"max_context": 256, "max_sequences": 2, "cache_tokens": 512, "prefill_chunk": 4, "prefill": "exact"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with four_groups():
        yield written(tmp_path_factory.mktemp("ranks") / "ckpt")


def test_two_ranks_say_what_one_says_and_go_on_as_if_they_had_stayed(folder: Path):
    """A prompt, its first token, out and back in, drafted steps."""
    request, trace = Request("a", PROMPT, 3, GREEDY, verify=5), Trace(keep_logits=True)
    one = engine_in_turns(folder, SimtDevice(), 1, **ROOM)
    one.submit(request, trace)
    alone = one._sequences["a"]
    while not one.idle:
        one.step()
    two = engine_in_turns(folder, SimtDevice(), 2, **ROOM)
    two.submit(request)
    sequence, resumed = two._sequences["a"], False
    while not two.idle:
        two.step()
        if not resumed and sequence.emitted:
            stop_and_resume(two, sequence, sequence.last_position // 2 * 2)
            resumed = True
    assert resumed and len(sequence.emitted) == 3
    assert_same_text(sequence.emitted, alone.emitted, trace)
    assert two.backend._pages.free == two.backend._pages.count
