"""A warpgroup product whose number of columns is chosen when it runs: one accumulator tuple, one instruction a width.

Each width has its own wgmma; a tree of uniform branches picks one. Fence, products and commit stand inside each branch:
the compiler puts its own where they are missing, and then waits for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.mma import decode_bf16
from dsuf.kernels.ptx.op import HOPPER, Op, ptx
from dsuf.kernels.ptx.wgmma import _spread

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes


def _tree(widths: Sequence[int]) -> str:
    """Branches to W<n> of the first width that is not below operand 3."""
    if len(widths) == 1:
        return f" bra.uni W{widths[0]};"
    half = len(widths) // 2
    return f" setp.gt.s32 q, <3>, {widths[half - 1]}; @q bra.uni T{widths[half]};{_tree(widths[:half])}" + (
        f" T{widths[half]}:{_tree(widths[half:])}"
    )


def _products(n: int, registers: int) -> str:
    acc = ",".join(f"<d.{i}>" for i in range(registers))
    text = ""
    for part, (descriptor, keep) in enumerate((("<1>", "p"), ("e", "t"))):
        a = ",".join(f"<0.{4 * part + i}>" for i in range(4))
        text += (
            f" wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{acc}}}, {{{a}}}, {descriptor}, {keep}, 1, 1, 0;"
        )
    return f" W{n}: wgmma.fence.sync.aligned;{text} wgmma.commit_group.sync.aligned; bra.uni D;"


@cache
def wgmma_pair(widths: tuple[int, ...]) -> Op:
    """Two products m64 x n x 16 of bf16, A from registers, as one committed group: n is the first width >= columns.

    (A of both, descriptor of B [n, 32], add the first to acc?, columns, acc of the widest) -> acc; what lies beyond n
    stays as it is. B is K-major with the 128-byte swizzle.
    """
    most = widths[-1]

    def twin(lanes: Lanes, a: Any, b: Any, add: Any, columns: Any, acc: Any) -> tuple[np.ndarray, ...]:
        n = next(w for w in widths if w >= lanes.one(columns))
        out = tuple(acc)
        for part in range(2):
            words = np.stack([np.asarray(lanes.vector(w)).astype(np.uint32) for w in a[4 * part : 4 * part + 4]], -1)
            pairs = np.ascontiguousarray(words).view(np.uint16).reshape(4, 8, 4, 2, 2, 2)  # warp, g, t, pair, row, half
            left = decode_bf16(np.ascontiguousarray(pairs.transpose(0, 4, 1, 3, 2, 5)))
            right = decode_bf16(lanes.shared.swizzled_tile(lanes.one(b) + 2 * part, n, 32).view(np.uint16))
            product = left.reshape(64, 16).astype(np.float64) @ right.astype(np.float64).T
            out = _spread(lanes, product, out, part == 1 or lanes.one(add) != 0) + tuple(out[n // 2 :])
        return out

    twin.__name__ = f"wgmma_pair_{len(widths)}_{most}"
    body = "".join(_products(n, n // 2) for n in widths)
    text = (
        "{.reg .pred p, q, t; .reg .b64 e; add.s64 e, <1>, 2; setp.ne.b32 p, <2>, 0; setp.eq.s32 t, 0, 0;"
        f"{_tree(widths)}{body} D: }}"
    )
    signature = f"f32*{most // 2} = u32*8, s64, s32, s32, +f32*{most // 2}"
    return ptx(signature, text, chips=HOPPER, unit="warpgroup")(twin)
