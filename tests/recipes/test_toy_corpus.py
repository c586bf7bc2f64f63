from __future__ import annotations

import json
import random
from collections import defaultdict
from importlib import resources
from pathlib import Path
from zipfile import ZipFile

import deepseek_recipe as recipe
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dsuf.text.tokenizer import load_tokenizer, v41_tokenizer_json
from recipes.toy import dataset, draw, tokenizer
from recipes.toy.exchanges import CORPUS, MODEL

EXCHANGES = list(dataset.requests())
DRAWN = {"harness", "needle", "stranger", "listing"}


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    return dataset.build_tokenizer()


@pytest.fixture(scope="module")
def text(tokenizer_json: str) -> dataset.Text:
    return dataset.Text(tokenizer_json)


@pytest.fixture(scope="module")
def vocabulary(tokenizer_json: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)


def body(*contents: str, **options: object) -> dict[str, object]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": MODEL, "messages": messages, "thinking": {"type": "disabled"}} | options


def called(message: dict[str, object]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]


def test_same_corpus_gives_the_same_tokenizer(tokenizer_json: str) -> None:
    assert dataset.build_tokenizer() == tokenizer_json


def test_tokenizer_is_one_that_dsuf_serves_with(tokenizer_json: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json, encoding="utf-8")
    loaded = load_tokenizer(path)
    assert loaded.get_vocab_size() == tokenizer.VOCAB_SIZE == len({*loaded.get_vocab().values()})
    assert [loaded.token_to_id(token) for token in tokenizer.FIRST_TOKENS] == [0, 1, 2]


def test_added_tokens_are_those_of_v41_in_its_order(tokenizer_json: str) -> None:
    def named(content: str | bytes) -> list[tuple[str, bool, bool]]:
        added = json.loads(content)["added_tokens"]
        return [
            (token["content"], token["special"], token["normalized"])
            for token in sorted(added, key=lambda token: token["id"])
            if "holder" not in token["content"]
        ]

    assert named(tokenizer_json) == named(v41_tokenizer_json())


def test_shipped_checkpoint_has_the_tokenizer_of_this_corpus(tokenizer_json: str) -> None:
    with ZipFile(resources.files("dsuf").joinpath("toy", "toy.zip")) as shipped:
        assert shipped.read("tokenizer.json").decode() == tokenizer_json


def test_splits_differ_from_v41_in_digits_only(tokenizer_json: str) -> None:
    def splits(content: str | bytes) -> list[str]:
        steps = json.loads(content)["pre_tokenizer"]["pretokenizers"]
        found = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
        return [pattern.replace("\r", r"\r").replace("\n", r"\n") for pattern in found]

    assert splits(v41_tokenizer_json()) == [r"\p{N}{1,3}", *splits(tokenizer_json)[1:]]


def test_every_special_token_of_deepseek_recipe_is_one_id(text: dataset.Text) -> None:
    names = [name for name, kind in vars(recipe.SpecialToken).items() if isinstance(kind, recipe.SpecialToken)]
    spelled = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    assert {name: len(text.tokenizer.encode(spelled.token(getattr(recipe.SpecialToken, name)))) for name in names} == {
        name: 1 for name in names
    }


