"""Opening checkpoints: zero-copy reads, and folders that are not what they should be, each defect told."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import deserialize

from dsuf.errors import CheckpointError
from dsuf.model.checkpoint import Checkpoint
from tests.model.damage import FILE, INDEX, edit_header, edit_json, findings


def test_every_tensor_is_what_the_safetensors_library_reads(made):
    twin = dict(deserialize((made / FILE).read_bytes()))
    with Checkpoint.open(made) as checkpoint:
        assert set(checkpoint.names()) == set(twin)
        for name in checkpoint.names():
            array, info = checkpoint.raw(name), checkpoint.info(name)
            assert (info.dtype, list(array.shape)) == (twin[name]["dtype"], twin[name]["shape"])
            assert array.tobytes() == twin[name]["data"], name


def test_dtypes_of_raw_arrays(made):
    with Checkpoint.open(made) as checkpoint:
        found = {checkpoint.info(name).dtype: checkpoint.raw(name).dtype.name for name in checkpoint.names()}
    assert found == {"BF16": "uint16", "F32": "float32", "F8_E4M3": "uint8", "F8_E8M0": "uint8", "I8": "uint8"}


def test_arrays_are_read_only_views_that_outlive_close(made):
    checkpoint = Checkpoint.open(made)
    array = checkpoint.raw("norm.weight")
    checkpoint.close()
    assert not array.flags.writeable and not array.flags.owndata
    assert array.sum() > 0
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.raw("norm.weight")


def test_one_file_without_an_index_is_enough(folder):
    (folder / INDEX).unlink()
    (folder / FILE).rename(folder / "model.safetensors")
    assert Checkpoint.open(folder).total_bytes == 225_431


def test_optional_files(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.generation == {} and checkpoint.tokenizer_path is None
    np.testing.assert_array_equal(checkpoint.class_map(), np.arange(64) % 40)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "engram_token_map.json").unlink()
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.generation == {"max_new_tokens": 7}
    assert checkpoint.tokenizer_path == folder / "tokenizer.json"
    assert checkpoint.class_map() is None


def test_an_absent_folder_and_a_file_are_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    for path, found in ((tmp_path / "absent", "found nothing"), (tmp_path / "file", "found a file")):
        with pytest.raises(CheckpointError, match=found):
            Checkpoint.open(path)


def test_a_folder_without_config_is_no_checkpoint(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"found no config\.json"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}', b'{"text_config": 1}']
)
def test_an_unusable_config_is_a_checkpoint_error(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_a_config_of_a_billion_experts_is_refused_at_once(folder):
    edit_json(folder / "config.json", lambda config: config["text_config"].update(n_routed_experts=10**9))
    with pytest.raises(CheckpointError, match="3000000002 routed experts"):
        Checkpoint.open(folder)


def test_all_defects_are_told_at_once(folder):
    def edit(header):
        header["surplus.weight"] = header.pop("norm.weight")
        header["layers.0.attn.attn_sink"]["dtype"] = "I32"
        header["layers.1.attn.wkv.scale"]["shape"] = [1]

    edit_header(folder, edit)
    edit_json(folder / "engram_token_map.json", lambda classes: classes[:-1])
    found = "\n".join(findings(folder))
    assert f"surplus.weight: found BF16 [32], expected no such tensor (in {FILE})" in found
    assert f"norm.weight: not found in {FILE}, expected BF16 [32]" in found
    assert f"layers.0.attn.attn_sink: found I32 [2], expected F32 [2] (in {FILE})" in found
    assert f"layers.1.attn.wkv.scale: found F8_E8M0 [1], expected F8_E8M0 [1, 1] (in {FILE})" in found
    assert "engram_token_map.json: found 63 entries, expected a list of 64 classes, one a token id" in found
    assert len(findings(folder)) == 5


@pytest.mark.parametrize(
    ("edit", "finding"),
    [
        (lambda index: {}, 'found no "weight_map" object'),
        (lambda index: [], 'found no "weight_map" object'),
        (lambda index: index["weight_map"].pop("norm.weight") and None, "norm.weight: found in"),
        (lambda index: index["weight_map"].update({"extra": FILE}), "extra: found a line for it"),
        (lambda index: index["weight_map"].update({"norm.weight": "absent"}), "absent: the index names it"),
    ],
)
def test_a_wrong_index(folder, edit, finding):
    edit_json(folder / INDEX, edit)
    assert any(finding in line for line in findings(folder))


def test_no_weights_at_all(folder):
    (folder / INDEX).unlink()
    (folder / FILE).unlink()
    found = findings(folder)
    assert found == (f"{INDEX}: found neither it nor model.safetensors, expected one of them",)


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("generation_config.json", "[1]", "found [1], expected a JSON object"),
        ("generation_config.json", "{", "not valid JSON"),
        ("engram_token_map.json", json.dumps([40] + [0] * 63), "found 40 for token id 0, expected 0 .. 39"),
        ("engram_token_map.json", json.dumps([True] + [0] * 63), "found True for token id 0"),
        ("engram_token_map.json", '{"0": 1}', "expected a list of 64 classes"),
    ],
)
def test_damaged_side_files(folder, name, content, finding):
    (folder / name).write_text(content)
    (found,) = findings(folder)
    assert found.startswith(name) and finding in found


def test_names_out_of_a_file_are_safe_to_print(folder):
    def edit(header):
        header["\x1b[31m\ud800" + "x" * 1000] = header.pop("norm.weight")

    edit_header(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(caught.value).isascii() and "\x1b" not in str(caught.value)
    assert max(map(len, str(caught.value).splitlines())) < 400
