"""Bodies as clients send them, for every protocol, most of them right and some with one thing spoiled; and `check`.

Bodies drawn from a description alone hardly ever get past validation where fields depend on one another: a tool's
result needs its call, a schema its format, a conversation its order.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import httpx

Body = dict[str, Any]
MODELS = ("deepseek-chat", "deepseek-v4.1-flash", "deepseek-reasoner", "deepseek-flash")
TEXTS = (
    "hi", "Answer in json, please.", "中文 👋🏽 e\u0301", "  ", "</think>", "<｜DSML｜ calls>", "<｜User｜>",
    "a b " * 300, "\u0000\u200d", '{"a": [1, 2]}', "\r\n\n", "नमस्ते", "\\ud800",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 1e308, 0.5, "", "x", "👋" * 9, [], {}, [[]], [None], {"type": "x"}, {"type": "text"},
)  # fmt: skip
ANSWERS = (
    "because</think>Hello 👋🏽, naïve world. 中文",
    "Hello.",
    '{"city": "Zürich", "days": 3}',
    'I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Rome'
    '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>",
    '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city">Rome',
    "one two three four five six seven 2 <",
    "</think></think>",
    "<｜DSML｜ tool_calls></｜DSML｜ invoke>",
)


def chat(rng: random.Random) -> Body:
    """A Chat Completions body."""
    body: Body = {"messages": _chat_messages(rng)}
    _some(rng, body, _sampling(rng), 0.3)
    _some(rng, body, {
        "max_tokens": rng.choice((1, 5, 4000, 256_000)),
        "max_completion_tokens": 7,
        "stop": rng.choice(("five", ["a", "👋🏽", "<"], ["\n"])),
        "thinking": {"type": rng.choice(("enabled", "disabled", "adaptive"))},
        "reasoning_effort": rng.choice(("none", "low", "high", "max")),
        "tools": [_chat_tool(rng, name) for name in ("weather", "search")[: rng.randint(1, 2)]],
        "stream_options": {"include_usage": True, "include_steps": rng.random() < 0.5},
    }, 0.35)  # fmt: skip
    if rng.random() < 0.15:
        body["response_format"] = rng.choice((
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}},
            {"type": "regex", "regex": "[a-z]{1,9}"},
        ))  # fmt: skip
        body["messages"].append({"role": "user", "content": "as json"})
    if rng.random() < 0.15:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 20)}
    if "tools" in body and rng.random() < 0.3:
        forced = {"type": "function", "function": {"name": "weather"}}
        body["tool_choice"] = rng.choice(("auto", "none", "required", forced))
        body["thinking"] = {"type": "disabled"}
    if not body.get("stream"):
        body.pop("stream_options", None)
    return body


def messages(rng: random.Random) -> Body:
    """An Anthropic Messages body."""
    body: Body = {"messages": _anthropic_messages(rng), "max_tokens": rng.choice((1, 50, 4000))}
    _some(rng, body, _sampling(rng, "seed", "min_tokens", "top_k"), 0.3)
    _some(rng, body, {
        "system": rng.choice(("Be brief.", [{"type": "text", "text": "Be brief."}])),
        "stop_sequences": ["five", "👋🏽"],
        "thinking": rng.choice(({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024})),
        "tools": [{"name": "weather", "description": rng.choice(TEXTS), "input_schema": SCHEMA}],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low"},
    }, 0.35)  # fmt: skip
    if "tools" in body and rng.random() < 0.3:
        body["tool_choice"] = rng.choice(({"type": "auto"}, {"type": "any"}, {"type": "none"}))
    return body


def responses(rng: random.Random) -> Body:
    """A Responses body."""
    body: Body = {"input": rng.choice((rng.choice(TEXTS), _response_items(rng), _response_items(rng)))}
    _some(rng, body, _sampling(rng, "top_k", "min_tokens"), 0.3)
    _some(rng, body, {
        "instructions": rng.choice(TEXTS),
        "max_output_tokens": rng.choice((1, 50, 4000)),
        "reasoning": {"effort": rng.choice(("none", "low", "high"))},
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": rng.random() < 0.5}],
        "store": False,
        "parallel_tool_calls": rng.random() < 0.5,
        "include": ["reasoning.encrypted_content"],
    }, 0.35)  # fmt: skip
    if rng.random() < 0.15:
        schema = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
        body["text"] = {"format": rng.choice(({"type": "text"}, schema))}
    return body


def completions(rng: random.Random) -> Body:
    """A text completion's body."""
    prompt = rng.choice((rng.choice(TEXTS) or "x", [rng.randrange(129_280) for _ in range(rng.randint(1, 40))]))
    body: Body = {"prompt": prompt}
    _some(rng, body, _sampling(rng), 0.3)
    _some(rng, body, {
        "max_tokens": rng.choice((1, 16, 4000)), "stop": ["five", "<"], "echo": True, "logprobs": rng.randint(0, 5),
    }, 0.3)  # fmt: skip
    return body


def count_tokens(rng: random.Random) -> Body:
    """What count_tokens takes: a Messages body without the answer's part."""
    body = messages(rng)
    return {name: body[name] for name in ("messages", "system", "tools", "thinking") if name in body}


PATHS: dict[str, Callable[[random.Random], Body]] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/v1/completions": completions,
    "/v1/messages/count_tokens": count_tokens,
}


def draw(rng: random.Random, path: str, spoiled: float) -> Body:
    """A body for `path`, with one thing spoiled in a share of the cases."""
    body = {"model": rng.choice(MODELS), **PATHS[path](rng)}
    if rng.random() < spoiled:
        spoil(rng, body)
    return body


