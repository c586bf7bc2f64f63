"""Safetensors files on disk: which ones a checkpoint folder names, and what each header claims.

A file is: u64 length n (little endian), n bytes of JSON, data. The JSON maps a tensor name to dtype, shape and
data_offsets [begin, end) relative to the data, which the tensors must fill without gap or overlap.
Nothing here raises for a damaged file; every reader appends one line a defect to `findings`, so that all of them
reach the user at once. Source: the format page of the safetensors project.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MOST_JSON_BYTES = 100_000_000  # the limit that the safetensors library sets for a header


class Damaged(Exception):
    """One defect that makes a whole file useless; becomes a finding."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as a header describes it; `begin` and `end` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One mapped file; `entries` are those header entries that are well formed, `named` all of them."""

    name: str
    named: frozenset[str]
    start: int  # byte of the file at which data starts
    entries: list[Entry]
    data: mmap.mmap


def quoted(text: object) -> str:
    """Anything out of a file, made safe and short enough for a terminal."""
    line = ascii(text) if not isinstance(text, str) else ascii(text)[1:-1]
    return line if len(line) <= 160 else line[:157] + "..."


def parse_json(raw: bytes) -> Any:
    """JSON in which no object names a key twice. Raises Damaged."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise Damaged(f"the name {quoted(twice)} stands twice in one JSON object")
        return found

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not valid JSON ({quoted(str(error))})") from None


def read_json(path: Path) -> Any:
    """The parsed file, or None where there is no such file. Raises Damaged."""
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_JSON_BYTES:
                raise Damaged(f"{size} bytes, expected at most {MOST_JSON_BYTES}")
            return parse_json(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror or error}") from None


def shard_files(folder: Path, findings: list[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Files of the checkpoint by the name that the index gives them, and the index's map of tensor to file name.

    Without an index a single `model.safetensors` is taken and the map is empty.
    """
    try:
        index = read_json(folder / INDEX)
    except Damaged as defect:
        findings.append(f"{INDEX}: {defect}")
        return {}, {}
    if index is None:
        if (folder / SINGLE_FILE).exists():
            return {SINGLE_FILE: folder / SINGLE_FILE}, {}
        findings.append(f"{INDEX}: found neither it nor {SINGLE_FILE}, expected one of them")
        return {}, {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        findings.append(f'{INDEX}: found no "weight_map" object, expected a map from tensor name to file name')
        return {}, {}
    files: dict[str, Path] = {}
    claimed: dict[str, str] = {}
    refused: set[str] = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            findings.append(f"{INDEX}: {quoted(tensor)}: found {quoted(name)}, expected a file name")
            continue
        claimed[tensor] = name
        if name not in files and name not in refused:
            why_not = _leaves(folder, name)
            if why_not:
                refused.add(name)
                findings.append(f"{INDEX}: {quoted(tensor)}: found file {quoted(name)}, {why_not}")
            else:
                files[name] = folder / name
    return files, claimed


def _leaves(folder: Path, name: str) -> str:
    """Why a file name of the index is refused; empty when it stays in the folder."""
    expected = "expected a file inside the checkpoint folder"
    if not name or "\0" in name or "\\" in name:
        return f"which is not a usable name, {expected}"
    if os.path.isabs(name):
        return f"an absolute path, {expected}"
    if ".." in Path(name).parts:
        return f"which climbs out of the folder, {expected}"
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    if target.is_relative_to(root):
        return ""
    # The Hugging Face cache keeps .../snapshots/REVISION/FILE as a link to .../blobs/DIGEST of the same model.
    if root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs":
        return ""
    return f"a link that leaves the folder, {expected}"


def open_shard(name: str, path: Path, findings: list[str]) -> Shard | None:
    """Map one file and read its header; None, with a finding, when the header cannot be used at all."""
    shown = quoted(name)
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header, start = _read_header(file, size)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (Damaged, FileNotFoundError) as defect:
        findings.append(f"{shown}: {defect if isinstance(defect, Damaged) else 'the index names it, but no such file'}")
        return None
    except (OSError, ValueError) as error:
        findings.append(f"{shown}: cannot be read: {quoted(str(error))}")
        return None
    header.pop("__metadata__", None)
    entries = []
    for tensor, value in header.items():
        entry = _entry(tensor, value)
        if entry is None:
            findings.append(
                f"{quoted(tensor)}: found {quoted(value)} in {shown}, expected dtype, shape and data_offsets"
            )
        elif entry.end > size - start:
            findings.append(
                f"{quoted(tensor)}: found data_offsets [{entry.begin}, {entry.end}] in {shown}, "
                f"expected at most {size - start}, the bytes of data in the file (is it truncated?)"
            )
        else:
            entries.append(entry)
    if len(entries) == len(header):
        _check_layout(shown, entries, size - start, findings)
    return Shard(name, frozenset(header), start, entries, data)


def _open_regular(path: Path) -> BinaryIO:
    """Open for reading, refusing what is no regular file (a FIFO would block for ever)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged("not a regular file")
    return os.fdopen(descriptor, "rb")


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header object and the byte at which data starts."""
    if size < 8:
        raise Damaged(f"found {size} bytes, expected at least the 8 of the header length (is it truncated?)")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MOST_JSON_BYTES:
        raise Damaged(f"found a header of {length} bytes, expected at most {MOST_JSON_BYTES}")
    if 8 + length > size:
        raise Damaged(f"found {size} bytes, expected {8 + length} for the header alone (is it truncated?)")
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise Damaged("the header is no JSON object")
    return header, 8 + length


def _entry(name: str, value: Any) -> Entry | None:
    """A well formed header entry, else None."""
    if not isinstance(value, dict):
        return None
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        return None
    begin, end = offsets
    return Entry(name, dtype, tuple(shape), begin, end) if begin <= end else None


def _counts(value: Any) -> bool:
    # type() and not isinstance(): true and false are integers to Python, not to the format
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_layout(shown: str, entries: list[Entry], data_bytes: int, findings: list[str]) -> None:
    """The tensors fill the data from its first byte to its last, each byte once."""
    at, before = 0, "the start of the data"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            fault = "overlaps" if entry.begin < at else "leaves a gap after"
            findings.append(
                f"{quoted(entry.name)}: found data from byte {entry.begin} in {shown}, "
                f"expected from byte {at}; it {fault} {before}"
            )
        at, before = max(at, entry.end), quoted(entry.name)
    if at != data_bytes:
        findings.append(f"{shown}: found {data_bytes} bytes of data, expected {at}, where the last tensor ends")
