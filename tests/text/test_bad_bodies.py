"""Bodies that make no prompt: values out of range, what is not supported, and anything at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.errors import NotSupported, PromptError, UsageError
from dsuf.text.prompt import NO_IMAGES
from tests.support.prompts import prompt
from tests.support.serving import v41_text


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"temperature": 1e300},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"presence_penalty": 3},
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_k": 2**40},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.5},
        {"seed": "x"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 393_217},
        {"max_tokens": 1.5},
        {"max_completion_tokens": 0},
        {"max_completion_tokens": "many"},
        {"min_tokens": -1},
        {"min_tokens": 6, "max_tokens": 5},
        {"min_tokens": "x"},
        {"ignore_eos": "yes"},
        {"ignore_eos": 1},
        {"n": 2},
        {"n": 0},
        {"logprobs": "x"},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stream_options": {"include_usage": True}},
        {"stream": "yes"},
        {"messages": []},
        {"messages": [{"role": "system", "content": ""}]},
        {"messages": [{"role": "developer", "content": []}]},
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        {"messages": [3]},
        {"model": 3},
        {"model": None},
        {"model": "gpt-5"},
        {"model": "DeepSeek-V4-Pro"},
        {"reasoning_effort": "extreme"},
        {"thinking": {"type": "perhaps"}},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "bad name"}}]},
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        },
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
def test_bad_values_are_the_clients_errors(fields):
    with pytest.raises(PromptError) as caught:
        prompt(**fields)
    assert str(caught.value) and caught.value.http_status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": 1e999}',
        b"[" * 100_000,
        b'{"messages":' * 1000 + b"1" + b"}" * 1000,
    ],
)
def test_what_is_no_json_object_is_the_clients_error(raw):
    with pytest.raises(PromptError, match="invalid"):
        v41_text().chat(raw)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
)
def test_what_this_build_cannot_do_is_refused_by_name(fields, name):
    with pytest.raises(NotSupported, match=name):
        prompt(**fields)


def test_neutral_values_of_unsupported_fields_pass():
    prompt(logit_bias={}, min_p=0, repetition_penalty=1.0, n=1, presence_penalty=0, user="me", metadata={"a": "b"})
    prompt(stop=None, logit_bias=None, stream=True, stream_options={"continuous_usage_stats": True})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png", "detail": "low"}},
        {"type": "file", "file_data": "data:image/png;base64,iVBORw0KGgo="},
    ],
)
def test_images_are_refused(part):
    with pytest.raises(NotSupported) as caught:
        prompt(messages=[{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}])
    assert str(caught.value) == NO_IMAGES == "image input is not supported by this build"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *("messages", "model", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "stream_options", "tools"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "logprobs", "top_logprobs", "logit_bias"),
    *("response_format", "tool_choice", "thinking", "reasoning_effort", "min_p"),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_any_body_is_a_prompt_or_a_usage_error(fields):
    try:
        made = prompt(**fields)
    except UsageError as error:
        assert str(error)
    else:
        assert made.ids and 1 <= made.max_tokens <= 4096
