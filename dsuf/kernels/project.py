"""The projections of a decode step, and how each is launched on the kernels of project_kernel.py."""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.kernels.catalogue import Entry, Width, tile_of
from dsuf.kernels.lang import SHARED_LIMIT
from dsuf.kernels.pack import BF16_CHUNK, FP8_CHUNK, chunk_width
from dsuf.kernels.project_kernel import make, shared_of
from dsuf.ops.product import grouped_product, product
from dsuf.spec import Spec

# (warps, stages) by kind and rows, one for all chips. Measured on an H200 with 6 rows: 8 warps with four stages beat 16
# with two for q8 (wo_b 13.7 us, 14.1), 16 are ahead for wo_a (12.5, 12.9) and bf16; accumulators of many rows need the
# registers of half as many warps. A team orders sums, so it follows from the weight, never from rows: as many warps a
# tile as make TEAM_TILES parts of it, so that every SM has work to the end (wo_b: a team of 8 13.7 us, of 4 15.9); the
# head's tiles are many, and a team of four reads what lies together (302 us, 310).
TUNED = {"q8": {8: (8, 4)}, "wo_a": {8: (16, 2)}, "bf16": {8: (16, 2)}}
STAGED, DIRECT, SMALL = (8, 2), (8, 4), (4, 2)
DIRECT_FEW = (16, 2)  # rows up to 8
SM_COUNT = 132
TEAM_TILES, MOST_TEAM = 15 * SM_COUNT, 8
WIDE_TILES, WIDE_TEAM = 4096, 4


@dataclass(frozen=True)
class Launch:
    """How a projection is launched; `arguments` follow w, x, sx, y, live."""

    name: str
    grid: tuple[int, int]
    shared: int
    arguments: tuple[int, int, int, int]  # n, k, groups, team


@dataclass(frozen=True)
class Projection:
    """A weight of the model: [groups * n, k] of a kind."""

    n: int
    k: int
    kind: str
    groups: int = 1

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows, all groups."""
        return self.groups * -(-self.n // 16)

    def team(self, chunk: int, most: int) -> int:
        """Warps that share a tile; two chunks a warp at least. Two teams of wo_a share a block."""
        most = most // 2 if self.kind == "wo_a" else most
        if self.tiles >= WIDE_TILES:
            return WIDE_TEAM
        team = 1
        while self.tiles * team < TEAM_TILES and team < most and self.k // chunk >= 2 * 2 * team:
            team *= 2
        return team

    def floor(self, rows: int) -> tuple[int, int]:
        """Bytes and operations of a launch."""
        weight = self.groups * self.n * self.k
        weight = weight * 2 if self.kind == "bf16" else weight + weight // 1024
        return weight + rows * self.groups * (self.k + 2 * self.n), 2 * rows * self.groups * self.n * self.k


def shape_for(label: str, kind: str, rows: int, k: int) -> dict[str, int | bool | str]:
    """Factory arguments, but for most_k, of the kernel that multiplies a tile of rows by weights of K columns."""
    chunk = chunk_width(k, BF16_CHUNK if kind == "bf16" else FP8_CHUNK)
    warps, stages = SMALL if label == "small" else TUNED[kind].get(rows, STAGED)
    staged = shared_of(kind, rows, chunk, warps, stages, True, k) <= SHARED_LIMIT
    if not staged:
        warps, stages = DIRECT_FEW if rows <= 8 else DIRECT
    return {"kind": kind, "rows": rows, "chunk": chunk, "warps": warps, "stages": stages, "staged": staged}


def name_of(label: str, shape: dict[str, int | bool | str]) -> str:
    """Catalogue name of such a kernel."""
    return f"project.{shape['kind']}{'' if shape['staged'] else '_direct'}/{label}/r{shape['rows']}"


def launch_of(label: str, one: Projection, rows: int) -> Launch:
    """The launch of a projection for so many rows, on kernels of a width."""
    shape = shape_for(label, one.kind, tile_of(label, rows), one.k)
    warps = shape["warps"]
    chunk = shape["chunk"]
    team = one.team(chunk, SMALL[0] if label == "small" else MOST_TEAM)
    blocks = min(SM_COUNT // one.groups, max(1, -(-one.tiles * team // warps // one.groups))) * one.groups
    size = shared_of(one.kind, shape["rows"], chunk, warps, shape["stages"], shape["staged"], one.k)
    return Launch(name_of(label, shape), (blocks, 1), size, (one.n, one.k, one.groups, team))


def projections(spec: Spec) -> dict[str, Projection]:
    """The projections of a checkpoint's decode step."""
    heads, q, d = spec.num_attention_heads * spec.head_dim, spec.q_lora_rank, spec.hidden_size
    engram = spec.engram_columns * spec.engram_head_dim
    return {
        "wq_a_wkv": Projection(q + spec.head_dim, d, "q8"),
        "wq_b": Projection(heads, q, "q8"),
        "index_wq_b": Projection(spec.index_n_heads * spec.index_head_dim, q, "q8"),
        "wo_a": Projection(spec.o_lora_rank, heads // spec.o_groups, "wo_a", spec.o_groups),
        "wo_b": Projection(d, spec.o_groups * spec.o_lora_rank, "q8"),
        "shared_gate_up": Projection(2 * spec.moe_intermediate_size, d, "q8"),
        "shared_down": Projection(d, spec.moe_intermediate_size, "q8"),
        "engram_wkv": Projection((spec.hc_mult + 1) * d, engram, "q8"),
        "main_proj": Projection(d, len(spec.dspark_target_layer_ids) * d, "q8"),
        "gate": Projection(spec.n_routed_experts, d, "bf16"),
        "draft_gate": Projection(spec.dspark_n_routed_experts, d, "bf16"),
        "compressor": Projection(spec.head_dim, d, "bf16"),
        "compressor_gated": Projection(2 * spec.head_dim, d, "bf16"),
        "index_weights": Projection(spec.index_n_heads, d, "bf16"),
        "head": Projection(spec.vocab_size, d, "bf16"),
    }


def entries(width: Width) -> list[Entry]:
    """One kernel for each kind and row tile, a second where some weight's activations do not fit a block."""
    found: dict[str, Entry] = {}
    for one in sorted(projections(width.spec).values(), key=lambda one: one.k):
        for rows in width.row_tiles:
            shape = shape_for(width.label, one.kind, rows, one.k)
            name = name_of(width.label, shape)
            if name in found and one.floor(rows) < (found[name].floor_bytes, found[name].floor_operations):
                shape, floor = {**shape, "most_k": one.k}, (found[name].floor_bytes, found[name].floor_operations)
            else:
                shape, floor = {**shape, "most_k": one.k}, one.floor(rows)
            reference = grouped_product if one.kind == "wo_a" else product
            found[name] = Entry(name, make, shape, width.chips, reference, *floor)
    return list(found.values())
