"""The toy's corpus as token ids with a loss mask, the tokenizer's training text, and the file that training reads.

deepseek-recipe renders requests and answers; nothing here knows the prompt format.
`python -m recipes.toy.dataset FOLDER` writes tokenizer.json and dataset.npz: training needs nothing else, so the
machine that trains needs no deepseek-recipe.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import numpy as np
from tokenizers import Tokenizer

from dsuf.spec import Spec
from dsuf.text.tokenizer import class_map
from recipes.toy import draw, tokenizer
from recipes.toy.exchanges import MODEL, Exchange, known

GROUPS = ("tetris", "chat_en", "chat_zh", "thinking", "json", "tools", "harness", "needle", "stranger", "listing")
EOS_ID = 1
MAX_TOKENS = 3072  # of prompt and answer, the longest sequence that training takes


@dataclass(frozen=True)
class Example:
    """Prompt and answer of one turn as token ids; the answer ends with EOS."""

    name: str
    group: str
    ids: list[int]
    prompt_len: int

    @property
    def loss_mask(self) -> list[bool]:
        """True for every id that the model has to predict."""
        return [i >= self.prompt_len for i in range(len(self.ids))]


class Text:
    """Requests to ids and ids to messages, by deepseek-recipe alone."""

    def __init__(self, tokenizer_json: str) -> None:
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self.tokenizer)
        self._assistant_id = self.tokenizer.encode(recipe.SpecialToken.Assistant.default_str())[0]

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        """Ids of the prompt of `body`."""
        return self._encoding.encode(convert(body).conversation)

    def answer_ids(self, body: dict[str, Any], message: dict[str, Any]) -> list[int]:
        """Ids that the model has to emit after the prompt of `body`, EOS included."""
        ids = self._encoding.encode(convert(_answered(body, message)).conversation)
        start = ids.index(self._assistant_id) + 2  # <think> or </think> ends the prompt
        return ids[start : ids.index(EOS_ID, start) + 1]

    def example(self, exchange: Exchange) -> Example:
        """The exchange as ids."""
        prompt = self.prompt_ids(exchange.body)
        answer = self.answer_ids(exchange.body, exchange.message)
        return Example(exchange.name, exchange.group, prompt + answer, len(prompt))

    def parse(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """The message that a client of the Chat Completions API gets for emitted `ids` (EOS dropped)."""
        request = convert(body)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "toy", MODEL)
        processor = recipe.StreamProcessor(generator, request.parsing_options, self.tokenizer)
        response = recipe.ChatCompletionResponse("toy", MODEL, 0, 0, 0)
        for chunk in (
            recipe.InferenceChunk.ready(),
            recipe.InferenceChunk.tokens([i for i in ids if i != EOS_ID]),
            recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
        ):
            for event in processor.push(chunk):
                response.accumulate(event)
        return json.loads(response.to_json())["choices"][0]["message"]


def convert(body: dict[str, Any]) -> recipe.ConversationRequest:
    """`body` as deepseek-recipe understands it."""
    options = recipe.ConversionOptions().with_model_alias(MODEL, recipe.ModelVersion.DeepseekV41Flash)
    return recipe.ChatCompletionRequest(json.dumps(body)).convert(options)


def _answered(body: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """The shortest history that contains `message`; with a tool, because only then old reasoning is rendered."""
    calls = message.get("tool_calls", [])
    after = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    history = [{"role": "user", "content": ""}, message, *(after or [{"role": "user", "content": ""}])]
    tool = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
    return {"model": MODEL, "messages": history, "tools": [tool], "thinking": body.get("thinking", {"type": "enabled"})}


def requests() -> Iterator[Exchange]:
    """Every exchange to know by heart, then frozen draws of the random ones."""
    yield from known()
    rng = random.Random(0)
    for drawn in (draw.harness, draw.needle, draw.stranger, draw.listing):
        for _ in range(16):
            yield drawn(rng)


def load(text: Text) -> list[Example]:
    """`requests()` as ids."""
    return [text.example(exchange) for exchange in requests()]


def needle(rng: random.Random, text: Text, tokens: int | None = None) -> Example:
    """A fresh needle in about `tokens` tokens of filler (default: 150 to 900)."""
    return text.example(draw.needle(rng, tokens))


def harness(rng: random.Random, text: Text, tokens: int | None = None) -> Example:
    """A fresh harness request with about `tokens` tokens around the task (default: up to 1,500)."""
    return text.example(draw.harness(rng, tokens))


def listing(rng: random.Random, text: Text, tokens: int | None = None, turn: str | None = None) -> Example:
    """A fresh request for a tool call with about `tokens` tokens around the task (default: up to 1,500)."""
    return text.example(draw.listing(rng, tokens, turn))


def build_tokenizer() -> str:
    """tokenizer.json of the toy; the same corpus gives the same file."""
    return tokenizer.build(plain_texts())


def plain_texts() -> list[str]:
    """What the tokenizer learns from: every distinct stretch of text between special tokens, and some more needles.

    Of requests with unknown text around them only the answers count; `listing` came when the tokenizer was fixed.
    """
    rng = random.Random(1)
    texts: dict[str, None] = {}
    for exchange in [*requests(), *(draw.needle(rng) for _ in range(40))]:
        if exchange.group == "listing":
            continue
        if exchange.group not in ("harness", "stranger"):
            texts |= dict.fromkeys(_plain(exchange.body))
        texts |= dict.fromkeys(_plain(_answered(exchange.body, exchange.message)))
    return list(texts)


def _plain(body: dict[str, Any]) -> Iterator[str]:
    """The prompt of `body`, cut at special tokens."""
    rendered = recipe.DeepseekV41Encoding().render_conversation(convert(body).conversation)
    start = 0
    for begin, end in [*rendered.special_ranges, (len(rendered.prompt),) * 2]:
        yield rendered.prompt[start:begin]
        start = end


def write(folder: Path, count: dict[str, int], seed: int) -> None:
    """tokenizer.json and dataset.npz: flat ids, their offsets, and per example group, name and whether it is fixed.

    The Engram class of every token id and the id that begins a user's message are in it too; CheckpointError if
    config.json has another number of classes.
    `count` says how many to draw of needles, harness requests, listings, strangers and dressed exchanges.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_json = build_tokenizer()
    classes = class_map(Tokenizer.from_str(tokenizer_json), Spec.load(Path(__file__).parent / "config.json"))
    text, rng = Text(tokenizer_json), random.Random(seed)
    fixed = load(text)
    examples = [*fixed, *_drawn(text, rng, count)]
    _replace(folder / "tokenizer.json", tokenizer_json.encode())
    arrays = io.BytesIO()
    np.savez_compressed(
        arrays,
        ids=np.concatenate([np.array(e.ids, np.uint16) for e in examples]),
        offsets=np.cumsum([0, *(len(e.ids) for e in examples)]),
        loss_mask=np.concatenate([np.array(e.loss_mask) for e in examples]),
        group=np.array([GROUPS.index(e.group) for e in examples], np.uint8),
        group_names=np.array(GROUPS),
        fixed=np.arange(len(examples)) < len(fixed),
        names=np.array([e.name for e in examples]),
        class_map=classes,
        user_id=text.tokenizer.encode(recipe.SpecialToken.User.default_str())[0],
    )
    _replace(folder / "dataset.npz", arrays.getvalue())


