"""Write a checkpoint of any size whose weights are a function of tensor name, position and seed alone.

    z_k = SplitMix64(state = crc32(name) + seed * 2^32 + (k + 1) * 0x9E3779B97F4A7C15)       k: position in the tensor
    v_k = (z_k >> 40) / 2^23 - 1                                                             in [-1, 1)
    tensor = mean + sqrt(3) * sigma * v, then rounded to bf16 or quantised

Quantised parameters draw from the name with `.weight`. Any row range of a tensor can be made without the rows before
it, so that memory is bounded by a few chunks whatever the size. Sigmas and means follow measurements on the real
weights (reference document, section 12; vision: ours), except that wo_b and w2 are scaled by 1/4 to keep a random
model from being chaotic.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dsuf.errors import ConfigError, EnvironmentProblem, UsageError
from dsuf.formats import float32_to_bf16, quantise_fp4_rows, quantise_fp8_blocks, quantise_fp8_rows
from dsuf.model.checkpoint import CLASS_MAP, CONFIG, HOLES
from dsuf.model.inventory import Parameter, inventory, parameters
from dsuf.model.shards import INDEX, Damaged, read_json
from dsuf.spec import BLOCK, Spec

SHARD_ABOVE_BYTES = 4_000_000_000  # more than this is split by layer, as the released checkpoint is
CHUNK_VALUES = 1 << 18  # values made at a time: a few MB of working memory, which stay in the CPU caches

_GAIN = {  # sigma in units of fan_in^-1/2, by the component that names the matrix
    **{"wq_a": 1.6, "wq_b": 0.95, "wkv": 1.8, "wo_a": 1.6, "wo_b": 1.9 * 0.25},
    **{"w1": 1.5, "w3": 1.5, "w2": 1.05 * 0.25, "gate": 2.9, "wgate": 20},
}
_NORM_MEAN = {
    "attn_norm": 0.025,
    "ffn_norm": 0.2,
    "q_norm": 0.97,
    "kv_norm": 0.4,
    "k_norm": 0.5,
    "compressor.norm": 0.6,
}
_EMBEDDING_RMS = 0.12
_ENGRAM_RMS = 0.5


def load_config(name_or_path: str) -> dict[str, Any]:
    """The parsed config of a built-in name (`builtin_configs`) or of a path to a config.json or its folder.

    Raises ConfigError when there is none, or when it is not JSON.
    """
    if name_or_path in builtin_configs():
        return json.loads(_configs().joinpath(name_or_path + ".json").read_text(encoding="utf-8"))
    path = Path(name_or_path)
    path = path / CONFIG if path.is_dir() else path
    try:
        config = read_json(path)
    except Damaged as defect:
        raise ConfigError(f"{path}: {defect}. Give a config.json of DeepSeek-V4.1-Flash's schema.") from None
    if config is None:
        names = ", ".join(builtin_configs())
        raise ConfigError(f"{path} was not found. Give a path to a config.json, or one of the built-in names {names}.")
    return config


def builtin_configs() -> list[str]:
    """Names that `load_config` knows."""
    return sorted(item.name[:-5] for item in _configs().iterdir() if item.name.endswith(".json"))


def _configs() -> resources.abc.Traversable:
    return resources.files("dsuf").joinpath("configs")


def write_checkpoint(
    config: dict[str, Any],
    out: Path,
    *,
    seed: int = 0,
    sparse: bool = False,
    progress: Callable[[int, int], None] | None = None,
    class_map: np.ndarray | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `config` and weights for it to the folder `out`, which must be absent or empty.

    seed         0 gives the bytes of the reference's make_tiny.py
    sparse       headers and index as usual, holes for data (no disk used): a GPU makes weights of the same kind from
                 the seed when it loads the checkpoint, a CPU sees zeros
    progress     called with (bytes done, bytes in all)
    class_map    Engram class of every token id; default id mod engram_compressed_vocab_size
    extra_files  further files of the folder by name, for example tokenizer.json

    The folder appears whole or not at all: it is written beside `out` and renamed. Raises ConfigError for a config
    that cannot be used, UsageError for a target in use, EnvironmentProblem for a disk that is too small.
    """
    spec = Spec.from_config(config)
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {seed}, expected 0 to 2^63 - 1.")
    tensors = inventory(spec, config)
    total_bytes = sum(info.nbytes for info in tensors.values())
    shards = _shards(list(parameters(spec, config)), total_bytes)
    done_bytes = 0

    def advance(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if progress:
            progress(done_bytes, total_bytes)

    with _appearing(out, 0 if sparse else total_bytes) as folder:
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map.update({info.name: name for parameter in shard for info in parameter.tensors()})
            _write_shard(folder / name, shard, seed, sparse, advance)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": {name: weight_map[name] for name in tensors}}
        ids = range(spec.vocab_size)
        classes = [i % spec.engram_compressed_vocab_size for i in ids] if class_map is None else class_map.tolist()
        (folder / CONFIG).write_text(json.dumps(config, indent=1))
        (folder / INDEX).write_text(json.dumps(index))
        (folder / CLASS_MAP).write_text(json.dumps(classes))
        if sparse:
            (folder / HOLES).write_text(json.dumps({"seed": seed}))
        for name, content in (extra_files or {}).items():
            (folder / name).write_bytes(content)


@contextmanager
def _appearing(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends, and vanishes when it raises."""
    out = Path(os.path.realpath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "a folder that is not empty" if out.is_dir() else "a file"
        raise UsageError(f"{out} is {what}, expected a new or empty folder. Give another one or remove it.")
    folder = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    absent_parents = [parent for parent in out.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise EnvironmentProblem(
                f"{out.parent} has {free_bytes / 1e9:.1f} GB free, the checkpoint needs {needed_bytes / 1e9:.1f} GB. "
                "Give a folder on a larger disk, or ask for a sparse checkpoint."
            )
        yield folder
        folder.rename(out)
    except OSError as error:
        raise EnvironmentProblem(
            f"{out} cannot be written: {error.strerror or error}. Give a folder that can be written."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after the rename there is nothing of that name
        for parent in absent_parents:
            with suppress(OSError):  # not empty: `out` is in it
                parent.rmdir()


def _shards(everything: list[Parameter], total_bytes: int) -> list[list[Parameter]]:
    """One file for a small checkpoint, else the files of the released one: vision, embed, one a layer, head and norm,
    one a drafter stage, one for the Engram tensors of each Engram layer."""
    if total_bytes <= SHARD_ABOVE_BYTES:
        return [everything]
    files: dict[tuple[int, int], list[Parameter]] = {}
    for parameter in everything:
        files.setdefault(_file_of(parameter.name), []).append(parameter)
    return [files[key] for key in sorted(files)]


def _file_of(name: str) -> tuple[int, int]:
    part, *rest = name.split(".")
    if part == "layers":
        return (5 if rest[1] == "engram" else 2, int(rest[0]))
    if part == "mtp":
        return 4, int(rest[0])
    return {"embed": 1, "head": 3, "norm": 3}.get(part, 0), 0


def _write_shard(path: Path, shard: list[Parameter], seed: int, sparse: bool, advance: Callable[[int], None]) -> None:
    header, at = {}, 0
    for parameter in shard:
        for info in parameter.tensors():
            end = at + info.nbytes
            header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        offset = file.tell()
        if sparse:
            file.truncate(offset + at)
            advance(at)
            return
        for parameter in shard:
            offset = _write_parameter(file, offset, parameter, seed, advance)


def _write_parameter(
    file: BinaryIO, offset: int, parameter: Parameter, seed: int, advance: Callable[[int], None]
) -> int:
    """Write the tensors of one parameter from byte `offset` on, by row chunks; returns where they end."""
    infos = parameter.tensors()
    places = [offset] if len(infos) == 1 else [offset, offset + infos[0].nbytes]
    rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
    step = max(CHUNK_VALUES // columns // BLOCK, 1) * BLOCK  # whole 32-row blocks share a scale
    for first in range(0, rows, step):
        chunk = _stored(parameter, _values(parameter, seed, first, min(step, rows - first), columns))
        for tensor, array in enumerate(chunk):
            file.seek(places[tensor])
            file.write(memoryview(np.ascontiguousarray(array)).cast("B"))
            places[tensor] += array.nbytes
        advance(sum(array.nbytes for array in chunk))
    return offset + sum(info.nbytes for info in infos)


def _stored(parameter: Parameter, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """float32 [rows, columns] as the arrays of `Parameter.tensors`."""
    if parameter.kind == "f32":
        return (values,)
    if parameter.kind in ("norm", "bf16"):
        return (float32_to_bf16(values),)
    quantise = {"fp8": quantise_fp8_blocks, "rows": quantise_fp8_rows, "fp4": quantise_fp4_rows}
    return quantise[parameter.kind](values)


def _values(parameter: Parameter, seed: int, first_row: int, rows: int, columns: int) -> np.ndarray:
    """Rows `first_row` .. of a parameter before storage, float32 [rows, columns]."""
    quantised = parameter.kind in ("fp8", "fp4", "rows")
    name = parameter.name + ".weight" if quantised else parameter.name
    values = uniform(name, first_row * columns, rows * columns, seed).reshape(rows, columns)
    mean, sigma = statistics(parameter)
    # Rounded to float32 in this order: the bytes for seed 0 are given.
    values *= np.float32(sigma * math.sqrt(3))
    if parameter.kind == "norm":
        values += np.float32(1)
        values *= np.float32(mean)
    elif mean:
        values += np.float32(mean)
    return values


def uniform(name: str, first: int, count: int, seed: int = 0) -> np.ndarray:
    """Values `first` .. `first + count` of the stream of one tensor, float32 [count] in [-1, 1)."""
    state = (zlib.crc32(name.encode()) + (seed << 32)) % 2**64
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(state)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(40)
    values = z.astype(np.float32)  # 24 bits: exact, and so is the rest
    values *= np.float32(2**-23)
    values -= np.float32(1)
    return values


def arrays(parameter: Parameter, seed: int) -> tuple[np.ndarray, ...]:
    """The one or two arrays that store a whole parameter, shaped as its tensors are; for small ones."""
    rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
    made = _stored(parameter, _values(parameter, seed, 0, rows, columns))
    return tuple(array.reshape(info.shape) for array, info in zip(made, parameter.tensors(), strict=True))


def statistics(parameter: Parameter) -> tuple[float, float]:
    """Mean and sigma of a parameter's values; for norms the sigma is relative to the mean."""
    name, kind, fan_in = parameter.name, parameter.kind, parameter.shape[-1]
    *_, owner, last = ("", *name.split("."))
    if kind == "norm":
        return _NORM_MEAN.get("compressor.norm" if name.endswith("compressor.norm.weight") else owner, 1.0), 0.1
    if kind == "rows":
        return 0.0, _ENGRAM_RMS
    if kind == "f32":
        if last == "attn_sink":
            return 0.0, 1.0
        suffix = last.rsplit("_", 1)[-1]
        return {"fn": (0.0, fan_in**-0.5), "base": (0.0, 0.5), "scale": (1.0, 0.1)}.get(suffix, (0.0, 0.05))
    if name == "embed.weight" or name.startswith("image_"):
        return 0.0, _EMBEDDING_RMS
    if name.endswith("markov_head.embed.weight"):
        return 0.0, 1.0
    matrix = owner if last == "weight" else last
    gain = 4 if name == "head.weight" else _GAIN.get(matrix, 1)
    if ".engram." in name or ".indexer." in name:
        gain = 1
    return 0.0, gain * fan_in**-0.5
