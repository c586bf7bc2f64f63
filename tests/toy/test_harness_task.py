"""A coding harness asks for something that takes a tool of its own: the toy calls it and goes on from its result."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsuf.engine.engine import Engine, open_engine
from dsuf.engine.messages import Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from recipes.toy import draw
from recipes.toy.dataset import EOS_ID, Text

SEED = 771_043  # no seed of the training data, its frozen draws or the evaluation
AROUND = {"call": (50, 800, 2500, 17000), "done": (50, 800, 2500), "title": (50, 800)}  # tokens asked of the drawing
MOST = 120


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return open_engine(EngineOptions(ckpt=folder))


@pytest.mark.parametrize("turn", AROUND)
def test_a_task_is_answered_after_unknown_text(engine: Engine, text: Text, turn: str) -> None:
    rng = random.Random(SEED)
    drawn = {f"{turn} {tokens}": draw.listing(rng, tokens, turn) for tokens in AROUND[turn]}
    for id, exchange in drawn.items():
        prompt = text.prompt_ids(exchange.body)
        engine.submit(Request(id, prompt, MOST, Sampling(temperature=0), eos_ids=[EOS_ID]))
    found: dict[str, list[int]] = {id: [] for id in drawn}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.id] += event.ids
    wanted = {id: text.answer_ids(exchange.body, exchange.message) for id, exchange in drawn.items()}
    assert found == wanted
