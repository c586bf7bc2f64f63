"""Gives every assignment in straight-line code a name of its own.

An unrolled body assigns the same names hundreds of times, and the time Numba takes to bring that into single-assignment
form grows with (names assigned twice) x (blocks). A name keeps its spelling only where it must: when branches or loops
carry it from one pass to another, or its value is used after them.
"""

from __future__ import annotations

import ast
from collections import Counter

from dsuf.kernels.trees import names_in

Block = list[ast.stmt]


def _loads(node: ast.AST) -> Counter[str]:
    return Counter([n.id for n in names_in(node) if isinstance(n.ctx, ast.Load)])


def _targets(node: ast.AST) -> list[str]:
    return [n.id for n in names_in(node) if isinstance(n.ctx, ast.Store)]


def _exposed(block: Block, defined: set[str]) -> set[str]:
    """Names that may be read in a block before it assigned them; extends `defined` by what it surely assigns."""
    found: set[str] = set()
    for statement in block:
        if isinstance(statement, ast.If):
            found |= _loads(statement.test).keys() - defined
            taken, other = set(defined), set(defined)
            found |= _exposed(statement.body, taken) | _exposed(statement.orelse, other)
            defined |= taken & other
        elif isinstance(statement, ast.While):
            found |= _loads(statement.test).keys() - defined
            found |= _exposed(statement.body, set(defined))
        else:
            reads = _loads(statement).keys()
            if isinstance(statement, ast.AugAssign):
                reads = reads | set(_targets(statement))
            found |= reads - defined
            defined |= set(_targets(statement))
    return found


class _Renamer(ast.NodeTransformer):
    def __init__(self, current: dict[str, str]) -> None:
        self.current = current

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Load):
            node.id = self.current.get(node.id, node.id)
        return node


class Versions:
    """One function's names."""

    def __init__(self, body: Block, parameters: list[str]) -> None:
        self.total: Counter[str] = Counter()
        for statement in body:
            self.total += _loads(statement)
        self.assigned = {name for statement in body for name in _targets(statement)} | set(parameters)
        self.count: Counter[str] = Counter(parameters)

    def fresh(self, name: str) -> str:
        """The next name of a variable; the first is the variable's own."""
        self.count[name] += 1
        return name if self.count[name] == 1 else f"{name}__v{self.count[name]}"

    def block(self, block: Block, current: dict[str, str], pinned: frozenset[str]) -> None:
        """Rename in place. `current` maps variables to their names here; `pinned` ones must keep theirs."""
        for statement in block:
            if isinstance(statement, (ast.If, ast.While)):
                self.nested(statement, current, pinned)
            elif isinstance(statement, ast.AugAssign):
                statement.value = _Renamer(current).visit(statement.value)
                statement.target.id = current.get(statement.target.id, statement.target.id)
            else:
                if hasattr(statement, "value"):
                    statement.value = _Renamer(current).visit(statement.value)
                for node in names_in(statement):
                    if isinstance(node.ctx, ast.Store):
                        if node.id not in pinned or node.id not in current:
                            current[node.id] = self.fresh(node.id)
                        node.id = current[node.id]

    def nested(self, statement: ast.If | ast.While, current: dict[str, str], pinned: frozenset[str]) -> None:
        """A branch or loop: what it assigns and others see, or it carries round, keeps one name in all of it."""
        inside = set(_targets(statement))
        own = _loads(statement)
        carried = _exposed([statement], set())
        escaping = {name for name in inside if own[name] < self.total[name] or name in carried} | (inside & pinned)
        for name in escaping:
            if name not in current:
                current[name] = self.fresh(name)
        statement.test = _Renamer(current).visit(statement.test)
        held = pinned | escaping
        self.block(statement.body, dict(current), held)
        self.block(statement.orelse, dict(current), held)


def separate(body: Block, parameters: list[str]) -> None:
    """Rename the variables of a function body in place."""
    versions = Versions(body, parameters)
    versions.block(body, {name: name for name in parameters}, frozenset())
