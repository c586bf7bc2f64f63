"""A random fact, stated early in a long prompt and asked for at its end, is found: it cannot be known by heart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsuf.engine.engine import Engine, open_engine
from dsuf.engine.messages import Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from recipes.toy import draw
from recipes.toy.dataset import EOS_ID, Text

SEED = 771_042  # no seed of the training data, its frozen draws or its held-out needles
FILLER = (120, 250, 400, 550, 700, 900)  # tokens; window and top-k are 32


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return open_engine(EngineOptions(ckpt=folder))


def test_a_needle_is_found(engine: Engine, text: Text) -> None:
    rng = random.Random(SEED)
    drawn = {str(tokens): draw.needle(rng, tokens) for tokens in FILLER}
    for id, exchange in drawn.items():
        prompt = text.prompt_ids(exchange.body)
        engine.submit(Request(id, prompt, 60, Sampling(temperature=0), eos_ids=[EOS_ID]))
    found: dict[str, list[int]] = {id: [] for id in drawn}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.id] += event.ids
    said = {id: text.parse(drawn[id].body, ids)["content"] for id, ids in found.items()}
    assert said == {id: exchange.message["content"] for id, exchange in drawn.items()}
    assert all(ids[-1] == EOS_ID for ids in found.values())
