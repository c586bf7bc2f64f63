"""Opening checkpoints: the inventory's published totals, zero-copy reads, and every kind of damage."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from dsuf.errors import CheckpointError, ConfigError
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.inventory import inventory
from dsuf.model.synthetic import load_config, write_checkpoint
from dsuf.spec import Spec
from tests.model.micro import micro_config

FILE = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "micro"
    write_checkpoint(micro_config(), folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "micro"))


def read_shard(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_shard(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    beside = path.with_suffix(".new")  # a file under a live map must not shrink
    beside.write_bytes(struct.pack("<Q", len(text)) + text + data)
    beside.replace(path)


def edit_header(folder: Path, edit) -> None:
    header, data = read_shard(folder / FILE)
    write_shard(folder / FILE, edit(header) or header, data)


def edit_json(path: Path, edit) -> None:
    value = json.loads(path.read_text())
    edited = edit(value)
    path.write_text(json.dumps(value if edited is None else edited))


def findings(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return caught.value.findings


# --- inventory -------------------------------------------------------------------------------------------------------


def tensors_of(name: str):
    config = load_config(name)
    return inventory(Spec.from_config(config), config)


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("v41-flash", 96_085, 510_286_023_000),
        ("h200x1", None, 110_547_546_792),
        ("h200x2", None, 218_359_378_536),
        ("tiny", 1_797, 7_050_850),
    ],
)
def test_totals_are_the_published_ones(name, count, total):
    tensors = tensors_of(name)
    assert count in (None, len(tensors))
    assert sum(info.nbytes for info in tensors.values()) == total


def part_of(name: str) -> str:
    stage = name.startswith("mtp.")
    if "markov_head" in name:
        return "markov head"
    if ".ffn.experts." in name:
        return "drafter experts" if stage else "experts"
    if ".engram.embed." in name:
        return "engram tables"
    if stage:
        return "drafter rest"
    if name in ("embed.weight", "head.weight"):
        return name
    return "vision" if name.startswith(("vision.", "aligner.", "image_")) else "dense"


def test_parts_of_the_released_model_have_the_published_bytes():
    parts: dict[str, int] = {}
    for info in tensors_of("v41-flash").values():
        parts[part_of(info.name)] = parts.get(part_of(info.name), 0) + info.nbytes
    assert parts == {  # reference document 1.2
        "experts": 288_777_830_400,
        "engram tables": 202_758_032_400,
        "dense": 7_199_094_208,
        "embed.weight": 1_323_827_200,
        "head.weight": 1_323_827_200,
        "drafter experts": 7_219_445_760,
        "drafter rest": 581_046_152,
        "markov head": 132_382_720,
        "vision": 970_536_960,
    }


def test_a_plain_layer_has_the_published_bytes():
    plain = [
        i for i in tensors_of("v41-flash").values() if i.name.startswith("layers.5.") and ".experts." not in i.name
    ]
    assert sum(info.nbytes for info in plain) == 170_055_128


def test_drafter_of_the_released_model_has_2401_tensors():
    assert sum(name.startswith("mtp.") for name in tensors_of("v41-flash")) == 2_401


def test_a_broken_vision_config_is_refused():
    config = load_config("v41-flash")
    config["vision_config"]["patch_size"] = "14"
    with pytest.raises(ConfigError, match="patch_size is '14'"):
        inventory(Spec.from_config(config), config)


# --- reading ---------------------------------------------------------------------------------------------------------


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


# --- damage ----------------------------------------------------------------------------------------------------------


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


def test_a_truncated_shard_names_the_tensors_that_are_cut(folder):
    path = folder / FILE
    os.truncate(path, path.stat().st_size - 100)
    (found,) = findings(folder)
    assert found.startswith("mtp.0.confidence_head.proj.weight: found data_offsets [225303, 225431]")
    assert found.endswith("expected at most 225331, the bytes of data in the file (is it truncated?)")


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_shard_cut_inside_its_header(folder, size):
    os.truncate(folder / FILE, size)
    (found,) = findings(folder)
    assert "truncated" in found


def test_bytes_after_the_last_tensor(folder):
    with (folder / FILE).open("ab") as file:
        file.write(b"more")
    assert findings(folder) == (f"{FILE}: found 225435 bytes of data, expected 225431, where the last tensor ends",)


def move(name: str, by: int):
    def edit(header):
        header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]

    return edit


@pytest.mark.parametrize(("by", "fault"), [(-2, "overlaps"), (2, "leaves a gap after")])
def test_overlaps_and_gaps(folder, by, fault):
    edit_header(folder, move("norm.weight", by))
    found = [line for line in findings(folder) if line.startswith("norm.weight")]
    assert len(found) == 1 and f"expected from byte 8192; it {fault} head.weight" in found[0]


def test_data_of_another_length_than_the_shape(folder):
    def edit(header):
        header["norm.weight"]["data_offsets"][1] -= 2

    edit_header(folder, edit)
    assert f"norm.weight: found 62 bytes of data, expected 64 for BF16 [32] (in {FILE})" in findings(folder)


def test_a_header_over_100_mb_is_refused_without_being_read(folder):
    with (folder / FILE).open("r+b") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    assert findings(folder) == (f"{FILE}: found a header of 100000001 bytes, expected at most 100000000",)


def test_a_name_twice_in_one_header(folder):
    header, data = read_shard(folder / FILE)
    text = json.dumps(header)
    write_shard(folder / FILE, (text[:-1] + ', "norm.weight": {}}').encode(), data)
    assert findings(folder) == (f"{FILE}: the name norm.weight stands twice in one JSON object",)


def test_a_tensor_in_two_shards(folder):
    shutil.copy(folder / FILE, folder / "again.safetensors")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"norm.weight": "again.safetensors"}))
    found = findings(folder)
    assert f"embed.weight: found in {FILE} and again.safetensors, expected in one" in found


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../outside.safetensors", "climbs out"),
        ("sub/../../outside.safetensors", "climbs out"),
        ("/outside.safetensors", "an absolute path"),
        ("link.safetensors", "a link that leaves the folder"),
        ("", "not a usable name"),
        ("a\0b", "not a usable name"),
        (7, "expected a file name"),
    ],
)
def test_index_entries_that_leave_the_folder(folder, name, why):
    shutil.copy(folder / FILE, folder.parent / "outside.safetensors")
    (folder / "link.safetensors").symlink_to("../outside.safetensors")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"norm.weight": name}))
    found = [line for line in findings(folder) if line.startswith(INDEX)]
    assert len(found) == 1 and "norm.weight" in found[0] and why in found[0]


def test_a_folder_of_the_hugging_face_cache_opens(folder, tmp_path):
    snapshot = tmp_path / "models--x--y/snapshots/0123"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (tmp_path / "models--x--y/blobs").mkdir()
    (snapshot / FILE).rename(tmp_path / "models--x--y/blobs/4567")
    (snapshot / FILE).symlink_to("../../blobs/4567")
    assert Checkpoint.open(snapshot).total_bytes == 225_431


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


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_a_shard_that_is_no_regular_file(folder, kind):
    (folder / FILE).unlink()
    os.mkdir(folder / FILE) if kind == "folder" else os.mkfifo(folder / FILE)
    assert findings(folder) == (f"{FILE}: not a regular file",)


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


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def opened_bytes(folder: Path) -> dict[str, bytes] | None:
    """Every tensor's bytes, or None when the checkpoint is refused; anything else is a failure of the test."""
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError:
        return None
    return {name: checkpoint.raw(name).tobytes() for name in checkpoint.names()}


