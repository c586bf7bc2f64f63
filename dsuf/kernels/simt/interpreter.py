"""Executes an expanded kernel body for many lanes at once: one numpy operation per expression, under a mask.

A kernel's tree becomes Python closures once (`program`), so that a unit spends its time in numpy and in the twins of
the operations. A unit is a generator: it yields while an operation answers WAIT (barriers, mbarriers, flags), so that
other units of the block can run. Numbers that are the same in every lane stay plain numbers, and their branches are
taken, not masked.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from dsuf.kernels.lang import Cast, Kernel, Select
from dsuf.kernels.ptx.op import Op
from dsuf.kernels.simt.errors import KernelFault
from dsuf.kernels.simt.lanes import WAIT, Lanes
from dsuf.kernels.trees import names_in

BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: np.logical_not,
}  # fmt: skip

Value = Callable[["Unit"], Any]  # evaluates an expression for all lanes
Step = Callable[["Unit", np.ndarray], "Iterator[None] | None"]  # executes a statement for the lanes of a mask


class Unit:
    """One group of lanes in one kernel; `steps` counts executed statements, so that a standstill shows."""

    def __init__(self, kernel: Kernel, lanes: Lanes, args: tuple[Any, ...]) -> None:
        self.kernel, self.lanes = kernel, lanes
        self.variables: dict[str, Any] = dict(zip((name for name, _ in kernel.parameters), args, strict=True))
        self.steps = 0

    def run(self) -> Iterator[None]:
        """Execute the body to its end, yielding while it waits."""
        with np.errstate(all="ignore"):
            yield from self.block(program(self.kernel), np.ones(self.lanes.count, bool))

    def block(self, body: list[Step], mask: np.ndarray) -> Iterator[None]:
        """Execute statements for the lanes of a mask."""
        lanes = self.lanes
        for step in body:
            lanes.mask = mask
            waits = step(self, mask)
            if waits is not None:
                yield from waits
            self.steps += 1
        lanes.mask = mask

    def assign(self, name: str, value: Any, mask: np.ndarray) -> None:
        """Bind a name for the lanes of the mask; others keep what they have."""
        variables = self.variables
        if name in variables and not mask.all():
            value = _merge(mask, value, variables[name])
        variables[name] = value


@lru_cache(maxsize=256)
def program(kernel: Kernel) -> list[Step]:
    """A kernel's body as closures. Raises KernelFault for what is not part of the kernel language."""
    return Program(kernel).block(kernel.tree.body)


