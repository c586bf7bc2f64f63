"""PTX operations as data: assembly text, twins against dsuf.formats, and whether every chip's assembler takes them."""

from __future__ import annotations

import ast
import importlib

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels.build import build
from dsuf.kernels.lang import Kernel, uint32
from dsuf.kernels.ptx import convert
from dsuf.kernels.ptx.memory import stg_f32, stg_s64, stg_u32
from dsuf.kernels.ptx.op import ALL_CHIPS, Op, assemble, ptx, word

GROUPS = ("memory", "convert", "mma", "sync", "copy", "wgmma", "tcgen05")


def operations(group: str) -> dict[str, Op]:
    module = importlib.import_module(f"dsuf.kernels.ptx.{group}")
    found: dict[str, Op] = {}
    for value in vars(module).values():
        for op in value if isinstance(value, tuple) else (value,):
            if isinstance(op, Op) and op.twin.__module__ == module.__name__:
                found[op.name] = op
    if group == "wgmma":
        made = [module.wgmma(n, kind) for n in (64, 128, 256) for kind in ("bf16", "e4m3")]
        found |= {op.name: op for op in [*made, module.wgmma_wait(64), module.zeros(64)]}
    if group == "mma":
        found |= {op.name: op for op in (module.mma_bf16_tiles(4), module.mma_bf16_tiles(8))}
    return found


def test_assembly_numbers_outputs_then_inputs_and_ties():
    op = operations("mma")["mma_bf16"]
    text, constraints = assemble(op)
    assert text.endswith("{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};")
    assert constraints == "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"

    @ptx("f32*2 = u32, +f32*2", "op <d>, <0>, <1.1>;")
    def tied(a, acc):
        return acc

    assert assemble(tied) == ("op {$0,$1}, $2, $1;", "=f,=f,r,0,1,~{memory}")


def test_a_text_that_names_no_operand_is_refused():
    with pytest.raises(ValueError, match="not an operand"):
        ptx("u32 = u32", "mov <d>, <1>;")(lambda a: a)


def one_kernel(ops: list[Op]) -> Kernel:
    """A kernel that uses every operation of a list once and stores what it returns."""
    names: dict = {"stg_u32": stg_u32, "stg_f32": stg_f32, "stg_s64": stg_s64, "uint32": uint32}
    source = {"u16": "u", "u32": "u", "s32": "n", "u64": "a", "s64": "a", "f32": "f"}
    lines = []
    for op in ops:
        names[op.name] = op
        args = [f"({(source[s.type] + ', ') * s.count})" if s.count else source[s.type] for s in op.ins]
        call = f"{op.name}({', '.join(args)})"
        if not op.outs:
            lines.append(call)
            continue
        lines.append(f"r = {call}")
        slot = op.outs[0]
        store = "stg_f32(a, {})" if slot.type == "f32" else "stg_s64(a, {})" if "64" in slot.type else "stg_u32(a, {})"
        lines += [store.format(f"r[{i}]" if slot.count else "r") for i in range(slot.registers)]
    body = [
        f"    {line}".replace("r[", f"r{i}[").replace("(a, r)", f"(a, r{i})").replace("    r = ", f"    r{i} = ")
        for i, line in _numbered(lines)
    ]
    tree = ast.parse("def every(a, u, n, f):\n" + "\n".join(body)).body[0]
    kinds = (("a", "s64"), ("u", "u32"), ("n", "s32"), ("f", "f32"))
    return Kernel("every", tree, names, kinds, 128, (1, 1), 0, 1, 1)


def _numbered(lines: list[str]) -> list[tuple[int, str]]:
    """Each `r = ...` starts a new variable, so that no name changes its type."""
    out, number = [], 0
    for line in lines:
        number += line.startswith("r = ")
        out.append((number, line))
    return out


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("chip", ["sm_90a", "sm_103a"])
def test_every_operation_assembles_where_it_says(group: str, chip: str):
    ops = [op for op in operations(group).values() if chip in op.chips]
    if not ops:
        assert chip not in ALL_CHIPS or group in ("wgmma", "tcgen05")
        return
    for first in range(0, len(ops), 40):
        kernel = one_kernel(ops[first : first + 40])
        # registers may spill here: the point is that the assembler accepts the text
        from dsuf.kernels.build import _compile

        cubin, _ = _compile(kernel, chip)
        assert cubin[:4] == b"\x7fELF"


def test_a_kernel_is_refused_on_a_chip_that_lacks_an_operation(tmp_path):
    from dsuf.errors import ConfigError

    with pytest.raises(ConfigError, match="fp4x8_f16_cvt"):
        build(one_kernel([convert.fp4x8_f16_cvt]), "sm_90a", tmp_path)


def test_e4m3_twins_agree_with_formats():
    x = np.concatenate([np.linspace(-460, 460, 4001), np.geomspace(1e-4, 1, 999)]).astype(np.float32)
    expected = formats.e4m3_encode(np.clip(x, -448, 448))
    low = convert.e4m3x2.twin(np.float32(0), x) & 255
    assert (low == expected).all()
    assert np.array_equal(convert.E4M3[:127], formats.e4m3_decode(np.arange(127, dtype=np.uint8)))
    pair = convert.e4m3x4_f16.twin(word(np.full(256, 0, np.uint32)) + np.arange(256) * 0x01010101)
    finite = np.arange(256) & 127 != 127
    every = formats.e4m3_decode(np.arange(256, dtype=np.uint8))
    assert np.array_equal(convert.f16_low.twin(pair[0])[finite], every[finite])


def test_e2m1_twin_agrees_with_formats():
    x = np.concatenate([np.linspace(-6, 6, 4801), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]]).astype(np.float32)
    assert np.array_equal(convert.e2m1_code.twin(x) & 7, formats.e2m1_encode(x) & 7)
    assert np.array_equal(convert.E2M1[convert.e2m1_code.twin(x)], formats.e2m1_decode(formats.e2m1_encode(x)))


def test_e4m3_to_bf16_is_exact():
    codes = np.array([c for c in range(256) if c & 127 != 127], np.int64)
    low, _ = convert.e4m3x4_bf16.twin(codes)
    assert np.array_equal(convert.bf16_low.twin(low), formats.e4m3_decode(codes.astype(np.uint8)))


def test_scale_bytes_become_powers_of_two():
    word_ = int.from_bytes(bytes([127, 120, 130, 1]), "little")
    assert [convert.ue8m0[i].twin(word_).item() for i in range(4)] == [1, 2.0**-7, 8, 2.0**-126]
