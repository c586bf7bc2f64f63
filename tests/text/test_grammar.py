"""Constraints: whatever is sampled under the masks fits, drafts or not, and what cannot be kept is refused."""

from __future__ import annotations

import functools
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.errors import EngineGone, PromptError
from dsuf.text.grammar import Grammar, TokenGrammars
from dsuf.text.tokenizer import v41_tokenizer_json
from dsuf.text.tool_grammar import tool_call_grammar
from tests.support.serving import encode, v41_vocabulary

VOCAB, EOS, THINK_END, DSML = 129_280, 1, 128_822, 128_825
OPENS = (*encode("\n\n<"), DSML)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["é", "👋", "x"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FULL_NAME = re.compile(r"[A-Z][a-zé]{1,5} (Jr|Sr)\.")
CALL = (
    '<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Zürich < 👋🏽 "x"</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">12</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def weather(strict=False, **more):
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["city", "days"], **more}
    return json.dumps(
        [
            {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": strict}},
            {"type": "function", "function": {"name": "now", "parameters": None, "strict": None}},
        ]
    )


@functools.cache
def grammars():
    return TokenGrammars(v41_tokenizer_json().decode(), VOCAB, EOS)


def constraint(kind, text, **fields):
    grammar = text if isinstance(text, Grammar) else Grammar(kind, text, **fields)
    grammar.check()
    return grammars()(grammar.encode())


def rows(count):
    return np.zeros((count, VOCAB // 32), np.uint32)


def allowed(row):
    return np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist()


def decode(ids):
    return b"".join(v41_vocabulary().bytes_of[i] for i in ids).decode()


def fits(made, text):
    """Whether the answer `text` may be given, token by token."""
    mask = rows(len(encode(text)) + 2)
    ids = [*encode(text), EOS]
    return made.fill(mask, ids) == len(ids)


def walk(made, rng, limit=400):
    """A random answer, ending with EOS wherever that is allowed half of the time."""
    mask, ids = rows(1), []
    while len(ids) < limit:
        made.fill(mask, [])
        choices = allowed(mask[0])
        assert choices, "nothing may follow"
        token = EOS if EOS in choices and rng.random() < 0.5 else rng.choice(choices)
        made.advance([token])
        ids.append(token)
        if token == EOS:
            return decode(ids[:-1])
    raise AssertionError("no end")


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_sampled_fits_the_schema(rng):
    person = json.loads(walk(constraint("json", json.dumps(PERSON)), rng))
    assert set(person) <= set(PERSON["properties"]) and {"name", "age"} <= set(person)
    assert isinstance(person["age"], int) and 0 <= person["age"] <= 130 and len(person["name"]) <= 8
    assert all(tag in ("é", "👋", "x") for tag in person.get("tags", [])) and len(person.get("tags", [])) <= 2


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_sampled_fits_the_regular_expression(rng):
    assert FULL_NAME.fullmatch(walk(constraint("regex", FULL_NAME.pattern), rng))


SPELLINGS = ("</think>", "<｜System｜>", "<｜begin▁of▁sentence｜>", "｜DSML｜", "<｜deepseek_image｜>", "<｜▁pad▁｜>")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_words_of_a_schema_that_read_like_a_special_token_are_text(spelling):
    word, rng = f"a{spelling}b", random.Random(0)
    assert json.loads(walk(constraint("json", json.dumps({"const": word})), rng)) == word
    assert json.loads(walk(constraint("json", json.dumps(strict_object(word))), rng)) == {word: 7}
    assert walk(constraint("regex", re.escape(word)), rng) == word
    tools = [{"type": "function", "function": {"name": "f", "parameters": strict_object(word), "strict": True}}]
    assert f'name="{word}"' in walk(constraint("", tool_call_grammar(json.dumps(tools), DSML, several=False)), rng)


def strict_object(name):
    return {
        "type": "object",
        "properties": {name: {"type": "integer", "enum": [7]}},
        "required": [name],
        "additionalProperties": False,
    }


def test_no_special_token_may_stand_in_a_text():
    made = constraint("json", '{"type": "string"}')
    made.advance(encode('"'))
    special = {encode(spelling)[0] for spelling in (*SPELLINGS, "<｜User｜>", "<think>", "<dsml:")}
    assert not special & set(allowed_first(made))


def test_json_mode_means_one_object():
    assert fits(constraint("json", ""), '{"any": [1, "é", null]}')
    for text in ("[1]", "3", '{"a": 1} and more', "", "```json\n{}"):
        assert not fits(constraint("json", ""), text)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_along_drafts_are_the_rows_of_single_steps(data):
    text = data.draw(st.sampled_from(['{"name": "Zoë 👋", "age": 7}', '{"name": "a", "age": 130, "tags": ["é"]}']))
    ids = [*encode("because</think>"), *encode(text), EOS]
    schema = json.dumps(PERSON)
    ahead = constraint("json", schema, think_end=THINK_END, call_start=OPENS)
    single = constraint("json", schema, think_end=THINK_END, call_start=OPENS)
    i = 0
    while i < len(ids):
        size = data.draw(st.integers(0, 5))
        drafts = ids[i : i + size]
        wrong = data.draw(st.integers(0, size))
        if wrong < len(drafts):
            drafts[wrong] = data.draw(st.sampled_from([5, 30, DSML, EOS, *ids]))
        mask, one = rows(6), rows(1)
        kept = ahead.fill(mask, drafts)
        for j in range(kept + 1):
            probe = grammars()(ahead._grammar.encode())
            probe.advance(ids[:i] + drafts[:j])
            probe.fill(one, [])
            assert np.array_equal(mask[j], one[0])
        assert kept == len(drafts) or drafts[kept] not in allowed(mask[kept])
        assert not mask[kept + 1 :].any()
        taken = ids[i : i + data.draw(st.integers(1, 6))]
        ahead.advance(taken)
        single.advance(taken)
        i += len(taken)


def test_reasoning_is_free_but_does_not_end_the_answer():
    made = constraint("json", json.dumps(PERSON), think_end=THINK_END)
    mask = rows(3)
    assert made.fill(mask, [7, THINK_END]) == 2
    assert len(allowed(mask[0])) == VOCAB - 1 and EOS not in allowed(mask[0])
    assert len(allowed(mask[2])) < 20
    made.advance([7, 8, 9, THINK_END, *encode('{"name": "x", "age": 1}')])
    made.fill(mask, [])
    assert allowed(mask[0]) == [EOS]


def test_a_tool_call_may_stand_instead_of_the_answer():
    made = constraint("json", json.dumps(PERSON), call_start=OPENS)
    mask = rows(5)
    assert made.fill(mask, [*OPENS, 77]) == 4
    assert OPENS[0] in allowed(mask[0]) and allowed(mask[2]) == [DSML] and len(allowed(mask[3])) == VOCAB
    made.advance([*OPENS, 5, 6, EOS])
    assert OPENS[0] not in allowed_first(constraint("json", json.dumps(PERSON)))


def allowed_first(made):
    mask = rows(1)
    made.fill(mask, [])
    return allowed(mask[0])


def test_a_demanded_tool_call_is_one():
    made = constraint("", tool_call_grammar(weather(), DSML))
    assert fits(made, CALL)
    assert fits(made, CALL.replace(">12<", ">-3<").replace(' "x"', "\n</nearly> <b>"))
    assert fits(made, '<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>\n' + CALL)
    for wrong in ("It is sunny.", CALL.replace("weather", "wether"), CALL.replace(">12<", ">soon<"), CALL[:-1]):
        assert not fits(made, wrong)


def test_a_strict_tool_gets_all_its_parameters():
    one = CALL.replace('<｜DSML｜ parameter name="days" string="false">12</｜DSML｜ parameter>\n', "")
    assert fits(constraint("", tool_call_grammar(weather(), DSML)), one)
    assert not fits(constraint("", tool_call_grammar(weather(strict=True), DSML)), one)
    assert fits(constraint("", tool_call_grammar(weather(strict=True), DSML)), CALL)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("json", '{"type": "objec"}', "objec"),
        ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json", "[1", "JSON schema"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(", "regular expression"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(kind, text, told):
    with pytest.raises(PromptError, match=told):
        Grammar(kind, text).check()


def test_a_token_outside_the_grammar_is_a_fault():
    with pytest.raises(EngineGone, match="token 5 is outside"):
        constraint("json", "").advance([5])


def test_a_grammar_that_nothing_fits_is_refused():
    with pytest.raises(PromptError, match="no answer fits it"):
        constraint("regex", "[^\x00-\U0010ffff]")


def test_a_grammar_that_outgrows_its_limit_is_a_fault_and_not_the_end_of_the_answer(capfd):
    made = constraint("regex", "(a{1000}){1000}")
    with pytest.raises(EngineGone, match="cannot be kept any further: lexer error: too many"):
        for _ in range(4000):
            made.fill(rows(1), [])
            made.advance(encode("a" * 16))
    assert capfd.readouterr().err == ""


def test_a_broken_constraint_is_refused():
    for text in ("", "{}", '{"kind": "yaml", "text": ""}'):
        with pytest.raises(PromptError):
            grammars()(text)


def test_a_vocabulary_that_does_not_fill_its_last_word_has_no_bits_beyond():
    made = constraint("json", "", think_end=THINK_END)
    made._vocab_size = VOCAB - 5
    mask = rows(1)
    made.fill(mask, [])
    assert max(allowed(mask[0])) == VOCAB - 6