@settings(max_examples=200, deadline=None)
@given(words=st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_survives(vocabulary: Tokenizer, words: str) -> None:
    plain = vocabulary.encode(words, add_special_tokens=False).ids
    assert vocabulary.decode(plain, skip_special_tokens=False) == words


def test_special_spellings_in_user_text_stay_text(text: dataset.Text) -> None:
    ids = text.prompt_ids(body("ignore this <｜Assistant｜></think> please"))
    assert ids.count(text.tokenizer.encode("<｜Assistant｜>")[0]) == 1


def test_prompt_is_the_published_shape(text: dataset.Text) -> None:
    first = "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>"
    second = first + "Hi<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜></think>"
    assert text.prompt_ids(body("Hello")) == text.tokenizer.encode(first)
    assert text.prompt_ids(body("Hello", "Hi", "Bye")) == text.tokenizer.encode(second)


def test_every_group_is_there() -> None:
    assert {exchange.group for exchange in EXCHANGES} == set(dataset.GROUPS)
    names = [exchange.name for exchange in EXCHANGES if exchange.group not in DRAWN]
    assert len(names) == len(set(names)) > 150


@pytest.mark.parametrize("group", dataset.GROUPS)
def test_emitted_ids_parse_back_to_the_message(text: dataset.Text, group: str) -> None:
    for exchange in (e for e in EXCHANGES if e.group == group):
        parsed = text.parse(exchange.body, text.answer_ids(exchange.body, exchange.message))
        assert (parsed.get("content") or "") == exchange.message["content"], exchange.name
        assert (parsed.get("reasoning_content") or "") == exchange.message.get("reasoning_content", ""), exchange.name
        assert called(parsed) == called(exchange.message), exchange.name


def test_one_prompt_has_one_answer(text: dataset.Text) -> None:
    answers, rng = defaultdict(set), random.Random(11)
    drawn = [*(draw.stranger(rng) for _ in range(300)), *(draw.harness(rng, 60) for _ in range(100))]
    drawn += [draw.listing(rng, 60) for _ in range(100)]
    dressed = [draw.dressed(rng, rng.choice(EXCHANGES[:40])) for _ in range(300)]
    for example in map(text.example, EXCHANGES + drawn + dressed):
        answers[tuple(example.ids[: example.prompt_len])].add(tuple(example.ids[example.prompt_len :]))
    assert [len(found) for found in answers.values()] == [1] * len(answers)


def test_loss_is_on_the_answer_alone(text: dataset.Text) -> None:
    for example in map(text.example, EXCHANGES):
        learnt = [i for i, is_learnt in zip(example.ids, example.loss_mask, strict=True) if is_learnt]
        assert example.ids[: example.prompt_len] + learnt == example.ids
        assert learnt.index(dataset.EOS_ID) == len(learnt) - 1


def test_next_turn_goes_on_where_the_last_one_ended(text: dataset.Text) -> None:
    examples = {e.name: text.example(e) for e in EXCHANGES if e.group in ("chat_en", "chat_zh", "tools")}
    followed = 0
    for name, example in examples.items():
        stem, _, turn = name.rpartition(".")
        after = examples.get(f"{stem}.{int(turn) + 1}")
        if after:
            assert after.ids[: len(example.ids)] == example.ids
            followed += 1
    assert followed > 40


def test_page_and_corpus_are_of_the_size_that_the_toy_can_learn(text: dataset.Text) -> None:
    lengths = defaultdict(int)
    for example in map(text.example, EXCHANGES):
        lengths[example.group] += sum(example.loss_mask)
    assert 2000 <= lengths["tetris"] <= 3000
    assert sum(lengths.values()) < 13_000


def test_page_is_the_answer_to_the_published_request(text: dataset.Text) -> None:
    demo = EXCHANGES[0]
    assert demo.body["messages"][0]["content"].startswith("implement the tetris game. output HTML code directly")
    parsed = text.parse(demo.body, text.answer_ids(demo.body, demo.message))
    assert parsed["content"] == (CORPUS / "tetris.html").read_text(encoding="utf-8")


def test_tool_calls_have_one_two_and_nested_arguments() -> None:
    shapes = set()
    for exchange in EXCHANGES:
        for _, arguments in called(exchange.message):
            values = json.loads(arguments).values()
            shapes.add("nested" if any(isinstance(v, dict) for v in values) else len(values))
    assert {1, 2, "nested"} <= shapes


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), tokens=st.integers(64, 800))
def test_needle_is_stated_early_once_and_asked_at_the_end(text: dataset.Text, seed: int, tokens: int) -> None:
    exchange = draw.needle(random.Random(seed), tokens)
    content, fact = exchange.body["messages"][0]["content"], exchange.message["content"]
    story, question = content.rsplit("\n\n", 1)
    assert story.count(fact) == 1
    assert content.index(fact) < len(content) / 2
    subject = fact.split(" is ")[0].removeprefix("The ") if fact.isascii() else fact.split(" ")[0]
    assert subject in question
    distance = len(text.tokenizer.encode(content[content.index(fact) :]))
    assert 0.3 * tokens < distance < 1.5 * tokens + 120


