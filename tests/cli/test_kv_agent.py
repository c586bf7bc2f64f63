"""The watch over the kv agent's process: one that hangs is killed, one that is slow or only starting is not."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from types import SimpleNamespace

import pytest

from dsuf.cli import kv
from dsuf.cli.kv import AgentProcess
from dsuf.config import read_environment
from dsuf.engine.options import EngineOptions
from dsuf.model.synthetic import load_config, write_checkpoint


@pytest.fixture
def agent(monkeypatch):
    """An agent's process that does nothing for a minute."""
    monkeypatch.setattr(kv, "ASK_EVERY_S", 0.01)
    agent = AgentProcess(options=None)
    agent._process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    agent._process.start()
    yield agent
    agent._process.kill()
    agent._process.join()


def asked(agent, answers):
    """Let the watch ask until `answers` are used up; the process's exit code then."""
    given = iter(answers)

    async def watch():
        over = asyncio.Event()

        async def answer(within_s):
            found = next(given, None)
            if found is None:
                over.set()
                await asyncio.Event().wait()
            return found

        watching = asyncio.create_task(agent.kill_when_silent(answer))
        await asyncio.wait_for(over.wait(), 10)
        watching.cancel()

    asyncio.run(watch())
    agent._process.join(0.2)
    return agent._process.exitcode


def test_one_that_stops_answering_is_killed(agent, capsys):
    assert asked(agent, [False, True, *[False] * 6]) == -signal.SIGKILL
    assert "hung" in capsys.readouterr().err


@pytest.mark.parametrize("answers", [[False] * 20, [True, *[False] * 5, True, *[False] * 5]])
def test_one_that_is_starting_or_slow_is_not(agent, answers):
    assert asked(agent, answers) is None


def test_while_the_server_drains_none_is_started_again(agent, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(agent, "start", lambda: started.append(1))
    agent.options = SimpleNamespace(socket_path=tmp_path)
    agent._process.terminate()
    asyncio.run(asyncio.wait_for(agent.watch(lambda: True), 10))
    assert not started and agent.failure is None


@pytest.mark.parametrize(("available", "given"), [(40 << 30, 10 << 30), (900 << 30, 64 << 30)])
def test_memory_by_default_is_a_part_of_what_the_process_may_have(monkeypatch, tmp_path, available, given):
    write_checkpoint(load_config("tiny"), tmp_path / "tiny", sparse=True)
    monkeypatch.setattr(kv, "memory_bytes", lambda: (1 << 40, available))
    environment = read_environment({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert kv.agent_options(kv.KvFlags(), EngineOptions(tmp_path / "tiny"), tmp_path, environment).host_bytes == given


def test_servers_whose_numbers_of_gpus_differ_do_not_share_caches(tmp_path):
    write_checkpoint(load_config("tiny"), tmp_path / "tiny", sparse=True)
    environment = read_environment({"XDG_RUNTIME_DIR": str(tmp_path)})

    def name(*gpus):
        options = EngineOptions(tmp_path / "tiny", gpus=gpus)
        return kv.agent_options(kv.KvFlags(host_bytes="1GB"), options, tmp_path, environment).namespace

    assert name(0) == name(3) and name(0, 1) == name(2, 3) and len({name(), name(0), name(0, 1)}) == 3
