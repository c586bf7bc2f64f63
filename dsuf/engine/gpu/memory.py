"""The ledger of a device: what everything will take, before anything is loaded, and what that leaves for cache pages.

    ledger = plan_memory(spec, free, total, max_context=None, max_sequences=8)
    print("\\n".join(ledger.lines()))
    ledger.pages, ledger.slots, ledger.max_context

Weights, windows, tables, workspace and a reserve for graphs and code come first; pages get what is left, up to what all
sequences can use. A context that was asked for and does not fit is refused, and the largest that would fit is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dsuf.engine.gpu import buffers, engram_tables
from dsuf.engine.gpu.engram_tables import Placement
from dsuf.engine.gpu.pages import Sizes
from dsuf.engine.gpu.weight_plan import plan
from dsuf.errors import DeviceError
from dsuf.kernels import rope
from dsuf.layout import PAGE_TOKENS, pages_for
from dsuf.spec import Spec

GB, MIB = 1e9, 1 << 20
SHOWN = 1_000_000  # bytes from which a kind has a line of its own
GRAPHS = 768 << 20  # cubins, captured graphs and what the driver takes for them: measured 0.4 GB, with room
SPARE_SHARE = 0.005  # of the device, never planned
SPARE_SLOTS = 1  # so that a sequence can begin while the one that ended still has work queued
Workspace = Callable[[int], int]  # bytes for contexts of so many tokens


@dataclass(frozen=True)
class Ledger:
    """Bytes by kind as they will be allocated; `pages` of the pool, `slots` for sequences, the longest context."""

    total: int
    free: int  # before anything is taken
    entries: dict[str, int] = field(default_factory=dict)
    pages: int = 0
    slots: int = 0
    max_context: int = 0
    engram: Placement = "device"

    @property
    def planned(self) -> int:
        """Bytes of everything together."""
        return sum(self.entries.values())

    def with_pages(self, pages: int, page_bytes: int) -> Ledger:
        """With fewer pages, because another device has no room for more."""
        return replace(self, pages=pages, entries={**self.entries, "pages": pages * page_bytes})

    def lines(self) -> list[str]:
        """The table that is printed before loading."""
        width = max(len(kind) for kind in self.entries)
        rows = [f"{kind:{width}s} {count / GB:9.3f} GB" for kind, count in self.entries.items() if count >= SHOWN]
        rows.append(
            f"{'planned':{width}s} {self.planned / GB:9.3f} GB of {self.free / GB:.3f} free, {self.total / GB:.3f}"
        )
        tokens = self.pages * PAGE_TOKENS
        rows.append(
            f"room for {tokens:,} tokens in {self.pages:,} pages; one sequence has at most {self.max_context:,}"
        )
        return rows


def plan_memory(
    spec: Spec,
    free: int,
    total: int,
    *,
    max_context: int | None,
    max_sequences: int,
    cache_tokens: int | None = None,
    lookahead: int = 12,
    rank: int = 0,
    ranks: int = 1,
    engram: Placement | None = None,
    workspace: Workspace | None = None,
    exchange: int = 0,
) -> Ledger:
    """The ledger for `free` bytes. `lookahead`: tokens beyond a context that a sequence may write; `exchange`: bytes
    through which several ranks add up.

    `workspace` is what prefill takes beside the decode step's own. Raises DeviceError for what does not fit.
    """
    wanted = max_context or spec.max_position_embeddings
    planner = _Planner(spec, free, total, max_sequences, lookahead, rank, ranks, workspace, exchange)
    placement = engram or planner.placement(wanted)
    most = planner.largest(placement)
    if most < (max_context or PAGE_TOKENS):
        raise _too_large(planner, placement, max_context, most)
    context = min(wanted, most)
    fixed = planner.fixed(placement, context)
    room = (planner.usable - sum(fixed.values())) // planner.sizes.page
    useful = max_sequences * pages_for(context + lookahead)
    if cache_tokens is not None:
        useful = min(useful, max(pages_for(context + lookahead), cache_tokens // PAGE_TOKENS))
    pages = min(room, useful)
    entries = {**fixed, "pages": pages * planner.sizes.page}
    return Ledger(total, free, entries, pages, planner.slots, context, placement)


@dataclass(frozen=True)
class _Planner:
    spec: Spec
    free: int
    total: int
    max_sequences: int
    lookahead: int
    rank: int
    ranks: int
    workspace: Workspace | None
    exchange: int

    @property
    def usable(self) -> int:
        return self.free - int(self.total * SPARE_SHARE)

    @property
    def slots(self) -> int:
        return self.max_sequences + SPARE_SLOTS

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.spec)

    def fixed(self, placement: Placement, context: int) -> dict[str, int]:
        """Everything but the pages."""
        spec, sizes = self.spec, self.sizes
        kinds: dict[str, int] = {}
        for part in plan(spec, rank=self.rank, ranks=self.ranks):
            kinds[part.kind] = kinds.get(part.kind, 0) + taken(part.nbytes)
        tables = kinds.pop("engram tables", 0)
        entries = {f"weights, {kind}": count for kind, count in kinds.items()}
        entries["weights, engram tables"] = 0 if placement == "host" else tables
        entries["windows"] = self.slots * (sizes.window_pitch - sizes.drafter_windows)
        entries["windows, drafter"] = self.slots * sizes.drafter_windows
        entries["open pairs, history"] = self.slots * (sizes.pairs + sizes.history)
        entries["page tables"] = 4 * self.slots * pages_for(context + self.lookahead)
        rows = rope.FINE + pages_for(context + self.lookahead)
        entries["ropes"] = 2 * rows * spec.qk_rope_head_dim * 4
        entries["workspace, decode"] = _sum(buffers.sizes_of(spec, context + self.lookahead))
        entries["workspace, prefill"] = self.workspace(context) if self.workspace is not None else 0
        entries["exchange"] = self.exchange
        entries["graphs and code"] = GRAPHS
        return entries

    def need(self, placement: Placement, context: int) -> int:
        """Bytes for one sequence of a context, and everything fixed."""
        return sum(self.fixed(placement, context).values()) + self.sizes.page * pages_for(context + self.lookahead)

    def largest(self, placement: Placement) -> int:
        """The longest context that fits alone, in whole pages; 0: none."""
        low, high = 0, pages_for(self.spec.max_position_embeddings)
        while low < high:
            middle = (low + high + 1) // 2
            if self.need(placement, middle * PAGE_TOKENS) <= self.usable:
                low = middle
            else:
                high = middle - 1
        return min(low * PAGE_TOKENS, self.spec.max_position_embeddings)

    def placement(self, context: int) -> Placement:
        """Tables on the device if one sequence of the wanted context still fits beside them."""
        spare = self.usable - self.need("host", context)
        return engram_tables.choose(self.spec, spare, self.ranks)


def _too_large(planner: _Planner, placement: Placement, asked: int | None, most: int) -> DeviceError:
    need = planner.need(placement, asked or PAGE_TOKENS)
    what = f"a context of {asked:,} tokens" if asked else "this checkpoint"
    largest = sorted(planner.fixed(placement, asked or PAGE_TOKENS).items(), key=lambda item: -item[1])[:4]
    most_of_it = ", ".join(f"{kind} {count / GB:.2f}" for kind, count in largest)
    todo = f"The largest context that fits is {most:,}: use --max-context {most}" if most else "Use more GPUs"
    return DeviceError(
        f"{what} needs {need / GB:.2f} GB on the device, {planner.usable / GB:.2f} GB can be used (most of it, in GB: "
        f"{most_of_it}). {todo}, or --gpus 0."
    )


def taken(nbytes: int) -> int:
    """Bytes that an allocation takes: the driver gives large ones whole pages of 2 MiB (measured on an H200)."""
    unit = 2 * MIB if nbytes >= MIB else 512
    return -(-nbytes // unit) * unit


def _sum(sizes: dict[str, int | tuple[int, ...]]) -> int:
    return sum(taken(part) for size in sizes.values() for part in (size if isinstance(size, tuple) else (size,)))
