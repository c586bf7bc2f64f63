"""Executes an expanded kernel body for many lanes at once: one numpy operation per expression, under a mask.

A unit is a generator: it yields while an operation answers WAIT (barriers, mbarriers, flags), so that other units of
the block can run. Numbers that are the same in every lane stay plain numbers, and their branches are taken, not masked.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dsuf.kernels.lang import Cast, Kernel, Select
from dsuf.kernels.ptx.op import Op
from dsuf.kernels.simt.errors import KernelFault
from dsuf.kernels.simt.lanes import WAIT, Lanes

BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip


class Unit:
    """One group of lanes in one kernel; `steps` counts executed statements, so that a standstill shows."""

    def __init__(self, kernel: Kernel, lanes: Lanes, args: tuple[Any, ...]) -> None:
        self.kernel, self.lanes, self.names = kernel, lanes, kernel.names
        self.variables: dict[str, Any] = dict(zip((name for name, _ in kernel.parameters), args, strict=True))
        self.steps = 0

    def run(self) -> Iterator[None]:
        """Execute the body to its end, yielding while it waits."""
        with np.errstate(all="ignore"):
            yield from self.block(self.kernel.tree.body, np.ones(self.lanes.count, bool))

    # ---- statements

    def block(self, body: list[ast.stmt], mask: np.ndarray) -> Iterator[None]:
        """Execute statements for the lanes of a mask."""
        for statement in body:
            self.lanes.mask = mask
            kind = type(statement)
            if kind is ast.Assign:
                self.assign(statement.targets[0], self.value(statement.value), mask)
            elif kind is ast.Expr:
                while self.value(statement.value) is WAIT:
                    yield
                    self.lanes.mask = mask
            elif kind is ast.AugAssign:
                held = self.variables[statement.target.id]
                new = BINARY[type(statement.op)](held, self.value(statement.value))
                self.assign(statement.target, new, mask)
            elif kind is ast.If:
                yield from self.branch(statement, mask)
            elif kind is ast.While:
                yield from self.loop(statement, mask)
            elif kind is not ast.Pass:
                raise KernelFault(f"not part of the kernel language: {ast.unparse(statement)}")
            self.steps += 1
        self.lanes.mask = mask

    def branch(self, statement: ast.If, mask: np.ndarray) -> Iterator[None]:
        """Both sides under their masks, or one side if the condition is the same everywhere."""
        condition = self.value(statement.test)
        if np.ndim(condition) == 0:
            yield from self.block(statement.body if condition else statement.orelse, mask)
            return
        taken, other = mask & condition, mask & ~condition
        if taken.any():
            yield from self.block(statement.body, taken)
        if statement.orelse and other.any():
            yield from self.block(statement.orelse, other)

    def loop(self, statement: ast.While, mask: np.ndarray) -> Iterator[None]:
        """Until no lane is left; a loop that only watches memory lets the others move."""
        watches = all(isinstance(s, ast.Pass) for s in statement.body)
        while True:
            self.lanes.mask = mask
            condition = self.value(statement.test)
            if np.ndim(condition):
                mask = mask & condition
            elif not condition:
                return
            if not mask.any():
                return
            if watches:
                yield
            else:
                yield from self.block(statement.body, mask)

    def assign(self, target: ast.expr, value: Any, mask: np.ndarray) -> None:
        """Bind a name for the lanes of the mask; others keep what they have."""
        if isinstance(target, ast.Tuple):
            for part, one in zip(target.elts, value, strict=True):
                self.assign(part, one, mask)
            return
        if not mask.all() and target.id in self.variables:
            value = _merge(mask, value, self.variables[target.id])
        self.variables[target.id] = value

    # ---- expressions

    def value(self, node: ast.expr) -> Any:
        """Evaluate for all lanes."""
        kind = type(node)
        if kind is ast.Constant:
            return node.value
        if kind is ast.Name:
            return self.variables[node.id] if node.id in self.variables else self.names[node.id]
        if kind is ast.BinOp:
            return BINARY[type(node.op)](self.value(node.left), self.value(node.right))
        if kind is ast.Call:
            return self.call(node)
        if kind is ast.Subscript:
            return self.value(node.value)[self.value(node.slice)]
        if kind is ast.Tuple:
            return tuple(self.value(part) for part in node.elts)
        if kind is ast.Compare:
            return COMPARE[type(node.ops[0])](self.value(node.left), self.value(node.comparators[0]))
        if kind is ast.UnaryOp:
            held = self.value(node.operand)
            if isinstance(node.op, ast.USub):
                return -held
            return ~held if isinstance(node.op, ast.Invert) else np.logical_not(held)
        raise KernelFault(f"not part of the kernel language: {ast.unparse(node)}")

    def call(self, node: ast.Call) -> Any:
        """A PTX operation, a cast, a selection, min or max."""
        name = node.func.id
        target = self.names.get(name)
        args = [self.value(a) for a in node.args]
        if isinstance(target, Op):
            return target.twin(self.lanes, *args) if target.wants_lanes else target.twin(*args)
        if isinstance(target, (Cast, Select)):
            return target(*args)
        if name in ("min", "max"):
            return (np.minimum if name == "min" else np.maximum)(*args)
        raise KernelFault(f"not part of the kernel language: {ast.unparse(node)}")


def _merge(mask: np.ndarray, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_merge(mask, a, b) for a, b in zip(new, old, strict=True))
    merged = np.where(mask, new, old)
    floats = np.asarray(new).dtype == np.float32
    return merged.astype(np.float32) if floats else merged
