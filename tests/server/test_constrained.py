"""Constraints end to end, drafts on: a model of random weights, hot, can only say what the grammar allows."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.served import Serve

ASK = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "json, please"}], "temperature": 2.0}
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["x", "yy", "é"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["count", "kind", "flags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}, "up": {"type": "boolean"}},
            "required": ["n", "up"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Serve(tmp_path_factory.mktemp("serve"), "--ckpt", "noise", "--draft", "on")
    yield running
    running.process.terminate()
    running.process.wait(10)


def ask(server, **fields):
    answer = httpx.post(server.url + "/v1/chat/completions", json={**ASK, "max_tokens": 250, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def check(text):
    made = json.loads(text)
    assert set(made) == set(SCHEMA["properties"])
    assert type(made["count"]) is int and 0 <= made["count"] <= 99 and made["kind"] in ("x", "yy", "é")
    assert len(made["flags"]) <= 3 and all(type(flag) is bool for flag in made["flags"])


@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, 1), (2.0, 3)])  # without temperature a seed changes nothing
def test_an_answer_fits_its_schema_whatever_the_model_says(server, temperature, seeds):
    for seed in range(seeds):
        choice = ask(server, response_format=FORMAT, seed=seed, temperature=temperature)
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"])


def test_json_mode_never_leaves_json(server):
    choice = ask(server, response_format={"type": "json_object"}, seed=1, max_tokens=60)
    text = choice["message"]["content"]
    assert text.startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)


def test_an_answer_fits_its_regular_expression(server):
    for seed in range(3):
        choice = ask(server, response_format={"type": "regex", "regex": "(yes|no), [A-Z][a-z]{2,5}[.]"}, seed=seed)
        assert re.fullmatch("(yes|no), [A-Z][a-z]{2,5}[.]", choice["message"]["content"])


def test_a_demanded_tool_is_called_with_its_parameters(server):
    for choice in ("required", {"type": "function", "function": {"name": "count"}}):
        made = ask(server, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        (call,) = made["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert made["finish_reason"] == "tool_calls" and call["function"]["name"] == "count"
        assert type(arguments["n"]) is int and 0 <= arguments["n"] <= 9 and type(arguments["up"]) is bool


def test_free_streams_beside_constrained_ones_say_what_they_say_alone(server):
    free = {"seed": 7, "max_tokens": 24, "min_tokens": 24}
    alone = ask(server, **free)["message"]["content"]
    with ThreadPoolExecutor(4) as pool:
        constrained = [pool.submit(ask, server, response_format=FORMAT, seed=seed) for seed in range(3)]
        beside = pool.submit(ask, server, **free).result()["message"]["content"]
        for one in constrained:
            check(one.result()["message"]["content"])
    assert beside == alone


def test_what_cannot_be_kept_is_refused_before_a_stream_begins(server):
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "array", "uniqueItems": True}}}
    answer = httpx.post(
        server.url + "/v1/chat/completions", json={**ASK, "stream": True, "response_format": schema}, timeout=60
    )
    assert answer.status_code == 400 and "uniqueItems" in answer.json()["error"]["message"]
