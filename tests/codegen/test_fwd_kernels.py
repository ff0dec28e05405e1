"""Forward variants compiled for sm_90a: what ptxas says and what stands in the machine code. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from maskc.codegen.disasm import disassemble, find_nvdisasm, opcodes
from maskc.codegen.forward import forward_source, forward_spec, schedule_source
from maskc.codegen.nvrtc import Cubin, compile_cubin
from maskc.codegen.spec import KernelSpec, MaskForm
from tests.codegen.sass_loops import Loop, opcode, tensor_loops

pytest.importorskip("cuda.bindings.nvrtc")
if find_nvdisasm() is None:
    pytest.skip("nvdisasm is not installed", allow_module_level=True)

FULL, TRIANGLE = MaskForm(), MaskForm(causal=True)
DOCUMENT, INTERVAL = MaskForm(causal=True, lts=True), MaskForm(causal=True, lts=True, lte=True)
TWO_SIDED, FOUR = MaskForm(lts=True, ute=True), MaskForm(lts=True, lte=True, uts=True, ute=True)
EVERYTHING = replace(FOUR, diag=True, causal=True, blocks=True)
UPPER, LOCAL = MaskForm(ute=True), MaskForm(lts=True, ute=True, diag=True)


def default(form: MaskForm, head_dim: int, dtype: str = "bf16", out: str = "input") -> KernelSpec:
    return forward_spec(form, head_dim, dtype, out)  # type: ignore[arg-type]


# name -> (spec, bytes of spills that are known to lie outside the steady loops)
VARIANTS: dict[str, tuple[KernelSpec, int]] = {
    "full-128": (default(FULL, 128), 0),
    "causal-128": (default(TRIANGLE, 128), 0),
    "document-128": (default(DOCUMENT, 128), 0),
    "interval-128-f16": (default(INTERVAL, 128, "f16"), 0),
    "two-sided-128": (default(TWO_SIDED, 128), 0),
    "four-128": (default(FOUR, 128), 0),
    "everything-128": (default(EVERYTHING, 128), 0),
    "everything-128-f32": (default(EVERYTHING, 128, out="f32"), 0),
    "upper-128": (default(UPPER, 128), 0),
    "local-128-f16-f32": (default(LOCAL, 128, "f16", "f32"), 0),
    "document-128-schedule": (replace(default(DOCUMENT, 128), queue="schedule"), 0),
    "four-128-record": (replace(default(FOUR, 128), record_queue=True), 0),
    "document-128-trace": (replace(default(DOCUMENT, 128), trace=4096), 0),
    "document-128-static": (replace(default(DOCUMENT, 128), scheduler="static"), 0),
    "four-128-giants": (replace(default(FOUR, 128), scheduler="giants"), 0),
    "document-128-unchained": (replace(default(DOCUMENT, 128), chain=False), 0),
    "document-128-one-tag": (replace(default(DOCUMENT, 128), row_groups=1), 0),
    "four-128-f32": (default(FOUR, 128, out="f32"), 0),
    "causal-64": (default(TRIANGLE, 64), 0),
    "full-64": (default(FULL, 64), 0),
    "document-64-f16": (default(DOCUMENT, 64, "f16"), 0),
    "everything-64": (default(EVERYTHING, 64), 0),
    "full-256-f16": (default(FULL, 256, "f16"), 0),
    "document-256": (default(DOCUMENT, 256), 0),
    "everything-256": (default(EVERYTHING, 256), 40),
}
UNMASKED_BUDGET = {64: 375, 128: 365, 256: 300}  # usual instructions of a warp per tile of 128 keys, 64 at head dim 256
QUICK = ("document-128",)  # in the default run; the others under `make kernels`
EVERY = [pytest.param(n, id=n, marks=() if n in QUICK else pytest.mark.kernels) for n in VARIANTS]


@cache
def built(name: str) -> tuple[Cubin, str]:
    cubin = compile_cubin(forward_source(VARIANTS[name][0]))
    return cubin, disassemble(cubin.image)


def steady(name: str) -> list[Loop]:
    """The loops over UNMASKED and over PARTIAL tiles; the loops over work items around them are not steady."""
    return [loop for loop in tensor_loops(built(name)[1]) if not loop.count("UTMASTG", "STSM", "EXIT")][:2]


@pytest.mark.parametrize("name", EVERY)
def test_compiles_clean(name: str) -> None:
    cubin, sass = built(name)
    spec, budget = VARIANTS[name]
    assert cubin.notes == ()
    assert cubin.spills <= budget
    assert cubin.shared == 0, "all shared memory is dynamic"
    found = opcodes(sass)
    assert found["HGMMA"] > 0
    assert found["UTMALDG"] > 0
    assert found["USETMAXREG"] == 2
    assert found["UTMASTG"] == (spec.head_dim // 64 if spec.out_dtype == "input" else 0)
    assert (found["UBLKCP"] > 0) == spec.packed
    if budget == 0:
        assert found["LDL"] == found["STL"] == 0


@pytest.mark.parametrize("name", EVERY)
def test_steady_loops(name: str) -> None:
    spec, budget = VARIANTS[name]
    loops = steady(name)
    assert len(loops) == 2
    for loop in loops:
        assert loop.count("HGMMA") == spec.head_dim // 16 + spec.block_kv // 16
        assert loop.count("WARPGROUP") == 4, "two arrivals, two waits: nothing is serialised"
        assert loop.count("LDL", "STL") <= (2 if budget else 0)
        assert loop.count("R2UR") == 0 or spec.head_dim == 256
        assert loop.count("MUFU") == spec.block_kv // 2 + 2
    unmasked, partial = loops
    if spec.trace:
        return  # its marks compare, select and store
    assert unmasked.count("LDS", "LDG", "LD") == 0, "an UNMASKED tile reads no bounds"
    usual = [opcode(text) for text in unmasked.usual()]
    assert usual.count("ISETP") <= 4, "and compares no element with them, only ring positions and the tiles left"
    assert len(usual) <= UNMASKED_BUDGET[spec.head_dim]
    assert usual.count("FSEL") + usual.count("SEL") <= 2, "nothing is masked"
    assert "FMNMX" not in usual, "and no maximum is taken"
    assert partial.count("FSEL", "SEL") >= spec.block_kv // 2


@pytest.mark.parametrize("name", EVERY)
def test_schedule_compiles(name: str) -> None:
    spec, _ = VARIANTS[name]
    if spec.packed:
        cubin = compile_cubin(schedule_source(spec))
        assert {k.name for k in cubin.kernels} == {"kv_bounds", "row_runs", "row_order"}
        assert cubin.spills == 0
