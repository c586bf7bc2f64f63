"""Asynchronous copies into shared memory and the mbarriers that say when they are done.

An mbarrier's phase ends when its pending arrivals and its pending bytes are both zero. `mbarrier_wait(address, parity)`
returns once the phase of that parity has ended; a fresh barrier answers parity 1 at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsuf.kernels.ptx.op import BLACKWELL, Op, ptx

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes

WAIT_LOOP = "{{.reg .pred p; W: mbarrier.try_wait.parity.{scope} p, [<0>], <1>; @p bra.uni D; bra.uni W; D: }}"


@ptx("= u32, u32", "mbarrier.init.shared::cta.b64 [<0>], <1>;", unit="warp")
def mbarrier_init(lanes: Lanes, address: Any, count: Any) -> None:
    """mbarrier.init.shared::cta.b64"""
    lanes.barrier_init(address, count)


@ptx("= u32, u32", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [<0>], <1>;", unit="warp")
def mbarrier_expect(lanes: Lanes, address: Any, count: Any) -> None:
    """mbarrier.arrive.expect_tx: one arrival, and so many bytes to come"""
    lanes.barrier_step(address, count)


@ptx("= u32", "mbarrier.arrive.shared::cta.b64 _, [<0>];", unit="warp")
def mbarrier_arrive(lanes: Lanes, address: Any) -> None:
    """mbarrier.arrive.shared::cta.b64"""
    lanes.barrier_step(address, 0)


@ptx("= u32", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [<0>];", unit="warp")
def mbarrier_arrive_cluster(lanes: Lanes, address: Any) -> None:
    """mbarrier.arrive.release.cluster at an address from cluster_address"""
    lanes.barrier_step_cluster(address)


@ptx("= u32, u32", WAIT_LOOP.format(scope="shared::cta.b64"), unit="warp")
def mbarrier_wait(lanes: Lanes, address: Any, parity: Any) -> Any:
    """mbarrier.try_wait.parity in a loop"""
    return lanes.barrier_wait(address, parity)


@ptx("= u32, u32", WAIT_LOOP.format(scope="acquire.cluster.shared::cta.b64"), unit="warp")
def mbarrier_wait_cluster(lanes: Lanes, address: Any, parity: Any) -> Any:
    """The same with cluster scope: what another block of the cluster wrote is visible afterwards"""
    return lanes.barrier_wait(address, parity)


@ptx("=", "fence.mbarrier_init.release.cluster;")
def fence_mbarrier_init() -> None:
    """fence.mbarrier_init.release.cluster"""


@ptx("=", "fence.proxy.async.shared::cta;")
def fence_async() -> None:
    """fence.proxy.async.shared::cta: ordinary writes to shared memory become visible to asynchronous copies"""


@ptx("u64 =", "createpolicy.fractional.L2::evict_first.b64 <d>, 1.0;", pure=True)
def policy_evict_first() -> Any:
    """createpolicy: data read once need not stay in L2"""
    return 0


@ptx("u64 =", "createpolicy.fractional.L2::evict_last.b64 <d>, 1.0;", pure=True)
def policy_evict_last() -> Any:
    """createpolicy: data that is read again soon stays in L2 as long as it can"""
    return 0


def _bulk(name: str, hint: bool) -> Op:
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    if hint:

        def twin(lanes: Lanes, target: Any, source: Any, count: Any, barrier: Any, policy: Any) -> None:
            lanes.bulk_copy(target, source, count, barrier)

        signature, text = "= u32, s64, u32, u32, u64", f"{text}.L2::cache_hint [<0>], [<1>], <2>, [<3>], <4>;"
    else:

        def twin(lanes: Lanes, target: Any, source: Any, count: Any, barrier: Any) -> None:
            lanes.bulk_copy(target, source, count, barrier)

        signature, text = "= u32, s64, u32, u32", f"{text} [<0>], [<1>], <2>, [<3>];"
    twin.__name__ = name
    return ptx(signature, text, unit="warp")(twin)


bulk_load = _bulk("bulk_load", hint=False)  # cp.async.bulk: global to shared, 16-byte units, counted by an mbarrier
bulk_load_hint = _bulk("bulk_load_hint", hint=True)  # the same with an L2 policy


PUSH = "st.async.shared::cluster.mbarrier::complete_tx::bytes"


@ptx("= u32, u32, u32", f"{PUSH}.u32 [<0>], <1>, [<2>];", unit="warp")
def push_u32(lanes: Lanes, target: Any, value: Any, barrier: Any) -> None:
    """st.async: a word into a block of the cluster, counted by its mbarrier (both from cluster_address)"""
    lanes.push(target, (value,), barrier)


@ptx("= u32, u32*2, u32", f"{PUSH}.v2.u32 [<0>], <1>, [<2>];", unit="warp")
def push_u32x2(lanes: Lanes, target: Any, value: Any, barrier: Any) -> None:
    """The same with two words"""
    lanes.push(target, value, barrier)


@ptx(
    "= u32, u32, u32, u32",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [<0>], [<1>], <2>, [<3>];",
    unit="warp",
)
def bulk_push(lanes: Lanes, target: Any, source: Any, count: Any, barrier: Any) -> None:
    """cp.async.bulk: shared memory into a block of the cluster, 16-byte units, counted by its mbarrier"""
    lanes.bulk_push(target, source, count, barrier)


@ptx("= u32, s64", "cp.async.cg.shared.global.L2::128B [<0>], [<1>], 16;")
def async_load16(lanes: Lanes, target: Any, source: Any) -> None:
    """cp.async.cg of 16 bytes a lane (the CPU copies at once)"""
    lanes.copy16(target, source)


@ptx("= u32", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [<0>];", unit="warp")
def async_arrive(lanes: Lanes, address: Any) -> None:
    """cp.async.mbarrier.arrive.noinc: an arrival once this thread's copies so far have landed"""
    lanes.barrier_step(address, 0)


