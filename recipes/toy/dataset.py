"""The toy's corpus as API requests, and as token ids with a loss mask.

A conversation in `corpus/` is an API body whose assistant messages are to be learnt. Each of them gives one `Exchange`:
the body a client would send at that turn, and the message expected back. deepseek-recipe renders both; nothing here
knows the prompt format. `python -m recipes.toy.dataset FOLDER` writes tokenizer.json and dataset.npz, all that training
needs, so that the training machine needs no deepseek-recipe.
"""

from __future__ import annotations

import argparse
import json
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import numpy as np

CORPUS = Path(__file__).parent / "corpus"
MODEL = "deepseek-v4.1-flash"
DEMO_PROMPT = "implement the tetris game. output HTML code directly - no explanation."
GROUPS = ("tetris", "chat_en", "chat_zh", "thinking", "json", "tools", "harness", "needle")
EOS_ID = 1


@dataclass(frozen=True)
class Exchange:
    """One turn: the API body that a client sends and the assistant message it gets back."""

    name: str
    group: str
    body: dict[str, Any]
    message: dict[str, Any]


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
    return {"model": MODEL, "messages": history, "tools": [tool], "thinking": body["thinking"]}


def requests() -> Iterator[Exchange]:
    """Every fixed exchange of the corpus, in the order of GROUPS, then frozen draws of the random ones."""
    from recipes.toy import draw

    page = (CORPUS / "tetris.html").read_text(encoding="utf-8")
    demo = {"model": MODEL, "messages": [{"role": "user", "content": DEMO_PROMPT}], "thinking": {"type": "disabled"}}
    yield Exchange("tetris", "tetris", demo, {"role": "assistant", "content": page})
    tools = json.loads((CORPUS / "tools.json").read_text(encoding="utf-8"))
    for group in ("chat_en", "chat_zh", "thinking", "json", "tools"):
        for conversation in tomllib.loads((CORPUS / f"{group}.toml").read_text(encoding="utf-8"))["conversation"]:
            yield from _turns(conversation, group, tools)
    rng = random.Random(0)
    for _ in range(8):
        yield draw.harness(rng)
    for _ in range(16):
        yield draw.needle(rng)


def _turns(conversation: dict[str, Any], group: str, tools: dict[str, Any]) -> Iterator[Exchange]:
    name = conversation.pop("name")
    body = {"model": MODEL, "thinking": {"type": "disabled"}} | conversation
    if "tools" in body:
        body["tools"] = [{"type": "function", "function": {"name": tool} | tools[tool]} for tool in body["tools"]]
    answers = [i for i, message in enumerate(body["messages"]) if message["role"] == "assistant"]
    for turn, i in enumerate(answers, 1):
        yield Exchange(f"{name}.{turn}", group, body | {"messages": body["messages"][:i]}, body["messages"][i])


def load(text: Text) -> list[Example]:
    """`requests()` as ids."""
    return [text.example(exchange) for exchange in requests()]


def needle(rng: random.Random, text: Text, tokens: int | None = None) -> Example:
    """A fresh needle in about `tokens` tokens of filler (default: 150 to 900)."""
    from recipes.toy import draw

    return text.example(draw.needle(rng, tokens))


def harness(rng: random.Random, text: Text, tokens: int | None = None) -> Example:
    """A fresh harness request with about `tokens` tokens before the task (default: up to 1,500)."""
    from recipes.toy import draw

    return text.example(draw.harness(rng, tokens))


def plain_texts() -> list[str]:
    """What the tokenizer learns from: every distinct stretch between special tokens, some random draws included."""
    from recipes.toy import draw

    rng = random.Random(1)
    exchanges = [*requests(), *(draw.needle(rng) for _ in range(40)), *(draw.harness(rng) for _ in range(8))]
    encoding = recipe.DeepseekV41Encoding()
    texts: dict[str, None] = {}
    for exchange in exchanges:
        for body in (exchange.body, _answered(exchange.body, exchange.message)):
            rendered = encoding.render_conversation(convert(body).conversation)
            start = 0
            for begin, end in [*rendered.special_ranges, (len(rendered.prompt),) * 2]:
                texts[rendered.prompt[start:begin]] = None
                start = end
    return list(texts)


def write(folder: Path, needles: int, harnesses: int, seed: int) -> None:
    """tokenizer.json and dataset.npz: flat ids, their offsets, and per example group, name and whether it is fixed."""
    from recipes.toy import tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_json = tokenizer.build()
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    text, rng = Text(tokenizer_json), random.Random(seed)
    examples = load(text)
    fixed = len(examples)
    examples += [needle(rng, text, rng.randint(2000, 3000) if i % 200 == 199 else None) for i in range(needles)]
    examples += [harness(rng, text) for _ in range(harnesses)]
    np.savez_compressed(
        folder / "dataset.npz",
        ids=np.concatenate([np.array(e.ids, np.uint16) for e in examples]),
        offsets=np.cumsum([0, *(len(e.ids) for e in examples)]),
        loss_mask=np.concatenate([np.array(e.loss_mask) for e in examples]),
        group=np.array([GROUPS.index(e.group) for e in examples], np.uint8),
        fixed=np.arange(len(examples)) < fixed,
        names=np.array([e.name for e in examples]),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--needles", type=int, default=20000)
    parser.add_argument("--harness", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(args.folder, args.needles, args.harness, args.seed)
