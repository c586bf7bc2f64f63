import asyncio
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from dsuf import wire
from dsuf.errors import ConfigError, EnvironmentProblem
from dsuf.kv import messages as m
from dsuf.kv.agent import AgentOptions
from dsuf.kv.client import EngineClient, WebClient
from dsuf.kv.names import ids_array, ids_bytes
from dsuf.kv.process import AgentThread, serve_agent
from tests.kv.fleet import SLOT, conversation, digest, options, page_bytes, snapshot_bytes


@pytest.fixture
def agent(tmp_path):
    thread = AgentThread(options(tmp_path, "agent"))
    thread.start()
    yield tmp_path / "agent.sock"
    thread.stop()


def save(client, ids, request="save", finish=True, **fields):
    """RESERVE, fill through the client's own mapping, READY."""
    reserved = client.reserve(m.Reserve(0, request, "", len(ids), ids_bytes(ids), **fields)).result(2)
    if not isinstance(reserved, m.Reserved):
        return reserved
    pages, new = client.pages(), ids_array(reserved.new).tolist()
    content = [page_bytes(ids, index) for index in new]
    snapshot = snapshot_bytes(ids)
    content += [snapshot[at : at + SLOT] for at in range(0, len(snapshot), SLOT)]
    for slot, data in zip(ids_array(reserved.slots).tolist(), content, strict=True):
        pages[slot] = np.frombuffer(data, np.uint8)
    return client.ready(reserved.entry).result(2) if finish else reserved


def restore(client, ids, request="r"):
    """The slots' content of the longest prefix, or why not."""
    found = client.lookup_ids(request, "", ids).result(2)
    claimed = client.claim(request).result(2)
    if isinstance(claimed, m.Nothing):
        return claimed
    assert isinstance(found, m.Found)
    content = client.slots(claimed.slots)
    assert client.release(request).result(2).ok
    client.tell(m.Forget(request))
    for index in range(claimed.pages):
        assert content[index].tobytes() == page_bytes(ids[: claimed.tokens], index)
    assert content[claimed.pages :].tobytes() == snapshot_bytes(ids[: claimed.tokens])
    return claimed


def numbers(client):
    return client.status().result(2).numbers


