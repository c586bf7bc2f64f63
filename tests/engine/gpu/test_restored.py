"""The GPU engine over a tier in shared memory: what is restored from it goes on as if it had stayed, beside streams."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from dsuf.engine.engine import Engine
from dsuf.engine.messages import Admitted, Request, Sampling, Tokens
from dsuf.engine.sequence import Trace
from dsuf.engine.shared import NumberedPages, SharedPages
from dsuf.engine.tier import Hit
from dsuf.layout import pages_for
from tests.engine.gpu.played import played_engine, text
from tests.engine.gpu.small import gpu_engine, written
from tests.support.memory_tier import Entry, MemoryTier

GREEDY = Sampling(temperature=0)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class SharedTier(MemoryTier):
    """Every entry has slots of its own in one memory."""

    def __init__(self, limits):
        super().__init__(limits)
        self.map = mmap.mmap(-1, 64 * mmap.PAGESIZE * -(-limits.page_bytes // mmap.PAGESIZE))
        self.memory, self.used = memoryview(self.map), 0

    def reserve(self, key, ids, position, *, periodic):
        entry = super().reserve(key, ids, position, periodic=periodic)
        count, size = pages_for(position), self.limits.page_bytes
        parts = -(-self.limits.snapshot_bytes // size)
        slots = np.arange(self.used, self.used + count)[::-1]
        begin = (self.used + count) * size
        self.used += count + parts
        pages = NumberedPages(np.arange(count), SharedPages(self.memory, size, slots))
        self.writing.remove(entry)
        self.writing.append(Entry(pages, [self.memory[begin : begin + parts * size]], entry.ids, periodic))
        return self.writing[-1]

    def found(self, key):
        hit = super().found(key)
        if not isinstance(hit, Hit):
            return hit
        entry = self.entries[self._prompt[key][: hit.position]]
        return Hit(hit.position, "local", entry.pages.shared, entry.state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("small") / "ckpt")


def test_a_prompt_out_of_registered_memory_has_the_logits_that_it_had_when_it_was_computed(folder):
    plain = gpu_engine(folder, prefill="exact", draft=False)
    engine = Engine(plain.backend, plain.options, tier=SharedTier(plain.limits))
    engine.backend._copies.first._registered.settle()
    engine.backend._copies.first._staging = None
    logits, cached = [], []
    for name in "ab":
        trace = Trace(keep_logits=True)
        engine.submit(Request(name, PROMPT, 1, GREEDY), trace)
        while not engine.idle:
            cached += [event.cached_tokens for event in engine.step() if isinstance(event, Admitted)]
        logits.append(trace.logits[0])
    assert cached == [0, len(PROMPT) - 1] and np.array_equal(*logits)
    engine._saver.tier.check_idle()
    engine.backend._copies.close()


def test_streams_go_on_while_a_prompts_bytes_are_on_their_way():
    engine = played_engine(delay=1)
    backend, looks = engine.backend, []

    def land(slot, *, wait=True):
        looks.append(wait)
        return wait or len(looks) > 12

    engine.submit(Request("a", [3] * 4, 60, GREEDY))
    while not engine._sequences["a"].emitted:
        engine.step()
    backend._copies.land = land
    engine.submit(Request("b", [4] * 4, 5, GREEDY))
    said = {"a": [], "b": []}
    while not looks or len(looks) < 12:
        for event in engine.step():
            if isinstance(event, Tokens):
                said[event.id] += event.ids
    assert len(said["a"]) >= 8 and not said["b"] and looks == [False] * 12
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                said[event.id] += event.ids
    assert said["b"] == text(4, 3, 5)


def test_alone_it_waits_on_the_device():
    engine, looks = played_engine(delay=1), []
    engine.backend._copies.land = lambda slot, *, wait=True: looks.append(wait) or True
    engine.submit(Request("a", [3] * 4, 5, GREEDY))
    while not engine.idle:
        engine.step()
    assert looks == [True]


def test_what_is_given_back_lands_nowhere():
    engine, forgotten = played_engine(delay=1), []
    engine.backend._copies.forget = forgotten.append
    engine.submit(Request("a", [3] * 4, 500, GREEDY))
    for _ in range(3):
        engine.step()
    slot = engine.backend.slot_of(engine._sequences["a"])
    engine.cancel("a")
    assert forgotten == [slot]
