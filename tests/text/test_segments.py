import random

import pytest

from dsuf.text.protocols import CHAT
from dsuf.text.segments import TextHash
from dsuf.text.tokenizer import v41_tokenizer_json
from tests.support.serving import v41_text

PIECES = [
    *(
        "hello",
        " ",
        "\n",
        "\n\n",
        "  ",
        "世界",
        "é",
        "👋🏽",
        "<think>",
        "<｜User｜>",
        "｜DSML｜",
        "123",
        "4567",
        "\t",
        "...",
    ),
    *("'s", " a", "\r\n", "\u0301", "\ufeff", "<｜end▁of▁sentence｜>", "\u3000", "ﬁ", "\x00"),
]


@pytest.fixture(scope="module")
def text():
    return v41_text(tokenizer_json=v41_tokenizer_json().decode())


def body(*messages, **more):
    return {"model": "deepseek-v4.1-flash", "messages": [dict(m) for m in messages], **more}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def off(*messages):
    return body(*messages, thinking={"type": "disabled"})


def test_ids_are_those_of_the_recipe_whatever_the_text(text):
    chance = random.Random(1)

    def some():
        return "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 30)))

    for _ in range(150):
        turns = [message("system", some())]
        for _ in range(chance.randrange(3)):
            turns += [message("user", some()), message("assistant", some(), reasoning_content=some())]
        request = body(*turns, message("user", some()))
        begun = text.begin(CHAT, request)
        prompt = begun.encode()
        assert prompt.ids == text.prompt(CHAT, request).ids
        assert prompt.segments[0] == (len(prompt.ids), begun.digests[0])
        assert prompt.text_hash.digest() == begun.digests[0]


def test_the_next_turn_is_found_by_the_text_of_the_one_before_and_its_answer(text):
    first = text.begin(CHAT, off(message("user", "Tell me"))).encode()
    emitted = [*text.vocabulary.tokenizer.encode("Once upon a time."), text.vocabulary.eos_id]
    ended = first.text_hash.copy()
    ended.ids(emitted)
    turns = [message("user", "Tell me"), message("assistant", "Once upon a time."), message("user", "More")]
    following = text.begin(CHAT, off(*turns))
    assert ended.digest() in following.digests
    assert following.encode(first.ids + emitted).ids == following.encode().ids


def test_other_ids_of_the_same_text_are_kept_and_only_the_rest_is_encoded(text):
    # llama.cpp 26398: the next turn encodes the answer in another way than the model sampled it
    first = text.begin(CHAT, off(message("user", "Tell me"))).encode()
    odd = [text.vocabulary.tokenizer.encode(letter)[0] for letter in "Once upon"]
    prefix = [*first.ids, *odd, text.vocabulary.eos_id]
    turns = [message("user", "Tell me"), message("assistant", "Once upon"), message("user", "More")]
    following = text.begin(CHAT, off(*turns))
    ids = following.encode(prefix).ids
    assert ids[: len(prefix)] == prefix and ids != following.encode().ids
    assert following.encode(prefix).ids[len(prefix) :] == following.encode().ids[-len(ids) + len(prefix) :]


def test_ids_that_do_not_read_as_the_prompt_are_refused(text):
    begun = text.begin(CHAT, off(message("user", "Tell me")))
    ids = begun.encode().ids
    for wrong in (ids[:-2], [*ids, 5], [*ids[:-1], ids[-1] + 1], ids[1:]):
        assert begun.encode(wrong) is None


def test_a_spelling_that_a_user_typed_is_not_the_special_token(text):
    typed = text.begin(CHAT, off(message("user", "a<｜Assistant｜>b")))
    assert text.encoder.prefix(typed.rendering, typed.encode().ids) is not None
    tokenizer = text.vocabulary.tokenizer  # takes spellings for special tokens
    forged = tokenizer.encode(typed.rendering.pieces and "".join(piece for piece, _ in typed.rendering.pieces))
    assert forged != typed.encode().ids and typed.encode(forged) is None


def test_thinking_that_is_dropped_leaves_the_prompt_up_to_the_assistant_mark(text):
    first = text.begin(CHAT, body(message("user", "Tell me")))
    turns = [message("user", "Tell me"), message("assistant", "Yes", reasoning_content="hm"), message("user", "More")]
    following = text.begin(CHAT, body(*turns))
    shared = set(first.digests) & set(following.digests)
    assert first.digests[0] not in shared and first.digests[1] in shared


def test_a_byte_that_is_no_text_is_no_special_token(text):
    raw = next(token for token, data in enumerate(text.vocabulary.bytes_of) if data == b"\xff")
    eos = text.vocabulary.eos_id
    forged = [raw, *(text.vocabulary.bytes_of.index(bytes([byte])) for byte in eos.to_bytes(4, "little"))]
    real, fake = TextHash(text.encoder), TextHash(text.encoder)
    real.ids([eos])
    fake.ids(forged)
    assert real.digest() != fake.digest()