def until(condition, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def test_the_engine_saves_and_restores_through_its_own_mapping(agent):
    client = EngineClient(agent)
    ids = conversation(1, 601)
    assert save(client, ids[:600]).ok
    claimed = restore(client, ids)
    assert (claimed.tokens, claimed.source, claimed.pages) == (600, "local", 5)
    assert restore(client, conversation(2, 600)).kind == "none"
    assert numbers(client)["used_bytes"] == 7 * SLOT and numbers(client)["leases"] == 0
    client.close()


def test_web_looks_up_what_the_engine_claims(agent):
    engine = EngineClient(agent)
    ids = conversation(1, 602)
    assert save(engine, ids[:600], request="turn 1", segments=[(600, digest("end"))]).ok

    async def web():
        client = WebClient(agent)
        assert (await client.lookup("t2", "", segments=[digest("no")])).kind == "none"
        found = await client.lookup("t2", "", segments=[digest("longer"), digest("end")])
        assert (found.tokens, ids_array(found.ids).tolist()) == (600, ids[:600].tolist())
        claimed = await asyncio.wrap_future(engine.claim("t2"))
        assert claimed.tokens == 600
        assert (await client.status()).numbers["leases"] == 1
        await client.tell(m.Forget("t2"))
        assert (await client.status()).numbers["leases"] == 1, "the engine is copying"
        engine.tell(m.Forget("t2"))
        await asyncio.wrap_future(engine.status())
        assert not await client.alias("t2", digest("x"), 602, ids[599:602].tolist()), "forgotten"
        await client.lookup("t3", "", segments=[digest("end")])
        assert (await client.status()).numbers["leases"] == 1
        await client.close()

    asyncio.run(web())
    until(lambda: numbers(engine)["leases"] == 0 and numbers(engine)["requests"] <= 1)  # web is gone
    engine.close()


def test_a_client_that_hangs_up_takes_what_it_was_writing(agent):
    first, second = EngineClient(agent), EngineClient(agent)
    assert save(first, conversation(1, 600)).ok
    save(first, conversation(2, 600), finish=False)
    assert numbers(first)["used_bytes"] == 14 * SLOT
    first.close()
    until(lambda: second.connected and numbers(second)["used_bytes"] == 7 * SLOT)
    assert restore(second, np.append(conversation(1, 600), 1)).tokens == 600
    second.close()


def _engine(agent, state, ready):
    """An engine process in one state of a save or a restore."""
    client = EngineClient(agent)
    if state == "claimed":
        client.lookup_ids("r", "", np.append(conversation(1, 600), 1)).result(5)
        client.claim("r").result(5)
    else:
        reserved = save(client, conversation(2, 600), finish=False)
        if state == "ready":
            client.ready(reserved.entry).result(5)
    ready.send(state)
    if state == "hangs up":
        client._connection.close()
    time.sleep(60)


@pytest.mark.parametrize("state", ["reserved", "ready", "claimed", "hangs up"])
def test_an_engine_killed_in_any_state_leaves_what_was_ready_and_nothing_else(agent, state):
    client = EngineClient(agent)
    assert save(client, conversation(1, 600)).ok
    here, there = multiprocessing.Pipe()
    engine = multiprocessing.get_context("fork").Process(target=_engine, args=(agent, state, there), daemon=True)
    engine.start()
    here.recv()
    if state == "hangs up":
        time.sleep(0.1)  # its connection is gone and it lives: it may be writing
        assert numbers(client)["used_bytes"] == 14 * SLOT
    engine.kill()
    engine.join()
    expected = 14 if state == "ready" else 7
    until(lambda: numbers(client)["leases"] == 0 and numbers(client)["used_bytes"] == expected * SLOT)
    assert restore(client, np.append(conversation(1, 600), 1)).tokens == 600
    assert (restore(client, np.append(conversation(2, 600), 1)).tokens if state == "ready" else 600) == 600
    client.close()


def test_without_an_agent_every_question_is_answered_at_once(tmp_path):
    client = EngineClient(tmp_path / "nobody.sock")
    begin = time.monotonic()
    for _ in range(100):
        assert client.claim("r").result(0).kind == "agent"
    client.tell(m.Forget("r"))
    assert time.monotonic() - begin < 0.2

    async def web():
        client = WebClient(tmp_path / "nobody.sock")
        assert (await client.lookup("r", "")).kind == "agent" and await client.status() is None
        await client.close()

    asyncio.run(web())


def test_an_agent_that_ends_answers_what_is_in_flight_and_comes_back_empty(tmp_path):
    first = AgentThread(options(tmp_path, "agent"))
    first.start()
    client = EngineClient(tmp_path / "agent.sock")
    assert save(client, conversation(1, 600)).ok
    first.stop()
    until(lambda: client._connection is None)
    assert client.claim("r").result(2).kind == "agent"
    second = AgentThread(options(tmp_path, "agent"))
    second.start()
    until(lambda: client.connected)
    assert restore(client, np.append(conversation(1, 600), 1)).kind == "none"
    assert save(client, conversation(1, 600)).ok
    client.close()
    second.stop()


def test_the_agent_process_serves_and_ends_with_its_parent_or_by_a_signal(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=serve_agent, args=(options(tmp_path, "agent"),))
    process.start()
    client = EngineClient(tmp_path / "agent.sock")
    until(lambda: client.connected, 15)
    assert save(client, conversation(1, 600)).ok
    os.kill(process.pid, signal.SIGINT)
    assert restore(client, np.append(conversation(1, 600), 1)).tokens == 600
    process.terminate()
    process.join(5)
    assert process.exitcode == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["kv.key", "kv.key.lock", "redis.lock"]


def test_nonsense_on_the_socket_ends_that_connection_only(agent):
    client = EngineClient(agent)
    assert client.connected
    other = wire.connect(agent, m.FromAgent)
    assert isinstance(other.receive(), m.Geometry)
    other.send({"type": "nonsense"})
    assert other.receive() is None
    assert numbers(client)["entries"] == 0
    client.close()


@pytest.mark.parametrize(
    ("tokens", "ids", "fields", "kind"),
    [
        (0, 0, {}, "wrong"),
        (600, 599, {}, "wrong"),
        (600, 604, {}, "wrong"),
        (600, 600, {"base": 12345}, "base"),
        (128_000_000, 600, {}, "wrong"),
    ],
)
def test_a_reserve_that_makes_no_sense_is_refused(agent, tokens, ids, fields, kind):
    client = EngineClient(agent)
    ask = m.Reserve(0, "r", "", tokens, ids_bytes(conversation(1, ids)), **fields)
    assert client.reserve(ask).result(2).kind == kind
    client.close()


def test_saving_goes_on_from_the_entry_before(agent):
    client = EngineClient(agent)
    ids = conversation(1, 903)
    first = save(client, ids[:300])
    reserved = client.reserve(m.Reserve(0, "r", "", 900, ids_bytes(ids[300:903]), base=first.entry)).result(2)
    assert ids_array(reserved.new).tolist() == [2, 3, 4, 5, 6, 7], "the partial page is written anew"
    client.tell(m.Abandon(reserved.entry))
    until(lambda: numbers(client)["entries"] == 1)
    client.close()


def test_what_is_saved_already_is_not_written_again(agent):
    client = EngineClient(agent)
    first = save(client, conversation(1, 600))
    again = client.reserve(m.Reserve(0, "r", "", 600, ids_bytes(conversation(1, 600)))).result(2)
    assert (again.entry, again.new, again.slots) == (first.entry, b"", b"")
    assert client.ready(again.entry).result(2) == m.Done(client.ready(again.entry).result(2).id - 1, True, first.entry)
    client.close()


def test_many_threads_may_ask_at_once(agent):
    client = EngineClient(agent)
    wrong = []

    def work(number):
        try:
            for i in range(20):
                ids = conversation(number * 100 + i, 200)
                assert save(client, ids, request=f"{number}-{i}").ok
                assert restore(client, np.append(ids, 1), request=f"{number}-{i}").tokens == 200
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    client.close()


def test_options_that_would_open_the_cache_are_refused(tmp_path):
    base = dict(
        host_bytes=1 << 20,
        slot_bytes=SLOT,
        snapshot_bytes=1,
        namespace=b"",
        runtime_dir=tmp_path,
        socket_path=tmp_path / "s",
        backend="cpu",
    )
    key = tmp_path / "key"
    for changes in (
        {"redis_url": "redis://192.0.2.1:6379"},
        {"listen": "192.0.2.1:7000"},
        {"listen": "0.0.0.0:7000", "key_file": key},
        {"listen": "here"},
        {"listen": "127.0.0.1:99999"},
        {"require_rdma": True, "paths": ("tcp",)},
    ):
        with pytest.raises(ConfigError):
            AgentOptions(**base, **changes)
    AgentOptions(**base, redis_url="redis://localhost:6379")
    AgentOptions(**base, redis_url="redis://192.0.2.1:6379", listen="192.0.2.1:0", key_file=key)


def test_an_agent_that_cannot_start_says_why(tmp_path):
    thread = AgentThread(options(tmp_path, "agent", key_file=tmp_path / "none"))
    with pytest.raises(EnvironmentProblem, match="key file"):
        thread.start()
    thread.stop()
