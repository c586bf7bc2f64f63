import asyncio
import re

import numpy as np
import pytest
import redis

from dsuf.kv import messages as m
from dsuf.kv.names import ids_bytes
from tests.kv.fleet import SLOT, conversation, digest, fleet
from tests.kv.redis_server import RedisServer


def story(tmp_path, names="ab", **changes):
    """Run a coroutine function of nodes; afterwards nothing may be held."""

    def run(tell):
        async def told():
            async with fleet(tmp_path, names, **changes) as nodes:
                await tell(*nodes)
                for node in nodes:
                    await node.settled()

        asyncio.run(told())

    return run


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_the_next_turn_at_another_server_finds_all_of_the_turn_before(tmp_path, path):
    @story(tmp_path, paths=(path,))
    async def _(a, b):
        ids = conversation(1, 1003)  # prompt, reply, and an ending token at position 1002
        await a.save(ids, tokens=1002, request="turn 1", segments=[(1003, digest("turn 1"))])
        await a.announced()
        turn = await b.turn([digest("turn 2"), digest("turn 1")])
        assert (turn.source, turn.tokens, turn.ids) == ("remote", 1002, ids.tolist())
        assert list(b.agent.fetcher.bytes_by_path) == [path]
        again = await b.turn([digest("turn 2"), digest("turn 1")])
        assert (again.source, again.tokens) == ("local", 1002)


def test_the_end_of_a_reply_is_found_by_its_text_as_soon_as_the_web_process_was_told(tmp_path):
    @story(tmp_path)
    async def _(a, b):
        ids = conversation(1, 603)
        await a.desk.lookup(m.Lookup(1, "turn 1", "", [digest("nothing")]), "web")
        await a.save(ids[:601], tokens=600, request="turn 1")
        answer = await a.desk.alias(m.Alias(2, "turn 1", digest("turn 1"), 603, ids_bytes(ids[600:])))
        a.forget("turn 1")
        assert answer.ok
        turn = await b.turn([digest("turn 1")])  # at once: the answer came after Redis knew
        assert (turn.source, turn.tokens, turn.ids) == ("remote", 600, ids.tolist())


def test_the_end_of_a_reply_waits_for_a_save_that_is_still_being_written(tmp_path):
    @story(tmp_path, "a")
    async def _(a):
        ids = conversation(1, 602)
        reserved = a.desk.reserve(m.Reserve(1, "turn 1", "", 600, ids_bytes(ids)), "engine")
        task = asyncio.create_task(a.desk.alias(m.Alias(2, "turn 1", digest("t"), 602, ids_bytes(ids[600:]))))
        await asyncio.sleep(0.01)
        assert not task.done()
        a.fill(reserved, ids, 600)
        await a.desk.saves.ready(m.Ready(3, reserved.entry), "engine")
        assert (await task).ok
        assert (await a.turn([digest("t")])).tokens == 600


@pytest.mark.parametrize("wrong", ["no such request", "too far", "other ids", "no ids", "before its end"])
def test_an_ending_that_does_not_fit_what_was_saved_gets_no_name(tmp_path, wrong):
    @story(tmp_path, "a")
    async def _(a):
        ids = conversation(1, 610)
        await a.save(ids[:602], tokens=600, request="turn 1")
        request, boundary, last = "turn 1", 603, ids[599:603]
        if wrong == "no such request":
            request = "turn 2"
        if wrong == "too far":
            boundary, last = 604, ids[600:604]
        if wrong == "other ids":
            last = last + np.uint32(1)
        if wrong == "no ids":
            last = ids[:0]
        if wrong == "before its end":
            boundary, last = 599, ids[590:599]
        answer = await a.desk.alias(m.Alias(1, request, digest("t"), boundary, ids_bytes(last)))
        assert not answer.ok
        assert (await a.turn([digest("t")])).source == "none"


def test_the_longest_prefix_wins_wherever_it_is(tmp_path):
    @story(tmp_path, "abc")
    async def _(a, b, c):
        ids = conversation(1, 2000)
        for node, tokens in ((a, 400), (b, 1200), (c, 800)):
            await node.save(ids[:tokens], segments=[(tokens, digest(str(tokens)))])
            await node.announced()
        texts = [digest(text) for text in ("2000", "1200", "800", "400")]
        turn = await a.turn(texts)
        assert (turn.source, turn.tokens) == ("remote", 1200)
        assert (await b.turn(texts)).source == "local"
        assert (await c.turn(texts[2:])).source == "local"


def test_only_what_is_not_here_is_moved(tmp_path):
    @story(tmp_path)
    async def _(a, b):
        ids = conversation(1, 2560)
        await b.save(ids[:1280], segments=[(1280, digest("half"))])
        await a.save(ids, segments=[(2560, digest("all"))])
        await a.announced()
        assert (await b.turn([digest("all"), digest("half")])).tokens == 2560
        assert sum(b.agent.fetcher.bytes_by_path.values()) == (10 + 2) * SLOT


def test_requests_that_want_the_same_share_one_pull(tmp_path):
    @story(tmp_path)
    async def _(a, b):
        ids = conversation(1, 2560)
        await a.save(ids, segments=[(2560, digest("all"))])
        await a.announced()
        turns = await asyncio.gather(*(b.turn([digest("all")], request=f"r{i}") for i in range(20)))
        assert {(turn.tokens, turn.why) for turn in turns} == {(2560, "")}
        assert sum(b.agent.fetcher.bytes_by_path.values()) == 22 * SLOT
        assert len(b.agent.store.entries) == 1


