"""What tells checkpoints apart whose caches must not be mixed: 32 bytes over files and the beginning of each tensor.

    SHA-256 over  config.json, tokenizer.json, engram_token_map.json (or that there is none),
                  every shard's header, the first 4 KiB of every tensor

A full digest, which whoever made the folder may have put beside the shards as `checkpoint.sha256`, replaces the
tensors: it also sees a change that begins after 4 KiB. Reading 96,085 beginnings of the released size takes seconds. Of
a sparse checkpoint, which holds none, the seed stands for the tensors.
"""

from __future__ import annotations

import hashlib

from dsuf.errors import CheckpointError
from dsuf.model.checkpoint import CLASS_MAP, CONFIG, TOKENIZER, Checkpoint

FULL_DIGEST = "checkpoint.sha256"
BEGINNING_BYTES = 4096


def fingerprint(checkpoint: Checkpoint) -> bytes:
    """The fingerprint of an open checkpoint. Raises CheckpointError for a full digest that is none."""
    digest = hashlib.sha256(b"dsuf checkpoint 1")

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)

    for name in (CONFIG, TOKENIZER, CLASS_MAP):
        path = checkpoint.folder / name
        add(b"file " + path.read_bytes() if path.is_file() else b"none")
    for name, header in checkpoint.headers():
        add(name.encode())
        add(header)
    if checkpoint.holes_seed is not None:  # no tensor is there: the seed decides what a GPU makes
        add(f"holes {checkpoint.holes_seed}".encode())
        return digest.digest()
    full = _full_digest(checkpoint)
    if full is not None:
        add(full)
        return digest.digest()
    for name in sorted(checkpoint.names()):
        add(name.encode())
        add(checkpoint.beginning(name, BEGINNING_BYTES))
    return digest.digest()


def _full_digest(checkpoint: Checkpoint) -> bytes | None:
    path = checkpoint.folder / FULL_DIGEST
    if not path.is_file():
        return None
    try:
        found = bytes.fromhex(path.read_text().split()[0])
    except (ValueError, IndexError, UnicodeDecodeError):
        found = b""
    if len(found) != 32:
        raise CheckpointError(f"{path} holds no SHA-256 as 64 hexadecimal digits. Correct or remove it.")
    return found
