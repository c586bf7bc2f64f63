"""The whole GPU engine on the interpreter against the CPU backend in bf16: prompt, first token, a drafted step."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.engine.engine import EngineOptions, open_engine
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Trace
from tests.engine.gpu.small import gpu_engine, texts, written

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("small") / "ckpt")


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
def test_logits_and_drafts_are_near_those_of_the_cpu(folder, prefill):
    """Two programs that round at the same points, through six layers of random weights: near, not equal."""
    request = Request("a", PROMPT, 2, Sampling(temperature=0, logprobs=2))
    options = {"prefill": prefill, "draft": True, "verify": 5}
    engine, traces = gpu_engine(folder, **options), [Trace(keep_logits=True) for _ in range(2)]
    found = texts(engine, request, traces={"a": traces[0]})["a"]
    want = texts(open_engine(EngineOptions(folder, numerics="bf16", **options)), request, traces={"a": traces[1]})["a"]
    for row, expected in zip(*(trace.logits for trace in traces), strict=True):
        assert np.linalg.norm(row - expected) < 0.1 * np.linalg.norm(expected)
        if np.argmax(row) != np.argmax(expected):  # from here on they say different things
            top = np.sort(expected)[-2:]
            assert top[1] - top[0] < 0.5
            break
    assert len(found) == len(want) == 2
    (step,), (other,) = (trace.steps for trace in traces)
    assert len(step.drafted) == 5 and step.position == other.position
    assert engine.backend._pages.free == engine.backend._pages.count
    counts = engine.backend.counts()
    assert counts.steps == 1 and counts.slots == 5 and 0 < counts.experts <= 2 * 6 * 4
