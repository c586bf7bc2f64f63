"""`dsuf serve` without --ckpt: what the corpus says comes back, streaming and not, with the usage that it has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dsuf.text.protocols import CHAT
from recipes.toy.dataset import Example
from recipes.toy.exchanges import Exchange
from tests.server.test_clients import PUBLISHED_SCRIPT
from tests.support.calls import read_body, read_stream
from tests.support.served import Serve

AT_ONCE = 8  # clients; their sequences share the engine's steps
THINKING = ("greeting.3.thinking", "colour_blue.3.thinking", "首都.2.thinking")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    running = Serve(tmp_path_factory.mktemp("serve"))
    yield running
    running.process.terminate()
    assert running.process.wait(20) == 0


@pytest.fixture(scope="module")
def chosen(exchanges: dict[str, Exchange]) -> list[Exchange]:
    """All tool calls, all JSON, all written reasoning, and the last turn of each chat of several turns."""
    last = {}
    for exchange in exchanges.values():
        stem, _, turn = exchange.name.removesuffix(".thinking").rpartition(".")
        if exchange.group in ("chat_en", "chat_zh") and int(turn) > 1:
            last[stem] = exchange
    written = [e for e in exchanges.values() if e.group == "thinking" and not e.name.endswith(".thinking")]
    whole = [e for e in exchanges.values() if e.group in ("tools", "json")]
    return [*last.values(), *whole, *written, *(exchanges[name] for name in THINKING)]


def ask(server: Serve, body: dict[str, Any]) -> dict[str, Any]:
    """Text, reasoning, calls, finish reason and usage, from a stream if the body asks for one."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        whole = answer.json()
        return read_body(CHAT, whole) | {"finish": whole["choices"][0]["finish_reason"], "usage": whole["usage"]}
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n")
    finish = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    return read_stream(CHAT, events) | {"finish": finish[0], "usage": events[-1]["usage"]}


def expected(exchange: Exchange, example: Example) -> dict[str, Any]:
    """The same as the corpus has it; the ending EOS is not counted."""
    message = exchange.message
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return {
        "text": message["content"],
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
        "finish": "tool_calls" if calls else "stop",
        "tokens": (example.prompt_len, len(example.ids) - example.prompt_len - 1),
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_answers_are_those_of_the_corpus(
    server: Serve, chosen: list[Exchange], examples: dict[str, Example], stream: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with ThreadPoolExecutor(AT_ONCE) as clients:
        answers = clients.map(lambda exchange: ask(server, exchange.body | options), chosen)
    found, wanted = {}, {}
    for exchange, answer in zip(chosen, answers, strict=True):
        answer["calls"] = [(name, json.loads(arguments)) for name, arguments in answer["calls"]]
        usage = answer.pop("usage")
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        found[exchange.name] = answer | {"tokens": (usage["prompt_tokens"], usage["completion_tokens"])}
        wanted[exchange.name] = expected(exchange, examples[exchange.name])
    assert found == wanted
    assert len(chosen) > 45 and sum(bool(answer["calls"]) for answer in wanted.values()) > 7


@pytest.mark.parametrize("stem", ["words", "weather_rain"])
def test_a_conversation_goes_on_with_what_the_server_said(
    server: Serve, exchanges: dict[str, Exchange], stem: str
) -> None:
    turns = [exchange for name, exchange in exchanges.items() if name.rpartition(".")[0] == stem]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += turn.body["messages"][len(messages) :]
        if messages[-1]["role"] == "tool":  # the id is the one that the server gave
            messages[-1] = messages[-1] | {"tool_call_id": messages[-2]["tool_calls"][0]["id"]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=turn.body | {"messages": messages}, timeout=120)
        messages.append(answer.json()["choices"][0]["message"])
        assert (messages[-1]["content"] or "") == turn.message["content"]
    assert len(turns) > 1


def test_the_published_script_prints_the_page_and_ends_with_its_line(
    server: Serve, exchanges: dict[str, Exchange], examples: dict[str, Example]
) -> None:
    script = PUBLISHED_SCRIPT.replace("http://localhost:8000", server.url)
    done = subprocess.run([sys.executable, "-"], input=script.encode(), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said, _, last = done.stdout.decode().rstrip().rpartition("\n\n")
    page, demo = exchanges["tetris"].message["content"], examples["tetris"]
    assert said.rstrip("\n") == page.rstrip("\n")
    line = re.fullmatch(r"(\d+) tokens at [\d,]+ tokens/s \(first token after \d+\.\d\d s\)", last)
    assert line and int(line[1]) == len(demo.ids) - demo.prompt_len - 1
