import asyncio
import time

import pytest
import redis

from dsuf.kv import directory as module
from dsuf.kv.directory import Announcement, Directory, DirectoryDown, Server
from tests.kv.redis_server import RedisServer

NS = b"\x01\x02\x03\x04" * 8
KEYS = [bytes([i]) * 20 for i in range(10)]


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.thaw()
    server.kill()


def announcement(entry, *keys, continues=b""):
    return Announcement(entry, tuple(keys), tokens=512, nbytes=1 << 20, continues=continues)


async def opened(server, sid, **more):
    directory = Directory(server.url, NS, Server(sid, f"boot-{sid}", f"192.0.2.1:{ord(sid)}", "host"), **more)
    await directory.open()
    return directory


async def written(directory, *announcements):
    for one in announcements:
        await asyncio.wait_for(directory.announce(one).wait(), 2)


async def until(condition, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.02)


async def sids(directory, keys):
    try:
        found = await directory.find(keys)
    except DirectoryDown:
        return "down"
    return found and (found[0], [holder.sid for holder in found[1]])


def story(server, *names):
    """Run a coroutine function of directories a, b, ... against the server."""

    def run(tell):
        async def told():
            directories = [await opened(server, name) for name in names]
            try:
                await tell(*directories)
            finally:
                await asyncio.gather(*(directory.close() for directory in directories))

        asyncio.run(told())

    return run


def test_the_first_key_that_somebody_holds_is_found_with_its_holders(server):
    @story(server, "a", "b", "c")
    async def _(a, b, c):
        assert await b.find(KEYS) is None and await b.find([]) is None
        await written(a, announcement(7, KEYS[3], KEYS[4]))
        await written(c, announcement(8, KEYS[3]))
        index, holders = await b.find(KEYS)
        assert index == 3 and [holder.sid for holder in holders] == ["c", "a"], "the newest first"
        assert (holders[1].entry, holders[1].tokens, holders[1].nbytes, holders[1].boot) == (7, 512, 1 << 20, "boot-a")
        assert holders[1].address == "192.0.2.1:97" and holders[1].host_id == "host"
        assert await sids(b, KEYS[4:]) == (0, ["a"])
        assert await sids(a, KEYS[3:]) == (0, ["c"]), "not oneself"


def test_a_server_withdraws_its_own_field_only(server):
    @story(server, "a", "b", "c")
    async def _(a, b, c):
        await written(a, announcement(1, KEYS[0]))
        await written(c, announcement(2, KEYS[0]))
        a.withdraw(1)
        await until(lambda: _equal(sids(b, KEYS), (0, ["c"])))


def test_a_late_withdrawal_leaves_a_newer_entry_of_that_name_alone(server):
    @story(server, "a", "b")
    async def _(a, b):
        await written(a, announcement(1, KEYS[0]), announcement(2, KEYS[0]))
        a.withdraw(1)
        await written(a, announcement(3, KEYS[1]))
        assert await sids(b, KEYS) == (0, ["a"])


async def _equal(answer, expected):
    return await answer == expected


def test_records_of_a_server_that_left_or_died_are_void(server, monkeypatch):
    monkeypatch.setattr(module, "SERVER_TTL_S", 0.3)
    monkeypatch.setattr(module, "BEAT_S", 0.1)

    @story(server, "a", "b")
    async def _(a, b):
        await written(a, announcement(1, KEYS[0]))
        c = await opened(server, "c")
        await written(c, announcement(2, KEYS[0]), announcement(3, KEYS[1]))
        await c.set_state("draining")
        assert await sids(b, KEYS) == (0, ["c", "a"]), "one that drains still gives"
        await c.close()
        assert await sids(b, KEYS) == (0, ["a"])
        for task in a._tasks:
            task.cancel()
        await until(lambda: _equal(sids(b, KEYS), None))


def test_a_restarted_server_does_not_own_what_it_had(server):
    @story(server, "a", "b")
    async def _(a, b):
        await written(a, announcement(1, KEYS[0]))
        reborn = Directory(server.url, NS, Server("a", "another-boot", "192.0.2.1:1", "host"))
        await reborn.open()
        assert await sids(b, KEYS) is None
        await reborn.close()


def test_two_namespaces_do_not_meet(server):
    @story(server, "a", "b")
    async def _(a, b):
        await written(a, announcement(1, KEYS[0]))
        other = Directory(server.url, b"\x09" * 32, b.me)
        await other.open()
        assert await other.find(KEYS) is None
        await other.close()


