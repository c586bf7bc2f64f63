"""Responses, Messages, text completions and token counts over HTTP: paths, shapes, errors in each one's words."""

from __future__ import annotations

import json

import httpx
import pytest

from dsuf.server.options import ServerOptions
from tests.support.calls import HI, call
from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says, v41_text

TEXT = "Hello 👋🏽, naïve world. 中文"
MODEL = {"model": "deepseek-flash"}
OFF = {"thinking": {"type": "disabled"}}
BODIES = {
    "/chat/completions": {**MODEL, **OFF, "messages": HI},
    "/completions": {**MODEL, "prompt": "hi", "max_tokens": 99},
    "/responses": {**MODEL, "input": "hi", "reasoning": {"effort": "none"}},
    "/messages": {**MODEL, **OFF, "messages": HI, "max_tokens": 99},
}


@pytest.fixture(scope="module")
def server():
    with running_server(says(TEXT)) as running:
        yield running


def post(server, path, body=None, **options):
    return httpx.post(server.url + path, json=BODIES[path] if body is None else body, timeout=10, **options)


def events(text):
    """[(name, data)] of a stream."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields.get("event"), fields["data"]))
    return found


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/beta/completions",
        "/completions",
        "//v1//completions/",
        "/v1/responses",
        "/responses",
        "/v1/messages",
        "/messages",
        "/anthropic/v1/messages",
        "/anthropic/messages",
        "//anthropic//v1/messages",
    ],
)
def test_every_prefix_leads_to_the_protocol(server, path):
    answer = httpx.post(server.url + path, json=BODIES["/" + path.rstrip("/").rpartition("/")[2]])
    assert answer.status_code == 200 and TEXT in answer.text


def test_a_response_repeats_what_was_asked(server):
    body = post(server, "/responses", {**BODIES["/responses"], "temperature": 0.5, "instructions": "be brief"}).json()
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "deepseek-flash")
    assert (body["temperature"], body["instructions"], body["store"]) == (0.5, "be brief", False)
    assert body["output"][0]["content"][0]["text"] == TEXT
    count = len(encode(TEXT))
    assert body["usage"]["output_tokens"] == count
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + count


def test_a_streamed_response_has_named_numbered_events_and_no_done(server):
    got = events(post(server, "/responses", {**BODIES["/responses"], "stream": True}).text)
    data = [json.loads(item) for _, item in got]
    assert [name for name, _ in got] == [item["type"] for item in data]
    assert [item["sequence_number"] for item in data] == list(range(len(data)))
    assert "".join(item["delta"] for item in data if item["type"] == "response.output_text.delta") == TEXT
    assert data[-1]["type"] == "response.completed"
    assert data[-1]["response"]["usage"]["output_tokens"] == len(encode(TEXT))


def test_a_response_that_was_cut_is_incomplete(server):
    body = post(server, "/responses", {**BODIES["/responses"], "max_output_tokens": 2}).json()
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert server.service is not None and body["usage"]["output_tokens"] == 2


def test_messages_are_blocks_with_a_stop_reason(server):
    body = post(server, "/messages").json()
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "end_turn")
    assert body["content"] == [{"type": "text", "text": TEXT}]
    assert body["usage"]["output_tokens"] == len(encode(TEXT))
    cut = post(server, "/messages", {**BODIES["/messages"], "max_tokens": 2}).json()
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    stopped = post(server, "/messages", {**BODIES["/messages"], "stop_sequences": ["world"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "world")


def test_streamed_messages_have_named_events(server):
    got = events(post(server, "/messages", {**BODIES["/messages"], "stream": True}).text)
    data = [json.loads(item) for _, item in got]
    assert [name for name, _ in got] == [item["type"] for item in data]
    assert (data[0]["type"], data[-1]["type"]) == ("message_start", "message_stop")
    text = "".join(item["delta"].get("text", "") for item in data if item["type"] == "content_block_delta")
    assert text == TEXT and data[-2]["usage"]["output_tokens"] == len(encode(TEXT))


@pytest.mark.parametrize("name", ["claude-opus-5", "claude-3-5-haiku-latest", "deepseek-chat"])
def test_messages_serve_claude_names_and_echo_them(server, name):
    assert post(server, "/messages", {**BODIES["/messages"], "model": name}).json()["model"] == name
    if name.startswith("claude"):
        assert post(server, "/chat/completions", {**BODIES["/chat/completions"], "model": name}).status_code == 400


def test_a_schema_for_messages_reaches_the_engine():
    body = {**BODIES["/messages"], "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
    with running_server(says("{}")) as server:
        assert post(server, "/messages", body).status_code == 200
        assert json.loads(server.peer.requests[0].constraint) == {"kind": "json", "text": '{"type":"object"}'}


def test_counted_tokens_are_the_prompts(server):
    before = len(server.peer.requests)
    body = {key: value for key, value in BODIES["/messages"].items() if key != "max_tokens"}
    for path in ("/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"):
        counted = httpx.post(server.url + path, json=body).json()
        assert counted == {"input_tokens": len(v41_text().chat(BODIES["/chat/completions"]).ids)}
    assert len(server.peer.requests) == before
    too_long = {**body, "messages": [{"role": "user", "content": "word " * 5000}]}
    assert httpx.post(server.url + "/messages/count_tokens", json=too_long).json()["input_tokens"] > 5000


def test_a_text_completion_has_its_own_shape(server):
    body = post(server, "/completions").json()
    assert (body["object"], body["model"]) == ("text_completion", "deepseek-flash")
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["completion_tokens"] == len(encode(TEXT)) and body["usage"]["prompt_tokens"] == 2
    assert server.peer.requests[-1].prompt_ids == [0, *encode("hi")]


@pytest.mark.parametrize(
    ("prompt", "more", "ids"),
    [
        ([5, 6], {}, [5, 6]),
        ([[5, 6]], {}, [5, 6]),
        (["hi"], {}, [0, *encode("hi")]),
        ("hi", {"add_special_tokens": False}, encode("hi")),
        ("<｜begin▁of▁sentence｜><｜User｜>hi", {}, [0, 128803, *encode("hi")]),
        ("", {}, [0]),
    ],
)
def test_a_raw_prompt_is_taken_as_it_is(server, prompt, more, ids):
    assert post(server, "/completions", {**BODIES["/completions"], "prompt": prompt, **more}).status_code == 200
    assert server.peer.requests[-1].prompt_ids == ids


def test_benchmark_clients_fields_pass_and_reach_the_engine(server):
    body = {
        **BODIES["/completions"], "repetition_penalty": 1.0, "logprobs": None, "temperature": 0.0, "ignore_eos": True,
        "min_tokens": 3, "seed": 9, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    got = [json.loads(item) for _, item in events(post(server, "/completions", body).text)[:-1]]
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] > 0
    asked = server.peer.requests[-1]
    assert (asked.ignore_eos, asked.min_tokens, asked.sampling.seed, asked.sampling.temperature) == (True, 3, 9, 0)
    assert asked.max_tokens == 99


def test_a_text_completion_can_repeat_its_prompt_and_stop(server):
    body = post(server, "/completions", {**BODIES["/completions"], "echo": True, "stop": ["world"]}).json()
    assert body["choices"][0]["text"] == "hi" + TEXT.partition("world")[0]
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_text_completion_are_parallel_lists(server, stream):
    answer = post(server, "/completions", {**BODIES["/completions"], "logprobs": 2, "stream": stream})
    chunks = [json.loads(item) for _, item in events(answer.text)[:-1]] if stream else [answer.json()]
    lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            lists[name] += values
    assert all(len(values) == len(encode(TEXT)) for values in lists.values())
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
    assert set(lists["token_logprobs"]) == {-0.5} and len(lists["top_logprobs"][0]) == 2


def test_text_becomes_ids_and_ids_text(server):
    spelled = post(server, "/tokenize", {"prompt": TEXT}).json()
    assert spelled["tokens"] == [0, *encode(TEXT)] and spelled["count"] == len(spelled["tokens"])
    assert spelled["max_model_len"] == 4096
    assert post(server, "/detokenize", {"tokens": spelled["tokens"][1:]}).json() == {"prompt": TEXT}
    bare = post(server, "/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json()
    assert bare["tokens"] == encode(TEXT)
    chat = post(server, "/v1/tokenize", {"messages": HI, **OFF}).json()
    assert chat["tokens"] == v41_text().chat(BODIES["/chat/completions"]).ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [129_280]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/messages/count_tokens", {"model": "gpt-5", "messages": HI}),
        ("/messages/count_tokens", []),
    ],
)
def test_bad_bodies_are_400(server, path, body):
    assert httpx.post(server.url + path, json=body).status_code == 400


@pytest.mark.parametrize(
    ("path", "send", "status", "kind"),
    [
        ("/v1/messages", {"json": {"model": "gpt-5"}}, 400, "invalid_request_error"),
        ("/v1/messages", {"content": b"{"}, 400, "invalid_request_error"),
        ("/v1/messages", {"content": b"x" * 30_000}, 413, "request_too_large"),
        ("/v1/messages/count_tokens", {"content": b"x" * 30_000}, 413, "request_too_large"),
        ("/anthropic/v1/nothing", {"json": {}}, 404, "not_found_error"),
        ("/v1/messages", {"json": {}, "headers": {"x-api-key": "wrong"}}, 401, "authentication_error"),
    ],
)
def test_messages_hear_errors_in_their_own_envelope(path, send, status, kind):
    options = ServerOptions(max_body_bytes=20_000, api_keys=("right",), drain_delay_s=0)
    with running_server(says("x"), options=options) as server:
        answer = httpx.post(server.url + path, **{"headers": {"x-api-key": "right"}, **send})
        assert answer.status_code == status
        body = answer.json()
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert body["error"]["type"] == kind and body["error"]["message"]
        assert body["request_id"] == answer.headers["x-request-id"]
        answer = httpx.get(server.url + "/v1/files", headers={"x-api-key": "right"})
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_waiting_messages_hear_overload_in_their_own_words():
    options = ServerOptions(max_queued_requests=1, drain_delay_s=0)
    scripts = iter([Script(queue_s=0.4), Script()])
    with (
        running_server(lambda request: next(scripts), options=options) as server,
        httpx.stream("POST", server.url + "/messages", json={**BODIES["/messages"], "stream": True}) as first,
    ):
        answer = post(server, "/messages")
        assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        first.read()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_breaks_ends_with_the_protocols_error_and_a_dropped_connection(path):
    script = Script(in_steps(encode("Hello there, world")), reason="error", message="device fault")
    with running_server(lambda request: script) as server:
        text = ""
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", server.url + path, json={**BODIES[path], "stream": True}, timeout=10) as stream,
        ):
            for part in stream.iter_text():
                text += part
    name, data = events(text)[-1]
    error = json.loads(data)
    assert "[DONE]" not in text and "message_stop" not in text and "response.completed" not in text
    assert error["error"]["message"] == "device fault"
    if path == "/messages":
        assert (name, error["type"], error["error"]["type"]) == ("error", "error", "overloaded_error")
    elif path == "/responses":
        assert (name, error["type"], error["message"]) == ("error", "error", "device fault")
    else:
        assert name is None


@pytest.mark.parametrize("path", BODIES)
def test_silence_is_broken_by_comments_after_headers_that_came_at_once(path):
    options = ServerOptions(keepalive_s=0.1, drain_delay_s=0)
    slow = Script(in_steps(encode(TEXT), 3), queue_s=0.35, prefill_s=0.35)
    with (
        running_server(lambda request: slow, options=options) as server,
        httpx.stream("POST", server.url + path, json={**BODIES[path], "stream": True}, timeout=10) as stream,
    ):
        assert stream.status_code == 200 and server.service.admission.waiting == 1
        lines = [line for line in stream.iter_lines() if line]
    first = next(i for i, line in enumerate(lines) if not line.startswith(":"))
    assert first >= 2 and lines.count(": keep-alive") >= 4


@pytest.mark.parametrize("path", BODIES)
def test_the_log_names_the_protocol_and_how_it_ended(server, path):
    before = len(server.log())
    post(server, path)
    line = server.request_end(before + 1)
    protocol = {"/chat/completions": "chat"}.get(path, path[1:])
    assert (line["protocol"], line["status"], line["finish_reason"]) == (protocol, "ok", "stop")
    assert line["completion_tokens"] == len(encode(TEXT))


def test_a_demanded_call_is_demanded_of_the_engine():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    body = {**BODIES["/chat/completions"], "tools": tools, "tool_choice": "required"}
    with running_server(says(call().partition("\n")[2])) as server:
        message = post(server, "/chat/completions", body).json()["choices"][0]
        constraint = json.loads(server.peer.requests[0].constraint)
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert constraint["kind"] == "lark" and "weather" in constraint["text"]


def test_models_are_told_in_both_protocols_words(server):
    listed = httpx.get(server.url + "/anthropic/v1/models").json()
    assert listed["has_more"] is False and listed["first_id"] == listed["data"][0]["id"]
    assert listed["data"][0]["type"] == "model" and listed["data"][0]["display_name"]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_chunks_tell_steps_and_tokens_so_far_when_asked(server, path):
    body = {**BODIES[path], "stream": True, "stream_options": {"include_steps": True}}
    chunks = [json.loads(item) for _, item in events(post(server, path, body).text)[:-1]]
    steps = [chunk["steps"] for chunk in chunks if "steps" in chunk]
    assert steps == sorted(steps, key=lambda step: (step["decode"], step["tokens"]))
    assert steps[-1]["tokens"] == len(encode(TEXT))
    assert steps[-1]["decode"] == len(in_steps(encode(TEXT)))  # all but the first, and the one of the EOS
    assert not any(
        "steps" in json.loads(item)
        for _, item in events(post(server, path, {**BODIES[path], "stream": True}).text)[:-1]
    )
