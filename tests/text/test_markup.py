"""What reaches a client's eye: no markup in arguments or content, no lost tails, whole characters, honest usage.

Each test stands for the whole kind of a public report about another server, so texts and splits are drawn.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.messages import Admitted, Tokens
from dsuf.text.completion import completion
from dsuf.text.completion_reply import CompletionReply
from dsuf.text.output import Reply
from dsuf.text.protocols import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.support.calls import answer, call, request
from tests.support.serving import encode, split, v41_text

TEXT = v41_text()
PARSED = (CHAT, RESPONSES, MESSAGES)
by_name = {"ids": lambda protocol: protocol.name}
splits = st.lists(st.integers(1, 8), min_size=1, max_size=12)
# what looks like the beginning or the end of markup, and what JSON must escape
odd_texts = st.lists(
    st.sampled_from(
        [
            "<",
            "</",
            "</｜",
            "｜",
            "DSML",
            "<｜DSML",
            "parameter>",
            " invoke",
            '"',
            "\\",
            "\n",
            "👋",
            "é",
            "x",
            " ",
            "calls>",
        ]
    ),
    max_size=10,
).map("".join)

# DSML has no escape: the parser ends a value at its closing mark, also when all of the text comes at once
odd_values = odd_texts.filter(lambda text: "</｜DSML｜" not in text)


def asked(protocol, tools=False, stop=None, stream=True):
    return request(protocol, stream=stream, thinking=False, tools=tools, stop=stop)


@pytest.mark.parametrize("protocol", PARSED, **by_name)
@settings(max_examples=50, deadline=None)
@given(odd_values, splits)
def test_arguments_are_json_without_markup_in_any_split(protocol, city, sizes):
    ids = encode("I look.\n\n" + call(city=city, days=3))
    got = answer(TEXT, protocol, asked(protocol, tools=True), split(ids, sizes), "stop")
    ((name, arguments),) = got["calls"]
    assert name == "weather" and json.loads(arguments) == {"city": city, "days": 3}
    assert got["text"] == "I look." and got["finish"] == "tool_calls"


@pytest.mark.parametrize("protocol", PARSED, **by_name)
@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["I look.", "2 < 3, so", "a <b> c", "x </y>", "<"]), splits)
def test_no_piece_of_an_opening_tag_leaks_into_the_content(protocol, said, sizes):
    ids = encode(f"{said}\n\n{call(city='Oslo')}")
    got = answer(TEXT, protocol, asked(protocol, tools=True), split(ids, sizes), "stop")
    assert got["text"].rstrip() == said
    assert len(got["calls"]) == 1


@pytest.mark.parametrize("protocol", (*PARSED, COMPLETIONS), **by_name)
@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["2 <", "2 </", "a <｜", "</think", "ends with <", "x STO", "👋 <"]), splits, st.booleans())
def test_a_tail_that_could_have_been_markup_is_not_lost(protocol, said, sizes, tools):
    body = asked(protocol, tools=tools and protocol is not COMPLETIONS, stop=["STOP"])
    assert answer(TEXT, protocol, body, split(encode(said), sizes), "stop")["text"] == said


@pytest.mark.parametrize("protocol", PARSED, **by_name)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "12"}, {"city": "12"}),
        ({"city": "true"}, {"city": "true"}),
        ({"days": 12, "on": True, "no": None}, {"days": 12, "on": True, "no": None}),
        ({"arguments": '{"a": 1}'}, {"arguments": '{"a": 1}'}),
        ({"arguments": {"a": 1}}, {"arguments": {"a": 1}}),
        ({"name": "x", "string": "y"}, {"name": "x", "string": "y"}),
    ],
)
def test_types_follow_the_attribute_and_no_name_is_special(protocol, arguments, expected):
    got = answer(TEXT, protocol, asked(protocol, tools=True), [encode(call(**arguments))], "stop")
    assert json.loads(got["calls"][0][1]) == expected


@pytest.mark.parametrize("protocol", (CHAT, MESSAGES, COMPLETIONS), **by_name)
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["ab", "b", " a", "👋", "é", "STOP", " STOP", "ST", "OP", "\n"]), max_size=12), st.data()
)
def test_text_ends_before_the_first_complete_stop_string_wherever_it_is_in_a_step(protocol, words, data):
    said = "x" + "".join(words)
    stops = data.draw(st.lists(st.sampled_from(["STOP", "b a", "👋", "OPST", "é\n", "TO"]), min_size=1, unique=True))
    found = [(said.find(stop) + len(stop), said.find(stop)) for stop in stops if stop in said]
    got = answer(TEXT, protocol, asked(protocol, stop=stops), split(encode(said), data.draw(splits)), "length")
    assert got["text"] == (said[: min(found)[1]] if found else said)
    assert got["finish"] == ("stop" if found else "length")
    assert got["tokens"] <= len(encode(said))


@pytest.mark.parametrize("protocol", (*PARSED, COMPLETIONS), **by_name)
@settings(max_examples=50, deadline=None)
@given(
    st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs", "Cn", "Co"]), min_size=1, max_size=12), splits
)
def test_characters_arrive_whole(protocol, said, sizes):
    ids = encode("x" + said)
    for event in events_of(protocol, split(ids, sizes)):
        event.data.encode()  # no lone surrogate
        assert "\ufffd" not in event.data or "\ufffd" in said


def events_of(protocol, steps, **fields):
    body = asked(protocol) | fields
    if protocol is COMPLETIONS:
        reply = CompletionReply(TEXT, completion(TEXT, body), "id-1")
    else:
        reply = Reply(TEXT, TEXT.prompt(protocol, body), "id-1")
    events = reply.ready(Admitted("x", 7, 2))
    for ids in steps:
        events += reply.tokens(Tokens("x", ids))
    return events + reply.finish("stop")


@pytest.mark.parametrize("protocol", (CHAT, COMPLETIONS), **by_name)
@pytest.mark.parametrize("include_usage", [False, True])
def test_no_chunk_but_the_last_ones_has_a_usage(protocol, include_usage):
    fields = {"stream_options": {"include_usage": True}} if include_usage else {}
    events = [json.loads(event.data) for event in events_of(protocol, [[i] for i in encode("Hello there")], **fields)]
    last = 2 if include_usage else 1
    assert all(event.get("usage") is None for event in events[:-last])
    for event in events[-last:]:
        assert (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) == (7, 2)
        assert event["usage"]["total_tokens"] == 9
        assert event["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_responses_have_a_usage_only_at_their_end():
    events = [json.loads(event.data) for event in events_of(RESPONSES, [encode("Hello there")])]
    usages = [event["response"]["usage"] for event in events if "response" in event]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert (usages[-1]["input_tokens"], usages[-1]["output_tokens"], usages[-1]["total_tokens"]) == (7, 2, 9)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_messages_begin_with_the_prompts_tokens_and_end_with_the_answers():
    events = [json.loads(event.data) for event in events_of(MESSAGES, [encode("Hello there")])]
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (5, 2)
    assert (last["input_tokens"], last["cache_read_input_tokens"], last["output_tokens"]) == (5, 2, 2)
    assert [event["type"] for event in events].count("message_stop") == 1


@pytest.mark.parametrize("protocol", PARSED, **by_name)
def test_a_broken_call_is_told_without_a_crash(protocol):
    for broken in (
        call(city="x")[:-60],
        call(city="x")[:40],
        call().replace("weather", "unknown"),
        call() + " and more",
    ):
        for reason in ("stop", "length"):
            for stream in (False, True):
                got = answer(TEXT, protocol, asked(protocol, tools=True, stream=stream), [encode(broken)], reason)
                assert "DSML" not in got["text"]


def test_a_continued_answer_holds_only_what_is_new():
    half = {"role": "assistant", "content": "```python\n", "prefix": True}
    body = asked(CHAT, stop=["```"]) | {"messages": [{"role": "user", "content": "code"}, half]}
    got = answer(TEXT, CHAT, body, split(encode("\nprint(1)\n```\nDone"), [3]), "stop")
    assert (got["text"], got["reasoning"], got["finish"]) == ("\nprint(1)\n", "", "stop")
    thought = {"role": "assistant", "content": "", "reasoning_content": "so", "prefix": True}
    body = {"model": "deepseek-flash", "stream": True, "messages": [{"role": "user", "content": "x"}, thought]}
    got = answer(TEXT, CHAT, body, split(encode(" far</think>Yes"), [2]), "stop")
    assert (got["text"], got["reasoning"]) == ("Yes", " far")