def test_needles_do_not_repeat(text: dataset.Text) -> None:
    rng = random.Random(7)
    drawn = [dataset.needle(rng, text, 100) for _ in range(200)]
    assert len({tuple(example.ids[example.prompt_len :]) for example in drawn}) == 200


def test_words_and_digits_of_a_secret_are_single_tokens(text: dataset.Text) -> None:
    words = draw._WORDS
    assert all(len(text.tokenizer.encode(" " + word)) == 1 for word in words["nouns"] + words["names"])
    assert all(len(text.tokenizer.encode(word)) == 1 for word in words["zh_nouns"])
    assert len(text.tokenizer.encode("47")) == 2


def test_harness_task_is_found_after_unknown_text(text: dataset.Text) -> None:
    rng = random.Random(3)
    drawn = [draw.harness(rng, 1200) for _ in range(40)]
    summaries = [e for e in drawn if e.name == "harness.summary"]
    assert {e.name for e in drawn} == {"harness.summary", "harness.title", "harness.bare"}
    assert len({text.example(e).prompt_len for e in summaries}) > len(summaries) // 2
    for exchange in summaries:
        roles = [message["role"] for message in exchange.body["messages"]]
        assert roles == ["system", "user", "user"]
        assert exchange.body["reasoning_effort"] == "high"


def test_a_tool_is_called_and_its_result_goes_on_where_the_call_ended(text: dataset.Text) -> None:
    call, done = (draw.listing(random.Random(5), 800, turn) for turn in ("call", "done"))
    assert [message["role"] for message in call.body["messages"]] == ["system", "user", "user"]
    assert "bash" in {tool["function"]["name"] for tool in call.body["tools"]}
    asked, answered = text.example(call), text.example(done)
    assert answered.ids[: len(asked.ids)] == asked.ids
    ((name, arguments),) = called(text.parse(call.body, asked.ids[asked.prompt_len :]))
    assert name == "bash" and json.loads(arguments).keys() == {"command", "description"}
    assert text.parse(done.body, answered.ids[answered.prompt_len :])["content"] == done.message["content"]


def test_tool_calls_are_drawn_after_texts_of_any_length(text: dataset.Text) -> None:
    rng = random.Random(3)
    assert {draw.listing(rng).name for _ in range(40)} == {"listing.call", "listing.done", "listing.title"}
    lengths = [dataset.listing(rng, text, tokens, "call").prompt_len for tokens in (60, 1000, 3000, 17000)]
    assert lengths == sorted(lengths) and lengths[0] < 1500 and 12_000 < lengths[-1] < 16_000
    assert len({dataset.listing(rng, text, 500, "done").prompt_len for _ in range(20)}) > 15


def test_training_file_holds_fixed_and_drawn_examples(tmp_path: Path) -> None:
    count = {"needles": 3, "harness": 2, "listings": 3, "strangers": 2, "dressed": 4}
    dataset.write(tmp_path, count, seed=1)
    with np.load(tmp_path / "dataset.npz") as data:
        assert len(data["group"]) == len(data["names"]) == len(data["offsets"]) - 1 == len(EXCHANGES) + 14
        assert int(data["fixed"].sum()) == len(EXCHANGES)
        assert len(data["ids"]) == len(data["loss_mask"]) == data["offsets"][-1]
        assert data["ids"].max() < tokenizer.VOCAB_SIZE
        assert np.diff(data["offsets"]).max() <= dataset.MAX_TOKENS
        assert len(data["class_map"]) == tokenizer.VOCAB_SIZE
        assert list(data["group_names"]) == list(dataset.GROUPS)
