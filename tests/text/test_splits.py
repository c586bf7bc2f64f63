"""Whatever steps the ids come in, and streamed or not, every protocol tells the same answer, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.text.protocols import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.support.calls import answer, call, request
from tests.support.serving import encode, split, v41_text

TEXT = v41_text()
PROTOCOLS = (CHAT, RESPONSES, MESSAGES, COMPLETIONS)
PIECES = (
    "plain words",
    " 2 < 3 <",
    "👋🏽",
    "👩‍👩‍👧‍👦",
    "e\u0301a\u0308\u0323",
    "中文字符",
    "नमस्ते",
    "שלום",
    "\r\n\n",
    "  ",
    '"quoted" \\',
    "</",
    "<｜",
    "｜DSML",
    " calls>",
    "STOP",
    "ST",
    "END",
    "{}",
)
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
splits = st.lists(st.integers(1, 8), min_size=1, max_size=12)
broken = st.lists(st.sampled_from(sorted(TEXT.vocabulary.open_ids)), max_size=3)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_stream_is_the_text_of_the_whole(protocol, data):
    thinking, tools = data.draw(st.booleans()), data.draw(st.booleans())
    stop = data.draw(st.sampled_from([None, ["STOP"], ["END", "👋", "<"], ["文字"]]))
    ids = encode(data.draw(texts))
    if thinking:
        ids = [*encode(data.draw(texts)), *encode("</think>"), *ids]
    if tools and data.draw(st.booleans()):
        ids += encode("\n\n" + call(city=data.draw(texts), days=[1, {"é": None}]))
    ids += data.draw(broken)
    reason = data.draw(st.sampled_from(["stop", "length"]))
    fields = {"thinking": thinking, "tools": tools, "stop": stop}
    whole = answer(TEXT, protocol, request(protocol, stream=False, **fields), [ids], reason)
    for sizes in (data.draw(splits), [1]):
        streamed = answer(TEXT, protocol, request(protocol, stream=True, **fields), split(ids, sizes), reason)
        if protocol is MESSAGES:  # its whole answer has arguments parsed, and those of a call that was cut are {}
            streamed["calls"] = [(name, _normal(arguments)) for name, arguments in streamed["calls"]]
        assert streamed == whole


def _normal(arguments):
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except ValueError:
        return "{}"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_the_text_is_the_one_that_was_encoded(protocol):
    text = "naïve 👩‍👩‍👧‍👦 e\u0301 中文 2 <"
    fields = {"thinking": False, "tools": False, "stop": None}
    for size in range(1, 9):
        got = answer(TEXT, protocol, request(protocol, stream=True, **fields), split(encode(text), [size]), "stop")
        assert got["text"] == text and got["tokens"] == len(encode(text)) and got["finish"] == "stop"


SPECIAL = [i for i, text in enumerate(TEXT.vocabulary.bytes_of) if i > 127_999 and text]
MARKUP = encode("\n\n" + call(city="x", n=1) + '</think><think>{}[],:"')
any_ids = st.lists(
    st.one_of(
        st.sampled_from(sorted(TEXT.vocabulary.open_ids)),
        st.integers(2, 127_999),
        st.sampled_from(SPECIAL),
        st.sampled_from(MARKUP),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@settings(max_examples=60, deadline=None)
@given(any_ids, splits, st.booleans(), st.booleans(), st.sampled_from(["stop", "length"]))
def test_any_ids_are_told_alike_and_never_a_crash(protocol, ids, sizes, thinking, tools, reason):
    fields = {"thinking": thinking, "tools": tools, "stop": None}
    whole = answer(TEXT, protocol, request(protocol, stream=False, **fields), [ids], reason)
    streamed = answer(TEXT, protocol, request(protocol, stream=True, **fields), split(ids, sizes), reason)
    if protocol is MESSAGES:
        streamed["calls"] = [(name, _normal(arguments)) for name, arguments in streamed["calls"]]
    assert streamed == whole
    assert whole["tokens"] == len(ids)
