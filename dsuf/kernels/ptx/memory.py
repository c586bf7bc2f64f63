"""Loads, stores, atomics and flags in global and shared memory.

Global addresses are s64 integers (bytes), shared addresses u32 offsets from `shared_base()`. `ldw_*` read data that
nobody writes while the kernel runs (weights, tables): they are pure and bypass L1. `ldg_*` read anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.op import Op, float_of, ptx

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes

_SUFFIX = {1: "b32", 2: "v2.b32", 4: "v4.b32"}


def _words(n: int) -> str:
    return "u32" if n == 1 else f"u32*{n}"


def _load(name: str, head: str, n: int, *, pure: bool) -> Op:
    def twin(lanes: Lanes, address: Any) -> Any:
        return lanes.load_global(address, np.uint32, n)

    twin.__name__ = name
    return ptx(f"{_words(n)} = s64", f"{head}.{_SUFFIX[n]} <d>, [<0>];", pure=pure)(twin)


# ld.global.nc with L1::no_allocate: weights, read once
ldw_u32x4 = _load("ldw_u32x4", "ld.global.nc.L1::no_allocate", 4, pure=True)
ldw_u32x2 = _load("ldw_u32x2", "ld.global.nc.L1::no_allocate", 2, pure=True)
ldw_u32 = _load("ldw_u32", "ld.global.nc", 1, pure=True)
# ld.global: written by the kernel before, or by other threads of this one
ldg_u32x4 = _load("ldg_u32x4", "ld.global", 4, pure=False)
ldg_u32x2 = _load("ldg_u32x2", "ld.global", 2, pure=False)
ldg_u32 = _load("ldg_u32", "ld.global", 1, pure=False)


@ptx("f32 = s64", "ld.global.f32 <d>, [<0>];")
def ldg_f32(lanes: Lanes, address: Any) -> Any:
    """ld.global.f32"""
    return float_of(lanes.load_global(address, np.uint32, 1))


@ptx("f32 = s64", "ld.global.nc.f32 <d>, [<0>];", pure=True)
def ldw_f32(lanes: Lanes, address: Any) -> Any:
    """ld.global.nc.f32"""
    return float_of(lanes.load_global(address, np.uint32, 1))


@ptx("u32 = s64", "{.reg .b16 t; ld.global.b16 t, [<0>]; cvt.u32.u16 <d>, t;}")
def ldg_u16(lanes: Lanes, address: Any) -> Any:
    """ld.global.b16, zero extended"""
    return lanes.load_global(address, np.uint16, 1)


@ptx("u32 = s64", "{.reg .b16 t; ld.global.nc.b16 t, [<0>]; cvt.u32.u16 <d>, t;}", pure=True)
def ldw_u16(lanes: Lanes, address: Any) -> Any:
    """ld.global.nc.b16, zero extended"""
    return lanes.load_global(address, np.uint16, 1)


@ptx("u32 = s64", "ld.global.u8 <d>, [<0>];")
def ldg_u8(lanes: Lanes, address: Any) -> Any:
    """ld.global.u8, zero extended"""
    return lanes.load_global(address, np.uint8, 1)


@ptx("u32 = s64", "ld.global.nc.u8 <d>, [<0>];", pure=True)
def ldw_u8(lanes: Lanes, address: Any) -> Any:
    """ld.global.nc.u8, zero extended"""
    return lanes.load_global(address, np.uint8, 1)


@ptx("s64 = s64", "ld.global.b64 <d>, [<0>];")
def ldg_s64(lanes: Lanes, address: Any) -> Any:
    """ld.global.b64: an address or a 64-bit counter"""
    return lanes.load_global(address, np.int64, 1)


@ptx("s64 = s64", "ld.global.nc.b64 <d>, [<0>];", pure=True)
def ldw_s64(lanes: Lanes, address: Any) -> Any:
    """ld.global.nc.b64"""
    return lanes.load_global(address, np.int64, 1)


@ptx("= s64, u32*4", "st.global.v4.b32 [<0>], <1>;")
def stg_u32x4(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.v4.b32"""
    lanes.store_global(address, value, np.uint32)


