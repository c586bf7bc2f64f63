"""What a PTX operation is: a signature, a text, and a twin in plain Python that the CPU interpreter runs.

    @ptx("u32*4 = s64", "ld.global.v4.b32 <d>, [<0>];")
    def ldg_u32x4(lanes, address): return lanes.load_global(address, np.uint32, 4)

Signature: `outs = ins`. `*n` makes a value a tuple of n registers; a leading `+` on an input ties its registers to the
outputs (read and written in place). Text: `<d>` is the result (`<d0>`, `<d1>` if there are several), `<0>`, `<1>` the
arguments; a tuple is written `{r,r,r,r}`, and `<0.2>` is one register of it.

`pure` operations may be moved, merged or dropped by the compiler: right for arithmetic and for loads of data that
nobody writes (weights), wrong for anything that another thread or the kernel before wrote.

A twin works on all lanes at once: integers travel as int64 arrays whatever their width, floats as float32 arrays. It
returns one value, or a tuple for tuple results. If its first parameter is called `lanes`, it receives the machine
(dsuf/kernels/simt/lanes.py) as well. Nothing here imports Numba.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")
ALL_CHIPS = HOPPER + BLACKWELL

# constraint letter of each register type in inline assembly
REGISTER = {"u16": "h", "u32": "r", "s32": "r", "u64": "l", "s64": "l", "f32": "f"}


@dataclass(frozen=True)
class Slot:
    """One value of a signature; `count` 0 is a scalar, n a tuple of n registers; `tied` inputs are also outputs."""

    type: str
    count: int
    tied: bool

    @property
    def registers(self) -> int:
        return self.count or 1


@dataclass(frozen=True, eq=False)
class Op:
    """One operation; `unit` names the fewest lanes that must run together on the CPU (None, warp, warpgroup, block)."""

    name: str
    signature: str
    text: str
    twin: Callable[..., Any]
    pure: bool = False
    chips: tuple[str, ...] = ALL_CHIPS
    unit: str | None = None
    wants_lanes: bool = field(init=False)

    def __post_init__(self) -> None:
        first = next(iter(inspect.signature(self.twin).parameters), "")
        object.__setattr__(self, "wants_lanes", first == "lanes")

    @property
    def outs(self) -> tuple[Slot, ...]:
        return _slots(self.signature.partition("=")[0])

    @property
    def ins(self) -> tuple[Slot, ...]:
        return _slots(self.signature.partition("=")[2])

    @property
    def identity(self) -> str:
        """What a cubin that uses this operation depends on."""
        return f"{self.signature}|{self.text}|{'pure' if self.pure else 'effect'}"


def ptx(
    signature: str, text: str, *, pure: bool = False, chips: tuple[str, ...] = ALL_CHIPS, unit: str | None = None
) -> Callable[[Callable[..., Any]], Op]:
    """Decorate a twin; its name becomes the operation's. Raises ValueError on a text that does not fit."""

    def decorate(twin: Callable[..., Any]) -> Op:
        op = Op(twin.__name__, signature, text, twin, pure, chips, unit)
        assemble(op)
        return op

    return decorate


def _slots(side: str) -> tuple[Slot, ...]:
    found = []
    for item in filter(None, (part.strip() for part in side.split(","))):
        kind, _, count = item.lstrip("+").partition("*")
        if kind.strip() not in REGISTER:
            raise ValueError(f"{item!r} is not a register type; expected one of {', '.join(REGISTER)}")
        found.append(Slot(kind.strip(), int(count) if count else 0, item.startswith("+")))
    return tuple(found)


def assemble(op: Op) -> tuple[str, str]:
    """LLVM's inline-assembly text ($0, $1, ...) and constraint string of an operation."""
    numbers: dict[str, list[int]] = {}
    grouped: dict[str, bool] = {}
    constraints: list[str] = []
    outs, ins = op.outs, op.ins
    for i, slot in enumerate(outs):
        key = "d" if len(outs) == 1 else f"d{i}"
        numbers[key] = list(range(len(constraints), len(constraints) + slot.registers))
        grouped[key] = slot.count > 0
        constraints += [f"={REGISTER[slot.type]}"] * slot.registers
    if op.text.startswith("{") and not any(slot.tied for slot in ins):
        # several instructions: an output may be written before the last input is read
        constraints = [c.replace("=", "=&") for c in constraints]
    tied = 0
    for i, slot in enumerate(ins):
        first, key = len(constraints), str(i)
        grouped[key] = slot.count > 0
        if slot.tied:
            numbers[key] = list(range(tied, tied + slot.registers))
            constraints += [str(n) for n in numbers[key]]
            tied += slot.registers
        else:
            numbers[key] = list(range(first, first + slot.registers))
            constraints += [REGISTER[slot.type]] * slot.registers
    if not op.pure:
        constraints.append("~{memory}")

    def operand(match: re.Match[str]) -> str:
        key, _, part = match.group(1).partition(".")
        if key not in numbers:
            raise ValueError(f"{op.name}: <{match.group(1)}> is not an operand of {op.signature!r}")
        if part:
            return f"${numbers[key][int(part)]}"
        listed = ",".join(f"${n}" for n in numbers[key])
        return f"{{{listed}}}" if grouped[key] else listed

    return re.sub(r"<(d?\d*(?:\.\d+)?)>", operand, op.text.replace("$", "$$")), ",".join(constraints)


# ---- how twins hold values


def u32(value: Any) -> np.ndarray:
    """The low 32 bits of lane integers, as uint32."""
    return np.asarray(value, np.int64).astype(np.uint32)


def word(value: np.ndarray) -> np.ndarray:
    """Unsigned machine words as lane integers."""
    return value.astype(np.int64)


def bits_of(value: Any) -> np.ndarray:
    """float32 lanes to their bits, as lane integers."""
    return np.asarray(value, np.float32).view(np.uint32).astype(np.int64)


def float_of(bits: Any) -> np.ndarray:
    """Bits to float32 lanes."""
    return u32(bits).view(np.float32)
