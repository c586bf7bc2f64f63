"""What the experts' kernels share (gate_up.py, experts.py): a stage times rows, sums of a team; and experts.py's walk.

A routed item's stage holds a chunk of all its tiles (pack_fp4), a shared item's stage a chunk of one of its tiles
(pack_fp8). Both multiply f16 activations; per group of 32 columns acc += (sum of exact products) * weight scale, one
rounding each, so a row's bits depend on its own values and the shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsuf.kernels.expert_plan import GROUP_PAIRS, PLAN_RECORD
from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.pack import FP8_SCALES, GROUP, ROWS, chunk_width, fp4_chunk_bytes
from dsuf.kernels.ptx.convert import add_rows, e4m3x4_f16, fp4x8_f16_bits, fp4x8_f16_cvt, ue8m0
from dsuf.kernels.ptx.copy import bulk_load_hint, mbarrier_expect, mbarrier_wait
from dsuf.kernels.ptx.memory import ldg_u32x4, lds_f32x4, lds_u32, lds_u32x2, lds_u32x4, sts_f32x4
from dsuf.kernels.ptx.mma import mma_f16
from dsuf.kernels.ptx.op import BLACKWELL, Op
from dsuf.kernels.ptx.sync import sync_named, sync_warp
from dsuf.kernels.quantise import WIDE_SHIFT
from dsuf.kernels.stream import FP4_BIAS


def fp4_on(chip: str) -> tuple[Op, float]:
    """How FP4 codes become f16 on a chip, and the unit of what they give with activations of hidden.py."""
    if chip in BLACKWELL:
        return fp4x8_f16_cvt, 2.0**-WIDE_SHIFT
    return fp4x8_f16_bits, FP4_BIAS * 2.0**-WIDE_SHIFT


@dataclass(frozen=True)
class Shape:
    """How the weights of a launch lie, and how a team walks them."""

    items: int  # of a group of pairs
    tiles: int  # of 16 weight rows of an item
    runs: int  # copies that bring a chunk of all its tiles
    width: int  # columns of a chunk
    run: int  # bytes of a copy
    chunks: int
    shared_width: int
    shared_run: int
    shared_chunks: int
    team: int
    stage: int  # bytes

    @classmethod
    def of(cls, k: int, most: int, items: int, tiles: int, runs: int, team: int) -> Shape:
        """For weights of k columns in FP4 chunks of up to `most`."""
        width, shared_width = chunk_width(k, most), chunk_width(k)
        run, shared_run = tiles // runs * fp4_chunk_bytes(k, most), shared_width * ROWS + FP8_SCALES
        return cls(items, tiles, runs, width, run, k // width, shared_width, shared_run, k // shared_width, team,
                   max(runs * run, shared_run))  # fmt: skip

    @property
    def groups(self) -> int:
        """Scales of a weight row in a chunk."""
        return self.width // GROUP

    @property
    def shared_groups(self) -> int:
        """The same of the shared weight."""
        return self.shared_width // GROUP

    @property
    def tile(self) -> int:
        """Bytes of one tile of a routed stage."""
        return self.runs * self.run // self.tiles

    @property
    def steps(self) -> int:
        """Stages that a warp needs for a routed item."""
        return self.chunks // self.team

    @property
    def shared_steps(self) -> int:
        """The same for a shared item, a tile at a time."""
        return self.shared_chunks // self.team * self.tiles


# What a warp remembers of its walk. Fetched next: address, stages left of this run, 1 if it is routed; the item after
# that run, the distance to the one after it, and the step of a shared item. Then the number of shared and of all items,
# its part of the team, the number of teams, and the ring's stage and phase.
AT, LEFT, ROUTED, AHEAD, STRIDE, STEP, SHARED, LAST, PART, TEAMS, STAGE, PHASE, STATE = range(13)


@inline
def ask(state: Any, stage: Any, shape: Any, ring: Any, bar: Any, w: Any, shared: Any, records: Any, lane: Any,
        policy: Any) -> None:  # fmt: skip
    """Fetch what a warp needs next into a ring stage (one lane does), and step its state on."""
    if state[LEFT] == 0 and state[AHEAD] < state[LAST]:
        aim(state, shape, w, shared, records)
    if state[LEFT] > 0:
        if lane == 0:
            to = uint32(ring + stage * shape.stage)
            ready = uint32(bar + 8 * stage)
            if state[ROUTED] == 1:
                mbarrier_expect(ready, uint32(shape.runs * shape.run))
                for i in unroll(shape.runs):
                    at = state[AT] + i * shape.chunks * shape.run
                    bulk_load_hint(uint32(to + i * shape.run), at, uint32(shape.run), ready, policy)
            else:
                mbarrier_expect(ready, uint32(shape.shared_run))
                bulk_load_hint(to, state[AT], uint32(shape.shared_run), ready, policy)
        state[AT] = state[AT] + shape.team * shape.run
        state[LEFT] = int32(state[LEFT] - 1)


@inline
def aim(state: Any, shape: Any, w: Any, shared: Any, records: Any) -> None:
    """Find where the next run of stages lies: a routed item, or one tile and chunk of a shared one."""
    item = state[AHEAD]
    ended = int32(1)
    if item < state[SHARED]:
        step = state[STEP]
        place = int32(item % shape.items * shape.tiles)
        tile = int32(step % shape.tiles)
        chunk = int32(state[PART] + step // shape.tiles * shape.team)
        state[AT] = shared + (int64(place + tile) * shape.shared_chunks + chunk) * shape.shared_run
        state[LEFT] = int32(1)
        state[ROUTED] = int32(0)
        ended = int32(1 if step + 1 == shape.shared_steps else 0)
        state[STEP] = int32(0 if ended == 1 else step + 1)
    else:
        mine = int32(item - state[SHARED])
        expert = int64(int32(lds_u32(uint32(records + mine // shape.items * (PLAN_RECORD * 4)))))
        first = (expert * shape.items + mine % shape.items) * shape.runs
        state[AT] = w + (first * shape.chunks + state[PART]) * shape.run
        state[LEFT] = int32(shape.steps)
        state[ROUTED] = int32(1)
    if ended == 1:
        state[AHEAD] = int32(item + state[STRIDE])
        state[STRIDE] = state[TEAMS]


@inline
def begin(state: Any, live: Any, items: Any, first: Any, teams: Any, part: Any) -> None:
    """The state of a warp of team `first`, before the plan is known: shared items only."""
    state[SHARED] = int32((live + GROUP_PAIRS - 1) // GROUP_PAIRS * items)
    state[LAST] = state[SHARED]
    state[AT] = int64(0)
    state[LEFT] = int32(0)
    state[ROUTED] = int32(0)
    state[AHEAD] = first
    state[STRIDE] = first_stride(state[SHARED], first, teams)
    state[STEP] = int32(0)
    state[PART] = part
    state[TEAMS] = teams
    state[STAGE] = int32(0)
    state[PHASE] = int32(0)


@inline
def first_stride(shared: Any, first: Any, teams: Any) -> Any:
    """From a team's first item to its second. A shared item is twice the work, so its team sits the next round out."""
    fits = int32(1 if shared <= teams else 0)
    skip = int32(2 * teams - shared if first < shared else teams - shared)
    return int32(skip if fits == 1 else teams)