@ptx("= s64, u32*2", "st.global.v2.b32 [<0>], <1>;")
def stg_u32x2(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.v2.b32"""
    lanes.store_global(address, value, np.uint32)


@ptx("= s64, u32", "st.global.b32 [<0>], <1>;")
def stg_u32(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.b32"""
    lanes.store_global(address, (value,), np.uint32)


@ptx("= s64, s64", "st.global.b64 [<0>], <1>;")
def stg_s64(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.b64"""
    lanes.store_global(address, (value,), np.int64)


@ptx("= s64, f32", "st.global.f32 [<0>], <1>;")
def stg_f32(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.f32"""
    lanes.store_global(address, (value,), np.float32)


@ptx("= s64, u32", "{.reg .b16 t; cvt.u16.u32 t, <1>; st.global.b16 [<0>], t;}")
def stg_u16(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.b16 of the low half"""
    lanes.store_global(address, (value,), np.uint16)


@ptx("= s64, u32", "{.reg .b16 t; cvt.u16.u32 t, <1>; st.global.b8 [<0>], t;}")
def stg_u8(lanes: Lanes, address: Any, value: Any) -> None:
    """st.global.b8 of the low byte"""
    lanes.store_global(address, (value,), np.uint8)


@ptx("= s64", "prefetch.global.L2 [<0>];")
def prefetch_l2(lanes: Lanes, address: Any) -> None:
    """prefetch.global.L2"""
    lanes.load_global(address, np.uint8, 1)


# ---- shared memory


@ptx("u32 =", "")
def shared_base(lanes: Lanes) -> Any:
    """u32 address of the dynamic shared memory, 1024-byte aligned (no instruction: build.py declares the symbol)."""
    return lanes.shared.base


@ptx("u32*4 = u32", "ld.shared.v4.b32 <d>, [<0>];")
def lds_u32x4(lanes: Lanes, address: Any) -> Any:
    """ld.shared.v4.b32"""
    return lanes.load_shared(address, np.uint32, 4)


@ptx("u32*2 = u32", "ld.shared.v2.b32 <d>, [<0>];")
def lds_u32x2(lanes: Lanes, address: Any) -> Any:
    """ld.shared.v2.b32"""
    return lanes.load_shared(address, np.uint32, 2)


@ptx("u32 = u32", "ld.shared.b32 <d>, [<0>];")
def lds_u32(lanes: Lanes, address: Any) -> Any:
    """ld.shared.b32"""
    return lanes.load_shared(address, np.uint32, 1)


@ptx("f32 = u32", "ld.shared.f32 <d>, [<0>];")
def lds_f32(lanes: Lanes, address: Any) -> Any:
    """ld.shared.f32"""
    return float_of(lanes.load_shared(address, np.uint32, 1))


@ptx("f32*4 = u32", "ld.shared.v4.f32 <d>, [<0>];")
def lds_f32x4(lanes: Lanes, address: Any) -> Any:
    """ld.shared.v4.f32"""
    return tuple(float_of(one) for one in lanes.load_shared(address, np.uint32, 4))


@ptx("u32 = u32", "{.reg .b16 t; ld.shared.b16 t, [<0>]; cvt.u32.u16 <d>, t;}")
def lds_u16(lanes: Lanes, address: Any) -> Any:
    """ld.shared.b16, zero extended"""
    return lanes.load_shared(address, np.uint16, 1)


@ptx("u32 = u32", "ld.shared.u8 <d>, [<0>];")
def lds_u8(lanes: Lanes, address: Any) -> Any:
    """ld.shared.u8, zero extended"""
    return lanes.load_shared(address, np.uint8, 1)


@ptx("= u32, u32*4", "st.shared.v4.b32 [<0>], <1>;")
def sts_u32x4(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.v4.b32"""
    lanes.store_shared(address, value, np.uint32)


@ptx("= u32, u32*2", "st.shared.v2.b32 [<0>], <1>;")
def sts_u32x2(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.v2.b32"""
    lanes.store_shared(address, value, np.uint32)


@ptx("= u32, u32", "st.shared.b32 [<0>], <1>;")
def sts_u32(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.b32"""
    lanes.store_shared(address, (value,), np.uint32)


@ptx("= u32, f32", "st.shared.f32 [<0>], <1>;")
def sts_f32(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.f32"""
    lanes.store_shared(address, (value,), np.float32)


@ptx("= u32, f32*4", "st.shared.v4.f32 [<0>], <1>;")
def sts_f32x4(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.v4.f32"""
    lanes.store_shared(address, value, np.float32)


@ptx("= u32, u32", "{.reg .b16 t; cvt.u16.u32 t, <1>; st.shared.b16 [<0>], t;}")
def sts_u16(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.b16 of the low half"""
    lanes.store_shared(address, (value,), np.uint16)


@ptx("= u32, u32", "{.reg .b16 t; cvt.u16.u32 t, <1>; st.shared.b8 [<0>], t;}")
def sts_u8(lanes: Lanes, address: Any, value: Any) -> None:
    """st.shared.b8 of the low byte"""
    lanes.store_shared(address, (value,), np.uint8)


@ptx("u32 = u32, u32", "atom.shared.add.u32 <d>, [<0>], <1>;")
def atom_add_shared(lanes: Lanes, address: Any, value: Any) -> Any:
    """atom.shared.add.u32; returns the value before. Only for counts: the order of lanes is not fixed."""
    return lanes.atomic_add(address, value, shared=True)


# ---- atomics and flags between blocks and ranks


@ptx("u32 = s64, u32", "atom.add.acq_rel.gpu.global.u32 <d>, [<0>], <1>;")
def atom_add(lanes: Lanes, address: Any, value: Any) -> Any:
    """atom.add.acq_rel.gpu.global.u32; returns the value before"""
    return lanes.atomic_add(address, value, shared=False)


@ptx("= s64, u32", "red.relaxed.gpu.global.add.u32 [<0>], <1>;")
def count_up(lanes: Lanes, address: Any, value: Any) -> None:
    """red.relaxed.gpu.global.add.u32: counts that nobody waits for; `atom_add` waits for all of a thread's stores"""
    lanes.atomic_add(address, value, shared=False)


def _release(name: str, text: str, *, add: bool) -> Op:
    def twin(lanes: Lanes, address: Any, value: Any) -> None:
        if add:
            lanes.atomic_add(address, value, shared=False)
        else:
            lanes.store_global(address, (value,), np.uint32)

    twin.__name__ = name
    return ptx("= s64, u32", text)(twin)


def _acquire(name: str, scope: str) -> Op:
    def twin(lanes: Lanes, address: Any) -> Any:
        return lanes.load_global(address, np.uint32, 1)

    twin.__name__ = name
    return ptx("u32 = s64", f"ld.acquire.{scope}.global.u32 <d>, [<0>];", unit="warp")(twin)


red_release = _release("red_release", "red.release.gpu.global.add.u32 [<0>], <1>;", add=True)
red_release_sys = _release("red_release_sys", "red.release.sys.global.add.u32 [<0>], <1>;", add=True)
st_release_sys = _release("st_release_sys", "st.release.sys.global.u32 [<0>], <1>;", add=False)
ld_acquire = _acquire("ld_acquire", "gpu")
ld_acquire_sys = _acquire("ld_acquire_sys", "sys")
