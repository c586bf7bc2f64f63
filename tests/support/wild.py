"""Bodies that no client would send: things in every order and of every kind, several of them spoiled, as raw bytes.

`tests.support.bodies` draws what clients send. Here parts are put together without regard for one another, so that what
a server takes for granted is not there: calls without results, results without calls, schemas that are none, numbers
and texts at the ends of what JSON can say, keys that are there twice.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from tests.support.bodies import PATHS, Body, draw, spoil
from tests.support.wild_schemas import TEXTS, VALUES, answer_format, many, schema, text, value

NAMES = ("weather", "search", "", "a.b", "w" * 64, "w" * 65, "ü", "x y", "\x00", 'a"b', "<｜DSML｜", "_", "-")
URLS = (
    "", "x", "data:", "data:,", "data:image/png;base64,", "data:image/png;base64,AAAA", "data:text/plain,hi", "http://",
    "http://127.0.0.1:1/x.png", "file:///etc/hostname", "http://[::1/", "https://x" + "x" * 3000, "//x", "ftp://x/y",
)  # fmt: skip


def wild(rng: random.Random, path: str) -> bytes:
    """A body for `path`."""
    body = draw(rng, path, spoiled=0)
    if rng.random() < 0.8:
        _put_wild(rng, path, body)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        spoil(rng, body, (*VALUES, *TEXTS))
    return _spelled(rng, body)


def headers(rng: random.Random) -> dict[str, str]:
    """Headers of a call, some of them odd."""
    odd = {
        "content-type": rng.choice(("text/plain", "application/json; charset=utf-16", "", "multipart/form-data")),
        "content-encoding": "identity",
        "accept": rng.choice(("text/html", "", "*/*;q=0")),
        "accept-encoding": "gzip",
        "x-request-id": rng.choice(("", "x" * 300, "a b", "ok-1", "%0d%0a")),
        "x-session-id": rng.choice(("", "x" * 300, "s")),
        "authorization": rng.choice(("", "Bearer", "Bearer x y", "Basic x", "Bearer " + "k" * 500)),
        "x-api-key": "k",
        "anthropic-version": rng.choice(("", "2026-10-21")),
        "origin": "null",
    }
    return {name: odd[name] for name in rng.sample(sorted(odd), rng.choice((0, 0, 1, 3)))}


def _put_wild(rng: random.Random, path: str, body: Body) -> None:
    """Put some parts that fit nothing in place of those that do."""
    turns = many(rng, _responses_item if "responses" in path else _message, 6)
    parts: Body = {
        "input" if "responses" in path else "messages": turns,
        "tools": many(rng, _tool, 3),
        "tool_choice": _tool_choice(rng),
        "parallel_tool_calls": rng.random() < 0.5,
        "response_format": answer_format(rng, NAMES),
        "text": {
            "format": {**answer_format(rng, NAMES), "name": "w", "schema": schema(rng)},
            "verbosity": rng.choice(("low", "x")),
        },
        "output_config": {"format": {"type": "json_schema", "schema": schema(rng)}, "effort": rng.choice(("low", "x"))},
        "stop": rng.choice((text(rng), many(rng, text, 18))),
        "stop_sequences": many(rng, text, 18),
        "system": rng.choice((text(rng), many(rng, _part, 3))),
        "thinking": {"type": rng.choice(("enabled", "disabled", "adaptive", "x")), "budget_tokens": value(rng)},
        "reasoning_effort": rng.choice(("none", "minimal", "max", "ultra", "")),
        "reasoning": {"effort": rng.choice(("none", "max", None)), "summary": "auto"},
        "logit_bias": rng.choice(({}, {"1": 5}, {"x": None})),
        "logprobs": value(rng),
        "top_logprobs": rng.choice((0, 20, 21, value(rng))),
        "n": rng.choice((1, 2, 0, None)),
        "stream": rng.random() < 0.6,
        "stream_options": rng.choice((None, {}, {"include_usage": value(rng), "include_steps": value(rng)})),
        "prompt": rng.choice((text(rng), many(rng, text, 2), [many(rng, _token, 5)], many(rng, _token, 5))),
        "instructions": text(rng),
        "include": many(rng, text, 2),
        "user": text(rng),
        "metadata": {text(rng): value(rng)},
        "max_tokens": value(rng),
        "max_output_tokens": value(rng),
        "temperature": value(rng),
        "min_tokens": rng.choice((0, 2, value(rng))),
        "ignore_eos": rng.random() < 0.5,
        "seed": value(rng),
    }
    usual = PATHS[path](rng)
    for name in rng.sample(sorted(parts), rng.choice((1, 1, 2, 3, 6))):
        if name in usual or rng.random() < 0.7:
            body[name] = parts[name]


def _token(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 5, 128799, 128822, 129264, 129279, 129280, -1, 2**70))


def _part(rng: random.Random) -> Any:
    """A content part of any protocol."""
    words, url = text(rng), rng.choice(URLS)
    return rng.choice(
        (
            words,
            {
                "type": rng.choice(("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")),
                "text": words,
            },
            {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}, "citations": None},
            {"type": "refusal", "refusal": words},
            {"type": "image_url", "image_url": rng.choice((url, {"url": url}, {"url": url, "detail": text(rng)}, {}))},
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {
                "type": "image",
                "source": rng.choice(
                    ({"type": "url", "url": url}, {}, {"type": "base64", "media_type": "image/png", "data": words})
                ),
            },
            {
                "type": rng.choice(("file", "input_file")),
                "file": rng.choice(({"file_data": url}, {"file_id": "x"}, {})),
            },
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": words}},
            {"type": "thinking", "thinking": words, "signature": words},
            {"type": "redacted_thinking", "data": words},
            {"type": "tool_use", "id": rng.choice(("t0", "t1", "")), "name": rng.choice(NAMES), "input": value(rng)},
            {
                "type": "tool_result",
                "tool_use_id": rng.choice(("t0", "t1", "")),
                "content": rng.choice((words, [], None, [{"type": "text", "text": words}])),
                "is_error": True,
            },
            {"type": "server_tool_use", "id": "t9", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "t9", "content": []},
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            {"type": "search_result", "source": url, "title": words, "content": []},
            {"type": words},
        )
    )


def _content(rng: random.Random) -> Any:
    return rng.choice((text(rng), text(rng), many(rng, _part, 3), None))


def _message(rng: random.Random) -> Body:
    """A turn of a chat; of Chat Completions or of Messages."""
    roles = ("user", "user", "assistant", "assistant", "system", "developer", "tool", "latest_reminder", "function")
    turn: Body = {"role": rng.choice(roles), "content": _content(rng)}
    extra = {
        "tool_calls": many(rng, _tool_call, 2),
        "tool_call_id": rng.choice(("t0", "t1", "")),
        "reasoning_content": rng.choice((text(rng), None)),
        "prefix": rng.random() < 0.7,
        "name": text(rng),
        "refusal": text(rng),
    }
    wanted = {"assistant": ("tool_calls", "reasoning_content", "prefix"), "tool": ("tool_call_id",)}
    for name in extra:
        if rng.random() < (0.4 if name in wanted.get(turn["role"], ()) else 0.05):
            turn[name] = extra[name]
    if rng.random() < 0.05:
        del turn["content"]
    return turn


def _arguments(rng: random.Random) -> Any:
    return rng.choice(
        ("{}", "", "x", '{"a": 1e400}', '{"a": [1,', '{"a": "\\ud800"}', "[]", "null", '{"": {}}', text(rng))
    )


def _tool_call(rng: random.Random) -> Body:
    call = {"id": rng.choice(("t0", "t1", "")), "type": rng.choice(("function", "custom"))}
    return {**call, "function": {"name": rng.choice(NAMES), "arguments": _arguments(rng)}}


def _responses_item(rng: random.Random) -> Body:
    words, call_id = text(rng), rng.choice(("t0", "t1", ""))
    return rng.choice(
        (
            {"role": rng.choice(("user", "assistant", "system", "developer")), "content": _content(rng)},
            {
                "type": "message",
                "role": rng.choice(("user", "assistant", "tool")),
                "content": _content(rng),
                "status": "completed",
            },
            {
                "type": "reasoning",
                "id": "r",
                "summary": many(rng, _part, 2),
                "content": rng.choice((None, many(rng, _part, 2))),
            },
            {"type": "reasoning", "encrypted_content": words, "summary": []},
            {"type": "function_call", "call_id": call_id, "name": rng.choice(NAMES), "arguments": _arguments(rng)},
            {"type": "function_call", "call_id": call_id, "namespace": "n", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": call_id, "output": _content(rng)},
            {"type": "custom_tool_call", "call_id": call_id, "name": rng.choice(NAMES), "input": words},
            {"type": "custom_tool_call_output", "call_id": call_id, "output": words},
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": words}},
            {
                "type": rng.choice(
                    ("item_reference", "file_search_call", "computer_call", "mcp_call", "local_shell_call", "x")
                ),
                "id": "x",
            },
            {"type": "compaction", "encrypted_content": words},
        )
    )


def _tool(rng: random.Random) -> Any:
    """A tool of any protocol."""
    name, parameters = rng.choice(NAMES[:5] if rng.random() < 0.8 else NAMES), schema(rng)
    function: Body = {"name": name, "description": text(rng), "parameters": parameters, "strict": rng.random() < 0.4}
    if rng.random() < 0.2:
        del function["parameters"]
    return rng.choice(
        (
            {"type": "function", "function": function},
            {"type": "function", **function},
            {"name": name, "input_schema": parameters, "description": text(rng)},
            {
                "type": "custom",
                "name": name,
                "format": rng.choice(
                    ({"type": "text"}, {"type": "grammar", "syntax": "lark", "definition": "start: x"})
                ),
            },
            {"type": "namespace", "name": name, "description": text(rng), "tools": [{"type": "function", **function}]},
            {"type": rng.choice(("web_search", "web_search_20250305", "bash_20250124", "mcp", "")), "name": name},
        )
    )


def _tool_choice(rng: random.Random) -> Any:
    name = rng.choice(NAMES)
    return rng.choice(
        (
            "auto",
            "none",
            "required",
            "",
            {"type": "function", "function": {"name": name}},
            {"type": "function", "name": name},
            {"type": "tool", "name": name, "disable_parallel_tool_use": True},
            {"type": "any"},
            {"type": "auto"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]},
            {"type": "custom", "name": name},
            {},
        )
    )


def _spelled(rng: random.Random, body: Body) -> bytes:
    """The body as JSON, or as what is nearly JSON."""
    whole = json.dumps(body, ensure_ascii=rng.random() < 0.8)
    how = rng.random()
    if how < 0.04 and body:  # a key twice
        key = rng.choice(sorted(body))
        whole = whole[:-1] + ", " + json.dumps({key: rng.choice(VALUES)})[1:]
    elif how < 0.07:  # a number that no float holds
        whole = re.sub(
            r"(?<=: )\d+(?=[,}])",
            lambda _: rng.choice(("1e400", "-1e999", "1e-999", "9" * 400, "0x1", "01")),
            whole,
            count=1,
        )
    elif how < 0.09:
        deep = rng.choice((200, 5000))
        whole = whole[:-1] + ', "x": ' + "[" * deep + "]" * deep + "}"
    elif how < 0.11:
        whole = whole[: rng.randrange(len(whole))]
    raw = whole.encode("utf-8", "surrogatepass")
    if how > 0.98:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.choice((b"\xff", b"\x00", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf")) + raw[at:]
    return raw
