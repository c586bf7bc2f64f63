"""Bad values and unsupported fields of every protocol: the client's error, told by name, never silence or a fault."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.errors import NotSupported, PromptError, UsageError
from dsuf.text.completion import completion
from dsuf.text.prompt import NO_IMAGES
from dsuf.text.protocols import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.support.serving import v41_text

TEXT = v41_text()
HELLO = [{"role": "user", "content": "Hello"}]
BASE = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": "Hello"},
    "responses": {"input": "Hello"},
    "messages": {"messages": HELLO, "max_tokens": 9},
}
PROTOCOLS = {one.name: one for one in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
PNG = "data:image/png;base64,AAAA"


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def flat(name="f", **parameters):
    return {"type": "function", "name": name, "parameters": {"type": "object", **parameters}}


def made(name, **fields):
    body = json.dumps({"model": "deepseek-flash", **BASE[name], **fields}).encode()
    return completion(TEXT, body) if name == "completions" else TEXT.prompt(PROTOCOLS[name], body)


BAD = [
    *[(name, {"model": "gpt-5"}, "gpt-5") for name in BASE],
    *[(name, {"model": None}, "") for name in BASE],
    *[(name, {"temperature": 2.5}, "temperature") for name in BASE if name != "messages"],
    *[(name, {"temperature": "hot"}, "temperature") for name in BASE],
    *[(name, {"top_p": 1.5}, "top_p") for name in BASE if name != "messages"],
    *[(name, {"seed": -1}, "seed") for name in BASE],
    *[(name, {"stream": "yes"}, "") for name in BASE],
    *[(name, {"ignore_eos": 3}, "ignore_eos") for name in BASE],
    *[(name, {"min_tokens": 10**7}, "min_tokens") for name in BASE],
    ("chat", {"messages": []}, ""),
    ("chat", {"messages": [{"role": "assistant", "content": None}]}, ""),
    ("chat", {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, ""),
    (
        "chat",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "x", **tool(), "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
        "",
    ),
    ("chat", {"tools": [tool(), tool()]}, ""),
    ("chat", {"tools": [tool("no spaces")]}, ""),
    ("chat", {"n": 2}, "n value"),
    ("chat", {"top_logprobs": 3}, "logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"stop": [""]}, "stop"),
    ("chat", {"stop": ["x"] * 17}, "top"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {"presence_penalty": 3}, "presence_penalty"),
    ("chat", {"response_format": {"type": "json_object"}}, "json"),
    ("chat", {"tools": [tool()], "tool_choice": "required"}, "Thinking mode"),
    ("chat", {"tools": [{**tool(), "function": {"name": "f", "strict": True, "parameters": {"type": "string"}}}]}, ""),
    ("chat", {"reasoning_effort": "bogus"}, "bogus"),
    ("chat", {"thinking": {"type": "bogus"}}, "bogus"),
    ("chat", {"max_tokens": 393_217}, "max_tokens"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [1, "x"]}, "prompt"),
    ("completions", {"prompt": [129_280]}, "129279"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": [True]}, "prompt"),
    ("completions", {"prompt": "word " * 5000}, "maximum context length"),
    ("completions", {"n": 2}, "n"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"stop": ["x"] * 17}, "stop"),
    ("completions", {"stop": ""}, "stop"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("responses", {"input": None}, ""),
    ("responses", {"max_output_tokens": 0}, "max_tokens"),
    ("responses", {"max_output_tokens": 393_217}, "max_tokens"),
    ("responses", {"top_logprobs": 21}, "top_logprobs"),
    ("responses", {"reasoning": {"effort": "bogus"}}, "bogus"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "json"),
    ("responses", {"tools": [flat(), flat()]}, ""),
    ("responses", {"tools": [flat()], "tool_choice": "required"}, "Thinking mode"),
    ("messages", {"max_tokens": 0}, "max_tokens"),
    ("messages", {"messages": []}, ""),
    ("messages", {"stop_sequences": [""]}, "stop"),
    ("messages", {"thinking": {"type": "bogus"}}, "bogus"),
    ("messages", {"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "server tools"),
    ("messages", {"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
]

UNSUPPORTED = [
    *[(name, {"logit_bias": {"5": 1}}, "logit_bias") for name in BASE],
    *[(name, {"min_p": 0.1}, "min_p") for name in BASE],
    *[(name, {"repetition_penalty": 1.2}, "repetition_penalty") for name in BASE],
    ("chat", {"functions": [{"name": "f"}]}, "functions"),
    ("chat", {"function_call": "auto"}, "function_call"),
    ("chat", {"modalities": ["text", "audio"]}, "modality"),
    ("chat", {"audio": {"voice": "x"}}, "audio"),
    ("chat", {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ("chat", {"best_of": 2}, "best_of"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]},
        NO_IMAGES,
    ),
    (
        "chat",
        {"response_format": {"type": "regex", "regex": "a"}, "tools": [tool()]},
        "response_format regex beside tools",
    ),
    (
        "chat",
        {
            "messages": [*HELLO, {"role": "assistant", "content": "a", "prefix": True}],
            "response_format": {"type": "regex", "regex": "a+"},
            "thinking": {"type": "disabled"},
        },
        "prefix",
    ),
    ("chat", {"response_format": {"type": "regex", "regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ("chat", {"response_format": {"type": "regex", "regex": "a"}, "min_tokens": 2}, "min_tokens"),
    ("completions", {"suffix": "the end"}, "suffix"),
    ("completions", {"prompt": ["a", "b"]}, "several prompts"),
    ("completions", {"prompt": [[1], [2]]}, "several prompts"),
    ("completions", {"echo": True, "logprobs": 1}, "echo with logprobs"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"conversation": "conv_1"}, "conversation"),
    ("responses", {"background": True}, "background"),
    ("responses", {"prompt": {"id": "x"}}, "prompt"),
    ("responses", {"tools": [{"type": "file_search", "vector_store_ids": []}]}, "file_search"),
    ("responses", {"tools": [{"type": "mcp", "server_label": "x"}]}, "mcp"),
    ("responses", {"tools": [{"type": "code_interpreter"}]}, "code_interpreter"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input_file",
    ),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]},
        NO_IMAGES,
    ),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ("messages", {"container": "x"}, "container"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}]},
        "document",
    ),
    (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                    ],
                }
            ]
        },
        NO_IMAGES,
    ),
]
UNKEPT = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(("name", "fields", "told"), BAD)
def test_bad_values_are_told(name, fields, told):
    with pytest.raises(PromptError) as caught:
        made(name, **fields)
    assert str(caught.value) and told in str(caught.value) and caught.value.http_status == 400


@pytest.mark.parametrize(("name", "fields", "told"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(name, fields, told):
    with pytest.raises(NotSupported) as caught:
        made(name, **fields)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNKEPT}}}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": UNKEPT}}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": UNKEPT}}}),
    ],
)
def test_a_schema_that_cannot_be_kept_names_the_keyword(name, fields):
    with pytest.raises(PromptError, match="uniqueItems"):
        made(name, **fields)


@pytest.mark.parametrize("name", BASE)
def test_hints_pass(name):
    made(
        name, user="u", metadata={"user_id": "u"}, store=True, service_tier="auto", parallel_tool_calls=True,
        presence_penalty=0, frequency_penalty=0.0, logit_bias=None, min_p=0, repetition_penalty=1.0, unheard_of=[1],
    )  # fmt: skip


@pytest.mark.parametrize("name", BASE)
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"messages": 3}'])
def test_what_is_no_request_is_the_clients_error(name, raw):
    with pytest.raises(PromptError):
        completion(TEXT, raw) if name == "completions" else TEXT.prompt(PROTOCOLS[name], raw)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = (
    "model messages input prompt max_tokens max_output_tokens temperature top_p stop stop_sequences stream tools "
    "tool_choice response_format text output_config thinking reasoning_effort reasoning logprobs top_logprobs seed "
    "stream_options include system suffix echo n modalities best_of metadata min_tokens ignore_eos logit_bias"
)


@pytest.mark.parametrize("name", BASE)
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES.split()), values, min_size=1, max_size=4))
def test_any_json_is_answered_or_refused(name, fields):
    body = {"model": "deepseek-flash", **BASE[name], **fields}
    try:
        completion(TEXT, body) if name == "completions" else TEXT.prompt(PROTOCOLS[name], body)
    except UsageError as error:
        assert str(error)