def test_ids_alone_lead_to_the_end_of_the_prompt_and_to_inner_points(tmp_path):
    @story(tmp_path)
    async def _(a, b):
        ids = conversation(1, 1601)
        await a.save(ids[:1024], periodic=True)
        await a.announced()
        assert (await b.turn(ids=ids)).tokens == 1024, "a multiple of 512"
        await a.save(ids[:1600])
        await a.announced()
        assert (await b.turn(ids=ids)).tokens == 1600
        assert (await b.turn(ids=ids[:1600])).tokens == 1024, "one token is left to compute"


def test_no_hit_between_tenants_or_namespaces(tmp_path):
    # I9
    async def told():
        server = RedisServer(tmp_path)
        async with (
            fleet(tmp_path, "ab", server.url) as (a, b),
            fleet(tmp_path, "c", server.url, namespace=b"o" * 32) as (c,),
        ):
            ids = conversation(1, 600)
            await a.save(ids, tenant="alice", segments=[(600, digest("t"))])
            await a.announced()
            for node, tenant in ((a, "bob"), (b, "bob"), (b, ""), (c, "alice")):
                assert (await node.turn([digest("t")], tenant=tenant)).source == "none"
                assert (await node.turn(ids=np.append(ids, 1), tenant=tenant)).source == "none"
            assert (await b.turn([digest("t")], tenant="alice")).source == "remote"
        server.kill()

    asyncio.run(told())


def test_a_server_of_another_model_is_refused_even_by_its_address(tmp_path):
    async def told():
        async with fleet(tmp_path, "a") as (a,), fleet(tmp_path, "c", namespace=b"o" * 32) as (c,):
            from dsuf.kv.directory import Holder
            from dsuf.kv.fetch import Fallback

            ids = conversation(1, 600)
            await a.save(ids)
            entry = next(iter(a.agent.store.entries.values()))
            me = a.agent.identity
            address = a.agent.directory.me.address
            holder = Holder(me.sid, me.boot, entry.id, 600, 1000, 1, address, me.host_id)
            with pytest.raises(Fallback, match="another model"):
                await c.agent.fetcher.ask(holder, entry.name, entry.names, 0)
            assert c.agent.control.refused == 0 and a.agent.control.refused == 1

    asyncio.run(told())


def test_redis_and_the_wire_carry_no_text_and_no_ids(tmp_path):
    async def told():
        server = RedisServer(tmp_path)
        async with fleet(tmp_path, "ab", server.url) as (a, b):
            ids = np.arange(7_000_000, 7_000_600, dtype=np.uint32)
            await a.save(ids, segments=[(600, digest("my secret"))])
            await a.announced()
            assert (await b.turn([digest("my secret")])).source == "remote"
            client = redis.Redis.from_url(server.url)
            everything = b"".join(
                key + b"".join(sum(client.hgetall(key).items(), ()))
                for key in client.scan_iter()
                if client.type(key) == b"hash"
            )
            assert b"secret" not in everything and digest("my secret").hex().encode() not in everything
            assert not re.search(rb"7000\d\d\d", everything)
        server.kill()

    asyncio.run(told())


def test_a_copy_is_let_go_before_an_original_and_a_continued_original_too(tmp_path):
    @story(tmp_path)
    async def _(a, b):
        await asyncio.sleep(0.1)  # until both listen for announcements
        ids = conversation(1, 1400)
        await a.save(ids[:600], segments=[(600, digest("t1"))])
        await a.announced()
        assert (await b.held_turn([digest("t1")], request="t2")).source == "remote"
        await b.save(ids[:1200], request="t2")
        b.forget("t2")
        first = a.agent.store.find(next(e.name for e in a.agent.store.ready_entries()))
        for _ in range(100):
            if first.superseded:
                break
            await asyncio.sleep(0.01)
        assert first.superseded
        copy, own = sorted(b.agent.store.ready_entries(), key=lambda entry: entry.tokens)
        assert copy.fetched and not own.fetched


def test_a_pull_that_costs_more_than_half_of_computing_is_not_made(tmp_path):
    @story(tmp_path, paths=("tcp",))
    async def _(a, b):
        ids = conversation(1, 1280)
        await a.save(ids, segments=[(1280, digest("t"))])
        await a.announced()
        b.agent.rates.prefilled(1e6)  # 1.3 ms for all of it; a pull takes 3 ms before the first byte
        turn = await b.turn([digest("t")])
        assert (turn.source, turn.why) == ("none", "slow")
        b.agent.rates.tokens_per_s = 1000.0
        assert (await b.turn([digest("t")])).source == "remote"


def test_a_draining_server_still_gives_and_one_that_left_does_not(tmp_path):
    @story(tmp_path)
    async def _(a, b):
        for i in range(3):
            await a.save(conversation(i, 300), segments=[(300, digest(str(i)))])
        await a.announced()
        await a.agent.leave(True)
        assert (await b.turn([digest("0")])).source == "remote"
        a.agent.control.leaving = True
        assert (await b.turn([digest("1")])).source == "none"
        await a.agent.directory.set_state("gone")
        assert (await b.turn([digest("2")])).why == "none"
        assert (await b.turn([digest("0")])).source == "local", "what it has stays"


def test_four_servers_take_turns_and_miss_nothing(tmp_path):
    @story(tmp_path, "abcd")
    async def _(*nodes):
        ids = conversation(1, 4000)
        for turn in range(8):
            node = nodes[turn % len(nodes)]
            tokens = 400 * turn
            got = await node.held_turn([digest(str(tokens))], request="t")
            assert got.tokens == tokens if turn else got.source == "none"
            await node.save(ids[: tokens + 400], request="t", segments=[(tokens + 400, digest(str(tokens + 400)))])
            node.forget("t")
            await node.announced()
