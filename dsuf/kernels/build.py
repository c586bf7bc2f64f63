"""Kernel -> LTO-IR -> cubin, without a GPU or a driver; the only file that imports Numba, and only when it compiles.

PTX operations become Numba intrinsics that emit inline assembly; Numba's LTO-IR is linked by nvJitLink (through PTX,
`setmaxnreg` would be dropped). Multiplication and addition are contracted only where a kernel says `fma`, and no
fast-math flag is given: variants of a kernel for different row counts must round alike.

A cubin is kept in the file <cache>/kernels/<chip>/<key>: a line of JSON (facts and digest), then the cubin. The key
hashes the expanded body, the constants, the text of every PTX operation, the options, the chip and the versions of the
tools. A file is written under a temporary name and renamed, so several processes may build at once; one that does not
agree with its digest is built again. A spill, use of the stack, or a "Performance Loss" line is an error.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from dsuf.errors import CheckFailed, ConfigError
from dsuf.kernels.lang import Cast, Inline, Kernel, Select
from dsuf.kernels.ptx.op import ALL_CHIPS, Op, Slot, assemble

TOOLS = ("numba-cuda", "numba", "llvmlite", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink")
SHARED_SYMBOL = "dsuf_dynamic_shared"


@dataclass(frozen=True)
class Facts:
    """What the assembler said about one cubin, and the seconds that it took to build."""

    entry: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    warnings: tuple[str, ...]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Why this cubin must not be used; empty if it may."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} + {self.spill_loads} bytes of registers")
        if self.stack:
            found.append(f"uses {self.stack} bytes of stack")
        return found + [line for line in self.warnings if "Performance Loss" in line]


@dataclass(frozen=True)
class Built:
    """A cubin with its facts and the launch geometry of its kernel; `fresh` if this process compiled it."""

    name: str
    chip: str
    cubin: bytes
    facts: Facts
    threads: int
    grid: tuple[int, int]
    shared: int
    cluster: int
    parameters: tuple[str, ...]
    fresh: bool = False


@cache
def tool_versions() -> tuple[str, ...]:
    """Versions of everything that takes part in a compilation."""
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in TOOLS)


def key_of(kernel: Kernel, chip: str) -> str:
    """Content hash of a compilation: 32 hex digits."""
    geometry = (kernel.threads, kernel.grid, kernel.shared, kernel.cluster)  # kept with the code
    recipe = json.dumps([kernel.identity, kernel.parameters, geometry, chip, tool_versions(), "lto no-fma no-fastmath"])
    return hashlib.sha256(recipe.encode()).hexdigest()[:32]


def build(kernel: Kernel, chip: str, cache_folder: Path | None) -> Built:
    """Compile, or take from the cache (None: no cache on disk). Raises CheckFailed on a spill, stack use or warning."""
    if chip not in ALL_CHIPS:
        raise ConfigError(f"{chip!r} is not a chip this build knows; expected one of {', '.join(ALL_CHIPS)}.")
    wrong = sorted(name for name, op in kernel.ops.items() if chip not in op.chips)
    if wrong:
        raise ConfigError(f"kernel {kernel.name} uses {', '.join(wrong)}, which {chip} does not have.")
    file = None if cache_folder is None else cached_file(cache_folder, chip, key_of(kernel, chip))
    built = None if file is None else read_cached(file)
    if built is None:
        cubin, facts = _compile(kernel, chip)
        kinds = tuple(kind for _, kind in kernel.parameters)
        geometry = (kernel.threads, kernel.grid, kernel.shared, kernel.cluster)
        built = Built(kernel.name, chip, cubin, facts, *geometry, kinds, fresh=True)
        if file is not None:
            _write(file, built)
    if built.facts.problems:
        raise CheckFailed(f"kernel {kernel.name} for {chip}: {'; '.join(built.facts.problems)}")
    return built


# ---- the cache on disk


def cached_file(cache_folder: Path, chip: str, key: str) -> Path:
    """Where a cubin is kept; makes its folder, closed to others."""
    folder = cache_folder / "kernels" / chip
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (cache_folder / "kernels").chmod(0o700)
    return folder / key


def read_cached(file: Path) -> Built | None:
    """The cubin in a cache file, or None if it is absent or damaged: then it is built again."""
    try:
        head, _, cubin = file.read_bytes().partition(b"\n")
        meta = json.loads(head)
        if hashlib.sha256(cubin).hexdigest() != meta.pop("sha256"):
            return None
        facts = Facts(**{**meta.pop("facts"), "warnings": tuple(meta.pop("warnings"))})
        meta["grid"], meta["parameters"] = tuple(meta["grid"]), tuple(meta["parameters"])
        return Built(cubin=cubin, facts=facts, **meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(file: Path, built: Built) -> None:
    meta = {key: value for key, value in asdict(built).items() if key not in ("cubin", "fresh")}
    meta["warnings"] = meta["facts"].pop("warnings")
    meta["sha256"] = hashlib.sha256(built.cubin).hexdigest()
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_bytes(json.dumps(meta).encode() + b"\n" + built.cubin)
    os.replace(temporary, file)


# ---- compilation


def _compile(kernel: Kernel, chip: str) -> tuple[bytes, Facts]:
    started = time.perf_counter()
    ltoir = _front_end(kernel).get_ltoir(cc=_capability(chip))
    cubin, log = _link(bytes(ltoir), chip)
    return cubin, _facts(log, time.perf_counter() - started)


@lru_cache(maxsize=1)
def _front_end(kernel: Kernel) -> Any:
    """Numba's library of a kernel: typed and lowered to LLVM IR, which is the same for all chips, in most of the time.

    numba.cuda.compile does this and one chip's LTO-IR in one step; its first half is what is kept here.
    """
    from numba.cuda import compiler

    _quicken_numba()
    types = _numba_types()
    library, _ = compiler._compile_pyfunc_with_fixup(
        _python_function(kernel),
        tuple(types[kind] for _, kind in kernel.parameters),
        debug=None,
        lineinfo=False,
        device=False,
        fastmath=False,
        cc=_capability(ALL_CHIPS[0]),
        opt=None,
        abi="numba",
        abi_info=None,
        forceinline=False,
        launch_bounds=(kernel.threads, kernel.min_blocks),
        lto=True,
    )
    return library


@cache
def _quicken_numba() -> None:
    """Replace one step of numba-cuda 0.30 that walks a whole block for each variable: half the time of long kernels."""
    from numba.cuda import lowering
    from numba.cuda.core import ir

    def find_singly_assigned(self: Any) -> None:
        blocks = self.func_ir.blocks
        use_defs, in_memory = lowering.compute_use_defs(blocks), lowering.must_use_alloca(blocks)
        blocks_of = Counter(name for names in use_defs.defmap.values() for name in names)
        elsewhere = {name for names in use_defs.usemap.values() for name in names}
        times = Counter(s.target.name for block in blocks.values() for s in block.find_insts(ir.assign_types))
        self._singly_assigned_vars = {
            name
            for name, count in blocks_of.items()
            if count == times[name] == 1 and name not in elsewhere and name not in in_memory
        }
        self._blk_local_varmap = {}

    lowering.Lower._find_singly_assigned_variable = find_singly_assigned


def _link(ltoir: bytes, chip: str) -> tuple[bytes, str]:
    """LTO-IR to a cubin and the assembler's log. By nvJitLink: cuda.core spells fma in a way that libnvvm refuses."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={chip}", "-lto", "-fma=0", "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
        try:
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            raise CheckFailed(f"linking for {chip} failed: {error}\n{_log(handle, error=True)}") from None
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin), _log(handle, error=False)
    finally:
        nvjitlink.destroy(handle)


