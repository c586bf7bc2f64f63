"""Weights on the device: an address for each name, in the layouts that the kernels read (weight_plan.py).

    weights = Weights.allocate(device, spec, class_map)
    load(weights, checkpoint) of weight_load.py      or    fill(weights, config, seed) of weight_fill.py
    weights.layers[3].wq_b, weights.stages[0].gate, weights.embed, ...

0 is the address of what a layer does not have. Engram tables are placed by engram_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsuf import formats
from dsuf.engine.gpu.weight_plan import PAIR_TILES, Part, plan
from dsuf.errors import CheckpointError
from dsuf.kernels import engram as engram_kernels
from dsuf.kernels import pack, rope
from dsuf.kernels.gate_up import GATE_UP_CHUNK
from dsuf.kernels.ptx.fragments import FP4_SHIFT, FP8_SHIFT
from dsuf.ops.engram import hashes
from dsuf.ops.rope import frequencies
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device
    from dsuf.engine.gpu.engram_tables import HostTables
    from dsuf.model.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # bytes done, bytes in all
BF16_EXPONENTS = 254  # the largest exponent field of a finite bf16; a product's multiplier has scale + shift there
TABLES = ("engram_table", "engram_table_scales")  # placed by engram_tables.py


@dataclass
class BlockWeights:
    """Addresses of one layer or drafter stage."""

    name: str = ""  # as in the checkpoint: layers.3, mtp.0
    attn_norm: int = 0
    ffn_norm: int = 0
    q_norm: int = 0
    kv_norm: int = 0
    attn_sink: int = 0
    wq_a_wkv: int = 0
    wq_b: int = 0
    wo_a: int = 0
    wo_b: int = 0
    hc_attn_fn: int = 0
    hc_attn_scale: int = 0
    hc_attn_base: int = 0
    hc_ffn_fn: int = 0
    hc_ffn_scale: int = 0
    hc_ffn_base: int = 0
    gate: int = 0
    gate_bias: int = 0  # float32 [2, experts]: text, image
    experts_w13: int = 0
    experts_w2: int = 0
    shared_gate_up: int = 0
    shared_down: int = 0
    compressor: int = 0
    compressor_norm: int = 0
    index_wk: int = 0
    index_k_norm: int = 0
    index_wq_b: int = 0
    index_weights: int = 0
    engram_wkv: int = 0
    engram_qk: int = 0
    engram_table: int = 0
    engram_table_scales: int = 0
    engram_constants: int = 0
    engram_tables: int = 0  # of several ranks: int64 [ranks, 2], each one's rows and scales
    engram_rows: int = 0  # of a rank


@dataclass
class Weights:
    """Addresses of a whole model (of one rank's share)."""

    device: Device
    spec: Spec
    parts: list[Part]
    layers: list[BlockWeights] = field(default_factory=list)
    stages: list[BlockWeights] = field(default_factory=list)
    embed: int = 0
    class_map: int = 0  # int32 [vocabulary]
    norm: int = 0
    head: int = 0
    rope_plain: int = 0  # rope.tables of layers without and with compression
    rope_compressed: int = 0
    main_proj: int = 0
    main_norm: int = 0
    draft_norm: int = 0
    host_tables: HostTables | None = None  # where Engram tables are, if not on the device
    markov_embed: int = 0
    markov_head: int = 0
    confidence: int = 0

    @classmethod
    def allocate(
        cls, device: Device, spec: Spec, class_map: np.ndarray, *, positions: int, rank: int = 0, ranks: int = 1
    ) -> Weights:
        """Take the memory, but for the Engram tables, and write what comes from no checkpoint: class_map int32
        [vocabulary], ropes up to `positions`, hash constants. Raises DeviceError when it does not fit.
        """
        weights = cls(device, spec, plan(spec, rank=rank, ranks=ranks))
        weights.layers = [BlockWeights(f"layers.{number}") for number in range(len(spec.layers))]
        weights.stages = [BlockWeights(f"mtp.{number}") for number in range(spec.num_nextn_predict_layers)]
        for part in weights.parts:
            if part.name not in TABLES:
                setattr(weights.owner(part), part.name, device.allocate(part.nbytes, f"weights, {part.kind}"))
        weights.class_map = weights._put(class_map.astype(np.int32))
        weights.rope_plain, weights.rope_compressed = (
            weights._put(rope.tables(frequencies(spec, compressed), positions)) for compressed in (False, True)
        )
        for layer, one in zip(spec.engram_layer_ids, hashes(spec), strict=True):
            weights.layers[layer].engram_constants = weights._put(engram_kernels.constants(one))
        return weights

    def owner(self, part: Part) -> BlockWeights | Weights:
        """What holds the part's address."""
        kind, _, number = part.owner.partition(".")
        return self if not kind else (self.layers if kind == "layers" else self.stages)[int(number)]

    def address(self, part: Part) -> int:
        """Where the part is."""
        return getattr(self.owner(part), part.name)

    @property
    def loaded(self) -> list[Part]:
        """Parts that `load` or a fill writes: all but Engram tables in host memory."""
        return [part for part in self.parts if part.name not in TABLES or self._on_device(part)]

    def _on_device(self, table: Part) -> bool:
        return self.address(table) != 0 and self.host_tables is None

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        """Pack on the host and copy, a part at a time: for small checkpoints (weight_load.py chooses)."""
        total, done = sum(part.nbytes for part in self.loaded), 0
        for part in self.loaded:
            self.device.upload(self.address(part), packed(part, checkpoint, self.device.chip))
            done += part.nbytes
            if progress is not None:
                progress(done, total)

    def _put(self, array: np.ndarray) -> int:
        address = self.device.allocate(array.nbytes, "weights, dense")
        self.device.upload(address, array)
        return address


def packed(part: Part, checkpoint: Checkpoint, chip: str) -> np.ndarray:
    """A part as bytes, uint8 [nbytes], in NumPy: the slow statement of what the device makes."""
    if part.layout == "plain":
        return np.concatenate([share(name, part, checkpoint) for name in part.tensors])
    if part.layout == "qk":
        q, k = (formats.bf16_to_float32(checkpoint.raw(name)) for name in part.tensors)
        return _bytes(q * k)
    if part.layout == "bf16":
        return _bytes(pack.pack_bf16(np.concatenate([share(name, part, checkpoint) for name in part.tensors])))
    if part.layout == "fp8":
        return _bytes(np.concatenate([pack.pack_fp8(*fp8_share(name, part, checkpoint)) for name in part.tensors]))
    experts = range(part.first, part.first + part.experts)
    one = _w13 if part.layout == "w13" else _w2
    return np.concatenate([_bytes(one(f"{part.tensors[0]}.{expert}", checkpoint, chip)) for expert in experts])


def _w13(expert: str, checkpoint: Checkpoint, chip: str) -> np.ndarray:
    w1, w3 = (pack.pack_fp4(*quantised(f"{expert}.{name}", checkpoint), chip, GATE_UP_CHUNK) for name in ("w1", "w3"))
    return pack.interleave(w1, w3, PAIR_TILES)


def _w2(expert: str, checkpoint: Checkpoint, chip: str) -> np.ndarray:
    return pack.pack_fp4(*quantised(f"{expert}.w2", checkpoint), chip)


def quantised(name: str, checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Stored codes and scales of an fp8 or fp4 matrix.

    Raises CheckpointError for a scale above what the prefill products can take.
    """
    codes, scales = checkpoint.raw(f"{name}.weight"), checkpoint.raw(f"{name}.scale")
    shift = FP4_SHIFT if checkpoint.info(f"{name}.weight").dtype == "I8" else FP8_SHIFT
    found, most = int(scales.max()), BF16_EXPONENTS - shift
    if found > most:
        raise CheckpointError(
            f"{name}.scale holds 2^{found - 127}, the GPU's products take scales up to 2^{most - 127}. "
            "Use --gpus 0, or a checkpoint whose scales were made from the largest weight of each block."
        )
    return codes, scales


def fp8_share(name: str, part: Part, checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of this rank's rows or columns of one of the stacked matrices."""
    codes, scales = quantised(name, checkpoint)
    if part.split is None:
        return codes, scales
    if part.split == "columns":
        columns = slice(part.first, part.first + part.k)
        return codes[:, columns], scales[:, part.first // 32 : (part.first + part.k) // 32]
    rows = slice(part.first, part.first + part.n)
    return codes[rows], scales[part.first // 32 : (part.first + part.n) // 32]


def share(name: str, part: Part, checkpoint: Checkpoint) -> np.ndarray:
    """This rank's rows of a tensor that is not quantised; of a plain part its bytes."""
    raw = checkpoint.raw(name)
    if part.layout == "plain":
        raw = _bytes(raw)
    return raw if part.split is None else raw[part.first : part.first + part.n]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
