"""Ways to damage a written checkpoint, and what opening it then finds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from dsuf.errors import CheckpointError
from dsuf.model.checkpoint import Checkpoint

FILE = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


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
