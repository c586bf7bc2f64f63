"""Token ids to events: the same text for any split into steps, usage, stop strings, EOS, logprobs, tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.messages import Admitted, TokenLogprobs, Tokens
from dsuf.text.output import Reply
from tests.support.serving import encode, split, v41_text

EOS = 1
OFF = {"thinking": {"type": "disabled"}}
TEXT = v41_text()
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Zürich < 👋🏽 "x"</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
CORPUS = (
    "plain words, and 2 < 3",
    "naïve café ÅÄÖ",
    "中文字符和日本語テキスト",
    "👋🏽👩‍👩‍👧‍👦 family 🏳️‍🌈!",
    "नमस्ते दुनिया",
    "שלום עולם مرحبا",
    "line\r\nbreaks\n\n  and\ttabs",
    "a</think>b <|not special|> <｜DSML｜ quoted",
    '{"key": [1, 2.5, "\\u00e9"]}',
)


def reply(stream=True, **fields):
    fields.setdefault("messages", [{"role": "user", "content": "json please"}])
    body = {"model": "deepseek-flash", "stream": stream, **fields}
    return Reply(TEXT, TEXT.chat(json.dumps(body).encode()), "chatcmpl-1")


def play(answer, steps, reason="stop", logprobs=None):
    """All events of an answer that comes in `steps`."""
    events = answer.ready(Admitted("x", 7, 2))
    for ids in steps:
        events += answer.tokens(Tokens("x", ids, logprobs and [logprobs(token) for token in ids]))
        if answer.finished:
            return [json.loads(event.data) for event in events]
    events += answer.finish(reason)
    return [json.loads(event.data) for event in events]


def joined(events, field="content"):
    return "".join(choice["delta"].get(field) or "" for event in events for choice in event["choices"])


def whole(ids, reason="stop", **fields):
    """The message of the answer that is not streamed and comes in one step."""
    answer = reply(stream=False, **fields)
    play(answer, [ids], reason)
    return json.loads(answer.body())


def test_the_first_chunk_carries_the_role_and_only_the_last_the_usage():
    events = play(reply(**OFF), split(encode("Hello there, world"), [2]))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in events[:-1])
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["prompt_tokens"] == 7 and events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert {event["model"] for event in events} == {"deepseek-flash"}


def test_include_usage_adds_one_chunk_with_the_same_usage_and_no_choices():
    events = play(reply(**OFF, stream_options={"include_usage": True}), split(encode("Hello there"), [2]))
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-1]["choices"] == [] and events[-1]["usage"] == events[-2]["usage"]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", CORPUS)
def test_every_split_streams_the_text_of_the_whole(text):
    ids = encode(text)
    expected = whole(ids, **OFF)["choices"][0]["message"]["content"]
    for size in range(1, 9):
        assert joined(play(reply(**OFF), split(ids, [size]))) == expected
    assert "\ufffd" not in expected


ids_of_any_kind = st.lists(
    st.one_of(
        st.sampled_from(sorted(TEXT.vocabulary.open_ids)),
        st.integers(3, 127_999),
        st.sampled_from(encode("👋🏽👩‍👩‍👧‍👦é中\n</think>")),
    ),
    min_size=1,
    max_size=24,
)
sizes = st.lists(st.integers(1, 8), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(ids_of_any_kind, sizes, st.sampled_from(["stop", "length"]), st.booleans())
def test_any_ids_in_any_split_give_the_same_text_and_usage(ids, sizes, reason, thinking):
    fields = {} if thinking else OFF
    expected = whole(ids, reason, **fields)
    events = play(reply(**fields), split(ids, sizes), reason)
    message = expected["choices"][0]["message"]
    for field in ("content", "reasoning_content"):
        assert joined(events, field) == (message.get(field) or "")
    assert events[-1]["usage"] == expected["usage"]
    assert events[-1]["usage"]["completion_tokens"] == len(ids)


def test_an_emoji_arrives_whole():
    ids = encode("👋🏽")
    assert len(ids) > 2
    parts = [event["choices"][0]["delta"].get("content") for event in play(reply(**OFF), split(ids, [1]))]
    assert [part for part in parts if part] == ["👋", "🏽"]


def test_an_answer_cut_inside_a_character_ends_before_it_and_counts_every_token():
    ids = encode("Hello 👋")[:-1]
    events = play(reply(**OFF), [ids], "length")
    assert joined(events) == "Hello"
    assert events[-1]["usage"]["completion_tokens"] == len(ids)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    body = whole(ids, "length", **OFF)
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["usage"]["completion_tokens"] == len(ids)


def test_an_ending_eos_is_neither_text_nor_counted():
    events = play(reply(**OFF), [[*encode("Bye"), EOS]])
    assert "end▁of" not in joined(events)
    assert events[-1]["usage"]["completion_tokens"] == len(encode("Bye"))


def test_an_ignored_eos_is_no_text_but_counts():
    ids = [*encode("Hello"), EOS, *encode(" there"), EOS]
    events = play(reply(**OFF, ignore_eos=True), [ids], "length")
    assert joined(events) == "Hello there"
    assert events[-1]["usage"]["completion_tokens"] == 4


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_stop_string_is_found_in_any_split(data):
    text = "One two — STOP here 👋 and STOP again"
    ids = encode(text)
    stop = data.draw(st.sampled_from(["STOP", "O", "two — S", "👋", "— STOP here", "never"]))
    answer = reply(**OFF, stop=[stop, "zzz"])
    events = play(answer, split(ids, data.draw(sizes)))
    assert joined(events) == text.split(stop)[0]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    if stop == "never":
        assert events[-1]["usage"]["completion_tokens"] == len(ids)
    else:
        assert events[-1]["usage"]["completion_tokens"] < len(ids) or text.endswith(stop)


def test_a_stop_string_ends_the_reply_at_once():
    answer = reply(**OFF, stop="two")
    answer.ready(Admitted("x", 7))
    events = answer.tokens(Tokens("x", encode("One two three four")))
    assert answer.finished and json.loads(events[-1].data)["choices"][0]["finish_reason"] == "stop"
    assert answer.finish_reason == "stop" and answer.completion_tokens == len(encode("One two"))


def test_reasoning_and_answer_are_apart():
    ids = encode("short thought</think>The answer é")
    for size in (1, 3, 50):
        answer = reply()
        events = play(answer, split(ids, [size]))
        assert joined(events, "reasoning_content") == "short thought" and joined(events) == "The answer é"
        assert answer.reasoning_tokens == 2


@settings(max_examples=100, deadline=None)
@given(sizes)
def test_a_tool_call_streams_clean_arguments_in_any_split(sizes):
    ids = encode(f"I look.\n\n{CALL}")
    events = play(reply(**OFF, tools=[WEATHER]), split(ids, sizes))
    calls = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls") or []]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"city": 'Zürich < 👋🏽 "x"'}
    assert "DSML" not in arguments + joined(events)
    assert joined(events).strip() == "I look."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = whole(ids, **OFF, tools=[WEATHER])["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert message["content"] == joined(events)


def test_logprobs_come_with_each_token_and_have_no_infinity():
    answer = reply(**OFF, logprobs=True, top_logprobs=2)
    ids = [*encode("Hello 👋"), EOS]
    events = play(
        answer, [ids], logprobs=lambda token: TokenLogprobs(-0.25, [(token, -0.25), (token + 1, float("-inf"))])
    )
    entries = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {}).get("content") or []
    ]
    assert len(entries) == len(ids) - 1
    assert entries[0]["token"] == "Hello" and bytes(entries[0]["bytes"]) == b"Hello"
    assert entries[0]["logprob"] == -0.25 and entries[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "Hello 👋"


def test_a_whole_answer_has_the_shape_clients_read():
    body = whole(encode("because</think>Hi"), seed=3)
    assert body["object"] == "chat.completion" and body["id"] == "chatcmpl-1"
    assert body["choices"][0]["message"]["reasoning_content"] == "because"
    assert body["choices"][0]["message"]["content"] == "Hi"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_the_body_of_an_unfinished_answer_is_refused():
    with pytest.raises(RuntimeError):
        reply(stream=False).body()
