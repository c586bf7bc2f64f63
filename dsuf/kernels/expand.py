"""The expansion behind `@kernel` (lang.py): unrolling, register arrays, static branches, inlined helpers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dsuf.kernels.trees import clone, names_in


@dataclass(frozen=True, eq=False)
class Inline:
    """A function whose body replaces its calls; it may assign to register arrays of its caller."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.function.__name__} is an @inline function: it is expanded inside kernels only")


def inline(function: Callable[..., Any]) -> Inline:
    """Mark a helper for expansion: `x = helper(...)` or `helper(...)`; one `return` at its end at most."""
    return Inline(function)


def function_tree(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax tree of a function, without its docstring: a copy that is the caller's own."""
    return clone(_parsed(function))


@cache
def _parsed(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise SyntaxError(f"{function} is not a plain function")
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return tree


def free_names(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function's global and closure names stand for."""
    closure = inspect.getclosurevars(function)
    return {**closure.globals, **closure.nonlocals}


_SAFE = {"min": min, "max": max, "len": len, "int": int, "abs": abs}
_CONSTANT = (int, float, bool, str, tuple, type(None))


class Expander(ast.NodeTransformer):
    """Rewrites one function body; `names` grows by the table elements and helper names that it introduces."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names: dict[str, Any] = dict(names)
        self.loops: dict[str, int] = {}
        self.arrays: dict[str, int] = {}
        self.inlined = 0

    # ---- constants

    def constant(self, node: ast.expr) -> tuple[bool, Any]:
        """(True, value) if an expression is known while expanding."""
        if isinstance(node, ast.Constant):
            return True, node.value
        for inner in ast.walk(node):
            known = isinstance(inner, ast.Name) and (inner.id in self.loops or inner.id in self.names)
            if isinstance(inner, ast.Name) and not known and inner.id not in _SAFE:
                return False, None
            if isinstance(inner, ast.Call) and not (isinstance(inner.func, ast.Name) and inner.func.id in _SAFE):
                return False, None
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<constant>", "eval")
        value = eval(code, {"__builtins__": _SAFE}, {**self.names, **self.loops})  # expressions of our own kernels only
        return isinstance(value, _CONSTANT), value

    def need(self, node: ast.expr, what: str) -> Any:
        """The value of an expression that must be constant."""
        known, value = self.constant(node)
        if not known:
            raise SyntaxError(f"{what} must be known while expanding: {ast.unparse(node)}")
        return value

    # ---- statements

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Expand a list of statements; never empty."""
        out: list[ast.stmt] = []
        for statement in statements:
            for before in self._hoisted(statement):
                result = self.visit(before)
                out += result if isinstance(result, list) else [result]
        return out or [ast.Pass()]

    def _hoisted(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statement with `@inline` calls inside its expression moved to assignments before it."""
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
            return [statement]
        hoist = _Hoist(self)
        if isinstance(statement.value, ast.Call) and self._helper(statement.value):
            return [statement]  # its arguments become assignments of their own
        statement.value = hoist.visit(statement.value)
        return [*hoist.before, statement]

    def visit_For(self, node: ast.For) -> Any:
        if not (isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name)):
            raise SyntaxError(f"a kernel loops over unroll() or range(): {ast.unparse(node.iter)}")
        if not isinstance(node.target, ast.Name):
            raise SyntaxError(f"a loop has one variable: {ast.unparse(node.target)}")
        if node.iter.func.id == "unroll":
            return self._unroll(node)
        if node.iter.func.id != "range":
            raise SyntaxError(f"a kernel loops over unroll() or range(): {ast.unparse(node.iter)}")
        return self._count(node)

    def _unroll(self, node: ast.For) -> list[ast.stmt]:
        name, bounds = node.target.id, [self.need(a, "a bound of unroll()") for a in node.iter.args]
        outer, out = self.loops.get(name), []
        for value in range(*bounds):
            self.loops[name] = value
            out += self.block([clone(s) for s in node.body])
        self.loops.pop(name, None)
        if outer is not None:
            self.loops[name] = outer
        return out or [ast.Pass()]

    def _count(self, node: ast.For) -> list[ast.stmt]:
        args = [self.visit(a) for a in node.iter.args]
        start, stop, step = {
            1: lambda: (ast.Constant(0), args[0], ast.Constant(1)),
            2: lambda: (args[0], args[1], ast.Constant(1)),
            3: lambda: tuple(args),
        }[len(args)]()
        for inner in node.body:
            if any(isinstance(n, (ast.Continue, ast.Break)) for n in ast.walk(inner)):
                raise SyntaxError(f"break and continue are not part of the kernel language: {ast.unparse(node.iter)}")
        name = node.target.id

        def wrap(value: ast.expr) -> ast.expr:
            return ast.Call(ast.Name("int32", ast.Load()), [value], [])

        read = ast.Name(name, ast.Load())
        first = ast.Assign([ast.Name(name, ast.Store())], wrap(start))
        following = ast.Assign([ast.Name(name, ast.Store())], wrap(ast.BinOp(read, ast.Add(), step)))
        body = self.block(node.body)
        return [first, ast.While(ast.Compare(read, [ast.Lt()], [stop]), [*body, following], [])]

    def visit_While(self, node: ast.While) -> Any:
        node.test, node.body = self.visit(node.test), self.block(node.body)
        return node

    def visit_If(self, node: ast.If) -> Any:
        known, value = self.constant(node.test)
        if known:
            kept = node.body if value else node.orelse
            return self.block(kept) if kept else []
        node.test, node.body = self.visit(node.test), self.block(node.body)
        node.orelse = self.block(node.orelse) if node.orelse else []
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        helper = self._helper(node.value)
        return self._inline(node.value, helper, None) if helper else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        target, call = node.targets[0], node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "regs":
            return self._declare(target, call)
        helper = self._helper(call)
        if helper:
            return self._inline(call, helper, target)
        node.value = self.visit(call)
        if isinstance(target, ast.Name) and target.id in self.arrays:
            node.targets = [self._tuple(target.id, 0, self.arrays[target.id], ast.Store())]
        else:
            node.targets = [self.visit(target)]
        return node

    def _declare(self, target: ast.expr, call: ast.Call) -> list[ast.stmt]:
        if not isinstance(target, ast.Name):
            raise SyntaxError(f"regs() is assigned to one name: {ast.unparse(target)}")
        count = self.need(call.args[0], "the length of regs()")
        self.arrays[target.id] = count
        if len(call.args) < 2:
            return []
        names = [ast.Name(f"{target.id}_{i}", ast.Store()) for i in range(count)]
        return [ast.Assign([name], self.visit(clone(call.args[1]))) for name in names]

    # ---- helpers

    def _helper(self, node: ast.expr) -> Inline | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = self.names.get(node.func.id)
            return found if isinstance(found, Inline) else None
        return None

    def _inline(self, call: ast.Call, helper: Inline, target: ast.expr | None) -> list[ast.stmt]:
        tree, free = function_tree(helper.function), free_names(helper.function)
        if len(call.args) != len(tree.args.args) or call.keywords:
            raise SyntaxError(f"{tree.name} takes {len(tree.args.args)} positional arguments: {ast.unparse(call)}")
        self.inlined += 1
        mark = f"{tree.name}{self.inlined}_"
        renamed: dict[str, ast.expr] = {}
        setup: list[ast.stmt] = []
        for parameter, argument in zip(tree.args.args, call.args, strict=True):
            known_name = isinstance(argument, ast.Name) and (argument.id in self.arrays or argument.id in self.names)
            if known_name or self.constant(argument)[0]:
                renamed[parameter.arg] = argument
            else:
                local = mark + parameter.arg
                renamed[parameter.arg] = ast.Name(local, ast.Load())
                setup.append(ast.Assign([ast.Name(local, ast.Store())], argument))
        for name, value in free.items():
            if self.names.get(name) is value:
                continue  # the caller means the same by it
            self.names[mark + name] = value
            renamed[name] = ast.Name(mark + name, ast.Load())
        local_names = {n.id for n in names_in(tree) if isinstance(n.ctx, ast.Store)}
        for name in sorted(local_names - renamed.keys()):
            renamed[name] = ast.Name(mark + name, ast.Load())
        body = [_Rename(renamed).visit(statement) for statement in tree.body]
        if body and isinstance(body[-1], ast.Return):
            result = body.pop().value
            if target is not None and result is not None:
                body.append(ast.Assign([target], result))
        elif target is not None:
            raise SyntaxError(f"{tree.name} returns nothing, but its result is used: {ast.unparse(call)}")
        return self.block([*setup, *body])

    # ---- expressions

    def visit_Constant(self, node: ast.Constant) -> Any:
        # a bare Python float would make Numba compute in float64
        if isinstance(node.value, float):
            return ast.Call(ast.Name("float32", ast.Load()), [node], [])
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Load) and node.id in self.loops:
            return ast.Constant(self.loops[node.id])
        if isinstance(node.ctx, ast.Load) and isinstance(self.names.get(node.id), float):
            return self.visit_Constant(ast.Constant(self.names[node.id]))
        if isinstance(node.ctx, ast.Load) and node.id in self.arrays:
            return self._tuple(node.id, 0, self.arrays[node.id], ast.Load())
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        known, value = self.constant(node.test)
        if known:
            return self.visit(node.body if value else node.orelse)
        arguments = [self.visit(part) for part in (node.test, node.body, node.orelse)]
        return ast.Call(ast.Name("select", ast.Load()), arguments, [])  # no branch, and so no block for Numba

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        known, value = self.constant(node)  # folded here in float64: Numba would carry float64 into the kernel
        return self.visit_Constant(ast.Constant(value)) if known else self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        result = self.visit(node.values[0])
        for part in node.values[1:]:
            result = ast.BinOp(result, operator, self.visit(part))
        return result

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return ast.Constant(self.need(node, "an attribute"))

    def visit_Call(self, node: ast.Call) -> Any:
        if self._helper(node):
            raise SyntaxError(f"an @inline call cannot stand in a condition or a branch of one: {ast.unparse(node)}")
        if isinstance(node.func, ast.Name) and node.func.id == "float32":
            known, value = self.constant(node.args[0])
            if known:
                return ast.Call(node.func, [ast.Constant(float(value))], [])
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        name = node.value.id if isinstance(node.value, ast.Name) else None
        if name in self.arrays:
            return self._register(node, name)
        known, value = self.constant(node)
        if known:
            return self.visit_Constant(ast.Constant(value))
        if name is not None and isinstance(self.names.get(name), (dict, list, tuple)):
            index = self.need(node.slice, "an index into a table")
            self.names[f"{name}__{index}"] = self.names[name][index]
            return ast.Name(f"{name}__{index}", ast.Load())
        return self.generic_visit(node)

    def _register(self, node: ast.Subscript, name: str) -> ast.expr:
        size = self.arrays[name]
        if isinstance(node.slice, ast.Slice):
            low = self.need(node.slice.lower, "a slice of registers") if node.slice.lower else 0
            high = self.need(node.slice.upper, "a slice of registers") if node.slice.upper else size
            return self._tuple(name, low, high, node.ctx)
        index = self.need(node.slice, "an index into registers")
        if not 0 <= index < size:
            raise SyntaxError(f"{ast.unparse(node)}: index {index} of {size} registers")
        return ast.Name(f"{name}_{index}", node.ctx)

    @staticmethod
    def _tuple(name: str, low: int, high: int, ctx: ast.expr_context) -> ast.Tuple:
        return ast.Tuple([ast.Name(f"{name}_{i}", ctx) for i in range(low, high)], ctx)


class _Hoist(ast.NodeTransformer):
    """Replaces `@inline` calls by names and collects their assignments; leaves the branches of conditions alone."""

    def __init__(self, expander: Expander) -> None:
        self.expander = expander
        self.before: list[ast.stmt] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if not self.expander._helper(node):
            return self.generic_visit(node)
        self.expander.inlined += 1
        name = f"value{self.expander.inlined}_"
        self.before.append(ast.Assign([ast.Name(name, ast.Store())], node))
        return ast.Name(name, ast.Load())

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        if not self.expander.constant(node.test)[0]:
            node.test = self.visit(node.test)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return node


class _Rename(ast.NodeTransformer):
    """Gives the names of an inlined body their place in the caller."""

    def __init__(self, renamed: Mapping[str, ast.expr]) -> None:
        self.renamed = renamed

    def visit_Name(self, node: ast.Name) -> ast.expr:
        new = self.renamed.get(node.id)
        if new is None:
            return node
        new = clone(new)
        if isinstance(new, ast.Name):
            new.ctx = node.ctx
        elif not isinstance(node.ctx, ast.Load):
            raise SyntaxError(f"{node.id} is a constant here and cannot be assigned")
        return new
