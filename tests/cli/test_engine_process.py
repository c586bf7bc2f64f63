"""The watch over the engine process: restarts with backoff, and an end when they are used up."""

from __future__ import annotations

import asyncio
import multiprocessing
import os

import pytest

from dsuf.cli import engine_process
from dsuf.cli.engine_process import RESTARTS, EngineProcess
from dsuf.engine.options import EngineOptions


class PlayedLink:
    def __init__(self):
        self.lost_calls = []

    def lost(self, why, for_good=False):
        self.lost_calls.append((why, for_good))


@pytest.fixture
def process(monkeypatch, tmp_path):
    """An engine that ends with status 7 as soon as it is started; `waits` and `signals` are what it cost."""
    process = EngineProcess(tmp_path / "engine.sock", options=None)
    process.starts, process.waits, process.signals = 0, [], []
    sleep = asyncio.sleep

    def start():
        process.starts += 1
        process._process = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
        process._process.start()

    async def waited(seconds):
        process.waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr(engine_process.asyncio, "sleep", waited)
    monkeypatch.setattr(engine_process.signal, "raise_signal", process.signals.append)
    return process


def watch(process, draining=lambda: False):
    link = PlayedLink()

    async def run():
        process.start()
        await asyncio.wait_for(process.watch(link, draining), 30)

    asyncio.run(run())
    return link.lost_calls


def test_a_dying_engine_is_started_again_with_longer_and_longer_waits_and_then_given_up(process, capsys):
    process.was_ready = True
    lost = watch(process)
    assert process.starts == 1 + RESTARTS
    assert process.waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert lost == [("the engine process ended with exit status 7", number == RESTARTS) for number in range(6)]
    assert process.signals == [engine_process.signal.SIGTERM]
    assert process.failure.exit_code == 3
    assert "ended 6 times in 10 minutes" in str(process.failure)
    assert "started again in 16 s" in capsys.readouterr().err


def test_while_the_server_drains_no_engine_is_started_again(process, capsys):
    process.was_ready = True
    lost = watch(process, lambda: True)
    assert (process.starts, len(lost), process.failure, process.signals) == (1, 1, None, [])
    assert capsys.readouterr().err == ""


def test_an_engine_whose_restart_is_waited_for_is_not_started_once_the_server_drains(process):
    process.was_ready = True
    watch(process, lambda: bool(process.waits))
    assert process.starts == 1


def test_an_engine_that_was_never_ready_is_not_started_again(process, capsys):
    lost = watch(process)
    assert process.starts == 1
    assert lost == [("the engine process ended with exit status 7", False)]
    assert process.failure is None
    assert capsys.readouterr().err == ""


def test_memory_that_an_engine_left_is_held_for_the_next(tmp_path):
    process = EngineProcess(tmp_path / "engine.sock", EngineOptions(tmp_path))
    fd = os.memfd_create("tables")
    os.write(fd, b"filled")
    process.keep(f"/proc/{os.getpid()}/fd/{fd}")
    os.close(fd)
    assert process._options.engram_memory.read_bytes() == b"filled"
    process.keep(None)
    process.keep("/proc/0/fd/0")
    assert process._options.engram_memory.read_bytes() == b"filled"
    os.close(process._kept)
