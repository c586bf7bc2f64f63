"""`dsuf run` on the tiny checkpoint against the goldens of the official forward, and every bad input's exit status."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dsuf.cli.app import run_command
from tests.cli.conftest import GOLDEN

TOLERANCE = {"exact32": 1e-3, "qdq64": 1e-5}


def run_json(capsys, tiny, prompt_file, *flags):
    command = ["run", "--ckpt", str(tiny), "--tokens", str(prompt_file), "--temperature", "0", "--json", *flags]
    assert run_command(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("numerics", ["exact32", "qdq64"])
@pytest.mark.parametrize("draft", ["on", "off"])
def test_exact_prefill_equals_the_goldens(capsys, tmp_path, tiny, prompt_file, numerics, draft):
    golden, rows_file = GOLDEN[numerics], tmp_path / "out.safetensors"
    flags = ["--max-tokens", "17", "--numerics", numerics, "--prefill", "exact", "--draft", draft]
    report = run_json(capsys, tiny, prompt_file, *flags, "--logits", str(rows_file))
    assert report["prompt_tokens"] == len(GOLDEN["prompt"])
    assert report["prompt_argmax"] == golden["argmax_prompt"]
    assert report["tokens"] == golden["greedy"]
    assert report["numerics"] == numerics
    rows = load_file(rows_file)["logits"]
    assert rows.dtype == np.float32
    assert rows.shape == (17, 1024)
    tolerance = TOLERANCE[numerics]
    np.testing.assert_allclose(rows[0], golden["logits_last_prompt"], atol=tolerance)
    np.testing.assert_allclose(rows[1:, :8], golden["decode_logits_first8"], atol=tolerance)
    assert rows.argmax(axis=1).tolist() == report["tokens"]


@pytest.mark.parametrize("numerics", ["exact32", "qdq64"])
def test_drafts_and_confidences_equal_the_goldens(capsys, tiny, prompt_file, numerics):
    flags = ["--max-tokens", "17", "--numerics", numerics, "--prefill", "exact", "--draft", "on", "--verify", "5"]
    steps = run_json(capsys, tiny, prompt_file, *flags)["steps"]
    expected = {draft["after"]: draft for draft in GOLDEN[numerics]["drafts"]}
    position = len(GOLDEN["prompt"])
    compared = 0
    for step in steps:
        assert set(step) >= {"position", "after", "drafted", "confidence", "accepted", "emitted"}
        assert step["position"] == position
        assert step["accepted"] == len(step["emitted"]) - 1
        position += len(step["emitted"])
        if step["after"] in expected:
            compared += 1
            assert step["drafted"] == expected[step["after"]]["tokens"]
            np.testing.assert_allclose(step["confidence"], expected[step["after"]]["confidence"], atol=1e-3)
    assert compared >= 15


def test_without_drafts_no_step_has_any(capsys, tiny, prompt_file):
    report = run_json(capsys, tiny, prompt_file, "--max-tokens", "4", "--draft", "off")
    assert all(step["drafted"] == [] and step["accepted"] == 0 for step in report["steps"])
    assert report["accept_length"] == 1.0


@pytest.mark.parametrize("numerics", ["exact32", "qdq64"])
def test_truncated_prefill_equals_its_golden(capsys, tmp_path, tiny, prompt_file, numerics):
    golden, rows_file = GOLDEN[numerics], tmp_path / "out.safetensors"
    flags = ["--max-tokens", "1", "--numerics", numerics, "--prefill", "truncated", "--logits", str(rows_file)]
    report = run_json(capsys, tiny, prompt_file, *flags)
    assert report["prompt_argmax"] is None
    assert report["tokens"] == [golden["argmax_decoder_tail"]]
    row = load_file(rows_file)["logits"][0]
    np.testing.assert_allclose(row, golden["logits_last_prompt_decoder_tail"], atol=TOLERANCE[numerics])


def test_one_seed_gives_one_answer_and_another_seed_another(capsys, tiny, prompt_file):
    def tokens(seed):
        command = ["run", "--ckpt", str(tiny), "--tokens", str(prompt_file), "--json", "--max-tokens", "12"]
        assert run_command([*command, "--numerics", "exact32", "--seed", str(seed)]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    assert tokens(1) == tokens(1) != tokens(2)


def test_plain_output_is_the_ids_on_one_line(capsys, tiny, prompt_file):
    command = ["run", "--ckpt", str(tiny), "--tokens", str(prompt_file), "--temperature", "0", "--max-tokens", "3"]
    assert run_command([*command, "--numerics", "exact32", "--prefill", "exact"]) == 0
    out, err = capsys.readouterr()
    assert [int(word) for word in out.split()] == GOLDEN["exact32"]["greedy"][:3]
    assert "3 tokens at" in err


@pytest.fixture
def refused(tiny, prompt_file, capsys):
    """Run with the tiny checkpoint and the goldens' prompt unless `flags` say otherwise; (status, message)."""

    def attempt(*flags, tokens=prompt_file, ckpt=tiny):
        status = run_command(["run", "--ckpt", str(ckpt), "--tokens", str(tokens), "--max-tokens", "2", *flags])
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return status, err

    return attempt


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--temperature", "-1"], "--temperature is -1.0; expected a number from 0 to 2"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--top-p", "0"], "--top-p is 0.0; expected a number above 0 to 1"),
        (["--top-k", "-5"], "--top-k is -5"),
        (["--seed", "-1"], "--seed is -1"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--verify", "6"], "this checkpoint drafts 5 tokens"),
        (["--verify", "many"], "--verify is 'many'"),
        (["--draft", "maybe"], "--draft is 'maybe'"),
        (["--numerics", "fp7"], "numerics is 'fp7'"),
        (["--prefill", "half"], "prefill is 'half'"),
        (["--max-context", "1"], "max_context is 1"),
        (["--max-context", "30"], "30"),
        (["--chat"], "one of PROMPT, --chat or --tokens"),
        (["hello"], "one of PROMPT, --chat or --tokens"),
        (["--thinking"], "--system and --thinking are parts of a chat"),
        (["--system", "Be brief."], "--system and --thinking are parts of a chat"),
        (["--logits", "/absent/rows"], "--logits /absent/rows cannot be written: there is no folder /absent"),
    ],
)
def test_a_wrong_flag_ends_with_2_and_says_what_is_expected(refused, flags, complaint):
    status, message = refused(*flags)
    assert status == 2
    assert complaint in message


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[]", "is empty"),
        ("[1, 1024]", "1024"),
        ("[-1]", "-1"),
        ("[1.5]", "not a JSON list of token ids"),
        ('["a"]', "not a JSON list of token ids"),
        ("[1", "not a JSON list of token ids"),
        ('{"prompt": [1]}', "not a JSON list of token ids"),
    ],
)
def test_wrong_ids_end_with_2(refused, tmp_path, content, complaint):
    (tmp_path / "ids.json").write_text(content)
    status, message = refused(tokens=tmp_path / "ids.json")
    assert status == 2
    assert complaint in message


