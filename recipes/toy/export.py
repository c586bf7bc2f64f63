"""Float32 masters of train.py -> a checkpoint folder in the released file format, and the packed file of the package.

`python -m recipes.toy.export MASTERS DATASET_FOLDER OUT --pack dsuf/toy/toy.zip`, where DATASET_FOLDER holds
tokenizer.json and dataset.npz. The folder is opened and checked as any checkpoint before it is packed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dsuf import formats
from dsuf.model.checkpoint import CLASS_MAP, CONFIG, GENERATION, TOKENIZER, Checkpoint
from dsuf.model.shards import INDEX
from dsuf.spec import Spec
from recipes.toy.drafter import Drafter
from recipes.toy.model import Backbone
from recipes.toy.names import checkpoint_tensors

SHARD = "model-00001-of-00001.safetensors"
GREEDY = {"temperature": 0}
_QUANTISED = {
    "fp8": (formats.quantise_fp8_blocks, formats.dequantise_fp8_blocks, "F8_E4M3"),
    "rows": (formats.quantise_fp8_rows, formats.dequantise_fp8_rows, "F8_E4M3"),
    "fp4": (formats.quantise_fp4_rows, formats.dequantise_fp4_rows, "I8"),
}


def load_checkpoint(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill a model with what a checkpoint holds; its weights already lie on their grids."""
    raw = checkpoint.raw
    for name, kind, value in checkpoint_tensors(module):
        if name.endswith("bias_vl"):  # of image tokens, which the model does not know
            continue
        if kind in _QUANTISED:
            array = _QUANTISED[kind][1](raw(name), raw(name.removesuffix("weight") + "scale"))
        else:
            array = formats.bf16_to_float32(raw(name)) if kind == "bf16" else raw(name)
        value.copy_(torch.from_numpy(array.astype(np.float32)))


def load_masters(module: nn.Module, folder: Path, name: str) -> None:
    """Fill a model from NAME.*.pt."""
    state: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{name}.*.pt")):
        state |= torch.load(path, map_location="cpu", weights_only=True)
    module.load_state_dict(state)


def stored(module: nn.Module) -> dict[str, tuple[str, np.ndarray]]:
    """Tensor name -> safetensors dtype and the bytes as an array."""
    tensors = {}
    for name, kind, value in checkpoint_tensors(module):
        array = value.to(torch.float32).numpy()
        if kind in _QUANTISED:
            quantise, _, dtype = _QUANTISED[kind]
            weight, scale = quantise(array)
            tensors[name] = dtype, weight
            tensors[name.removesuffix("weight") + "scale"] = "F8_E8M0", scale
        elif kind == "bf16":
            tensors[name] = "BF16", formats.float32_to_bf16(array)
        else:
            tensors[name] = "F32", array
    return tensors


def write_folder(
    out: Path, config: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]], tokenizer: str, classes: np.ndarray
) -> None:
    """Write the files of a checkpoint and open it. Raises CheckpointError when the inventory does not fit."""
    out.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (out / SHARD).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    index = {"metadata": {"total_size": at}, "weight_map": dict.fromkeys(tensors, SHARD)}
    (out / INDEX).write_text(json.dumps(index))
    (out / CONFIG).write_text(json.dumps(config, indent=1))
    (out / GENERATION).write_text(json.dumps(GREEDY))
    (out / CLASS_MAP).write_text(json.dumps(classes.tolist()))
    (out / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    with Checkpoint.open(out):
        pass


def pack(folder: Path, target: Path) -> str:
    """All files of the folder in one zip with fixed dates; returns its sha256."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.iterdir()):
            entry = zipfile.ZipInfo(path.name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return hashlib.sha256(target.read_bytes()).hexdigest()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("masters", type=Path)
    parser.add_argument("dataset", type=Path, help="folder with tokenizer.json and dataset.npz")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pack", type=Path)
    arguments = parser.parse_args()
    config = json.loads((Path(__file__).parent / "config.json").read_text())
    spec = Spec.from_config(config)
    with np.load(arguments.dataset / "dataset.npz") as data:
        classes = data["class_map"]
    tensors = {}
    for name, module in (("target", Backbone(spec, classes)), ("drafter", Drafter(spec))):
        load_masters(module, arguments.masters, name)
        tensors |= stored(module)
    tokenizer = (arguments.dataset / "tokenizer.json").read_text(encoding="utf-8")
    write_folder(arguments.out, config, tensors, tokenizer, classes)
    print(f"{arguments.out}: {len(tensors)} tensors, {sum(a.nbytes for _, a in tensors.values()):,} bytes")
    if arguments.pack:
        print(
            f"{arguments.pack}: sha256 {pack(arguments.out, arguments.pack)}, {arguments.pack.stat().st_size:,} bytes"
        )


if __name__ == "__main__":
    main()
