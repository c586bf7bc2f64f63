"""`@kernel`: a Python function whose shapes are constants, expanded to straight code that Numba and the CPU both run.

    def make(width: int) -> Kernel:
        @kernel(threads=256, grid=(width // 256,))
        def double(x: s64, y: s64) -> None:
            i = int64(block_index()) * 256 + thread_index()
            stg_f32(y + i * 4, ldg_f32(x + i * 4) * float32(2))
        return double

What the expansion does, on the syntax tree:
  for i in unroll(n)      n copies of the body; i is a constant in each
  a = regs(n[, value])    n scalar variables; a[i] needs a constant i, a[lo:hi] and a alone stand for a tuple
  if CONSTANT             only the branch taken is kept (also for `x if CONSTANT else y`)
  x if c else y; and; or  all parts are evaluated, without a branch
  table[CONSTANT]         an element of a tuple, list or dict of operations
  for i in range(...)     a counted int32 loop (Numba's range carries a 64-bit iterator)
  y = f(helper(a))        the body of an `@inline` function, in place (not inside conditions)
Constants are the closure's and module's numbers, strings, tuples, and attributes of frozen objects.

Parameters are annotated with their register type. Numba gives int64 for int32 + int32, so counters are wrapped:
`i = int32(i + 1)`. Nothing here imports Numba.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dsuf.kernels.expand import Expander, Inline, free_names, function_tree, inline
from dsuf.kernels.ptx.op import Op
from dsuf.kernels.trees import names_in
from dsuf.kernels.versions import separate

__all__ = [
    "Cast", "Inline", "Kernel", "f32", "float32", "inline", "int32", "int64", "kernel", "regs", "s32", "s64", "u32",
    "u64", "uint32", "uint64", "unroll",
]  # fmt: skip

s32 = u32 = s64 = u64 = f32 = Any  # annotations of kernel parameters
SHARED_LIMIT = 227 * 1024  # bytes of shared memory that a block can have, on all chips


class Cast:
    """A numeric type of the kernel language: on a GPU Numba's type of that name, on a CPU what its conversion does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: Any) -> Any:
        if self.name == "float32":
            return np.asarray(value).astype(np.float32)[()]
        whole = np.asarray(value)
        whole = np.trunc(whole).astype(np.int64) if whole.dtype.kind == "f" else whole.astype(np.int64)
        if self.name == "uint32":
            whole = whole & 0xFFFFFFFF
        elif self.name == "int32":
            whole = (whole + 0x80000000 & 0xFFFFFFFF) - 0x80000000
        return whole[()]


int32, uint32, int64, uint64, float32 = (Cast(n) for n in ("int32", "uint32", "int64", "uint64", "float32"))


@dataclass(frozen=True)
class Select:
    """What `x if c else y` becomes where c is not constant: both sides are evaluated, so neither may have an effect."""

    def __call__(self, condition: Any, yes: Any, no: Any) -> Any:
        """Lane by lane on a CPU."""
        if np.ndim(condition) == 0:
            return yes if condition else no
        return np.where(condition, yes, no)


select = Select()


def unroll(*bounds: int) -> range:
    """Bounds of a loop that is expanded; only meaningful inside a kernel."""
    return range(*bounds)


def regs(n: int, value: Any = None) -> list[Any]:
    """n registers with constant indices; only meaningful inside a kernel."""
    return [value] * n


# names that mean the same in every kernel and helper, whether its module imports them or not
VOCABULARY: dict[str, Any] = {
    "unroll": unroll, "regs": regs, "int32": int32, "float32": float32, "select": select,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Kernel:
    """An expanded kernel with its launch geometry; `names` says what the free names of `tree` stand for."""

    name: str
    tree: ast.FunctionDef
    names: Mapping[str, Any]
    parameters: tuple[tuple[str, str], ...]
    threads: int
    grid: tuple[int, int]
    shared: int
    min_blocks: int
    cluster: int

    @property
    def text(self) -> str:
        """The expanded body as source."""
        return ast.unparse(self.tree)

    @cached_property
    def ops(self) -> dict[str, Op]:
        """The PTX operations it uses, by the name they have in the body."""
        used = {node.id for node in names_in(self.tree)}
        return {name: value for name, value in sorted(self.names.items()) if name in used and isinstance(value, Op)}

    @property
    def identity(self) -> str:
        """Everything in this package that the compiled code depends on."""
        used = {node.id for node in names_in(self.tree)}
        parts = [self.text, f"threads {self.threads} min_blocks {self.min_blocks} cluster {self.cluster}"]
        for name, value in sorted(self.names.items()):
            if name in used:
                parts.append(f"{name} = {value.identity if isinstance(value, Op) else _described(value)}")
        return "\n".join(parts)


def _described(value: Any) -> str:
    return value.name if isinstance(value, Cast) else repr(value)


def kernel(
    *,
    threads: int,
    grid: tuple[int, ...] = (1,),
    shared: int = 0,
    min_blocks: int = 1,
    cluster: int = 1,
    name: str = "",
) -> Callable[[Callable[..., None]], Kernel]:
    """Expand a function into a Kernel. `shared` is dynamic shared memory in bytes, `grid` blocks along x (and y).

    Raises SyntaxError, with the line, on what the kernel language does not have.
    """

    def decorate(function: Callable[..., None]) -> Kernel:
        tree = function_tree(function)
        expander = Expander({**VOCABULARY, **free_names(function)})
        tree.body = expander.block(tree.body)
        tree = ast.parse(ast.unparse(ast.fix_missing_locations(tree))).body[0]  # no node stands in two places
        separate(tree.body, [argument.arg for argument in tree.args.args])
        parameters = tuple((a.arg, ast.unparse(a.annotation)) for a in tree.args.args if a.annotation)
        if len(parameters) != len(tree.args.args):
            raise SyntaxError(f"{function.__name__}: every kernel parameter needs its type (s64, s32, u32, f32)")
        for argument in tree.args.args:
            argument.annotation = None
        tree.returns, tree.decorator_list = None, []
        tree.name = name or function.__name__
        ast.fix_missing_locations(tree)
        size = (grid[0], grid[1] if len(grid) > 1 else 1)
        return Kernel(tree.name, tree, expander.names, parameters, threads, size, shared, min_blocks, cluster)

    return decorate
