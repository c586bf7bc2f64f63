"""A checkpoint folder, checked as a whole when it is opened and read through mmap afterwards.

Opening reads config.json, the index and the headers of every shard, never a tensor's data. All that is wrong is told
in one CheckpointError: tensor name, what was found, what was expected. Arrays are views over the map: nothing is
copied, and only the pages that somebody touches are read.
"""

from __future__ import annotations

from collections.abc import KeysView
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dsuf.errors import CheckpointError, ConfigError
from dsuf.model.inventory import TensorInfo, inventory
from dsuf.model.shards import INDEX, Damaged, Entry, Shard, open_shard, quoted, read_json, shard_files
from dsuf.spec import Spec

STORAGE = {"BF16": np.uint16, "F32": np.float32, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8}
CLASS_MAP = "engram_token_map.json"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
HOLES = "sparse.json"  # beside shards that are holes: {"seed": what weights would be made from}


class Checkpoint:
    """An open checkpoint.

    folder      where it lies
    config      config.json as parsed; `spec` are its dimensions
    generation  generation_config.json as parsed, {} where there is none
    """

    def __init__(self, folder: Path, config: dict[str, Any], spec: Spec) -> None:
        self.folder, self.config, self.spec = folder, config, spec
        self.generation: dict[str, Any] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Shard, int]] = {}
        self._class_map: np.ndarray | None = None

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open and check a folder. Raises CheckpointError with every defect that was found."""
        folder = Path(folder)
        config, spec, expected = _read_config(folder)
        checkpoint, findings = cls(folder, config, spec), []
        checkpoint._tensors = expected
        files, claimed = shard_files(folder, findings)
        shards = [shard for name, path in files.items() if (shard := open_shard(name, path, findings))]
        unread = not files or len(shards) < len(files)
        checkpoint._places = _compare(expected, shards, claimed, unread=unread, findings=findings)
        checkpoint.generation = _read_generation(folder, findings)
        checkpoint._class_map = _read_class_map(folder, spec, findings)
        if findings:
            raise CheckpointError(
                f"checkpoint {folder} is damaged ({len(findings)} finding{'s' * (len(findings) > 1)}). "
                "Make or download it again, or give another folder:",
                findings,
            )
        return checkpoint

    def names(self) -> KeysView[str]:
        """All tensor names in inventory order."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of one tensor. Raises KeyError for a name outside the inventory."""
        return self._tensors[name]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._tensors.values())

    def raw(self, name: str) -> np.ndarray:
        """One tensor as stored: float32, bf16 bits as uint16, FP8 and packed FP4 as uint8; read-only view of the file.

        A view may be unaligned, since the format aligns nothing. Raises KeyError for a name outside the inventory.
        """
        info = self._tensors[name]
        if name not in self._places:
            raise CheckpointError(f"checkpoint {self.folder} was closed; open it again to read {name}.")
        shard, offset = self._places[name]
        storage = np.dtype(STORAGE[info.dtype])
        return np.frombuffer(shard.data, storage, info.nbytes // storage.itemsize, offset).reshape(info.shape)

    def headers(self) -> list[tuple[str, bytes]]:
        """Name of every shard and its header as stored, by name."""
        shards = {shard.name: shard for shard, _ in self._places.values()}
        return [(name, shards[name].data[: shards[name].start]) for name in sorted(shards)]

    def beginning(self, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of one tensor as stored. Raises KeyError for a name outside the inventory."""
        shard, offset = self._places[name]
        return shard.data[offset : offset + min(nbytes, self._tensors[name].nbytes)]

    def class_map(self) -> np.ndarray | None:
        """Engram class of every token id, int32 [vocab]; None where the folder has no engram_token_map.json."""
        return self._class_map

    @property
    def tokenizer_path(self) -> Path | None:
        """tokenizer.json of the folder, None where there is none."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None

    @property
    def holes_seed(self) -> int | None:
        """Seed of the weights that a sparse checkpoint stands for but does not hold; None where they are there."""
        try:
            marker = read_json(self.folder / HOLES)
        except Damaged:
            return None
        seed = marker.get("seed") if isinstance(marker, dict) else None
        return seed if isinstance(seed, int) else None

    def close(self) -> None:
        """Let go of the files; a map ends when the last array over it does."""
        self._places = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _read_config(folder: Path) -> tuple[dict[str, Any], Spec, dict[str, TensorInfo]]:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            f"no checkpoint at {folder}: found {found}, expected a folder with {CONFIG} and safetensors files. "
            "Give such a folder or a built-in name."
        )
    try:
        config = read_json(folder / CONFIG)
        if config is None:
            raise CheckpointError(
                f"no checkpoint at {folder}: found no {CONFIG}, expected one beside the safetensors files."
            )
        spec = Spec.from_config(config)
        return config, spec, inventory(spec, config)
    except (Damaged, ConfigError) as defect:
        what, *lines = str(defect).splitlines()
        raise CheckpointError(f"checkpoint {folder}, {CONFIG}: {what}", [line.strip() for line in lines]) from None


def _compare(
    expected: dict[str, TensorInfo], shards: list[Shard], claimed: dict[str, str], *, unread: bool, findings: list[str]
) -> dict[str, tuple[Shard, int]]:
    """Place of every expected tensor as (shard, byte in its file); each disagreement becomes a finding.

    `claimed` is the index. With `unread` files, a finding each, tensors that may stand in them are not told as absent.
    """
    places: dict[str, tuple[Shard, int]] = {}
    home: dict[str, str] = {}
    for shard in shards:
        for name in shard.named:
            if name in home:
                findings.append(
                    f"{quoted(name)}: found in {quoted(home[name])} and {quoted(shard.name)}, expected in one"
                )
            home[name] = shard.name
        for entry in shard.entries:
            found = _disagreement(entry, expected.get(entry.name))
            if found:
                findings.append(f"{quoted(entry.name)}: {found} (in {quoted(shard.name)})")
            else:
                places[entry.name] = (shard, shard.start + entry.begin)
    read = {shard.name for shard in shards}
    for name, info in expected.items():
        file = claimed.get(name)
        if name in home:
            if claimed and home[name] != file:
                findings.append(f"{name}: found in {quoted(home[name])}, expected in {quoted(file)} by the index")
        elif file in read or (file is None and not (unread and not claimed)):
            findings.append(f"{name}: not found{f' in {quoted(file)}' if file else ''}, expected {info}")
    for name in claimed.keys() - expected.keys() - home.keys():
        findings.append(f"{quoted(name)}: found a line for it in {INDEX}, expected no such tensor")
    return places


def _disagreement(entry: Entry, info: TensorInfo | None) -> str:
    """What is wrong with a header entry that should be `info`; empty when nothing is."""
    if info is None or entry.dtype != info.dtype or entry.shape != info.shape:
        return f"found {quoted(entry.dtype)} {quoted(list(entry.shape))}, expected {info or 'no such tensor'}"
    if entry.end - entry.begin != info.nbytes:
        return f"found {entry.end - entry.begin} bytes of data, expected {info.nbytes} for {info}"
    return ""


def _read_generation(folder: Path, findings: list[str]) -> dict[str, Any]:
    try:
        generation = read_json(folder / GENERATION)
    except Damaged as defect:
        findings.append(f"{GENERATION}: {defect}")
        return {}
    if generation is not None and not isinstance(generation, dict):
        findings.append(f"{GENERATION}: found {quoted(generation)}, expected a JSON object")
        return {}
    return generation or {}


def _read_class_map(folder: Path, spec: Spec, findings: list[str]) -> np.ndarray | None:
    try:
        classes = read_json(folder / CLASS_MAP)
    except Damaged as defect:
        findings.append(f"{CLASS_MAP}: {defect}")
        return None
    if classes is None:
        return None
    count, top = spec.vocab_size, spec.engram_compressed_vocab_size
    if not isinstance(classes, list) or len(classes) != count:
        found = f"{len(classes)} entries" if isinstance(classes, list) else quoted(classes)
        findings.append(f"{CLASS_MAP}: found {found}, expected a list of {count} classes, one a token id")
        return None
    wrong = next((i for i, value in enumerate(classes) if type(value) is not int or not 0 <= value < top), None)
    if wrong is not None:
        findings.append(f"{CLASS_MAP}: found {quoted(classes[wrong])} for token id {wrong}, expected 0 .. {top - 1}")
        return None
    return np.array(classes, np.int32)
