"""Two warpgroup products as one committed group, on the first columns of a wider accumulator.

Tiles of several heights share one accumulator tuple, and so their epilogue. (One operation with a branch for each
height was 15 to 25 % slower: at the branches the compiler waits until the tensor core has read its A registers.)
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.mma import decode_bf16
from dsuf.kernels.ptx.op import HOPPER, Op, ptx
from dsuf.kernels.ptx.wgmma import _spread

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes


@cache
def wgmma_pair(n: int, most: int) -> Op:
    """Two products m64 x n x 16 of bf16, A from registers: fence, both, commit.

    (A of both, descriptor of B [n, 32], add the first to acc?, acc of `most` columns) -> acc; what lies beyond n stays
    as it is. B is K-major with the 128-byte swizzle.
    """

    def twin(lanes: Lanes, a: Any, b: Any, add: Any, acc: Any) -> tuple[np.ndarray, ...]:
        out = tuple(acc)
        for part in range(2):
            words = np.stack([np.asarray(lanes.vector(w)).astype(np.uint32) for w in a[4 * part : 4 * part + 4]], -1)
            pairs = np.ascontiguousarray(words).view(np.uint16).reshape(4, 8, 4, 2, 2, 2)  # warp, g, t, pair, row, half
            left = decode_bf16(np.ascontiguousarray(pairs.transpose(0, 4, 1, 3, 2, 5)))
            right = decode_bf16(lanes.shared.swizzled_tile(lanes.one(b) + 2 * part, n, 32).view(np.uint16))
            product = left.reshape(64, 16).astype(np.float64) @ right.astype(np.float64).T
            out = _spread(lanes, product, out, part == 1 or lanes.one(add) != 0) + tuple(out[n // 2 :])
        return out

    twin.__name__ = f"wgmma_pair_{n}_of_{most}"
    acc = ",".join(f"<d.{i}>" for i in range(n // 2))
    text = "{.reg .pred p, t; .reg .b64 e; add.s64 e, <1>, 2; setp.ne.b32 p, <2>, 0; setp.eq.s32 t, 0, 0;"
    text += " wgmma.fence.sync.aligned;"
    for part, (descriptor, keep) in enumerate((("<1>", "p"), ("e", "t"))):
        a = ",".join(f"<0.{4 * part + i}>" for i in range(4))
        text += (
            f" wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{acc}}}, {{{a}}}, {descriptor}, {keep}, 1, 1, 0;"
        )
    text += " wgmma.commit_group.sync.aligned;}"
    signature = f"f32*{most // 2} = u32*8, s64, s32, +f32*{most // 2}"
    return ptx(signature, text, chips=HOPPER, unit="warpgroup")(twin)
