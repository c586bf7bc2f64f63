"""Weights of a synthetic checkpoint made on the device, for benches at full width: 110 GB in seconds, nothing on disk.

Every matrix gets the distribution that `dsuf synth` gives it (uniform, sigma by model/synthetic.py), drawn from 256
equally likely values; routed experts get all 16 codes alike under the power of two that comes nearest to their sigma.
Vectors and other small tensors are those of `dsuf synth` itself. A function of name, seed and the rank's share alone,
but for the order in which a matrix is packed: statistics matter here, not bytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf import formats
from dsuf.engine.gpu.weight_plan import Part
from dsuf.engine.gpu.weights import Weights
from dsuf.kernels import pack
from dsuf.kernels.fill import BLOCKS
from dsuf.kernels.gate_up import GATE_UP_CHUNK
from dsuf.model.inventory import Parameter, parameters
from dsuf.model.synthetic import arrays, statistics

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

SMALL = 1 << 20  # bytes up to which a plain tensor is made on the host
UNIFORM_E2M1_RMS = 2.93  # of the 16 codes, each as likely
LARGEST_E4M3 = 448.0
E8M0_BIAS = 127


class Filler:
    """Draws on one device; tables of 256 values are made once for each distribution."""

    def __init__(self, device: Device, config: dict[str, Any], weights: Weights, seed: int) -> None:
        self.device, self.weights, self.seed = device, weights, seed
        self._parameters = {p.name: p for p in parameters(weights.spec, config)}
        self._tables: dict[tuple[int, bytes], int] = {}

    def fill(self, part: Part) -> int:
        """Queue filling one part; bytes written."""
        at = self.weights.address(part)
        if part.layout in ("w13", "w2"):
            self._experts(part, at)
        elif part.layout == "qk" or (part.layout == "plain" and self._is_small(part)):
            self.device.upload(at, self._small(part))
        elif part.layout == "plain":
            for name, size in self._plain(part):
                self._draw(at, size, name, part)
                at += size
        else:
            for parameter, size in self._matrices(part):
                self._draw(at, size, parameter, part)
                at += size
        return part.nbytes

    def _is_small(self, part: Part) -> bool:
        return part.nbytes <= SMALL and all(name in self._parameters for name in part.tensors)

    def _experts(self, part: Part, at: int) -> None:
        names = ("w1",) if part.layout == "w13" else ("w2",)
        sigma = statistics(self._parameters[f"{part.tensors[0]}.0.{names[0]}"])[1]
        exponent = round(math.log2(sigma / UNIFORM_E2M1_RMS))
        most = GATE_UP_CHUNK if part.layout == "w13" else pack.FP8_CHUNK
        width, chunk = pack.chunk_width(part.k, most), pack.fp4_chunk_bytes(part.k, most)
        tail = (E8M0_BIAS + exponent) * 0x01010101
        name = _named(f"{part.owner}.{part.name}", part)
        self._launch(at, part.nbytes, chunk, width * pack.ROWS // 2, 0, 0, tail, name)

    def _matrices(self, part: Part) -> Iterator[tuple[str, int]]:
        """(parameter, packed bytes) of each matrix of a stacked part."""
        rows = [self._parameters[name].shape[0] for name in part.tensors]
        for name, n in zip(part.tensors, rows, strict=True):
            yield name, part.nbytes * n // sum(rows)

    def _plain(self, part: Part) -> Iterator[tuple[str, int]]:
        return ((name, part.nbytes // len(part.tensors)) for name in part.tensors)

    def _draw(self, at: int, size: int, name: str, part: Part) -> None:
        """One matrix or table, `size` packed bytes."""
        base, _, kind = name.rpartition(".") if name not in self._parameters else (name, "", "")
        parameter = self._parameters[base]
        values, exponent = _levels(parameter)
        tail = (E8M0_BIAS + exponent) * 0x01010101
        chunk = codes = 16
        if kind == "scale":
            codes = 0
        elif part.layout == "fp8":
            chunk = pack.fp8_chunk_bytes(part.k)
            codes = chunk - pack.FP8_SCALES
        self._launch(at, size, chunk, codes, values.itemsize, self._table(values), tail, _named(name, part))

    def _launch(self, at: int, size: int, chunk: int, codes: int, width: int, table: int, tail: int, name: str) -> None:
        key0, key1 = zlib.crc32(name.encode()), zlib.crc32(self.seed.to_bytes(8, "little"))
        size = -(-size // 16) * 16  # an allocation ends at a multiple of 256
        grid = (min(BLOCKS, -(-size // 4096)), 1)
        self.device.launch("fill", at, size, chunk, codes, width, table, tail, key0, key1, grid=grid)

    def _small(self, part: Part) -> np.ndarray:
        made = [arrays(self._parameters[name], self.seed)[0] for name in part.tensors]
        if part.layout == "qk":
            q, k = (formats.bf16_to_float32(bits) for bits in made)
            return q * k
        raw = np.concatenate([array.reshape(-1).view(np.uint8) for array in made])
        return raw if part.split is None else raw[part.first : part.first + part.n]

    def _table(self, values: np.ndarray) -> int:
        key = (values.itemsize, values.tobytes())
        if key not in self._tables:
            self._tables[key] = self.device.allocate(values.nbytes, "workspace")
            self.device.upload(self._tables[key], values)
        return self._tables[key]


def _named(name: str, part: Part) -> str:
    """Another name for every share, so that ranks do not draw the same."""
    return name if part.split is None else f"{name} from {part.first}"


def _levels(parameter: Parameter) -> tuple[np.ndarray, int]:
    """256 equally likely stored values of a parameter, and the exponent of its scales (quantised kinds)."""
    sigma = statistics(parameter)[1]
    values = ((2 * np.arange(256) + 1) / 256 - 1) * math.sqrt(3) * sigma
    if parameter.kind == "f32":
        return values.astype(np.float32), 0
    if parameter.kind in ("norm", "bf16"):
        return formats.float32_to_bf16(values.astype(np.float32)), 0
    exponent = math.ceil(math.log2(math.sqrt(3) * sigma / LARGEST_E4M3))
    return formats.e4m3_encode((values * 2.0**-exponent).astype(np.float32)), exponent


def fill(weights: Weights, config: dict[str, Any], seed: int = 0) -> int:
    """Make all weights, Engram tables too where they have been placed on this device; bytes written."""
    filler = Filler(weights.device, config, weights, seed)
    total = sum(filler.fill(part) for part in weights.parts if weights.address(part))
    weights.device.synchronize()
    return total
