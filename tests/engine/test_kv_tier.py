"""Two engines, each with an agent of the cache tier: a conversation moves between them and goes on as if it had not."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import random

import pytest

from dsuf.engine.engine import Engine, open_engine
from dsuf.engine.kv_tier import connect_tier
from dsuf.engine.messages import Admitted, Finished, Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.kv import messages as m
from dsuf.kv.agent import AgentOptions
from dsuf.kv.client import WebClient
from dsuf.kv.names import ids_array
from dsuf.kv.process import AgentThread
from dsuf.layout import PageLayout, SnapshotLayout
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config
from tests.support.patience import be_patient

GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("micro") / "ckpt"
    write_checkpoint(micro_config(), folder)
    return folder


class Server:
    """An agent, an engine, and a web process that knows texts by their names."""

    def __init__(self, folder, name, checkpoint, prefill, paths, resume_every):
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        with Checkpoint.open(checkpoint) as opened:
            spec = opened.spec
        page, snapshot = PageLayout.of(spec).page_bytes, SnapshotLayout.of(spec).snapshot_bytes
        self.socket = folder / f"{name}.sock"
        namespace = f"micro {prefill}".encode().ljust(32)
        where = runtime, self.socket, "cpu"
        kept = AgentOptions(32 << 20, page, snapshot, namespace, *where, paths=paths, resume_tokens=resume_every)
        self.kept = kept
        self.agent = AgentThread(kept)
        self.agent.start()
        options = EngineOptions(checkpoint, prefill=prefill, max_sequences=4, resume_every=resume_every)
        self.engine = open_engine(options, tier=functools.partial(connect_tier, self.socket))
        self.engine._saver.tier.measured = lambda rows, seconds: None  # so small a model is faster than any pull

    def close(self):
        self.engine._saver.tier._client.close()
        self.agent.stop()

    def turn(self, request_id, ids, known, reply, end, **fields):
        """One request: look `known` texts up, run, name the end of the reply. (Admitted, emitted, Finished)."""
        return asyncio.run(self._turn(request_id, ids, known, reply, end, fields))

    async def _turn(self, request_id, ids, known, reply, end, fields):
        web = WebClient(self.socket)
        found = await web.lookup(request_id, "", segments=[text(name) for name in known])
        lease = m.NONE
        if isinstance(found, m.Found):
            lease = m.FOUND
            assert ids_array(found.ids).tolist() == ids[: len(found.ids) // 4]
        request = Request(request_id, ids, reply, GREEDY, lease=lease, **fields)
        events = await asyncio.to_thread(lambda: run(self.engine, request))
        admitted = next(event for event in events if isinstance(event, Admitted))
        emitted = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        boundary = len(ids) + len(emitted)
        assert await web.alias(request_id, text(end), boundary, (ids + emitted)[-4:])
        await web.tell(m.Forget(request_id))
        await web.close()
        return admitted, emitted, events[-1]


def run(engine, request):
    engine.submit(request)
    events = []
    while not engine.idle:
        events += engine.step()
    assert isinstance(events[-1], Finished) and events[-1].reason != "error"
    return events


def text(name):
    return hashlib.sha256(name.encode()).digest()


def tokens(count, seed):
    chance = random.Random(seed)
    return [chance.randrange(4, 64) for _ in range(count)]


@contextlib.contextmanager
def servers(folder, checkpoint, prefill="truncated", paths=("shm", "tcp"), names="ab", resume_every=8192):
    made = [Server(folder, name, checkpoint, prefill, paths, resume_every) for name in names]
    try:
        yield made
    finally:
        for server in made:
            server.close()


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("prefill", ["truncated", "exact"])
def test_a_conversation_moves_and_goes_on_as_if_it_had_stayed(tmp_path, checkpoint, prefill, path):
    with servers(tmp_path, checkpoint, prefill, (path,)) as (a, b):
        prompt = tokens(137, 1)
        admitted, reply, _ = a.turn("1", prompt, [], 21, "end 1")
        assert (admitted.cached_tokens, admitted.source) == (0, "none")
        following = [*prompt, *reply, *tokens(30, 2)]
        there, moved, there_end = b.turn("2", following, ["end 1"], 24, "end 2")
        assert there.source == "remote" and there.cached_tokens >= len(prompt) + len(reply) - 3
        here, stayed, here_end = a.turn("3", following, ["end 1"], 24, "end 3")
        assert (here.source, here.cached_tokens) == ("local", there.cached_tokens)
        assert moved == stayed
        assert there_end.stats.accepted_histogram == here_end.stats.accepted_histogram
        if prefill == "exact":
            with servers(tmp_path / "..", checkpoint, prefill, names="c") as (c,):
                cold, computed, end = c.turn("4", following, [], 24, "end 4")
                assert cold.cached_tokens == 0 and computed == moved
                assert end.stats.accepted_histogram == there_end.stats.accepted_histogram


def test_an_answer_asked_for_again_starts_at_the_end_of_its_prompt(tmp_path, checkpoint):
    with servers(tmp_path, checkpoint) as (a, b):
        prompt = tokens(200, 3)
        _, first, _ = a.turn("1", prompt, [], 10, "end", segments=[(199, text("p-1")), (200, text("p"))])
        for name, length in (("p", 200), ("p-1", 199)):
            admitted, again, _ = b.turn(f"again {name}", [*prompt[:length], *prompt[length:]], [name], 10, f"e {name}")
            assert admitted.cached_tokens >= len(prompt) - 2
            assert again == first


def test_long_prompts_are_found_inside_by_ids_alone(tmp_path, checkpoint):
    with servers(tmp_path, checkpoint) as (a, b):
        prompt = tokens(300, 4)
        a.turn("1", prompt, [], 2, "end 1")  # ends when what it kept has been announced
        events = run(b.engine, Request("2", prompt, 2, GREEDY))
        assert events[0].cached_tokens == 298 and events[0].source == "remote"
        assert run(b.engine, Request("3", [*prompt[:290], 5], 2, GREEDY))[0].cached_tokens == 0


def test_a_claim_that_does_not_belong_to_the_prompt_is_no_hit(tmp_path, checkpoint):
    with servers(tmp_path, checkpoint, names="a") as (a,):
        prompt = tokens(150, 5)
        a.turn("1", prompt, [], 4, "end")

        async def wrong():
            web = WebClient(a.socket)
            assert isinstance(await web.lookup("2", "", segments=[text("end")]), m.Found)
            events = await asyncio.to_thread(
                lambda: run(a.engine, Request("2", tokens(200, 6), 4, GREEDY, lease=m.FOUND))
            )
            assert events[0].cached_tokens == 0
            await web.close()

        asyncio.run(wrong())


def test_an_agent_that_is_gone_costs_hits_only(tmp_path, checkpoint):
    with servers(tmp_path, checkpoint, names="a") as (a,):
        prompt = tokens(150, 7)
        _, first, _ = a.turn("1", prompt, [], 8, "end")
        a.agent.stop()
        events = run(a.engine, Request("2", prompt, 8, GREEDY))
        assert events[0].source == "none"
        assert [token for event in events if isinstance(event, Tokens) for token in event.ids] == first


def test_the_backend_hears_of_the_memory_of_an_agent_that_came_back(tmp_path, checkpoint, monkeypatch):
    told = []
    monkeypatch.setattr("dsuf.engine.cpu.CpuBackend.share", lambda self, memory: told.append(memory))
    monkeypatch.setattr("dsuf.kv.client.RETRY_S", 0.0)
    with servers(tmp_path, checkpoint, names="a") as (a,):
        run(a.engine, Request("1", tokens(150, 7), 8, GREEDY))
        assert [len(memory) for memory in told] == [32 << 20]
        a.agent.stop()
        a.agent = AgentThread(a.kept)
        a.agent.start()
        for name in "23":
            (admitted, *_) = run(a.engine, Request(name, tokens(150, 7), 8, GREEDY))
        assert admitted.source == "local" and len(told) == 2
        assert told[0] is not told[1] is a.engine._saver.tier.memory


def test_forks_inside_a_group_at_a_point_and_behind_it_say_what_a_cold_run_says(tmp_path, checkpoint):
    # sglang 38031: two suffixes shared a compressed row at a split
    prompt, other = tokens(400, 8), tokens(400, 9)
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(servers(tmp_path, checkpoint, "exact", resume_every=128))
        (tmp_path / "cold").mkdir()
        (cold,) = stack.enter_context(servers(tmp_path / "cold", checkpoint, "exact", names="c", resume_every=8192))
        run(a.engine, Request("first", prompt, 4, GREEDY))
        hits = set()
        for cut in (127, 128, 129, 130, 255, 256, 257, 383, 385):
            forked = [*prompt[:cut], *other[cut : cut + 40]]
            events = run(b.engine, Request(f"fork {cut}", forked, 6, GREEDY))
            computed = run(cold.engine, Request(f"cold {cut}", forked, 6, GREEDY))
            hits.add(events[0].cached_tokens)
            assert events[0].cached_tokens == cut // 128 * 128 and computed[0].cached_tokens == 0
            assert said(events) == said(computed), cut
        assert hits == {0, 128, 256, 384}


def said(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_an_engine_of_another_backend_than_the_names_say_is_given_nothing(tmp_path, checkpoint):
    with servers(tmp_path, checkpoint, names="a") as (a,):
        a.turn("1", prompt := tokens(137, 1), [], 9, "end 1")
        limits = dataclasses.replace(a.engine.limits, backend="another")
        engine = Engine(a.engine.backend, a.engine.options, tier=connect_tier(a.socket, limits))
        for turn in range(2):
            admitted = run(engine, Request(f"there {turn}", prompt, 9, GREEDY))[0]
            assert (admitted.cached_tokens, admitted.source) == (0, "none")
        assert run(a.engine, Request("here", prompt, 9, GREEDY))[0].cached_tokens == 136
        engine._saver.tier._client.close()
