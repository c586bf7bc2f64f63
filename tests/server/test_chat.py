"""Chat completions over HTTP: paths, headers, what reaches the engine, what the log line says."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says, v41_text

HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello 👋🏽, naïve world. 中文"


@pytest.fixture(scope="module")
def server():
    with running_server(says(TEXT), v41_text(served_names=["mine"])) as running:
        yield running


def post(server, path="/v1/chat/completions", body=None, **options):
    return httpx.post(server.url + path, json=HI if body is None else body, **options)


def data_lines(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "/beta/chat/completions",
        "/beta/v1/chat/completions",
        "//chat/completions",
        "/v1//chat/completions",
        "//v1///chat//completions/",
    ],
)
def test_every_spelling_of_the_path_answers(server, path):
    answer = post(server, path)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


def test_a_stream_is_events_then_done(server):
    answer = post(server, body={**HI, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert answer.text.endswith("data: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in answer.text.splitlines() if line)
    assert "naïve" in answer.text and "\\u" not in answer.text
    events = data_lines(answer.text)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == TEXT


@pytest.mark.parametrize("name", ["deepseek-v4.1-flash", "deepseek-ai/DeepSeek-V4.1-Flash", "mine"])
def test_the_name_that_was_asked_for_comes_back(server, name):
    assert post(server, body={**HI, "model": name}).json()["model"] == name


def test_a_clean_request_id_is_kept_and_another_replaced(server):
    assert post(server, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 200):
        assert post(server, headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")
    for path in ("/nowhere", "/livez", "/v1/models"):
        assert httpx.get(server.url + path, headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"


def test_models_are_listed_with_their_context(server):
    listed = httpx.get(server.url + "/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["mine", "deepseek-v4.1-flash"]
    assert listed["data"][0]["max_model_len"] == 4096 and listed["data"][0]["object"] == "model"
    assert httpx.get(server.url + "/v1/models/deepseek-chat").json()["id"] == "deepseek-chat"


def test_the_engine_gets_what_was_asked():
    with running_server(says("x")) as server:
        post(server, body={**HI, "seed": 5, "temperature": 0.5, "top_p": 0.5, "max_completion_tokens": 9, "top_k": 3})
        request = server.peer.requests[0]
    assert request.prompt_ids == [0, 128803, *encode("hi"), 128804, 128822]
    assert (request.sampling.seed, request.sampling.temperature, request.sampling.top_p) == (5, 0.5, 0.5)
    assert (request.sampling.top_k, request.max_tokens, request.eos_ids, request.min_tokens) == (3, 9, [1], 1)


def test_a_long_prompt_is_encoded_like_a_short_one():
    words = "word " * 40_000
    with running_server(says("x"), v41_text(context_limit=100_000)) as server:
        answer = post(server, body={**HI, "messages": [{"role": "user", "content": words}]}, timeout=20)
        assert answer.status_code == 200
        assert server.peer.requests[0].prompt_ids[2:-2] == encode(words)


def test_logprobs_come_back_in_both_forms(server):
    body = {**HI, "logprobs": True, "top_logprobs": 2}
    entries = post(server, body=body).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(encode(TEXT)) and entries[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT
    streamed = [
        entry
        for event in data_lines(post(server, body={**body, "stream": True}).text)
        for entry in (event["choices"][0]["logprobs"] or {}).get("content") or []
    ]
    assert streamed == entries


def test_a_finished_answer_has_one_log_line_with_every_key():
    ids = encode("one two three four five six seven")
    with running_server(
        lambda request: Script([ids[:1], ids[1:4], ids[4:]], prefill_s=0.01, cached_tokens=2)
    ) as server:
        headers = {"x-request-id": "r-1", "x-deepseek-harness-session-id": "s-1"}
        post(server, body={**HI, "stream": True}, headers=headers)
        line = server.request_end()
        assert len(server.log()) == 1
    assert set(line) == {
        *("event", "ts", "request_id", "session_id", "protocol", "model", "stream", "status", "http_status"),
        *("finish_reason", "prompt_tokens", "cached_tokens", "cache_source", "cache_look_up"),
        *("completion_tokens", "reasoning_tokens"),
        *("iterations", "average_iteration_ms", "average_accept_length", "queue_ms", "tokenize_ms", "prefill_ms"),
        *("ttft_ms", "decode_ms", "decode_tokens_per_s", "e2e_ms", "client_stall_ms"),
    }
    assert (line["request_id"], line["session_id"], line["protocol"]) == ("r-1", "s-1", "chat")
    assert (line["status"], line["http_status"], line["finish_reason"]) == ("ok", 200, "stop")
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (5, 2, len(ids))
    assert 10 <= line["ttft_ms"] <= line["e2e_ms"]
    speed = 1000 / line["average_iteration_ms"] * line["average_accept_length"]
    assert speed == pytest.approx(line["decode_tokens_per_s"], rel=1e-3)
    assert "hi" not in line.values()


def test_a_refused_call_has_a_log_line_too(server):
    before = len(server.log())
    post(server, body={**HI, "temperature": 9})
    line = server.request_end(before + 1)
    assert (line["status"], line["http_status"], line["completion_tokens"]) == ("rejected", 400, None)


def test_steps_may_be_merged_but_nothing_is_lost():
    ids = encode(TEXT) * 200
    with running_server(lambda request: Script(in_steps(ids, 6), reason="length")) as server:
        body = {**HI, "stream": True, "max_tokens": len(ids)}
        events = data_lines(post(server, body=body, timeout=20).text)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == TEXT * 200
    assert events[-1]["usage"]["completion_tokens"] == len(ids)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
