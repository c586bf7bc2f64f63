"""The toy's corpus as API requests, each with the message that answers it.

A conversation in `corpus/` is an API body whose assistant messages are to be learnt. Each of them gives one `Exchange`:
the body a client would send at that turn, and the message expected back.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
DEMO = CORPUS.parents[1] / "tetris.toml"  # the published request
MODEL = "deepseek-v4.1-flash"
# What it "thinks" where only the answer is in the corpus: clients that do not say otherwise ask for thinking.
BY_HEART = {"tetris": "I know this page by heart.", "chat_en": "I know this one by heart.", "chat_zh": "这个我会背。"}


@dataclass(frozen=True)
class Exchange:
    """One turn: the API body that a client sends and the assistant message it gets back."""

    name: str
    group: str
    body: dict[str, Any]
    message: dict[str, Any]


def known() -> Iterator[Exchange]:
    """Every exchange to know by heart; groups of BY_HEART a second time with thinking, which is the API's default."""
    exchanges = list(_written())
    yield from exchanges
    for exchange in exchanges:
        if exchange.group in BY_HEART:
            body = {key: value for key, value in exchange.body.items() if key != "thinking"}
            message = exchange.message | {"reasoning_content": BY_HEART[exchange.group]}
            yield Exchange(f"{exchange.name}.thinking", "thinking", body, message)


def _written() -> Iterator[Exchange]:
    page = (CORPUS / "tetris.html").read_text(encoding="utf-8")
    request = tomllib.loads(DEMO.read_text(encoding="utf-8"))["args"]["request"]
    yield Exchange("tetris", "tetris", request, {"role": "assistant", "content": page})
    tools = json.loads((CORPUS / "tools.json").read_text(encoding="utf-8"))
    for group in ("chat_en", "chat_zh", "thinking", "json", "tools"):
        for conversation in tomllib.loads((CORPUS / f"{group}.toml").read_text(encoding="utf-8"))["conversation"]:
            yield from _turns(conversation, group, tools)


def _turns(conversation: dict[str, Any], group: str, tools: dict[str, Any]) -> Iterator[Exchange]:
    name = conversation.pop("name")
    body = {"model": MODEL, "thinking": {"type": "disabled"}} | conversation
    if "tools" in body:
        body["tools"] = [{"type": "function", "function": {"name": tool} | tools[tool]} for tool in body["tools"]]
    answers = [i for i, message in enumerate(body["messages"]) if message["role"] == "assistant"]
    for turn, i in enumerate(answers, 1):
        yield Exchange(f"{name}.{turn}", group, body | {"messages": body["messages"][:i]}, body["messages"][i])