@ptx("=", "cp.async.commit_group;")
def async_commit() -> None:
    """cp.async.commit_group"""


def _async_wait(n: int) -> Op:
    def twin() -> None:
        return None

    twin.__name__ = f"async_wait_{n}"
    return ptx("=", f"cp.async.wait_group {n};")(twin)


async_wait = tuple(_async_wait(n) for n in range(6))  # cp.async.wait_group n


@ptx("= s64", "prefetch.tensormap [<0>];")
def prefetch_tensor_map(address: Any) -> None:
    """prefetch.tensormap"""


@ptx(
    "= u32, s64, s32, s32, u32",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [<0>], [<1>, {<2>, <3>}], [<4>];",
    unit="warp",
)
def tensor_load(lanes: Lanes, target: Any, tensor_map: Any, x: Any, y: Any, barrier: Any) -> None:
    """cp.async.bulk.tensor.2d: one box of a tensor map (128-byte swizzle) to shared memory"""
    lanes.tensor_load(target, tensor_map, x, y, barrier, ranks=None)


@ptx(
    "= u32, s64, s32, s32, u32, u16",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [<0>], [<1>, {<2>, <3>}], [<4>], <5>;",
    unit="warp",
)
def tensor_load_multicast(lanes: Lanes, target: Any, tensor_map: Any, x: Any, y: Any, barrier: Any, ranks: Any) -> None:
    """The same into every block of the cluster whose bit is set"""
    lanes.tensor_load(target, tensor_map, x, y, barrier, ranks=lanes.one(ranks))


GATHER = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    " [<0>], [<1>, {<2>, <3>, <4>, <5>, <6>}], [<7>];"
)


@ptx("= u32, s64, s32, s32, s32, s32, s32, u32", GATHER, chips=BLACKWELL, unit="warp")
def tensor_gather4(
    lanes: Lanes, target: Any, tensor_map: Any, x: Any, a: Any, b: Any, c: Any, d: Any, barrier: Any
) -> None:
    """tile::gather4: four rows of a tensor map, one below the other"""
    for i, row in enumerate((a, b, c, d)):
        lanes.tensor_load(lanes.one(target) + 128 * i, tensor_map, x, row, barrier, ranks=None)