def _log(handle: int, *, error: bool) -> str:
    from cuda.bindings import nvjitlink

    size = nvjitlink.get_error_log_size(handle) if error else nvjitlink.get_info_log_size(handle)
    text = bytearray(size)
    (nvjitlink.get_error_log if error else nvjitlink.get_info_log)(handle, text)
    return text.decode(errors="replace").rstrip("\0")


def _facts(log: str, seconds: float) -> Facts:
    def largest(pattern: str) -> int:
        return max((int(x) for x in re.findall(pattern, log)), default=0)

    entry = re.search(r"entry function '([\w$]+)'", log)
    if entry is None:
        raise CheckFailed(f"the linker's log names no entry function:\n{log}")
    return Facts(
        entry=entry[1],
        registers=largest(r"Used (\d+) registers"),
        stack=largest(r"(\d+) bytes stack frame"),
        spill_stores=largest(r"(\d+) bytes spill stores"),
        spill_loads=largest(r"(\d+) bytes spill loads"),
        static_shared=largest(r"(\d+) bytes smem"),
        warnings=tuple(x for x in log.splitlines() if "warning" in x.lower() or "Performance Loss" in x),
        seconds=round(seconds, 3),
    )


def _capability(chip: str) -> tuple[int, int, str]:
    parts = re.fullmatch(r"sm_(\d+)(\d)([af]?)", chip)
    assert parts is not None
    return int(parts[1]), int(parts[2]), parts[3]


