"""Exchanges drawn at random: needles (a fact to copy out of a long text), and a known task after unknown text."""

from __future__ import annotations

import random
import tomllib
from typing import Any

from recipes.toy.dataset import CORPUS, MODEL, Exchange

_WORDS = {
    key: text.split("|") if "|" in text else text.split()
    for key, text in tomllib.loads((CORPUS / "words.toml").read_text(encoding="utf-8")).items()
}
_SUMMARY = tomllib.loads((CORPUS / "harness.toml").read_text(encoding="utf-8"))["summary"]
_SENTENCE_TOKENS = 10  # mean of `sentence` in the toy's tokenizer


def sentence(rng: random.Random, language: str = "en") -> str:
    """A grammatical sentence without a meaning."""
    if language == "zh":
        a, b = rng.sample(_WORDS["zh_nouns"], 2)
        name, place, verb = (rng.choice(_WORDS[key]) for key in ("zh_names", "zh_places", "zh_verbs"))
        return f"{name}{place}{verb}{a}和{b}。"
    a, b = rng.sample(_WORDS["nouns"], 2)
    verb, place = rng.choice(_WORDS["verbs"]), rng.choice(_WORDS["places"])
    return f"The {rng.choice(_WORDS['adjectives'])} {a} {verb} the {b} {place}."


def _fact(name: str, value: str, language: str) -> str:
    return f"{name}的密码是 {value}。" if language == "zh" else f"The secret code of {name} is {value}."


def needle(rng: random.Random, tokens: int | None = None) -> Exchange:
    """A fact near the start, decoys of its form anywhere, about `tokens` tokens of filler, the question at the end."""
    if tokens is None:
        tokens = rng.randint(500, 900) if rng.random() < 0.1 else rng.randint(150, 500)
    language = "zh" if rng.random() < 0.15 else "en"
    prefix = "zh_" if language == "zh" else ""
    names = rng.sample(_WORDS[prefix + "names"], rng.randint(2, 5))
    facts = []
    for name in names:
        words = rng.sample(_WORDS[prefix + "nouns"], rng.randint(2, 3))
        digits = "".join(rng.choices("0123456789", k=rng.randint(1, 3)))
        facts.append(_fact(name, " ".join([*words, digits]), language))
    lines = [sentence(rng, language) for _ in range(max(4, tokens // _SENTENCE_TOKENS))]
    for decoy in facts[1:]:
        lines.insert(rng.randint(0, len(lines)), decoy)
    lines.insert(rng.randint(0, len(lines) // 4), facts[0])
    question = f"{names[0]}的密码是什么？" if language == "zh" else f"What is the secret code of {names[0]}?"
    content = ("" if language == "zh" else " ").join(lines) + "\n\n" + question
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}}
    return Exchange(f"needle.{language}", "needle", body, {"role": "assistant", "content": facts[0]})


def harness(rng: random.Random, tokens: int | None = None) -> Exchange:
    """The task of corpus/harness.toml as a coding harness sends it: one in four is the title request."""
    if tokens is None:
        tokens = rng.randint(50, 1500)
    if rng.random() < 0.25:
        return _title(rng, tokens)
    system = _prose(rng, tokens // 2)
    tools = [_tool(rng, i) for i in range(max(1, tokens // 2 // 90))]
    context = _prose(rng, rng.randint(20, 120))
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": _SUMMARY["task"]},
        {"role": "user", "content": context},
    ]
    body = {"model": MODEL, "messages": messages, "tools": tools, "thinking": {"type": "enabled"}}
    body |= {"reasoning_effort": "high", "max_tokens": 256000}
    answer = {"role": "assistant", "reasoning_content": _SUMMARY["reasoning"], "content": _SUMMARY["answer"]}
    return Exchange("harness.summary", "harness", body, answer)


def _title(rng: random.Random, tokens: int) -> Exchange:
    messages = [{"role": "system", "content": _prose(rng, tokens // 4)}, {"role": "user", "content": _SUMMARY["task"]}]
    body = {"model": MODEL, "messages": messages, "thinking": {"type": "disabled"}, "max_tokens": 64}
    return Exchange("harness.title", "harness", body, {"role": "assistant", "content": _SUMMARY["title"]})


def _prose(rng: random.Random, tokens: int) -> str:
    """System-like text: headings, lists, code words and sentences."""
    lines = []
    for _ in range(max(1, tokens // 12)):
        a, b = rng.sample(_WORDS["nouns"], 2)
        lines.append(
            rng.choice(
                [
                    sentence(rng),
                    f"# {a.title()} {b}",
                    f"- `{a}_{b}`: {sentence(rng)}",
                    f"You MUST {rng.choice(_WORDS['verbs'])[:-1]} the {a} before the {b}.",
                    f"<{a}>{b}</{a}>",
                    f"{a}: /{b}/{rng.choice(_WORDS['nouns'])}/{rng.randint(0, 9999)}.py",
                    "".join(rng.choices("abcdefghijklmnopqrstuvwxyz (){}=.,_", k=rng.randint(8, 40))),
                ]
            )
        )
    return rng.choice(["\n", "\n", "\n\n", " "]).join(lines)


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    properties = {
        name: {"type": rng.choice(["string", "integer", "boolean"]), "description": sentence(rng)}
        for name in rng.sample(_WORDS["nouns"], rng.randint(1, 3))
    }
    name = f"{rng.choice(_WORDS['verbs'])}_{rng.choice(_WORDS['nouns'])}_{number}"
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": sentence(rng), "parameters": parameters}}
