"""The official SDKs beyond chat, unchanged: Responses, text completions, parsed schemas, and Anthropic's."""

from __future__ import annotations

import json

import anthropic
import openai
import pydantic
import pytest

from dsuf.server.options import ServerOptions
from tests.support.calls import SCHEMA, call
from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says

ANSWER = "Hello 👋🏽, naïve world. 中文"
HI = [{"role": "user", "content": "hi"}]
OFF = {"thinking": {"type": "disabled"}}
FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
TOOL = {"name": "weather", "input_schema": SCHEMA}


class Person(pydantic.BaseModel):
    name: str
    age: int


def client(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options)


def claude(server, key="none"):
    return anthropic.Anthropic(base_url=f"{server.url}/anthropic", api_key=key, max_retries=0)


def test_openai_responses_whole_and_streamed():
    with running_server(says(f"because</think>{ANSWER}", cached_tokens=3)) as server:
        sdk = client(server)
        whole = sdk.responses.create(model="deepseek-flash", input="hi")
        with sdk.responses.stream(model="deepseek-flash", input="hi") as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
    assert whole.output_text == streamed.output_text == ANSWER
    assert whole.output[0].content[0].text == "because"
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert whole.usage.output_tokens_details.reasoning_tokens == 1
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_openai_responses_call_a_tool_and_take_its_result():
    with running_server(says(f"I look.</think>{call(city='Oslo')}", size=4)) as server:
        sdk = client(server)
        first = sdk.responses.create(model="deepseek-flash", input=HI, tools=[FUNCTION])
        made = next(item for item in first.output if item.type == "function_call")
        assert (made.name, json.loads(made.arguments)) == ("weather", {"city": "Oslo"})
        history = [*HI, *[item.model_dump(exclude_none=True) for item in first.output]]
        history.append({"type": "function_call_output", "call_id": made.call_id, "output": "rain"})
        sdk.responses.create(model="deepseek-flash", input=history, tools=[FUNCTION])
        first_ids, second_ids = (request.prompt_ids for request in server.peer.requests)
    assert second_ids[: len(first_ids)] == first_ids


def test_openai_responses_raise_when_the_engine_fails():
    script = Script(in_steps(encode(ANSWER)), reason="error", message="device fault")
    with running_server(lambda request: script) as server, pytest.raises(openai.APIError, match="device fault"):
        list(client(server).responses.create(model="deepseek-flash", input="hi", stream=True))


def test_openai_parses_an_answer_into_a_model():
    with running_server(says('{"name": "Zoë 👋", "age": 7}')) as server:
        sdk = client(server)
        parsed = sdk.chat.completions.parse(model="deepseek-flash", messages=HI, response_format=Person, extra_body=OFF)
        assert parsed.choices[0].message.parsed == Person(name="Zoë 👋", age=7)
        answer = sdk.responses.parse(
            model="deepseek-flash", input="hi", text_format=Person, reasoning={"effort": "none"}
        )
        assert answer.output_parsed == Person(name="Zoë 👋", age=7)
        for request in server.peer.requests:
            constraint = json.loads(request.constraint)
            assert constraint["kind"] == "json"
            assert set(json.loads(constraint["text"])["required"]) == {"name", "age"}


def test_openai_text_completions_whole_and_streamed():
    with running_server(says(ANSWER)) as server:
        sdk = client(server)
        fields = {"model": "deepseek-flash", "prompt": "hi", "max_tokens": 99}
        assert sdk.completions.create(**fields).choices[0].text == ANSWER
        chunks = list(sdk.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == len(encode(ANSWER)) and not chunks[-1].choices


def test_anthropic_whole_and_streamed():
    with running_server(says(f"because</think>{ANSWER}", cached_tokens=3)) as server:
        sdk = claude(server)
        fields = {"model": "claude-opus-5", "max_tokens": 99, "messages": HI}
        whole = sdk.messages.create(**fields)
        with sdk.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == "because" and whole.content[1].text == text == ANSWER
    assert streamed.content[1].text == ANSWER and streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == len(encode(f"because</think>{ANSWER}"))
    assert whole.usage.cache_read_input_tokens == 3
    assert whole.model == "claude-opus-5"


def test_anthropic_calls_a_tool_and_takes_its_result():
    with running_server(says(f"I look.</think>{call(city='Oslo')}", size=4)) as server:
        sdk = claude(server)
        fields = {"model": "claude-opus-5", "max_tokens": 99, "tools": [TOOL]}
        with sdk.messages.stream(**fields, messages=HI) as stream:
            first = stream.get_final_message()
        made = next(block for block in first.content if block.type == "tool_use")
        assert (made.name, made.input, first.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": made.id, "content": "rain"}
        history = [*HI, {"role": "assistant", "content": [block.model_dump() for block in first.content]}]
        sdk.messages.create(**fields, messages=[*history, {"role": "user", "content": [result]}])
        first_ids, second_ids = (request.prompt_ids for request in server.peer.requests)
    assert second_ids[: len(first_ids)] == first_ids


def test_anthropic_counts_tokens_and_lists_models():
    with running_server(says("x")) as server:
        sdk = claude(server)
        counted = sdk.messages.count_tokens(model="claude-opus-5", messages=HI).input_tokens
        sdk.messages.create(model="claude-opus-5", max_tokens=9, messages=HI)
        assert counted == len(server.peer.requests[0].prompt_ids)
        assert [model.id for model in sdk.models.list()] == ["deepseek-v4.1-flash"]


def test_anthropic_raises_its_own_errors():
    options = ServerOptions(api_keys=("right",), drain_delay_s=0)
    script = Script(in_steps(encode(ANSWER)), reason="error", message="device fault")
    with running_server(lambda request: script, options=options) as server:
        fields = {"model": "claude-opus-5", "max_tokens": 99, "messages": HI}
        with pytest.raises(anthropic.AuthenticationError):
            claude(server, "wrong").messages.create(**fields)
        with pytest.raises(anthropic.BadRequestError, match="gpt-5"):
            claude(server, "right").messages.create(**{**fields, "model": "gpt-5"})
        with pytest.raises(anthropic.APIStatusError, match="device fault"):
            list(claude(server, "right").messages.create(**fields, stream=True))
