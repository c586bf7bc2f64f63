"""Tokenizers: V4.1's own file, Engram classes, refusals, and text out of a token stream."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dsuf.errors import CheckpointError, EnvironmentProblem
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from dsuf.text import tokenizer as module
from dsuf.text.tokenizer import (
    SPELLING,
    TokenStream,
    checkpoint_class_map,
    class_map,
    load_tokenizer,
    read_tokenizer,
    token_bytes,
    v41_tokenizer_json,
)
from tests.model.micro import micro_config

ENGRAM = json.loads((Path(__file__).parents[1] / "golden/engram.v41-flash.json").read_text())
V41 = Spec.from_config(load_config("v41-flash"))
# byte-level BPE's letters for the bytes that print as themselves, and one for space and newline
LETTERS = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ"]


@pytest.fixture(scope="module")
def v41():
    return read_tokenizer(v41_tokenizer_json().decode(), V41)


def small_tokenizer(words: list[str], added: list[str], *, decoder=None) -> Tokenizer:
    """A tokenizer with single-letter tokens, `words` and `added`, numbered in this order."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(LETTERS + words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


ALL_SPECIAL = [getattr(SPELLING, name) for name in SPELLING.__dataclass_fields__]


def test_the_file_of_v41_is_the_published_one():
    content = v41_tokenizer_json()
    assert len(content) == 6_367_257
    assert hashlib.sha256(content).hexdigest() == "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"


def test_another_packaged_file_is_refused(tmp_path, monkeypatch):
    class Found:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(module, "find_spec", lambda name: Found)
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        v41_tokenizer_json()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EnvironmentProblem, match="sha256"):
        v41_tokenizer_json()


@pytest.mark.parametrize(
    ("text", "ids"),
    [  # reference document, section 9
        ("<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>", [0, 128803, 19923, 128804, 128822]),
        (
            "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>Hello<｜Assistant｜></think>",
            [0, 128799, 7153, 9708, 16, 128803, 19923, 128804, 128822],
        ),
        ("<｜begin▁of▁sentence｜>The capital of France is", ENGRAM["example_text"]["ids"]),
        ("<｜deepseek_image｜><｜latest_reminder｜>｜DSML｜", [129264, 128828, 128825]),
    ],
)
def test_prompts_encode_to_the_golden_ids(v41, text, ids):
    assert v41.encode(text, add_special_tokens=False).ids == ids


def test_classes_of_v41_are_the_published_ones(v41):
    classes = class_map(v41, V41)
    assert classes.dtype == np.int32 and classes.max() + 1 == ENGRAM["compressed_vocab_size"]
    digest = hashlib.sha256(classes.astype("<i4").tobytes()).hexdigest()
    assert digest == ENGRAM["token_map_sha256_int32_le"]
    assert classes[ENGRAM["example_text"]["ids"]].tolist() == ENGRAM["example_text"]["compressed"]
    samples = {0: 0, 1: 1, 2: 2, 223: 174, 271: 174, 671: 237, 128799: 98611, 128803: 98615, 129264: 99076}
    assert {i: int(classes[i]) for i in samples} == samples


def test_classes_join_what_reads_alike():
    words = ["the", "The", "ĠTHE", "ï¬ģ", "fi", "Ã©", "ÃĮ", "e", "Ġ", "Ċ", "ĊĠ", "Ã"]
    tokenizer = small_tokenizer(words, [])
    size = tokenizer.get_vocab_size()
    config = micro_config(vocab_size=size)
    for classes in range(1, size + 1):
        config["text_config"]["engram_compressed_vocab_size"] = classes
        try:
            found = class_map(tokenizer, Spec.from_config(config))
            break
        except CheckpointError:
            continue
    of = {word: found[tokenizer.token_to_id(word)] for word in words}
    assert of["the"] == of["The"] == of["ĠTHE"]
    assert of["ï¬ģ"] == of["fi"]  # the ligature
    assert of["Ã©"] == of["e"]  # e with an accent
    assert of["Ġ"] == of["Ċ"] == of["ĊĠ"]  # white space alone
    assert of["Ã"] not in (of["ÃĮ"], of["e"])  # half a character


def test_another_number_of_classes_is_refused(v41):
    config = load_config("v41-flash")
    config["text_config"]["engram_compressed_vocab_size"] = 99_093
    with pytest.raises(CheckpointError, match="has 99092 Engram classes, expected 99093"):
        class_map(v41, Spec.from_config(config))


