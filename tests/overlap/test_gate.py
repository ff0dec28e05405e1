"""The gated forward variants: text, structs, registers and machine code. Needs no GPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from maskc.codegen.disasm import disassemble, find_nvdisasm, opcodes
from maskc.codegen.exchange import exchange_source
from maskc.codegen.forward import forward_source, forward_spec
from maskc.codegen.nvrtc import Cubin, compile_cubin
from maskc.codegen.render import CudaSource
from maskc.codegen.shipped import shipped, shipped_gated
from maskc.codegen.spec import GATE_SLOTS, KernelSpec, MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import exchange, hopper, hopper_bwd
from maskc.runtime.plan import CHUNK_LIMIT
from tests.codegen.sass_loops import loops, tensor_loops

FULL, TWO_SIDED = MaskForm(), MaskForm(lts=True, ute=True)
EVERYTHING = MaskForm(lts=True, lte=True, uts=True, ute=True, diag=True, blocks=True)
VARIANTS = {
    f"{name}-{dim}": replace(forward_spec(form, dim, "bf16"), gated=True)
    for name, form in (("full", FULL), ("two-sided", TWO_SIDED), ("everything", EVERYTHING))
    for dim in (64, 128, 256)
}
KNOWN_SPILLS = {"everything-256": 40}
"""Bytes; outside the steady loops, where the variant without a gate spills 16."""
QUICK = ("two-sided-128",)
EVERY = [pytest.param(n, id=n, marks=() if n in QUICK else pytest.mark.kernels) for n in VARIANTS]


def whole_text(spec: KernelSpec) -> str:
    source = forward_source(spec)
    return source.text + "".join(text for _, text in source.headers)


@pytest.mark.parametrize("name", VARIANTS)
def test_without_the_flag_nothing_of_the_gate_is_rendered(name: str) -> None:
    plain, gated = (whole_text(replace(VARIANTS[name], gated=g)) for g in (False, True))
    for word in ("gate", "arrival.cuh"):
        assert word not in plain.lower().replace("propagate", "")
        assert word in gated
    assert "-gated" in str(VARIANTS[name])


def test_gated_variants_have_a_digest_of_their_own() -> None:
    """So that a record of attention on one GPU stands when only they change."""
    assert not any("gated" in name for name, _, _ in shipped())
    assert all("gated" in name or name == "exchange" for name, _, _ in shipped_gated())


def test_a_plan_never_has_more_chunks_than_the_gate_tells_apart() -> None:
    assert GATE_SLOTS >= CHUNK_LIMIT
    assert GATE_SLOTS <= 1 << 16, "a slot is half of a table word"
    for spec in VARIANTS.values():
        region = spec.smem["gate"]
        assert region.size >= 16 + GATE_SLOTS // 8
        assert spec.shared_bytes >= region.offset + region.size


def test_structs_are_the_same_in_c_and_python() -> None:
    text = dict(forward_source(VARIANTS["everything-128"]).headers)["fwd/shared.cuh"]
    body = re.search(r"struct GateTables {(.*?)\n};", text, re.DOTALL)
    assert body
    kinds = {"u32": ctypes.c_uint32, "int": ctypes.c_int32}
    wanted = []
    for line in body[1].splitlines():
        if found := re.match(r"\s*(?:const )?(\w+\*?) (\w+);", line):
            wanted.append((found[2], ctypes.c_void_p if found[1].endswith("*") else kinds[found[1]]))
    assert list(hopper.GateTables._fields_) == wanted
    params = re.search(r"struct Params {(.*?)\n};", text, re.DOTALL)
    assert params
    assert params[1].rstrip().endswith("GateTables gate;"), "the gate comes after everything that other variants have"
    assert hopper._GatedParams.gate.offset == ctypes.sizeof(hopper._ForwardParams)


# ---------------------------------------------------------------- machine code


@cache
def built(spec: KernelSpec) -> tuple[Cubin, str]:
    pytest.importorskip("cuda.bindings.nvrtc")
    if find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    cubin = compile_cubin(forward_source(spec))
    return cubin, disassemble(cubin.image)


@pytest.mark.parametrize("name", EVERY)
def test_compiles_clean(name: str) -> None:
    cubin, sass = built(VARIANTS[name])
    assert cubin.notes == ()
    assert cubin.spills <= KNOWN_SPILLS.get(name, 0)
    found = opcodes(sass)
    if name not in KNOWN_SPILLS:
        assert found["LDL"] == found["STL"] == 0


@pytest.mark.parametrize("name", EVERY)
def test_steady_loops_are_those_of_the_kernel_without_a_gate(name: str) -> None:
    """Instruction for instruction, but for registers and addresses."""

    def steady(spec: KernelSpec) -> list[list[str]]:
        found = [loop for loop in tensor_loops(built(spec)[1]) if not loop.count("UTMASTG", "STSM", "EXIT")][:2]
        return [sorted(re.sub(r"\s.*", "", i) for i in loop.body) for loop in found]

    gated, plain = steady(VARIANTS[name]), steady(replace(VARIANTS[name], gated=False))
    assert len(gated) == 2
    for a, b in zip(gated, plain, strict=True):
        tensor = [[i for i in body if i.startswith(("HGMMA", "WARPGROUP", "MUFU", "LDS", "FSEL", "LDG"))] for body in (a, b)]
        assert tensor[0] == tensor[1]
        assert abs(len(a) - len(b)) <= 16


def test_the_wait_acquires_fences_and_gives_up() -> None:
    """The loop that polls a flag reads it with system scope, reads the stop word, and asks the clock; the fence of the
    asynchronous copies stands between the flag and the copy."""
    _, sass = built(VARIANTS["two-sided-128"])
    polling = [loop for loop in loops(sass) if any("STRONG.SYS" in i for i in loop.body)]
    text = "\n".join(polling[0].body)
    assert len(re.findall(r"LDG\.E\.STRONG\.SYS", text)) == 2
    assert "NANOSLEEP" in text
    assert "GLOBALTIMER" in text
    order = re.findall(r"LDG\.E\.STRONG\.SYS|FENCE\.VIEW\.ASYNC\.G|UTMALDG", sass)
    looks = order.index("FENCE.VIEW.ASYNC.G")
    assert order[:looks] == ["LDG.E.STRONG.SYS"] * looks
    assert looks in (2, 3), "the flag, the stop word, and perhaps the flag again"
    assert order[looks + 1] == "UTMALDG"


# ---------------------------------------------------------------- backward, and the kernels around both

BACKWARD = {
    f"{name}-{dim}{'-det' if d else ''}": replace(select_backward(form, dim, "bf16", deterministic=d), gated=True)
    for name, form in (("full", FULL), ("two-sided", TWO_SIDED), ("everything", EVERYTHING))
    for dim in (64, 128, 256)
    for d in (False, True)
}
EVERY_BACKWARD = [pytest.param(n, id=n, marks=() if n in QUICK else pytest.mark.kernels) for n in BACKWARD]


def text_of(source: CudaSource) -> str:
    return source.text + "".join(text for _, text in source.headers)


@pytest.mark.parametrize("name", BACKWARD)
def test_without_the_flag_nothing_of_the_backward_gate_is_rendered(name: str) -> None:
    plain, gated = (text_of(replace(BACKWARD[name], gated=g).source()) for g in (False, True))
    for word in ("gate", "system.cuh", "arrival.cuh", "tile_finished"):
        assert word not in plain.lower()
        assert word in gated
    assert "-gated" in str(BACKWARD[name])


@pytest.mark.parametrize("name", EVERY_BACKWARD)
def test_backward_compiles_clean(name: str) -> None:
    """No spills in the steady loops; their products are those of the kernel without a gate."""
    spec = BACKWARD[name]
    cubins = [compile_cubin(replace(spec, gated=g).source()) for g in (False, True)]
    assert cubins[1].notes == ()
    if find_nvdisasm() is None:
        return
    plain, gated = (disassemble(c.image) for c in cubins)
    steady = tensor_loops(gated)[:2]
    assert not any(loop.count("LDL") + loop.count("STL") for loop in steady)
    for op in ("HGMMA", "UTMALDG", "MUFU.EX2"):
        assert plain.count(op) == gated.count(op), op


def test_gradients_are_reported_after_they_are_stored() -> None:
    """A fence, the count, and a release of system scope, in this order; the wait stands before the first load."""
    if find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    sass = disassemble(compile_cubin(BACKWARD["two-sided-128"].source()).image)
    ops = (r"LDG\.E\.STRONG\.SYS", r"FENCE\.VIEW\.ASYNC\.G", "UTMALDG", r"ATOMG\S*ADD", r"MEMBAR\S*", r"STG?\.E\.STRONG\.SYS")
    order = re.findall("|".join(ops), sass)
    assert order.index("FENCE.VIEW.ASYNC.G") < order.index("UTMALDG")
    count = next(i for i, op in enumerate(order) if op.startswith("ATOMG"))
    assert any("MEMBAR" in op for op in order[:count])
    assert any(op.endswith("STRONG.SYS") and op.startswith("ST") for op in order[count:])


def fields_of(text: str, name: str) -> list[tuple[str, object]]:
    """(field, ctype) of a C struct; arrays of pointers or numbers of a fixed length."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert body
    kinds = {"u32": ctypes.c_uint32, "int": ctypes.c_int32, "i64": ctypes.c_int64, "float": ctypes.c_float}
    out: list[tuple[str, object]] = []
    for line in body[1].splitlines():
        found = re.match(r"\s*(?:const )?([\w ]+?)((?:\*| const\*| const\* const\*)*) ([\w, \[\]]+);", line)
        if not found:
            continue
        for field in found[3].split(", "):
            plain, _, length = field.partition("[")
            kind: Any = ctypes.c_void_p if "*" in found[2] else kinds[found[1].strip()]
            out.append((plain, kind * int(length[:-1]) if length else kind))
    return out


def same_fields(text: str, name: str, struct: type[ctypes.Structure]) -> None:
    wanted = fields_of(text, name)
    got = [(n, k) for n, k, *_ in struct._fields_]
    assert [n for n, _ in got] == [n for n, _ in wanted]
    assert [ctypes.sizeof(k) for _, k in got] == [ctypes.sizeof(k) for _, k in wanted]  # type: ignore[arg-type]


def test_structs_of_the_other_kernels_are_the_same_in_c_and_python() -> None:
    backward = dict(BACKWARD["two-sided-128"].source().headers)["bwd/shared.cuh"]
    same_fields(backward, "GateTables", hopper_bwd.GateTables)
    text = exchange_source().text
    for name in ("SumParams", "SpoilParams", "CopyParams"):
        same_fields(text, name, getattr(exchange, f"_{name}"))
    for name, row in (("Piece", exchange._PIECE), ("Part", exchange._PART)):
        wanted = fields_of(text, name)
        assert sum(ctypes.sizeof(k) for _, k in wanted) == row.itemsize  # type: ignore[arg-type]


def test_exchange_kernels_compile_clean() -> None:
    cubin = compile_cubin(exchange_source())
    assert cubin.notes == ()
    assert cubin.spills == 0
