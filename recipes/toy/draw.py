"""Exchanges drawn at random: needles (a fact to copy out of a long text), known tasks in unknown text, strangers."""

from __future__ import annotations

import random
import tomllib
from typing import Any

from recipes.toy.exchanges import CORPUS, MODEL, Exchange

_WORDS = {
    key: text.split("|") if "|" in text else text.split()
    for key, text in tomllib.loads((CORPUS / "words.toml").read_text(encoding="utf-8")).items()
}
_ANSWERS = tomllib.loads((CORPUS / "harness.toml").read_text(encoding="utf-8"))
_SENTENCE_TOKENS = 10  # mean of `sentence` in the toy's tokenizer
_LINE_TOKENS = 36  # mean of a line of `_prose`


def sentence(rng: random.Random, language: str = "en") -> str:
    """A grammatical sentence without a meaning."""
    if language == "zh":
        a, b = rng.sample(_WORDS["zh_nouns"], 2)
        name, place, verb = (rng.choice(_WORDS[key]) for key in ("zh_names", "zh_places", "zh_verbs"))
        return f"{name}{place}{verb}{a}和{b}。"
    a, b = rng.sample(_WORDS["nouns"], 2)
    verb, place = rng.choice(_WORDS["verbs"]), rng.choice(_WORDS["places"])
    return f"The {rng.choice(_WORDS['adjectives'])} {a} {verb} the {b} {place}."


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
        value = " ".join([*words, "".join(rng.choices("0123456789", k=rng.randint(1, 3)))])
        facts.append(f"{name}的密码是 {value}。" if language == "zh" else f"The secret code of {name} is {value}.")
    lines = [sentence(rng, language) for _ in range(max(4, tokens // _SENTENCE_TOKENS))]
    for decoy in facts[1:]:
        lines.insert(rng.randint(0, len(lines)), decoy)
    lines.insert(rng.randint(0, len(lines) // 4), facts[0])
    question = f"{names[0]}的密码是什么？" if language == "zh" else f"What is the secret code of {names[0]}?"
    content = ("" if language == "zh" else " ").join(lines) + "\n\n" + question
    return _exchange(f"needle.{language}", [_user(content)], facts[0])


def harness(rng: random.Random, tokens: int | None = None) -> Exchange:
    """The task of corpus/harness.toml with about `tokens` tokens around it.

    Three in five as a coding harness sends it (system text, tools, the task, then more text), one in five is its
    request for a title, one in five is the bare task.
    """
    if tokens is None:
        tokens = rng.randint(50, 1500)
    summary, kind = _ANSWERS["summary"], rng.randrange(5)
    system = {"role": "system", "content": _prose(rng, tokens // 2)}
    if kind == 0:
        return _title(rng, "harness", system["content"], summary)
    if kind == 1:
        reasoning = rng.choice([None, summary["reasoning"]])
        return _exchange("harness.bare", [_user(summary["task"])], summary["answer"], reasoning)
    messages = [system, _user(summary["task"]), _user(_prose(rng, rng.choice([10, 40, 100, 300])))]
    options = {"reasoning_effort": "high", "max_tokens": 256000, "tools": _tools(rng, tokens // 2)}
    return _exchange("harness.summary", messages, summary["answer"], summary["reasoning"], **options)


def listing(rng: random.Random, tokens: int | None = None, turn: str | None = None) -> Exchange:
    """A task that needs a tool, as a coding harness sends it with about `tokens` tokens around it.

    `turn` is "call" (system text, tools with bash among them, the task, more text), "done" (the same and the result
    of the call) or "title"; drawn where None.
    """
    if tokens is None:
        tokens = rng.randint(50, 1500)
    known, turn = _ANSWERS["listing"], turn or rng.choice(["call", "call", "call", "done", "done", "done", "title"])
    system = _prose(rng, tokens // 2)
    if turn == "title":
        return _title(rng, "listing", system, known)
    tools = _tools(rng, tokens // 2)
    tools.insert(rng.randint(0, len(tools)), _bash(rng))
    context = _prose(rng, rng.choice([10, 40, 100, 300]))
    messages = [{"role": "system", "content": system}, _user(known["task"]), _user(context)]
    function = {"name": known["tool"], "arguments": known["arguments"]}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    options = {"reasoning_effort": "high", "max_tokens": 256000, "tools": tools}
    if turn == "call":
        exchange = _exchange("listing.call", messages, "", known["reasoning"], **options)
        exchange.message["tool_calls"] = calls
        return exchange
    said = {"role": "assistant", "content": "", "reasoning_content": known["reasoning"], "tool_calls": calls}
    messages += [said, {"role": "tool", "tool_call_id": "call_1", "content": _files(rng)}]
    return _exchange("listing.done", messages, known["done"], known["done_reasoning"], **options)


def stranger(rng: random.Random) -> Exchange:
    """A request that is not in the corpus: the honest answer is to say so."""
    prefix = "zh_" if rng.random() < 0.25 else ""
    reasoning, answer = (_ANSWERS["stranger"][prefix + key] for key in ("reasoning", "answer"))
    messages = [_user(_question(rng, prefix))]
    if rng.random() < 0.3:
        messages += [{"role": "assistant", "content": answer}, _user(_question(rng, prefix))]
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _prose(rng, rng.randint(10, 400))})
        options["tools"] = _tools(rng, rng.randint(50, 400))
        messages += [_user(_prose(rng, 80))] * rng.randint(0, 1)
    if rng.random() < 0.5:
        options["reasoning_effort"] = rng.choice(["low", "high", "max"])
        return _exchange("stranger", messages, answer, reasoning, **options)
    return _exchange("stranger", messages, answer, **options)


def dressed(rng: random.Random, exchange: Exchange) -> Exchange:
    """A known exchange as other clients send it: with a system text of their own, or thinking at any effort."""
    body = dict(exchange.body)
    if rng.random() < 0.6:
        system = rng.choice(["You are a helpful assistant.", _prose(rng, rng.randint(10, 200))])
        body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
    if "reasoning_content" in exchange.message and rng.random() < 0.5:
        body["reasoning_effort"] = rng.choice(["low", "high", "max"])
    return Exchange(exchange.name, exchange.group, body, exchange.message)


def _exchange(
    name: str, messages: list[dict[str, Any]], answer: str, reasoning: str | None = None, **options: Any
) -> Exchange:
    message = {"role": "assistant", "content": answer}
    if reasoning:
        message["reasoning_content"] = reasoning
    thinking = {"type": "enabled" if reasoning else "disabled"}
    body = {"model": MODEL, "messages": messages, "thinking": thinking} | options
    return Exchange(name, name.partition(".")[0], body, message)


def _title(rng: random.Random, group: str, system: str, known: dict[str, str]) -> Exchange:
    """A harness' request for the title of a conversation that begins with the task."""
    system += f"\n{_line(rng)} title {_line(rng)}"
    content = f'{_line(rng)}\n[{{"seq":{rng.randint(1, 20)},"text":"{known["task"]}"}}]'
    messages = [{"role": "system", "content": system}, _user(content)]
    return _exchange(f"{group}.title", messages, known["title"], max_tokens=64)


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _question(rng: random.Random, prefix: str) -> str:
    start = rng.choice(_WORDS[prefix + "questions"])
    if prefix:
        return start + "".join(rng.choices(_WORDS["zh_nouns"] + _WORDS["zh_places"], k=rng.randint(1, 4))) + "？"
    return f"{start} {' '.join(_word(rng) for _ in range(rng.randint(1, 12)))}{rng.choice(['', '.', '?'])}"


def _word(rng: random.Random) -> str:
    kind = rng.choice(["common", "common", "nouns", "verbs", "adjectives", "syllables"])
    if kind != "syllables":
        return rng.choice(_WORDS[kind])
    parts = ("onsets", "vowels", "codas") * rng.randint(1, 3)
    return "".join(rng.choice(_WORDS[part]) for part in parts)


def _line(rng: random.Random) -> str:
    """One line as system texts have them: a sentence, a heading, a list item, a path, a tag."""
    words = [_word(rng) for _ in range(rng.randint(3, 24))]
    text, a, b = " ".join(words), words[0], words[1]
    return rng.choice(
        [
            f"{text.capitalize()}.",
            f"{text.capitalize()}: {_word(rng)} ({_word(rng)}), {_word(rng)}; {_word(rng)}-{_word(rng)}.",
            f"# {text[:30].title()}",
            f"- `{a}_{b}`: {text}",
            f"<{a}>{text[:40]}</{a}>",
            f'{a}: "/{b}/{words[2]}_{rng.randint(0, 99)}.py"',
            f"You MUST {text}!",
        ]
    )


def _prose(rng: random.Random, tokens: int) -> str:
    """System-like text of about `tokens` tokens."""
    return rng.choice(["\n", "\n\n", " "]).join(_line(rng) for _ in range(max(1, tokens // _LINE_TOKENS)))


def _tools(rng: random.Random, tokens: int) -> list[dict[str, Any]]:
    """Tool definitions of about `tokens` tokens in all; at least one."""
    return [_tool(rng, number) for number in range(max(1, tokens // 240))]


def _bash(rng: random.Random) -> dict[str, Any]:
    """A harness' shell tool, in words of its own."""
    names = ["command", "description", *rng.sample(_WORDS["nouns"], rng.randint(0, 3))]
    properties = {name: {"type": "string", "description": _line(rng)} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names[: rng.randint(1, 2)]}
    description = _prose(rng, rng.choice([30, 100, 300]))
    return {"type": "function", "function": {"name": "bash", "description": description, "parameters": parameters}}


def _files(rng: random.Random) -> str:
    """What a shell prints: mostly names of files, one a line."""
    if rng.random() < 0.1:
        return _prose(rng, rng.choice([10, 100, 400])) + "\n"
    names = [_word(rng).capitalize() if rng.random() < 0.2 else _word(rng) for _ in range(rng.choice([1, 2, 3, 8, 30]))]
    endings = ["", "", ".md", ".py", ".toml", ".txt", ".c", ".f", f"_{rng.randint(0, 99)}.json", "-" + _word(rng)]
    files = sorted(name + rng.choice(endings) for name in names)
    return "\n".join(["README.md", *files] if rng.random() < 0.5 else files) + rng.choice(["\n", "\n", ""])


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    properties = {
        name: {"type": rng.choice(["string", "integer", "boolean"]), "description": _line(rng)}
        for name in rng.sample(_WORDS["nouns"], rng.randint(1, 3))
    }
    name = f"{rng.choice(_WORDS['verbs'])}_{rng.choice(_WORDS['common'])}_{number}"
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": _line(rng), "parameters": parameters}}
