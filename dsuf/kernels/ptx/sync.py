"""Where a thread is, exchange inside a warp, barriers of a block and a cluster, and dependent launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.op import BLACKWELL, HOPPER, Op, float_of, ptx, u32, word

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes


@ptx("s32 =", "mov.u32 <d>, %tid.x;", pure=True)
def thread_index(lanes: Lanes) -> Any:
    """%tid.x"""
    return lanes.thread


@ptx("s32 =", "mov.u32 <d>, %ctaid.x;", pure=True)
def block_index(lanes: Lanes) -> Any:
    """%ctaid.x"""
    return lanes.block_index(0)


@ptx("s32 =", "mov.u32 <d>, %ctaid.y;", pure=True)
def block_index_y(lanes: Lanes) -> Any:
    """%ctaid.y"""
    return lanes.block_index(1)


@ptx("s32 =", "mov.u32 <d>, %nctaid.x;", pure=True)
def block_count(lanes: Lanes) -> Any:
    """%nctaid.x"""
    return lanes.grid[0]


@ptx("s32 =", "mov.u32 <d>, %laneid;", pure=True)
def lane_index(lanes: Lanes) -> Any:
    """%laneid"""
    return lanes.thread & 31


@ptx("=", "bar.sync 0;")
def sync_threads(lanes: Lanes) -> Any:
    """bar.sync 0: every thread of the block"""
    return lanes.sync_block()


@ptx("= u32, u32", "bar.sync <0>, <1>;", unit="warp")
def sync_named(lanes: Lanes, barrier: Any, threads: Any) -> Any:
    """bar.sync with a barrier number (1..15) and a count of threads"""
    return lanes.sync_named_of(barrier, threads)


@ptx("=", "bar.warp.sync 0xffffffff;")
def sync_warp(lanes: Lanes) -> None:
    """bar.warp.sync"""
    lanes.sync_warp()


def _shuffle(name: str, kind: str, as_float: bool, source: Any) -> Op:
    def twin(lanes: Lanes, value: Any, argument: Any) -> Any:
        lanes.whole_warps(name)
        held = lanes.warps(lanes.vector(value, np.float32 if as_float else np.int64))
        index = source(np.arange(32), lanes.warps(lanes.vector(argument)))
        return np.take_along_axis(held, np.broadcast_to(index, held.shape), axis=1).reshape(-1)

    twin.__name__ = name
    kind_ = "f32" if as_float else "u32"
    return ptx(f"{kind_} = {kind_}, u32", f"shfl.sync.{kind}.b32 <d>, <0>, <1>, 0x1f, 0xffffffff;")(twin)


shuffle_xor_f32 = _shuffle("shuffle_xor_f32", "bfly", True, lambda lane, mask: lane ^ mask)
shuffle_xor_u32 = _shuffle("shuffle_xor_u32", "bfly", False, lambda lane, mask: lane ^ mask)
shuffle_f32 = _shuffle("shuffle_f32", "idx", True, lambda lane, source: source & 31)
shuffle_u32 = _shuffle("shuffle_u32", "idx", False, lambda lane, source: source & 31)


@ptx("u32 = u32, u32", "{.reg .b32 t; shfl.sync.up.b32 t, <0>, <1>, 0, 0xffffffff; mov.b32 <d>, t;}")
def shuffle_up_u32(lanes: Lanes, value: Any, distance: Any) -> Any:
    """shfl.sync.up.b32: lanes below the distance keep their own value"""
    lanes.whole_warps("shuffle_up_u32")
    held, lane = lanes.warps(lanes.vector(value)), np.arange(32)
    index = lane - lanes.warps(lanes.vector(distance))
    return np.take_along_axis(held, np.where(index < 0, lane, index), axis=1).reshape(-1)


@ptx("u32 = u32", "{.reg .pred p; setp.ne.u32 p, <0>, 0; vote.sync.ballot.b32 <d>, p, 0xffffffff;}")
def ballot(lanes: Lanes, condition: Any) -> Any:
    """vote.sync.ballot.b32: bit l is set where lane l's value is not zero"""
    lanes.whole_warps("ballot")
    held = lanes.warps(lanes.vector(condition)) != 0
    bits = (held.astype(np.int64) << np.arange(32)).sum(1)
    return np.repeat(bits, 32)


@ptx("u32 = u32", "redux.sync.max.u32 <d>, <0>, 0xffffffff;")
def warp_max_u32(lanes: Lanes, value: Any) -> Any:
    """redux.sync.max.u32"""
    lanes.whole_warps("warp_max_u32")
    return np.repeat(word(lanes.warps(u32(lanes.vector(value))).max(1)), 32)


@ptx("u32 = u32", "redux.sync.min.u32 <d>, <0>, 0xffffffff;")
def warp_min_u32(lanes: Lanes, value: Any) -> Any:
    """redux.sync.min.u32"""
    lanes.whole_warps("warp_min_u32")
    return np.repeat(word(lanes.warps(u32(lanes.vector(value))).min(1)), 32)