class Program:
    """Turns one kernel's statements and expressions into closures."""

    def __init__(self, kernel: Kernel) -> None:
        self.names = kernel.names
        bound = {node.id for node in names_in(kernel.tree) if isinstance(node.ctx, ast.Store)}
        self.variables = bound | {name for name, _ in kernel.parameters}

    # ---- statements

    def block(self, body: list[ast.stmt]) -> list[Step]:
        """Statements in their order."""
        return [self.statement(statement) for statement in body if not isinstance(statement, ast.Pass)]

    def statement(self, statement: ast.stmt) -> Step:
        """One statement: its step returns what it waits with, or None if it is done."""
        if isinstance(statement, ast.Assign):
            return self.assignment(statement)
        if isinstance(statement, ast.Expr):
            return _operation(self.value(statement.value))
        if isinstance(statement, ast.AugAssign):
            name, change = statement.target.id, BINARY[type(statement.op)]
            value = self.value(statement.value)
            return lambda unit, mask: unit.assign(name, change(unit.variables[name], value(unit)), mask)
        if isinstance(statement, ast.If):
            return _branch(self.value(statement.test), self.block(statement.body), self.block(statement.orelse))
        if isinstance(statement, ast.While):
            watches = all(isinstance(s, ast.Pass) for s in statement.body)
            test, body = self.value(statement.test), self.block(statement.body)
            return lambda unit, mask: _loop(unit, mask, test, body, watches)
        raise KernelFault(f"not part of the kernel language: {ast.unparse(statement)}")

    def assignment(self, statement: ast.Assign) -> Step:
        """To a name, or the parts of a value to several."""
        target, value = statement.targets[0], self.value(statement.value)
        if isinstance(target, ast.Name):
            name = target.id
            return lambda unit, mask: unit.assign(name, value(unit), mask)
        names = [part.id for part in target.elts]

        def assign_parts(unit: Unit, mask: np.ndarray) -> None:
            for name, one in zip(names, value(unit), strict=True):
                unit.assign(name, one, mask)

        return assign_parts

    # ---- expressions

    def value(self, node: ast.expr) -> Value:
        """An expression, for all lanes."""
        if isinstance(node, ast.Constant):
            constant = node.value
            return lambda unit: constant
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.BinOp):
            return _binary(BINARY[type(node.op)], self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Compare):
            return _binary(COMPARE[type(node.ops[0])], self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.Subscript):
            return _binary(operator.getitem, self.value(node.value), self.value(node.slice))
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Tuple):
            parts = [self.value(part) for part in node.elts]
            return lambda unit: tuple([part(unit) for part in parts])
        if isinstance(node, ast.UnaryOp):
            change, held = UNARY[type(node.op)], self.value(node.operand)
            return lambda unit: change(held(unit))
        raise KernelFault(f"not part of the kernel language: {ast.unparse(node)}")

    def name(self, name: str) -> Value:
        """A variable of the unit, or what the kernel's surroundings call so."""
        if name in self.variables:
            return lambda unit: unit.variables[name]
        constant = self.names[name]
        return lambda unit: constant

    def call(self, node: ast.Call) -> Value:
        """A PTX operation, a cast, a selection, min or max."""
        name = node.func.id
        target: Any = self.names.get(name)
        args = [self.value(a) for a in node.args]
        if isinstance(target, Op):
            if target.wants_lanes:
                twin = target.twin
                return lambda unit: twin(unit.lanes, *[a(unit) for a in args])
            target = target.twin
        elif name in ("min", "max"):
            target = np.minimum if name == "min" else np.maximum
        elif not isinstance(target, (Cast, Select)):
            raise KernelFault(f"not part of the kernel language: {ast.unparse(node)}")
        if len(args) == 1:
            (only,) = args
            return lambda unit: target(only(unit))
        return lambda unit: target(*[a(unit) for a in args])


def _binary(operation: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    return lambda unit: operation(left(unit), right(unit))


def _operation(value: Value) -> Step:
    def step(unit: Unit, mask: np.ndarray) -> Iterator[None] | None:
        return _ask_again(unit, mask, value) if value(unit) is WAIT else None

    return step


def _ask_again(unit: Unit, mask: np.ndarray, value: Value) -> Iterator[None]:
    while True:
        yield
        unit.lanes.mask = mask
        if value(unit) is not WAIT:
            return


def _branch(test: Value, body: list[Step], orelse: list[Step]) -> Step:
    """Both sides under their masks, or one side if the condition is the same everywhere."""

    def step(unit: Unit, mask: np.ndarray) -> Iterator[None] | None:
        condition = test(unit)
        if np.ndim(condition) == 0:
            side = body if condition else orelse
            return unit.block(side, mask) if side else None
        return _both(unit, mask & condition, mask & ~condition, body, orelse)

    return step


def _both(unit: Unit, taken: np.ndarray, other: np.ndarray, body: list[Step], orelse: list[Step]) -> Iterator[None]:
    if body and taken.any():
        yield from unit.block(body, taken)
    if orelse and other.any():
        yield from unit.block(orelse, other)


def _loop(unit: Unit, mask: np.ndarray, test: Value, body: list[Step], watches: bool) -> Iterator[None]:
    """Until no lane is left; a loop that only watches memory lets the others move."""
    while True:
        unit.lanes.mask = mask
        condition = test(unit)
        if np.ndim(condition):
            mask = mask & condition
        elif not condition:
            return
        if not mask.any():
            return
        if watches:
            yield
        else:
            yield from unit.block(body, mask)


def _merge(mask: np.ndarray, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_merge(mask, a, b) for a, b in zip(new, old, strict=True))
    merged = np.where(mask, new, old)
    floats = np.asarray(new).dtype == np.float32
    return merged.astype(np.float32) if floats else merged