def _python_function(kernel: Kernel) -> Any:
    import ast

    from numba.cuda import types

    scope: dict[str, Any] = {}
    for name, value in kernel.names.items():
        if isinstance(value, Op):
            scope[name] = intrinsic_of(value)
        elif isinstance(value, Cast):
            scope[name] = getattr(types, value.name)
        elif isinstance(value, Select):
            scope[name] = _select()
        elif isinstance(value, (int, float, bool, tuple)) and not isinstance(value, Inline):
            scope[name] = value
    code = compile(ast.Module([kernel.tree], []), f"<kernel {kernel.name}>", "exec")
    exec(code, scope)  # the expanded tree of our own source
    return scope[kernel.name]


@cache
def _select() -> Any:
    """An intrinsic for lang.Select, of any one type."""
    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature

    def select(typingctx: Any, condition: Any, yes: Any, no: Any) -> Any:
        unified = typingctx.unify_types(types.unliteral(yes), types.unliteral(no))

        def lower(context: Any, builder: Any, typed: Any, args: Any) -> Any:
            return builder.select(*args)

        return signature(unified, types.boolean, unified, unified), lower

    return intrinsic(select)


def _numba_types() -> dict[str, Any]:
    from numba.cuda import types

    return {
        "u16": types.uint16, "u32": types.uint32, "s32": types.int32, "u64": types.uint64, "s64": types.int64,
        "f32": types.float32,
    }  # fmt: skip


def _llvm_type(kind: str) -> Any:
    from llvmlite import ir

    return ir.FloatType() if kind == "f32" else ir.IntType(int(kind[1:]))


@cache
def intrinsic_of(op: Op) -> Any:
    """A Numba intrinsic that emits the operation as inline assembly."""
    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature

    table, outs, ins = _numba_types(), op.outs, op.ins

    def numba_type(slot: Slot) -> Any:
        return types.UniTuple(table[slot.type], slot.count) if slot.count else table[slot.type]

    result = types.none
    if outs:
        result = numba_type(outs[0]) if len(outs) == 1 else types.Tuple(tuple(numba_type(o) for o in outs))
    typed = signature(result, *[numba_type(i) for i in ins])
    lower = _special(op) or _inline_assembly(op)
    arguments = ", ".join(f"a{i}" for i in range(len(ins)))
    scope: dict[str, Any] = {"typed": typed, "lower": lower}
    exec(f"def {op.name}(typingctx{', ' if ins else ''}{arguments}):\n    return typed, lower\n", scope)
    return intrinsic(scope[op.name])


def _inline_assembly(op: Op) -> Any:
    from llvmlite import ir

    text, constraints = assemble(op)
    outs, ins = op.outs, op.ins
    flat_outs = [_llvm_type(o.type) for o in outs for _ in range(o.registers)]
    flat_ins = [_llvm_type(i.type) for i in ins for _ in range(i.registers)]
    returned = ir.VoidType()
    if flat_outs:
        returned = flat_outs[0] if len(flat_outs) == 1 else ir.LiteralStructType(flat_outs)
    function_type = ir.FunctionType(returned, flat_ins)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat = []
        for slot, value in zip(ins, args, strict=True):
            flat += [builder.extract_value(value, j) for j in range(slot.count)] if slot.count else [value]
        call = builder.call(ir.InlineAsm(function_type, text, constraints, side_effect=not op.pure), flat)
        if not op.pure:
            call.attributes.add("convergent")
        if not outs:
            return context.get_dummy_value()
        total = len(flat_outs)
        registers = [call] if total == 1 else [builder.extract_value(call, j) for j in range(total)]
        values = []
        for slot in outs:
            mine, registers = registers[: slot.registers], registers[slot.registers :]
            values.append(_aggregate(builder, slot, mine))
        return values[0] if len(outs) == 1 else context.make_tuple(builder, signature.return_type, values)

    return lower


def _aggregate(builder: Any, slot: Slot, registers: list[Any]) -> Any:
    from llvmlite import ir

    if not slot.count:
        return registers[0]
    whole = ir.Constant(ir.ArrayType(_llvm_type(slot.type), slot.count), ir.Undefined)
    for j, register in enumerate(registers):
        whole = builder.insert_value(whole, register, j)
    return whole


def _special(op: Op) -> Any:
    """Operations without an instruction: the shared memory symbol, and constant register tiles."""
    from llvmlite import ir

    if op.text:
        return None

    def shared_base(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        symbol = builder.module.globals.get(SHARED_SYMBOL)
        if symbol is None:
            symbol = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), SHARED_SYMBOL, addrspace=3)
            symbol.linkage, symbol.align = "external", 1024
        return builder.ptrtoint(symbol, ir.IntType(32))

    def constant_zeros(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.ArrayType(ir.FloatType(), op.outs[0].count), None)

    return shared_base if op.name == "shared_base" else constant_zeros
