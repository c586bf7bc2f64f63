"""Damaged shards and indices: what is cut, overlaps, lies elsewhere or comes twice is named."""

from __future__ import annotations

import json
import os
import shutil
import struct

import pytest

from dsuf.model.checkpoint import Checkpoint
from tests.model.damage import FILE, INDEX, edit_header, edit_json, findings, read_shard, write_shard


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


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_a_shard_that_is_no_regular_file(folder, kind):
    (folder / FILE).unlink()
    os.mkdir(folder / FILE) if kind == "folder" else os.mkfifo(folder / FILE)
    assert findings(folder) == (f"{FILE}: not a regular file",)