@inline
def next_stage(state: Any, stages: Any) -> None:
    """Step the ring on."""
    last = int32(1 if state[STAGE] == stages - 1 else 0)
    state[STAGE] = int32(0 if last == 1 else state[STAGE] + 1)
    state[PHASE] = int32(state[PHASE] ^ last)


@inline
def fp4_tiles(acc: Any, at: Any, shape: Any, lane: Any, expand: Any, x: Any) -> None:
    """acc[i] += a routed stage times eight rows; x: the lane's address in its row, at the chunk."""
    f = regs(4 * shape.tiles)  # scales of weight rows g, then of rows g + 8
    for i in unroll(shape.tiles):
        if shape.groups == 8:
            f[4 * i : 4 * i + 4] = lds_u32x4(uint32(at + i * shape.tile + shape.groups * 256 + (lane >> 2) * 16))
        if shape.groups == 4:
            f[4 * i : 4 * i + 2] = lds_u32x2(uint32(at + i * shape.tile + shape.groups * 256 + (lane >> 2) * 8))
        if shape.groups == 2:
            f[4 * i] = lds_u32(uint32(at + i * shape.tile + shape.groups * 256 + (lane >> 2) * 4))
    a = regs(4 * shape.tiles)
    for q in unroll(shape.groups):
        if q % 2 == 0:
            for i in unroll(shape.tiles):
                a[4 * i : 4 * i + 4] = lds_u32x4(uint32(at + i * shape.tile + q * 256 + lane * 16))
        b = ldg_u32x4(x + q * 64)
        for i in unroll(shape.tiles):
            p = mma_f16(expand(a[4 * i + 2 * (q % 2)]), (b[0], b[1]), (0.0, 0.0, 0.0, 0.0))
            p = mma_f16(expand(a[4 * i + 2 * (q % 2) + 1]), (b[2], b[3]), p)
            f0 = ue8m0[q % 4](f[4 * i + q // 4])
            acc[i] = add_rows(acc[i], p, f0, ue8m0[(shape.groups + q) % 4](f[4 * i + (shape.groups + q) // 4]))


@inline
def fp8_tile(acc: Any, at: Any, shape: Any, lane: Any, x: Any) -> None:
    """acc[0] += a shared stage times eight rows."""
    f = lds_u32x2(uint32(at + shape.shared_groups * 512))
    for q in unroll(shape.shared_groups):
        a = lds_u32x4(uint32(at + q * 512 + lane * 16))
        top0 = e4m3x4_f16(a[0])
        low0 = e4m3x4_f16(a[1])
        top1 = e4m3x4_f16(a[2])
        low1 = e4m3x4_f16(a[3])
        b = ldg_u32x4(x + q * 64)
        p = mma_f16((top0[0], low0[0], top0[1], low0[1]), (b[0], b[1]), (0.0, 0.0, 0.0, 0.0))
        p = mma_f16((top1[0], low1[0], top1[1], low1[1]), (b[2], b[3]), p)
        w = ue8m0[q % 4](f[q // 4])
        acc[0] = add_rows(acc[0], p, w, w)


@inline
def multiply(acc: Any, state: Any, shape: Any, stages: Any, is_shared: Any, expand: Any, x: Any, ring: Any, bar: Any,
             w: Any, shared: Any, records: Any, lane: Any, policy: Any) -> None:  # fmt: skip
    """acc = a warp's part of an item, asking for what comes after; x: the lane's address in its row."""
    if is_shared:
        for n in range(shape.shared_steps):
            at_x = x + int64(state[PART] + n // shape.tiles * shape.team) * (shape.shared_width * 2)
            mbarrier_wait(uint32(bar + 8 * state[STAGE]), uint32(state[PHASE]))
            fp8_tile(acc, uint32(ring + state[STAGE] * shape.stage), shape, lane, at_x)
            held = acc[0]  # the next tile's turn; after all of them each is back in its place
            for i in unroll(shape.tiles - 1):
                acc[i] = acc[i + 1]
            acc[shape.tiles - 1] = held
            sync_warp()
            ask(state, state[STAGE], shape, ring, bar, w, shared, records, lane, policy)
            next_stage(state, stages)
    else:
        at_x = x + int64(state[PART]) * (shape.width * 2)
        for _ in range(shape.steps):
            mbarrier_wait(uint32(bar + 8 * state[STAGE]), uint32(state[PHASE]))
            fp4_tiles(acc, uint32(ring + state[STAGE] * shape.stage), shape, lane, expand, at_x)
            at_x = at_x + shape.team * shape.width * 2
            sync_warp()
            ask(state, state[STAGE], shape, ring, bar, w, shared, records, lane, policy)
            next_stage(state, stages)


@inline
def leave_part(acc: Any, tiles: Any, sums: Any, part: Any, team: Any, barrier: Any) -> None:
    """A warp's part of its team's sums to shared memory; sums: of part 0 of tile 0, at the lane."""
    sync_named(barrier, uint32(32 * team))
    for i in unroll(tiles):
        sts_f32x4(uint32(sums + (part * tiles + i) * 512), acc[i])
    sync_named(barrier, uint32(32 * team))


@inline
def sum_of_parts(acc: Any, tiles: Any, sums: Any, team: Any) -> None:
    """The team's sums, in warp order."""
    for i in unroll(tiles):
        acc[i] = lds_f32x4(uint32(sums + i * 512))
    for p in range(1, team):
        for i in unroll(tiles):
            q = lds_f32x4(uint32(sums + (p * tiles + i) * 512))
            acc[i] = (acc[i][0] + q[0], acc[i][1] + q[1], acc[i][2] + q[2], acc[i][3] + q[3])
