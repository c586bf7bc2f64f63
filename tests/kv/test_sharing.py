import asyncio

import pytest

from tests.kv.fleet import conversation, digest, fleet


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_the_next_turn_at_another_server_finds_all_of_the_turn_before(tmp_path, path):
    async def story():
        async with fleet(tmp_path, paths=(path,)) as (a, b):
            ids = conversation(1, 1003)  # prompt, reply, and an ending token at position 1002
            await a.save(ids, tokens=1002, request="turn 1", segments=[(1003, digest("turn 1"))])
            await a.announced()
            turn = await b.turn([digest("turn 2"), digest("turn 1")])
            assert (turn.source, turn.tokens, turn.ids) == ("remote", 1002, ids.tolist())
            assert list(b.agent.fetcher.bytes_by_path) == [path]
            again = await b.turn([digest("turn 2"), digest("turn 1")])
            assert (again.source, again.tokens) == ("local", 1002)
            await a.settled()
            await b.settled()

    asyncio.run(story())
