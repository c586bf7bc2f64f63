"""What `bench serve` sends: conversations of one or more turns, made from a seed or read from a file.

Lengths are in words of which each is one token of DeepSeek's tokenizer behind a space, so that the client needs none;
the counts in the result are the server's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dsuf.cli.recipe import load_recipe
from dsuf.config import check_number
from dsuf.errors import ConfigError

DATASETS = ("random", "tetris", "jsonl", "prefix", "chat", "mix")
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Shape:
    """Lengths of generated prompts and answers, in tokens. Raises ConfigError for a value out of range."""

    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0  # lengths vary by up to this share, evenly
    prefix_len: int = 1024  # prefix: the part that many prompts share
    prefixes: int = 4
    turns: int = 4  # chat

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("input_len", "output_len", "prefix_len", "prefixes", "turns"):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), 1, 2**21, whole=True)
        check_number("--range-ratio", self.range_ratio, 0, 1)


@dataclass(frozen=True)
class Conversation:
    """Requests that follow one another: each carries the answers before it."""

    turns: tuple[tuple[str, int | None], ...]  # (text of the user, tokens to make or None)
    base: dict[str, Any]  # fields of every body
    messages: tuple[dict[str, str], ...] = ()  # before the first turn

    def bodies(self) -> Bodies:
        """The requests, one by one."""
        return Bodies(self)


class Bodies:
    """Makes the next body from the answer to the one before."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation, self._messages = conversation, list(conversation.messages)

    def body(self, turn: int) -> dict[str, Any]:
        """The request of a turn; call `answer` before the next one."""
        text, tokens = self._conversation.turns[turn]
        if text:
            self._messages.append({"role": "user", "content": text})
        limit = {} if tokens is None else {"max_tokens": tokens}
        return {**self._conversation.base, **limit, "messages": list(self._messages)}

    def answer(self, text: str) -> None:
        """What the server said; an empty answer cannot be replayed."""
        self._messages.append({"role": "assistant", "content": text or "."})


def words(rng: random.Random, count: int) -> str:
    """So many random words."""
    return " ".join(rng.choices(WORDS, k=count))


def make_dataset(
    name: str, count: int, shape: Shape, rng: random.Random, path: Path | None, base: dict[str, Any]
) -> list[Conversation]:
    """`count` conversations. Raises ConfigError for an unknown name and for a file that does not fit it."""
    if (path is not None) != (name == "jsonl"):
        raise ConfigError("--dataset-path and --dataset jsonl go together; give both or neither.")
    makers: dict[str, Callable[[], list[Conversation]]] = {
        "random": lambda: [_random(shape, rng, base, "") for _ in range(count)],
        "tetris": lambda: [_tetris(base)] * count,
        "jsonl": lambda: _jsonl(path, count, shape, base),
        "prefix": lambda: _shared_prefix(shape, rng, base, count),
        "chat": lambda: [_chat(shape, rng, base) for _ in range(count)],
    }
    if name not in makers:
        raise ConfigError(f"--dataset is {name!r}; expected {', '.join(DATASETS)}.")
    return makers[name]()


def _vary(length: int, shape: Shape, rng: random.Random) -> int:
    spread = int(length * shape.range_ratio)
    return max(rng.randint(length - spread, length + spread), 1)


def _random(shape: Shape, rng: random.Random, base: dict[str, Any], prefix: str) -> Conversation:
    text = prefix + words(rng, _vary(shape.input_len, shape, rng))
    return Conversation(((text, _vary(shape.output_len, shape, rng)),), base)


def _tetris(base: dict[str, Any]) -> Conversation:
    request = load_recipe("tetris").request
    kept = {key: value for key, value in request.items() if key not in ("messages", "model")}
    return Conversation((("", None),), {**base, **kept}, tuple(request["messages"]))


def _shared_prefix(shape: Shape, rng: random.Random, base: dict[str, Any], count: int) -> list[Conversation]:
    prefixes = [words(rng, shape.prefix_len) + " " for _ in range(shape.prefixes)]
    return [_random(shape, rng, base, prefixes[i % len(prefixes)]) for i in range(count)]


def _chat(shape: Shape, rng: random.Random, base: dict[str, Any]) -> Conversation:
    def turn() -> tuple[str, int]:
        return words(rng, _vary(shape.input_len, shape, rng)), _vary(shape.output_len, shape, rng)

    return Conversation(tuple(turn() for _ in range(shape.turns)), base)


class _Row(msgspec.Struct):
    """One line of a file: `prompt` or `messages`, how long the answer may be, and further fields of the request."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None
    body: dict[str, Any] = {}


def _jsonl(path: Path, count: int, shape: Shape, base: dict[str, Any]) -> list[Conversation]:
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        rows = [msgspec.json.decode(line, type=_Row) for line in lines]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset-path {path}: {error}. Each line is an object with prompt or messages.") from None
    if not rows or any((row.prompt is None) == (row.messages is None) for row in rows):
        raise ConfigError(f"--dataset-path {path}: each line needs either prompt or messages, and one line at least.")
    made = []
    for i in range(count):
        row = rows[i % len(rows)]
        tokens = row.max_tokens or row.output_tokens or shape.output_len
        made.append(Conversation(((row.prompt or "", tokens),), {**base, **row.body}, tuple(row.messages or ())))
    return made
