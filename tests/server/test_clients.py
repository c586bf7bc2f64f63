"""Published clients, unchanged, against a running server."""

from __future__ import annotations

import re
import subprocess
import sys

import openai
import pytest

from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says

ANSWER = "<!DOCTYPE html>\n<p>naïve 👋🏽 中文</p>"

PUBLISHED_SCRIPT = r"""
import json, time, urllib.request

body = {
    "model": "deepseek-v4.1-flash",
    "messages": [{"role": "user", "content": "implement the tetris game. output HTML code directly - no explanation."}],
    "thinking": {"type": "disabled"},
    "stream": True,
    "stream_options": {"include_usage": True},
}
req = urllib.request.Request("http://localhost:8000/v1/chat/completions", json.dumps(body).encode(),
                             {"Content-Type": "application/json"})
start, first, tokens = time.time(), None, 0
with urllib.request.urlopen(req) as stream:
    for line in stream:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                first = first or time.time()
                print(text, end="", flush=True)
end = time.time()
print(f"\n\n{tokens} tokens at {tokens / (end - first):,.0f} tokens/s (first token after {first - start:.2f} s)")
"""


def test_the_published_script_runs_unchanged():
    with running_server(says(ANSWER, step_s=0.002)) as server:
        script = PUBLISHED_SCRIPT.replace("localhost:8000", f"127.0.0.1:{server.port}")
        done = subprocess.run([sys.executable, "-"], input=script.encode(), capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr.decode()
    text, _, last = done.stdout.decode().rstrip().rpartition("\n\n")
    assert text == ANSWER
    assert re.fullmatch(r"(\d+) tokens at [\d,]+ tokens/s \(first token after \d+\.\d\d s\)", last)
    assert last.startswith(f"{len(encode(ANSWER))} tokens at ")


def client(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **options)


HI = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "hi"}]}


def test_the_openai_sdk_reads_a_whole_answer():
    with running_server(says(f"because</think>{ANSWER}", cached_tokens=3)) as server:
        answer = client(server).chat.completions.create(**HI)
    assert answer.choices[0].message.content == ANSWER and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.reasoning_content == "because"
    assert answer.usage.completion_tokens == len(encode(f"because</think>{ANSWER}"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_openai_sdk_reads_a_stream(include_usage):
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    with running_server(says(ANSWER, size=2)) as server:
        chunks = list(
            client(server).chat.completions.create(
                **HI, stream=True, extra_body={"thinking": {"type": "disabled"}}, **options
            )
        )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == ANSWER
    assert chunks[-1].usage.completion_tokens == len(encode(ANSWER))
    assert bool(chunks[-1].choices) is not include_usage


def test_the_openai_sdk_lists_models():
    with running_server(says("x")) as server:
        sdk = client(server)
        assert [model.id for model in sdk.models.list()] == ["deepseek-v4.1-flash"]
        assert sdk.models.retrieve("deepseek-ai/DeepSeek-V4.1-Flash").id == "deepseek-ai/DeepSeek-V4.1-Flash"
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("gpt-5")


def test_the_openai_sdk_raises_its_own_errors():
    with running_server(says("x")) as server:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client(server).chat.completions.create(**HI, temperature=9)
        with pytest.raises(openai.BadRequestError, match=r"supported API model names are .*deepseek-v4\.1-flash"):
            client(server).chat.completions.create(model="gpt-5", messages=HI["messages"])


def test_the_openai_sdk_raises_when_the_engine_fails_in_a_stream():
    script = Script(in_steps(encode("Hello there, world")), reason="error", message="device fault")
    with running_server(lambda request: script) as server, pytest.raises(openai.APIError, match="device fault"):
        list(client(server).chat.completions.create(**HI, stream=True))


def test_the_openai_sdk_receives_a_tool_call():
    call = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="ls">\n'
        '<｜DSML｜ parameter name="path" string="true">/srv</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
    with running_server(says(f"I look.</think>{call}", size=4)) as server:
        message = client(server).chat.completions.create(**HI, tools=[tool]).choices[0].message
        assert message.tool_calls[0].function.arguments == '{"path": "/srv"}'
        history = [*HI["messages"], message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a b"})
        again = client(server).chat.completions.create(model="deepseek-flash", messages=history, tools=[tool])
        assert again.choices[0].finish_reason == "tool_calls"
        assert server.peer.requests[1].prompt_ids[: len(server.peer.requests[0].prompt_ids)] == (
            server.peer.requests[0].prompt_ids
        )
