"""The mixes on the built-in checkpoint: prompts a hundred times longer beside running streams, in this process's time.

Times are the CPU's, so that other work on the machine does not count.
"""

import gc
import itertools
import time
from collections import defaultdict

import numpy as np
import pytest

from dsuf.engine.cpu import CpuBackend
from dsuf.engine.engine import Engine, EngineOptions
from dsuf.engine.messages import Finished, Request, Sampling, Tokens
from dsuf.text.builtin import resolve
from tests.engine.test_simulator import FirstCome

SHORT, LONG = 20, 2000
GREEDY = Sampling(temperature=0)
clock = time.process_time


class Timed(CpuBackend):
    """Keeps what each chunk of prefill took."""

    def prefill(self, sequence, rows, budget_s):
        start = clock()
        done = super().prefill(sequence, rows, budget_s)
        self.chunks.append(clock() - start)
        return done


@pytest.fixture(autouse=True)
def only_its_own_garbage():
    """A collection that also walks what earlier tests have left takes as long as a chunk."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = resolve("toy", cache_dir=tmp_path_factory.mktemp("toy"))
    backend = Timed(EngineOptions(ckpt=folder), clock=clock)
    backend.load(lambda what, share: None)
    return backend


def run(backend, arrivals, policy=None):
    """Requests come when so many turns are over; (times of tokens by id, times of arrival, time in all)."""
    backend.chunks = []
    engine = Engine(backend, backend._options, clock)
    if policy is not None:
        engine._scheduler.__class__ = policy
    arrivals, times, arrived = sorted(arrivals, key=lambda a: a[0]), defaultdict(list), {}
    start = clock()
    for turn in itertools.count():
        while arrivals and arrivals[0][0] <= turn:
            request = arrivals.pop(0)[1]
            arrived[request.id] = clock()
            engine.submit(request)
        if engine.idle and not arrivals:
            return times, arrived, clock() - start
        for event in engine.step():
            if isinstance(event, Tokens):
                times[event.id].append(clock())
            elif isinstance(event, Finished) and event.id == "long2":
                engine.cancel("stream0")
                engine.cancel("stream1")


def prompt(length, seed):
    return [int(token) for token in np.random.default_rng(seed).integers(300, 2000, length)]


def load(tokens):
    streams = [(0, Request(f"stream{i}", prompt(SHORT, i), tokens, GREEDY, ignore_eos=True)) for i in range(2)]
    longs = [(40, Request(f"long{i}", prompt(LONG, 9 + i), 1, GREEDY)) for i in range(3)]
    shorts = [(45 + 9 * i, Request(f"short{i}", prompt(SHORT, 20 + i), 1, GREEDY)) for i in range(6)]
    return streams + longs + shorts


def test_gaps_and_first_tokens_keep_their_bounds_beside_long_prompts(toy):
    runs = []
    for _ in range(3):  # the middle of three: a percentile of few gaps is the machine's worst moment
        times, arrived, _ = run(toy, load(3000))
        runs.append((max(toy.chunks), *gaps(times, arrived), first_tokens(times, arrived)))
    chunk, idle, busy, first = np.median(np.array(runs), axis=0)
    assert busy <= 3 * idle + chunk
    assert first <= 2 * (chunk + idle)


def gaps(times, arrived):
    """The 99th percentiles of a stream's gaps before the long prompts and beside them; the worse of two streams."""
    begin, end, found = arrived["long0"], times["long2"][0], []
    for id in ("stream0", "stream1"):
        idle = [b - a for a, b in itertools.pairwise(t for t in times[id] if t < begin)][5:]
        busy = [b - a for a, b in itertools.pairwise(t for t in times[id] if begin < t < end)]
        assert len(idle) > 20 and len(busy) > 15
        found.append((np.percentile(idle, 99), np.percentile(busy, 99)))
    return max(found, key=lambda pair: pair[1] - 3 * pair[0])


def first_tokens(times, arrived):
    """The longest wait of a short prompt for its first token."""
    return max(times[f"short{i}"][0] - arrived[f"short{i}"] for i in range(6))


def test_total_throughput_is_within_a_tenth_of_first_come_first_served(toy):
    ours, theirs = [], []
    for _ in range(3):  # the shortest times of a few runs: the machine does other things beside this
        ours.append(run(toy, load(60))[2])
        theirs.append(run(toy, load(60), FirstCome)[2])
        if min(ours) <= 1.1 * min(theirs):
            return
    raise AssertionError(f"{min(ours):.2f} s, first come first served {min(theirs):.2f} s")