def check(path: str, body: Body | None, answer: httpx.Response) -> None:
    """Raise AssertionError unless the answer is whole and in the protocol's form, or refuses in its form.

    Without `body` it may be streamed or not.
    """
    kind = answer.headers["content-type"]
    if answer.status_code != 200:
        assert answer.status_code in (400, 413), (answer.status_code, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"], answer.text
        assert ("messages" in path) == (answer.json().get("type") == "error")
        return
    if not kind.startswith("text/event-stream"):
        assert body is None or not body.get("stream")
        assert isinstance(answer.json(), dict)
        return
    assert body is None or body["stream"] is True
    data = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    if "completions" in path:
        assert data.pop() == "[DONE]"
    events = [json.loads(one) for one in data]
    assert not any("error" in event and event["error"] for event in events), events[-1]
    if "messages" in path:
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    elif "responses" in path:
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        assert any(choice["finish_reason"] for event in events for choice in event["choices"])


def _sampling(rng: random.Random, *without: str) -> Body:
    fields = {
        "stream": rng.random() < 0.7,
        "temperature": rng.choice((0, 0.5, 1, 2)),
        "top_p": rng.choice((0.1, 1)),
        "seed": rng.choice((0, 7, 2**63 - 1)),
        "top_k": rng.choice((-1, 0, 40)),
        "min_tokens": rng.choice((0, 1)),
    }
    return {name: value for name, value in fields.items() if name not in without}


def _some(rng: random.Random, body: Body, fields: Body, share: float) -> None:
    body |= {name: value for name, value in fields.items() if rng.random() < share}


def _chat_tool(rng: random.Random, name: str) -> Body:
    function = {"name": name, "description": rng.choice(TEXTS), "parameters": SCHEMA}
    return {"type": "function", "function": function | ({"strict": True} if rng.random() < 0.3 else {})}


def _chat_messages(rng: random.Random) -> list[Body]:
    said: list[Body] = [{"role": rng.choice(("system", "developer")), "content": "Be brief."}] * (rng.random() < 0.4)
    for turn in range(rng.randint(0, 3)):
        said.append({"role": "user", "content": rng.choice(TEXTS)})
        if rng.random() < 0.4:
            call = {
                "id": f"c{turn}",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
            said.append({"role": "assistant", "content": rng.choice(("", None)), "tool_calls": [call]})
            said.append({"role": "tool", "tool_call_id": f"c{turn}", "content": rng.choice(TEXTS)})
        answer: Body = {"role": "assistant", "content": rng.choice(TEXTS)}
        said.append(answer | ({"reasoning_content": rng.choice(TEXTS)} if rng.random() < 0.4 else {}))
    part = {"type": "text", "text": rng.choice(TEXTS)}
    said.append({"role": "user", "content": rng.choice((rng.choice(TEXTS), [part, part]))})
    if rng.random() < 0.1:
        said.append({"role": "assistant", "content": rng.choice(TEXTS), "prefix": True})
    return said


def _anthropic_messages(rng: random.Random) -> list[Body]:
    said: list[Body] = []
    for turn in range(rng.randint(0, 3)):
        said.append({"role": "user", "content": rng.choice(TEXTS)})
        if rng.random() < 0.4:
            use = {"type": "tool_use", "id": f"t{turn}", "name": "weather", "input": {"city": "Rome", "days": 2}}
            result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": rng.choice(TEXTS)}
            said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        blocks = [{"type": "text", "text": rng.choice(TEXTS)}]
        if rng.random() < 0.3:
            blocks.insert(0, {"type": "thinking", "thinking": rng.choice(TEXTS), "signature": ""})
        said.append({"role": "assistant", "content": blocks})
    part = {"type": "text", "text": rng.choice(TEXTS)}
    cached = {**part, "cache_control": {"type": "ephemeral"}}
    return [*said, {"role": "user", "content": rng.choice((rng.choice(TEXTS), [part, cached]))}]


def _response_items(rng: random.Random) -> list[Body]:
    items: list[Body] = []
    for turn in range(rng.randint(0, 3)):
        items.append({"role": "user", "content": rng.choice((rng.choice(TEXTS), [_input_text(rng)]))})
        if rng.random() < 0.3:
            items.append({"type": "reasoning", "id": f"r{turn}", "summary": [], "content": []})
        if rng.random() < 0.4:
            call = {"type": "function_call", "call_id": f"f{turn}", "name": "weather", "arguments": '{"city": "Rome"}'}
            items += [call, {"type": "function_call_output", "call_id": f"f{turn}", "output": rng.choice(TEXTS)}]
        items.append({"role": "assistant", "content": [{"type": "output_text", "text": rng.choice(TEXTS)}]})
    return [*items, {"type": "message", "role": rng.choice(("user", "developer")), "content": [_input_text(rng)]}]


def _input_text(rng: random.Random) -> Body:
    return {"type": "input_text", "text": rng.choice(TEXTS)}


def spoil(rng: random.Random, body: Body, junk: tuple[Any, ...] = JUNK) -> None:
    """Replace, leave out or double something, however deep."""
    places = list(_places(body))
    if not places:
        return
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.6:
        holder[key] = copy.deepcopy(rng.choice(junk))
    elif what < 0.8:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[rng.choice(("x", "stream", "content", "role", "type"))] = copy.deepcopy(holder[key])


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)
