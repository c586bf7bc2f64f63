"""The timing client: the published definition, the unbiased one, the server's counts, servers that misbehave."""

from __future__ import annotations

import errno
import json

import pytest

from dsuf.cli.client import StepCounters, StreamTimes, chat_url, read_counters, steps_since, stream_chat
from dsuf.errors import CheckFailed, EnvironmentProblem, UsageError
from tests.support.chat_server import DONE, event, played_server


@pytest.fixture
def server():
    with played_server() as played:
        yield played


def ask(server, request=None, **changes):
    pieces = []
    answer = stream_chat(chat_url(server.url), request or {"stream": True}, pieces.append, **changes)
    assert "".join(pieces) == answer.text
    return answer


def test_the_published_definition_divides_all_tokens_by_the_time_after_the_first_event():
    times = StreamTimes("text", 5142, "stop", first_s=0.04, last_s=3.0, end_s=3.0348)
    assert times.headline() == "5142 tokens at 1,717 tokens/s (first token after 0.04 s)"
    assert times.unbiased_tokens_per_s == pytest.approx(5141 / 2.96)


def test_an_answer_of_one_event_has_no_unbiased_speed():
    assert StreamTimes("a", 1, "stop", 0.1, 0.1, 0.1).unbiased_tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
        ("https://h/base/v1/", "https://h/base/v1/chat/completions"),
        ("http://h:8000/chat/completions", "http://h:8000/chat/completions"),
        ("http://h:8000/v1/chat/completions", "http://h:8000/v1/chat/completions"),
    ],
)
def test_the_address_may_be_short_or_whole(given, expected):
    assert chat_url(given) == expected


@pytest.mark.parametrize("given", ["h:8000", "ftp://h", "http://", ""])
def test_an_address_that_is_none_is_a_usage_error(given):
    with pytest.raises(UsageError, match="--url"):
        chat_url(given)


def test_text_usage_and_times_come_from_the_stream(server):
    server.gap_s = 0.05
    server.pieces = [b": comment\n\n", event(), event("Hello"), event(" wörld"), event(finish="stop", usage=7), DONE]
    answer = ask(server)
    assert (answer.text, answer.completion_tokens, answer.finish_reason) == ("Hello wörld", 7, "stop")
    assert 0.05 <= answer.first_s < answer.last_s < answer.end_s


def test_the_request_is_sent_as_it_is_with_the_key(server):
    server.pieces = [event("x", usage=1), DONE]
    request = {"model": "m", "messages": [{"role": "user", "content": "é"}], "stream": True}
    ask(server, request, api_key="secret")
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert json.loads(body) == request
    assert headers["Authorization"] == "Bearer secret"


def test_a_refused_request_is_a_usage_error_with_the_servers_words(server):
    server.status, server.error = 400, "unknown model"
    with pytest.raises(UsageError, match="answered 400: unknown model"):
        ask(server)


def test_a_server_that_fails_is_an_environment_problem(server):
    server.status, server.error = 503, "the engine is starting"
    with pytest.raises(EnvironmentProblem, match="answered 503: the engine is starting"):
        ask(server)


def test_an_output_that_fails_is_not_taken_for_the_servers_fault(server):
    server.pieces = [event("x", usage=1), DONE]

    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        stream_chat(server.url + "/v1/chat/completions", {"stream": True}, full)


def test_an_error_event_is_never_a_success(server):
    server.pieces = [event("half"), b'data: {"error": {"message": "the engine process ended"}}\n\n', DONE]
    with pytest.raises(EnvironmentProblem, match="the engine process ended"):
        ask(server)


def test_an_answer_without_text_fails(server):
    server.pieces = [event(finish="stop", usage=0), DONE]
    with pytest.raises(CheckFailed, match="no text"):
        ask(server)


@pytest.mark.parametrize("piece", [b'data: {"a": 1}\n\n', b"data: {broken\n\n"])
def test_something_that_is_no_chat_stream_is_told(server, piece):
    server.pieces = [piece]
    with pytest.raises(EnvironmentProblem, match="does not stream chat completions"):
        ask(server)


def test_no_server_at_all_is_told():
    with pytest.raises(EnvironmentProblem, match="cannot be reached"):
        stream_chat("http://127.0.0.1:9/v1/chat/completions", {}, lambda text: None)


def metrics(steps, seconds, emitted):
    return (
        "# HELP dsuf_accept_length x\n"
        f'dsuf_accept_length_count{{model_name="m"}} {steps}\n'
        f'dsuf_accept_length_sum{{model_name="m"}} {emitted}\n'
        f'dsuf_request_decode_time_seconds_sum{{model_name="m"}} {seconds}\n'
    )


def test_the_servers_counts_give_step_time_and_accepted_length(server):
    server.metrics = [metrics(10.0, 1.0, 20.0), metrics(10.0, 1.0, 20.0), metrics(14.0, 1.02, 42.0)]
    url = chat_url(server.url)
    before = read_counters(url)
    assert before == StepCounters(10.0, 1.0, 20.0)
    # the first reading after the stream is from before the server counted it
    found = steps_since(url, before)
    assert found == {"average_iteration_ms": pytest.approx(5.0), "average_accept_length": 5.5}


def test_a_server_without_these_metrics_reports_nothing(server):
    server.metrics = ["vllm:something 1\n"]
    assert read_counters(chat_url(server.url)) is None
    assert steps_since(chat_url(server.url), None) is None