@pytest.fixture(scope="module")
def victim(made, tmp_path_factory):
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("victim") / "micro"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_bytes_are_refused_or_harmless(made, victim, data):
    content = bytearray((made / FILE).read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 11) | st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    (victim / "new").write_bytes(content[:cut])
    (victim / "new").replace(victim / FILE)
    assert opened_bytes(victim) in (None, opened_bytes(made))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_header_entries_are_refused_or_harmless(made, victim, data):
    header, tensors = read_shard(made / FILE)
    name = data.draw(st.sampled_from(sorted(header)))
    place = data.draw(st.sampled_from(["entry", "dtype", "shape", "data_offsets", "new name", "extra key"]))
    value = data.draw(ANY_JSON)
    if place == "entry":
        header[name] = value
    elif place == "new name":
        header[data.draw(st.text(max_size=5))] = header.pop(name)
    elif place == "extra key":
        header[name]["extra"] = value
    else:
        header[name][place] = value
    write_shard(victim / FILE, header, tensors)
    assert opened_bytes(victim) in (None, opened_bytes(made))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_json_files_are_refused_or_harmless(made, victim, data):
    for name in (FILE, INDEX, "config.json", "engram_token_map.json"):
        shutil.copy(made / name, victim / "new")
        (victim / "new").replace(victim / name)
    name = data.draw(st.sampled_from([INDEX, "config.json", "engram_token_map.json"]))
    content = bytearray((victim / name).read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    else:
        del content[data.draw(st.integers(0, len(content))) :]
    (victim / name).write_bytes(content)
    assert opened_bytes(victim) in (None, opened_bytes(made))
