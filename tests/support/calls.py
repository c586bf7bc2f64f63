"""Tool calls as the model writes them, and how answers of each protocol are read back."""

from __future__ import annotations

import json
from typing import Any

from dsuf.engine.messages import Admitted, Tokens
from dsuf.text.completion import completion
from dsuf.text.completion_reply import CompletionReply
from dsuf.text.output import Reply
from dsuf.text.prompt import ChatText
from dsuf.text.protocols import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Protocol

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HI = [{"role": "user", "content": "json hi"}]


def call(name: str = "weather", /, **arguments: Any) -> str:
    """The block for one call; a value that is a string is written as text, another as JSON."""
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜ parameter>\n"
        for key, value in arguments.items()
    ]
    return f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n{"".join(lines)}</｜DSML｜ invoke>\n</｜DSML｜ calls>'


def request(protocol: Protocol, *, stream: bool, thinking: bool, tools: bool, stop: list[str] | None) -> dict[str, Any]:
    """One request in the words of `protocol`; Responses have no stop strings, text completions neither tools."""
    body: dict[str, Any] = {"model": "deepseek-flash", "stream": stream}
    if protocol is CHAT:
        body |= {"messages": HI, "thinking": {"type": "enabled" if thinking else "disabled"}}
        body |= {"tools": [WEATHER]} if tools else {}
        body |= {"stop": stop} if stop else {}
    elif protocol is MESSAGES:
        body |= {"messages": HI, "max_tokens": 999, "thinking": {"type": "enabled" if thinking else "disabled"}}
        body |= {"tools": [{"name": "weather", "input_schema": SCHEMA}]} if tools else {}
        body |= {"stop_sequences": stop} if stop else {}
    elif protocol is RESPONSES:
        body |= {"input": "json hi", "reasoning": {"effort": "high" if thinking else "none"}}
        body |= {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]} if tools else {}
    else:
        body |= {"prompt": "hi"} | ({"stop": stop} if stop else {})
    return body


def answer(
    text: ChatText, protocol: Protocol, body: dict[str, Any], steps: list[list[int]], reason: str
) -> dict[str, Any]:
    """Play `steps` as the engine's and read the answer back: text, reasoning, calls, finish, tokens."""
    if protocol is COMPLETIONS:
        reply = CompletionReply(text, completion(text, body), "id-1")
    else:
        reply = Reply(text, text.prompt(protocol, body), "id-1")
    events = reply.ready(Admitted("x", 7, 2))
    for ids in steps:
        events += reply.tokens(Tokens("x", ids))
        if reply.finished:
            break
    else:
        events += reply.finish(reason)
    if body["stream"]:
        read = read_stream(protocol, [json.loads(event.data) for event in events])
    else:
        assert events == []
        read = read_body(protocol, json.loads(reply.body()))
    return read | {"tokens": reply.completion_tokens, "finish": reply.finish_reason}


def read_body(protocol: Protocol, body: dict[str, Any]) -> dict[str, Any]:
    """Text, reasoning and calls [(name, arguments)] of an answer that was not streamed."""
    if protocol is COMPLETIONS:
        return {"text": body["choices"][0]["text"], "reasoning": "", "calls": []}
    if protocol is CHAT:
        message = body["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        return {
            "text": message.get("content") or "",
            "reasoning": message.get("reasoning_content") or "",
            "calls": calls,
        }
    read: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    for item in body["content"] if protocol is MESSAGES else body["output"]:
        if item["type"] == "text":
            read["text"] += item["text"]
        elif item["type"] == "thinking":
            read["reasoning"] += item["thinking"]
        elif item["type"] == "tool_use":
            read["calls"].append((item["name"], json.dumps(item["input"], ensure_ascii=False)))
        elif item["type"] == "function_call":
            read["calls"].append((item["name"], item["arguments"]))
        else:
            read["text" if item["type"] == "message" else "reasoning"] += "".join(p["text"] for p in item["content"])
    return read


def read_stream(protocol: Protocol, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The same from the deltas of a stream."""
    read: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}

    def add_call(name: str | None, arguments: str) -> None:
        if name:
            read["calls"].append((name, arguments))
        else:
            last, so_far = read["calls"][-1]
            read["calls"][-1] = (last, so_far + arguments)

    for event in events:
        if protocol is COMPLETIONS:
            read["text"] += "".join(choice["text"] for choice in event["choices"])
        elif protocol is CHAT:
            for choice in event["choices"]:
                delta = choice["delta"]
                read["text"] += delta.get("content") or ""
                read["reasoning"] += delta.get("reasoning_content") or ""
                for one in delta.get("tool_calls") or []:
                    add_call(one["function"].get("name"), one["function"].get("arguments") or "")
        elif protocol is RESPONSES:
            if event["type"] == "response.output_text.delta":
                read["text"] += event["delta"]
            elif event["type"] == "response.reasoning_text.delta":
                read["reasoning"] += event["delta"]
            elif event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
                add_call(event["item"]["name"], event["item"]["arguments"])
            elif event["type"] == "response.function_call_arguments.delta":
                add_call(None, event["delta"])
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            add_call(event["content_block"]["name"], "")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            read["text"] += delta.get("text", "")
            read["reasoning"] += delta.get("thinking", "")
            if "partial_json" in delta:
                add_call(None, delta["partial_json"])
    return read