def test_a_missing_token_file_ends_with_2(refused, tmp_path):
    assert refused(tokens=tmp_path / "none.json")[0] == 2


def test_no_checkpoint_ends_with_3(refused, tmp_path):
    status, message = refused(ckpt=tmp_path / "none")
    assert status == 3
    assert "no checkpoint at" in message


def copy_of(tiny, target):
    target.mkdir()
    for file in tiny.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_truncated_shard_ends_with_3(refused, tiny, tmp_path):
    folder = copy_of(tiny, tmp_path / "cut")
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    status, message = refused(ckpt=folder)
    assert status == 3
    assert shard.name in message


@pytest.mark.parametrize("wrong", ['{"temperature": "hot"}', '{"temperature": 7}', '{"max_new_tokens": 0}'])
def test_wrong_defaults_of_a_checkpoint_end_with_3(refused, tiny, tmp_path, wrong):
    folder = copy_of(tiny, tmp_path / "defaults")
    (folder / "generation_config.json").write_text(wrong)
    status, message = refused(ckpt=folder)
    assert status == 3
    assert "generation_config.json: Expected" in message


def test_a_wrong_dtype_ends_with_3_and_names_the_tensor(refused, tiny, tmp_path):
    folder = copy_of(tiny, tmp_path / "typed")
    shard = next(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["embed.weight"]["dtype"] = "F16"
    text = json.dumps(header).encode().ljust(size)[:size]
    assert json.loads(text) == header
    shard.write_bytes(content[:8] + text + content[8 + size :])
    status, message = refused(ckpt=folder)
    assert status == 3
    assert "embed.weight" in message


def test_a_text_prompt_without_a_tokenizer_names_the_way_out(tiny, capsys):
    assert run_command(["run", "hello", "--ckpt", str(tiny)]) == 3
    assert "--tokens" in capsys.readouterr().err


def test_more_gpus_than_there_are_end_with_3(refused):
    status, message = refused("--gpus", "64")
    assert status == 3
    assert "Found:" in message


@pytest.mark.parametrize("flag", ["--json", "--logits=x"])
def test_a_chat_has_no_single_answer_to_describe(flag, capsys):
    assert run_command(["run", "--chat", flag]) == 2
    assert "--chat" in capsys.readouterr().err
