"""The engine process over a real Unix socket: loading, serving, faults and deaths, seen from both ends."""

import contextlib
import functools
import os
import signal
import time

import msgspec
import pytest

from dsuf import wire
from dsuf.engine.messages import (
    Admitted,
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Rejected,
    Request,
    Status,
    StatusRequest,
    Tokens,
    as_error,
)
from dsuf.errors import CheckpointError, EngineGone, PromptError
from tests.support.engine_process import Peer
from tests.support.scripted import failing_factory, scripted_factory, slow_factory, token_at


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(factory):
            peer = Peer(tmp_path, factory)
            stack.callback(peer.close)
            return peer

        yield start


def scripted(**settings):
    return functools.partial(scripted_factory, **settings)


def test_requests_are_served_rejected_and_cancelled_over_the_pipe(start):
    peer = start(scripted(step_s=0.001))
    peer.send(Request("early", [5, 6], 3))  # before the engine is ready
    assert peer.until(Status, ready=True)[-1].max_context == 4096
    seen = peer.until(Finished, id="early")
    assert isinstance(seen[0], Admitted)
    ids = [token for event in seen if isinstance(event, Tokens) for token in event.ids]
    assert ids == [token_at(Request("", [5, 6], 1), i, 1000) for i in range(3)]

    peer.send(Request("bad", [1_000_000], 3), StatusRequest(), Request("long", [5], 4000))
    rejected, status = peer.next(), peer.next()
    assert isinstance(rejected, Rejected) and isinstance(status, Status) and status.ready
    assert isinstance(as_error(rejected.kind, rejected.message), PromptError) and "1000000" in rejected.message
    peer.until(Tokens, id="long")
    asked = time.monotonic()
    peer.send(Cancel("long"))
    assert peer.until(Finished, id="long")[-1].reason == "cancelled"
    assert time.monotonic() - asked < 1.0
    peer.send(StatusRequest())
    assert peer.next().running == 0

    peer.pipe.close()  # the web process goes
    assert peer.exit_code() == 0


def test_several_streams_share_one_frame_a_step(start):
    peer = start(scripted())
    peer.until(Status, ready=True)
    peer.send(*(Request(str(i), [5], 50) for i in range(4)))
    most, ended = 0, 0
    while ended < 4:
        events = peer.pipe.receive()
        most = max(most, sum(isinstance(event, Tokens) for event in events))
        ended += sum(isinstance(event, Finished) for event in events)
    assert most == 4


def test_loading_is_told(start):
    peer = start(functools.partial(slow_factory, seconds=0.6))
    loading = peer.until(Status, ready=True)[:-1]
    assert 2 <= len(loading) <= 8  # at most ten a second
    assert [status.loaded for status in loading] == sorted(status.loaded for status in loading)
    assert {status.loading for status in loading} == {"script"}


def test_a_checkpoint_that_cannot_be_loaded_is_told_and_ends_with_its_exit_code(start):
    peer = start(functools.partial(failing_factory, error=CheckpointError("no checkpoint at X")))
    failed = peer.until(Failed)[-1]
    assert (failed.kind, failed.message, failed.exit_code) == ("CheckpointError", "no checkpoint at X", 3)
    assert isinstance(as_error(failed.kind, failed.message), CheckpointError)
    assert peer.next() is None and peer.exit_code() == 3


def test_a_fault_in_a_step_ends_its_requests_and_then_the_process(start):
    peer = start(scripted(fail_at_step=3))
    peer.send(Request("a", [5], 100), Request("b", [5], 100))
    said = peer.rest()
    ends = [event for event in said if isinstance(event, Finished)]
    assert {event.id for event in ends} == {"a", "b"} and all(event.reason == "error" for event in ends)
    assert "scripted fault" in ends[0].message and "Traceback" not in ends[0].message
    assert isinstance(said[-1], Failed) and isinstance(as_error(said[-1].kind, ""), EngineGone)
    assert peer.exit_code() == 1