def test_a_continuation_is_heard_by_the_others(server):
    async def told():
        heard = []
        a = await opened(server, "a", on_continued=heard.append)
        b = await opened(server, "b", on_continued=heard.append)
        await asyncio.sleep(0.1)  # until both have subscribed
        await written(b, announcement(1, KEYS[1], continues=KEYS[0]))
        await until(lambda: _equal(asyncio.sleep(0, heard), [KEYS[0]]))
        await asyncio.gather(a.close(), b.close())

    asyncio.run(told())


def test_killed_and_started_empty_under_load_everything_is_back(server, monkeypatch):
    # Mooncake 2246: holders do not register again after the metadata server restarted
    monkeypatch.setattr(module, "RETRY_S", 0.1)

    @story(server, "a", "b")
    async def _(a, b):
        await written(a, *(announcement(i, KEYS[i]) for i in range(10)))
        answers = []

        async def load():
            while True:
                begin = time.monotonic()
                answers.append((await sids(b, KEYS), time.monotonic() - begin))
                await asyncio.sleep(0.002)

        task = asyncio.create_task(load())
        await asyncio.sleep(0.05)
        server.kill()
        await asyncio.sleep(0.3)
        a.announce(announcement(11, b"\x77" * 20))  # said while nobody listens
        a.withdraw(9)
        server.start()
        await until(lambda: _equal(sids(b, [b"\x77" * 20]), (0, ["a"])))
        await until(lambda: _equal(sids(b, KEYS), (0, ["a"])))
        await until(lambda: _equal(sids(b, KEYS[8:]), (0, ["a"])))
        assert await sids(b, KEYS[9:]) is None
        task.cancel()
        kinds = [answer for answer, _ in answers]
        assert "down" in kinds and kinds[0] == (0, ["a"])
        assert max(seconds for _, seconds in answers) < 0.4, "never waits longer than the deadline"


def test_emptied_without_a_restart_everything_is_back(server, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.1)

    @story(server, "a", "b")
    async def _(a, b):
        await written(a, announcement(1, KEYS[0]))
        redis.Redis.from_url(server.url).flushall()
        assert await sids(b, KEYS) is None
        await until(lambda: _equal(sids(b, KEYS), (0, ["a"])))


@pytest.mark.parametrize("trouble", ["refused", "hung"])
def test_it_opens_without_redis_and_finds_when_redis_comes(server, trouble, monkeypatch):
    # LMCache 1491: the engine hangs when the look-up server is not up yet
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    server.kill() if trouble == "refused" else server.freeze()

    @story(server, "a", "b")
    async def _(a, b):
        begin = time.monotonic()
        assert await sids(b, KEYS) == "down"
        assert time.monotonic() - begin < 0.01, "fails at once, without another try"
        done = a.announce(announcement(1, KEYS[0]))
        server.start() if trouble == "refused" else server.thaw()
        await asyncio.wait_for(done.wait(), 5)
        await until(lambda: _equal(sids(b, KEYS), (0, ["a"])))


def test_slow_redis_costs_one_deadline_and_then_nothing(server):
    @story(server, "a")
    async def _(a):
        server.freeze()
        begin = time.monotonic()
        assert await sids(a, KEYS) == "down"
        assert 0.1 < time.monotonic() - begin < 0.4
        begin = time.monotonic()
        assert [await sids(a, KEYS) for _ in range(100)] == ["down"] * 100
        assert time.monotonic() - begin < 0.05
        server.thaw()


def test_records_hold_names_and_numbers_only(server):
    @story(server, "a")
    async def _(a):
        await written(a, announcement(1, KEYS[1]))
        client = redis.Redis.from_url(server.url)
        assert {key.decode() for key in client.scan_iter()} == {
            "{dsuf:01020304}:srv:a",
            "{dsuf:01020304}:seq",
            "{dsuf:01020304}:kv:" + "01" * 20,
        }
        assert client.hgetall("{dsuf:01020304}:kv:" + "01" * 20) == {b"a": b"boot-a|1|512|1048576|1"}
        assert 1_700_000 < client.pttl("{dsuf:01020304}:kv:" + "01" * 20) <= 1_800_000


def test_a_record_that_cannot_be_read_is_passed_over(server):
    @story(server, "a", "b")
    async def _(a, b):
        await written(a, announcement(1, KEYS[0]))
        redis.Redis.from_url(server.url).hset("{dsuf:01020304}:kv:" + "00" * 20, "b", "boot-b|nonsense")
        assert await sids(b, KEYS) == (0, ["a"])
