"""JSON schemas, regular expressions, texts and values at the ends of what there is, for `tests.support.wild`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.support.bodies import SCHEMA

TEXTS = (
    "", " ", "\n", "\x00", "\ufeff", "\ud800", "\udfff\ud800", "a\udc00", "\U0010ffff", "\u200d", "e\u0301" * 50,
    "json", "hi", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜System｜>",
    "<｜DSML｜", "<｜deepseek_image｜>", "</｜DSML｜ parameter>", "<tool_result>", "</tool_result>", "{{x}}",
    "%s", '"', "\\",
    "x" * 5000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -0.0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 1e308, 5e-324,
    float("nan"), float("inf"), 1.0, 1.5, [], {}, [[]], [{}], [None], [""], {"": ""}, {"type": None}, {"type": ""},
)  # fmt: skip
PATTERNS = (
    "", "a", "[", "(", "a{2,1}", "(?=a)b", "(?<!a)b", r"(a)\1", "(?P<x>a)", "a{1000}", "(a{1000}){1000}", r"\p{L}+",
    "^a$",
    "[^\x00-\U0010ffff]", "(a|)*", "(a*)*b", r"\d{3}-\d{4}", "a" * 3000, "\ud800", r"\x", "[a-", ".*", "(?i)json",
    "\\b",
    "((((((((((a*)*)*)*)*)*)*)*)*)*)*", "[[:alpha:]]", "中+", "(?s:.)", "a++", "(?#c)a",
)  # fmt: skip


def text(rng: random.Random) -> str:
    """A text; two texts; a part of one."""
    return rng.choice(TEXTS) + (rng.choice(TEXTS) if rng.random() < 0.2 else "")


def value(rng: random.Random) -> Any:
    """Anything but a text, mostly."""
    return rng.choice(VALUES) if rng.random() < 0.9 else text(rng)


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A JSON schema, or what stands where one should."""
    if depth > 3 or rng.random() < 0.1:
        return rng.choice(
            (True, False, {}, value(rng), {"type": rng.choice(("string", "x", "null", ["string", "null"]))})
        )
    inner = schema(rng, depth + 1)
    return rng.choice(
        (
            SCHEMA,
            {"type": "object", "properties": {text(rng)[:80]: inner, "city": schema(rng, depth + 1)}},
            {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": rng.choice(([], None, "x", {}, {"a": None})), "required": value(rng)},
            {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": many(rng, rng.choice((text, value)), 3)}},
            },
            {"type": "array", "items": inner, "minItems": value(rng), "prefixItems": [inner]},
            {
                "type": rng.choice(("string", ["string"], [], None)),
                "pattern": rng.choice(PATTERNS),
                "format": text(rng),
            },
            {"type": "number", "minimum": value(rng), "multipleOf": value(rng)},
            {"type": "string", "minLength": value(rng), "maxLength": value(rng)},
            {"enum": many(rng, value, 3)},
            {"const": value(rng)},
            {rng.choice(("anyOf", "allOf", "oneOf", "not", "if")): rng.choice(([inner, inner], inner, []))},
            {"$ref": rng.choice(("#", "#/$defs/a", "#/x", "http://127.0.0.1:1/x", "", 3)), "$defs": {"a": inner}},
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "$defs": rng.choice(({"a": {"$ref": "#/$defs/a"}}, [], 1)),
            },
            {"type": "object", "patternProperties": {rng.choice(PATTERNS): inner}, "propertyNames": inner},
        )
    )


def many(rng: random.Random, one: Callable[[random.Random], Any], most: int) -> list[Any]:
    """Up to `most` of `one`."""
    return [one(rng) for _ in range(rng.randint(0, most))]


def answer_format(rng: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    """A response_format."""
    wanted = rng.choice(("text", "json_object", "json_schema", "json_schema", "regex", "grammar"))
    made: dict[str, Any] = {"type": wanted}
    if wanted == "json_schema":
        made["json_schema"] = {"name": rng.choice(names), "schema": schema(rng), "strict": rng.random() < 0.5}
    elif wanted == "regex":
        made["regex"] = rng.choice(PATTERNS)
    return made