@ptx("u32 = u32", "redux.sync.add.u32 <d>, <0>, 0xffffffff;")
def warp_sum_u32(lanes: Lanes, value: Any) -> Any:
    """redux.sync.add.u32"""
    lanes.whole_warps("warp_sum_u32")
    return np.repeat(word(lanes.warps(u32(lanes.vector(value))).sum(1, dtype=np.uint32)), 32)


@ptx("=", "griddepcontrol.wait;")
def wait_for_previous_kernel() -> None:
    """griddepcontrol.wait: what the kernel before wrote is visible afterwards"""


@ptx("=", "griddepcontrol.launch_dependents;")
def let_next_kernel_start() -> None:
    """griddepcontrol.launch_dependents: the next kernel may be scheduled beside this one"""


@ptx("=", "fence.acq_rel.gpu;")
def fence_gpu() -> None:
    """fence.acq_rel.gpu"""


@ptx("=", "fence.acq_rel.sys;")
def fence_system() -> None:
    """fence.acq_rel.sys"""


@ptx("u64 =", "mov.u64 <d>, %globaltimer;")
def global_timer() -> Any:
    """%globaltimer, nanoseconds"""
    return 0


@ptx("= u32", "nanosleep.u32 <0>;")
def nanosleep(nanoseconds: Any) -> None:
    """nanosleep.u32"""


@ptx("=", "barrier.cluster.arrive.release.aligned;", unit="warp")
def cluster_arrive() -> None:
    """barrier.cluster.arrive.release.aligned"""


@ptx("=", "barrier.cluster.arrive.relaxed.aligned;", unit="warp")
def cluster_arrive_relaxed() -> None:
    """barrier.cluster.arrive.relaxed.aligned: orders no memory, so it does not wait for stores (release: MEMBAR.GPU)"""


@ptx("=", "fence.release.sync_restrict::shared::cta.cluster;")
def fence_release_shared() -> None:
    """fence.release.sync_restrict::shared::cta: with a relaxed arrival after it, what this thread wrote to its block's
    shared memory is released to the cluster, as by `cluster_arrive`, and nothing else is (MEMBAR.CTA, not .GPU)
    """


@ptx("=", "barrier.cluster.wait.acquire.aligned;", unit="warp")
def cluster_wait(lanes: Lanes) -> Any:
    """barrier.cluster.wait.acquire.aligned"""
    return lanes.sync_cluster()


@ptx("u32 =", "mov.u32 <d>, %cluster_ctarank;", pure=True)
def cluster_rank(lanes: Lanes) -> Any:
    """%cluster_ctarank"""
    return lanes.cluster_rank()


@ptx("u32 = u32, u32", "mapa.shared::cluster.u32 <d>, <0>, <1>;", pure=True, unit="warp")
def cluster_address(lanes: Lanes, address: Any, rank: Any) -> Any:
    """mapa.shared::cluster.u32: this address in the block of another rank (the CPU keeps the rank in bits 32 and up)"""
    return lanes.vector(address) | (lanes.vector(rank) + 1) << 32


@ptx("f32 = u32", "ld.shared::cluster.f32 <d>, [<0>];", unit="warp")
def ld_cluster_f32(lanes: Lanes, address: Any) -> Any:
    """ld.shared::cluster.f32 at an address from cluster_address"""
    return float_of(lanes.load_cluster(address, np.uint32))


@ptx("u32 = u32", "ld.shared::cluster.u32 <d>, [<0>];", unit="warp")
def ld_cluster_u32(lanes: Lanes, address: Any) -> Any:
    """ld.shared::cluster.u32 at an address from cluster_address"""
    return lanes.load_cluster(address, np.uint32)


@ptx("u32*4 = u32", "ld.shared::cluster.v4.b32 <d>, [<0>];", unit="warp")
def ld_cluster_u32x4(lanes: Lanes, address: Any) -> Any:
    """ld.shared::cluster.v4.b32 at an address from cluster_address"""
    return tuple(lanes.load_cluster(lanes.vector(address) + 4 * i, np.uint32) for i in range(4))


def _set_registers(kind: str, count: int) -> Op:
    def twin() -> None:
        return None

    twin.__name__ = f"setmaxnreg_{kind}_{count}"
    return ptx("=", f"setmaxnreg.{kind}.sync.aligned.u32 {count};", chips=HOPPER + BLACKWELL)(twin)


give_registers = _set_registers("dec", 40)  # setmaxnreg.dec: for the warpgroup that only moves data
take_registers = _set_registers("inc", 232)  # setmaxnreg.inc: for the warpgroups that multiply
give_some_registers = _set_registers("dec", 104)  # for a warpgroup that decodes what two others multiply
take_most_registers = _set_registers("inc", 200)  # for those two
give_four_registers = _set_registers("dec", 72)  # of four warpgroups: the one that fetches and expands,
give_score_registers = _set_registers("dec", 104)  # the one that makes scores,
take_four_registers = _set_registers("inc", 168)  # and the two that hold results
give_more_registers = _set_registers("dec", 88)  # where sums are held by warps: the one that makes scores,
take_more_registers = _set_registers("inc", 176)  # and the two that hold results


@ptx("=", r".pragma \22nounroll\22;")
def never_unroll() -> None:
    """.pragma nounroll, at the head of a loop"""
