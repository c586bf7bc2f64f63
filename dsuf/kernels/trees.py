"""Walking and copying syntax trees: the module `ast` takes several times as long for both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar

Tree = TypeVar("Tree", bound=ast.AST)


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    """Every name of a tree, from left to right."""
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.Name):
            yield one
            continue
        for value in reversed(one.__dict__.values()):
            if isinstance(value, ast.AST):
                stack.append(value)
            elif isinstance(value, list):
                stack += reversed(value)


def clone(node: Tree) -> Tree:
    """A copy whose names and statements can be changed; contexts and operators, which have no parts, are shared."""
    new = node.__class__.__new__(node.__class__)
    for field, value in node.__dict__.items():
        if isinstance(value, ast.AST):
            held = clone(value) if value._fields else value
        elif isinstance(value, list):
            held = [clone(one) for one in value]
        else:
            held = value
        new.__dict__[field] = held
    return new