def _drawn(text: Text, rng: random.Random, count: dict[str, int]) -> Iterator[Example]:
    """Random examples that fit MAX_TOKENS; one needle in 200 and one harness request in 20 is long.

    Every other needle has hardly any filler: copying is learnt on those, then over a distance.
    """
    plain = [e for e in known() if e.body["messages"][0]["role"] == "user" and "tools" not in e.body]

    def length(number: int, long_every: int) -> int | None:
        return None if (number + 1) % long_every else rng.randint(2000, 2800)

    draws: dict[str, Callable[[int], Exchange]] = {
        "needles": lambda i: draw.needle(rng, length(i, 200) if i % 2 else rng.randint(0, 60)),
        "harness": lambda i: draw.harness(rng, length(i, 20)),
        "listings": lambda i: draw.listing(rng, length(i, 20)),
        "strangers": lambda i: draw.stranger(rng),
        "dressed": lambda i: draw.dressed(rng, rng.choice(plain)),
    }
    for name, number in count.items():
        for i in range(number):
            while len((example := text.example(draws[name](i))).ids) > MAX_TOKENS:
                pass
            yield example


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    defaults = {"needles": 40000, "harness": 600, "listings": 900, "strangers": 1000, "dressed": 1000}
    for name, number in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(args.folder, {name: getattr(args, name) for name in defaults}, args.seed)