def test_a_broken_pipe_of_the_backends_own_is_a_fault_like_any_other(start):
    peer = start(scripted(fail_at_step=0, fail_with=BrokenPipeError("the cache's socket")))
    peer.send(Request("a", [5], 100))
    said = peer.rest()
    assert any(isinstance(event, Finished) and event.reason == "error" for event in said)
    assert "the cache's socket" in said[-1].message and peer.exit_code() == 1


@pytest.mark.parametrize("busy", [False, True])
def test_the_peer_notices_a_killed_engine_at_once(start, busy):
    peer = start(scripted(step_s=0.001))
    peer.until(Status, ready=True)
    if busy:
        peer.send(Request("a", [5], 4000))
        peer.until(Tokens)
    os.kill(peer.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    with contextlib.suppress(wire.WireError):  # it may have died inside a frame
        peer.rest()
    assert time.monotonic() - killed < 1.0
    assert peer.exit_code() == -signal.SIGKILL


@pytest.mark.parametrize("state", ["loading", "idle", "busy"])
def test_the_engine_ends_when_its_peer_does(start, state):
    peer = start(functools.partial(slow_factory, seconds=20) if state == "loading" else scripted(step_s=0.001))
    if state == "loading":
        peer.until(Status)
    else:
        peer.until(Status, ready=True)
    if state == "busy":
        peer.send(Request("a", [5], 4000))
        peer.until(Tokens)
    closed = time.monotonic()
    peer.pipe.close()
    assert peer.exit_code() == 0
    assert time.monotonic() - closed < 3.0


def test_sigterm_lets_what_runs_finish_and_refuses_the_rest(start):
    peer = start(scripted(step_s=0.005))
    peer.send(Request("a", [5], 60))
    peer.until(Tokens)
    os.kill(peer.process.pid, signal.SIGINT)  # ctrl-C is the web process's business
    os.kill(peer.process.pid, signal.SIGTERM)
    time.sleep(0.05)
    peer.send(Request("late", [5], 2))
    said = peer.rest()
    ends = {event.id: event for event in said if isinstance(event, (Finished, Rejected))}
    assert ends["a"].reason == "length" and ends["a"].stats.completion_tokens == 60
    assert isinstance(ends["late"], Rejected) and ends["late"].kind == "EngineGone"
    assert peer.exit_code() == 0


def test_a_second_sigterm_does_not_wait(start):
    peer = start(scripted(step_s=0.005))
    peer.send(Request("a", [5], 4000))
    peer.until(Tokens)
    for _ in range(2):
        os.kill(peer.process.pid, signal.SIGTERM)
        time.sleep(0.05)
    end = peer.until(Finished)[-1]
    assert end.reason == "error" and end.message == "the engine was told to stop"
    assert peer.rest() == [] and peer.exit_code() == 0


def test_sigterm_ends_an_idle_engine(start):
    peer = start(scripted())
    peer.until(Status, ready=True)
    os.kill(peer.process.pid, signal.SIGTERM)
    assert peer.rest() == [] and peer.exit_code() == 0


def test_a_frame_that_is_no_command_ends_the_engine_with_words(start):
    peer = start(scripted(step_s=0.001))
    peer.until(Status, ready=True)
    peer.send(Request("a", [5], 4000))
    peer.until(Tokens)
    peer.pipe.send({"not": "a list"})
    said = peer.rest()
    assert any(isinstance(event, Finished) and event.reason == "error" for event in said)
    assert isinstance(said[-1], Failed) and "not the expected message" in said[-1].message
    assert peer.exit_code() == 3


def test_every_message_survives_the_pipe():
    commands = [Request("a", [1, 2], 3, eos_ids=[1]), Cancel("a", keep=3), StatusRequest()]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(commands), type=list[Command]) == commands
    events = [
        Admitted("a", 2),
        Tokens("a", [1]),
        Finished("a", "stop"),
        Rejected("a", "PromptError", "x"),
        Status(True),
        Failed("DeviceError", "x", 3),
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[Event]) == events


def test_an_unknown_kind_of_error_becomes_engine_gone():
    assert isinstance(as_error("ZeroDivisionError", "x"), EngineGone)
    assert isinstance(as_error("annotations", "x"), EngineGone)