def test_other_classes_of_the_same_number_are_refused(v41, monkeypatch):
    monkeypatch.setattr(module, "V41_CLASSES_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="Engram classes have sha256 c60a8632"):
        class_map(v41, V41)


def test_classes_of_a_checkpoint_come_from_its_file_else_its_tokenizer(tmp_path):
    tokenizer = small_tokenizer([], ALL_SPECIAL)
    size = tokenizer.get_vocab_size()
    config = micro_config(vocab_size=size, engram_compressed_vocab_size=40)
    for key in ("bos", "eos", "pad", "image"):
        config[f"{key}_token_id"] = tokenizer.token_to_id(getattr(SPELLING, key))
    write_checkpoint(config, tmp_path / "a")
    with Checkpoint.open(tmp_path / "a") as checkpoint:
        assert checkpoint_class_map(checkpoint).tolist() == [i % 40 for i in range(size)]
    (tmp_path / "a/engram_token_map.json").unlink()
    with Checkpoint.open(tmp_path / "a") as checkpoint:
        with pytest.raises(CheckpointError, match=r"neither engram_token_map\.json nor tokenizer\.json"):
            checkpoint_class_map(checkpoint)
        tokenizer.save(str(tmp_path / "a/tokenizer.json"))
        with pytest.raises(CheckpointError, match=r"has \d+ Engram classes, expected 40"):
            checkpoint_class_map(checkpoint)


# --- refusals --------------------------------------------------------------------------------------------------------


def findings(tokenizer: Tokenizer, spec: Spec | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(tokenizer.to_str(), spec)
    return "\n".join(caught.value.findings)


def test_files_that_are_no_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path / "absent.json")
    for content in ("", "{", "[]", '{"model": 1}', '{"version": "1.0", "model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable"):
            load_tokenizer(tmp_path / "tokenizer.json")


def test_the_tokenizer_of_another_model_is_refused(v41):
    found = findings(v41, Spec.from_config(load_config("tiny")))
    assert "found 129280 token ids, expected 1024, the config's vocab_size" in found
    assert "<｜deepseek_image｜>: found id 129264, expected 1008, the config's image_token_id" in found


def test_v4_is_not_v41(v41):
    content = v41.to_str().replace(SPELLING.system, "<｜place▁holder▁no▁799｜>").replace(SPELLING.image, "<｜image2｜>")
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(content, V41)
    assert [line.split(":")[0] for line in caught.value.findings] == ["<｜System｜>", "<｜deepseek_image｜>"]


def test_special_tokens_must_be_one_id():
    found = findings(small_tokenizer([], [text for text in ALL_SPECIAL if text != "<think>"]))
    assert found == "<think>: found ids [27, 83, 71, 72, 77, 74, 29], expected one special token"


def test_a_tokenizer_that_adds_tokens_is_refused():
    tokenizer = small_tokenizer([], ALL_SPECIAL)
    bos = (SPELLING.bos, tokenizer.token_to_id(SPELLING.bos))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPELLING.bos} $A", special_tokens=[bos])
    assert "found that encoding adds tokens by itself" in findings(tokenizer)


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    assert "found decoder Metaspace" in findings(small_tokenizer([], ALL_SPECIAL, decoder=decoders.Metaspace()))


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_never_gives_half_a_character(v41):
    stream, text = TokenStream(v41), "héllo 🎉 wörld 龍"
    ids = v41.encode(text, add_special_tokens=False).ids
    pieces = [stream.feed([i]) for i in ids]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) == text
    assert "" in pieces  # some token ended inside a character
    assert stream.flush() == ""


def test_a_stream_cut_inside_a_character_ends_with_a_replacement(v41):
    first = v41.encode("🎉", add_special_tokens=False).ids[:1]
    stream = TokenStream(v41)
    assert stream.feed(first) == "" and stream.flush() == "\ufffd" and stream.flush() == ""


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 129_279), max_size=40), cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_a_stream_of_any_ids_is_what_the_library_decodes(v41, ids, cuts):
    stream, pieces, at = TokenStream(v41), [], 0
    for cut in cuts:
        pieces.append(stream.feed(ids[at : at + cut]))
        at += cut
    assert "".join(pieces) + stream.flush() == v41.decode(ids, skip_special_tokens=False)


def test_bytes_of_one_token(v41):
    assert token_bytes(v41, 128803) == "<｜User｜>".encode()
    assert token_bytes(v41, v41.encode(" Hello").ids[0]) == b" Hello"
    assert token_bytes(v41, 129_280) == b""
