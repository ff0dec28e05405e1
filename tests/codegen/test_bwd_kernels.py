"""Backward variants compiled for sm_90a: what ptxas says and what stands in the machine code. Needs no GPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import cache

import pytest

from maskc.codegen.disasm import disassemble, find_nvdisasm, opcodes
from maskc.codegen.nvrtc import Cubin, compile_cubin
from maskc.codegen.roles import check_barriers
from maskc.codegen.spec import SHARED_LIMIT, MaskForm
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from maskc.runtime import hopper_bwd
from tests.codegen.sass_loops import Loop, tensor_loops

pytest.importorskip("cuda.bindings.nvrtc")
if find_nvdisasm() is None:
    pytest.skip("nvdisasm is not installed", allow_module_level=True)

FULL, TRIANGLE = MaskForm(), MaskForm(causal=True)
DOCUMENT, INTERVAL = MaskForm(causal=True, lts=True), MaskForm(causal=True, lts=True, lte=True)
TWO_SIDED, FOUR = MaskForm(lts=True, ute=True), MaskForm(lts=True, lte=True, uts=True, ute=True)
EVERYTHING = replace(FOUR, diag=True, causal=True, blocks=True)

# name -> (spec, bytes of spills that are known to lie outside the steady loops)
VARIANTS: dict[str, tuple[BackwardSpec, int]] = {
    "full-128": (select_backward(FULL, 128, "bf16"), 0),
    "causal-128": (select_backward(TRIANGLE, 128, "bf16"), 16),
    "document-128": (select_backward(DOCUMENT, 128, "bf16"), 16),
    "document-128-det": (select_backward(DOCUMENT, 128, "bf16", deterministic=True), 24),
    "interval-128-f16": (select_backward(INTERVAL, 128, "f16"), 16),
    "two-sided-128": (select_backward(TWO_SIDED, 128, "bf16"), 16),
    "four-128": (select_backward(FOUR, 128, "bf16"), 12),
    "upper-128-det": (select_backward(MaskForm(ute=True, diag=True), 128, "bf16", deterministic=True), 16),
    "everything-128": (select_backward(EVERYTHING, 128, "bf16"), 76),
    "blocks-128-det": (select_backward(replace(DOCUMENT, blocks=True), 128, "bf16", deterministic=True), 24),
    "full-64": (select_backward(FULL, 64, "bf16"), 0),
    "document-64-f16": (select_backward(DOCUMENT, 64, "f16"), 0),
    "four-64-det": (select_backward(FOUR, 64, "bf16", deterministic=True), 16),
    "causal-256": (select_backward(TRIANGLE, 256, "bf16"), 0),
    "four-256-f16-det": (select_backward(FOUR, 256, "f16", deterministic=True), 0),
    "blocks-256": (select_backward(MaskForm(causal=True, lts=True, blocks=True), 256, "bf16"), 0),
}
UNMASKED_BUDGET = {64: 530, 128: 350, 256: 415}  # instructions of a warp per step
QUICK = ("document-128",)  # in the default run; the others under `make kernels`
EVERY = [pytest.param(n, id=n, marks=() if n in QUICK else pytest.mark.kernels) for n in VARIANTS]


@cache
def built(name: str) -> tuple[Cubin, str]:
    cubin = compile_cubin(VARIANTS[name][0].source())
    return cubin, disassemble(cubin.image)


def steady(name: str) -> tuple[Loop, Loop, list[Loop]]:
    """The loops over UNMASKED and over PARTIAL Q blocks, and perhaps over those in which a warp group rests."""
    first, second, *more = tensor_loops(built(name)[1])[: 2 + VARIANTS[name][0].halves]
    return (first, second, more) if first.count("FSEL") < second.count("FSEL") else (second, first, more)


@pytest.mark.parametrize("name", EVERY)
def test_compiles_clean(name: str) -> None:
    cubin, sass = built(name)
    spec, budget = VARIANTS[name]
    assert cubin.notes == ()
    assert cubin.spills <= budget
    assert cubin.kernel("attn_bwd").shared == 0, "all its shared memory is dynamic"
    found = opcodes(sass)
    assert found["HGMMA"] > 0
    assert found["UTMALDG"] > 0
    assert found["USETMAXREG"] == 2
    assert found["UTMASTG"] == 2 * (spec.block_kv // 64) * (spec.head_dim // 64), "boxes of dK and dV"
    assert (found["UBLKRED"] > 0) == spec.dq_reducer
    if budget == 0:
        assert found["LDL"] == found["STL"] == 0


@pytest.mark.parametrize("name", EVERY)
def test_steady_loops(name: str) -> None:
    """Five products a step, nothing serialised, no local memory; an UNMASKED step knows nothing of the mask."""
    spec, _ = VARIANTS[name]
    unmasked, partial, half = steady(name)
    scores, grads, dq = spec.head_dim // 16, spec.block_q // 16, spec.block_kv // 16
    pairs = spec.score_cols // 8  # loads of lse2, and of dpsum
    for loop in (unmasked, partial, *half):
        assert loop.count("HGMMA") == 2 * scores + 2 * grads + dq
        assert loop.count("WARPGROUP") <= (12 if loop in half else 10), "arrivals and waits: nothing is serialised"
        assert loop.count("LDL", "STL") == 0
        assert loop.count("MUFU") == spec.score_cols // 2, "exp2"
        assert loop.count("LDS") == 2 * pairs, "bounds are in registers"
        assert loop.count("LDG", "LD") == 0, "a block table is read between runs"
        assert loop.count("R2UR") <= (3 if spec.wide else spec.form.blocks)
    assert unmasked.count("FSEL") == 0
    assert unmasked.count("ISETP") <= 8, "ring positions and the blocks left, no element"
    assert len(unmasked.body) <= UNMASKED_BUDGET[spec.head_dim]
    assert partial.count("FSEL") == spec.score_cols // 2


@pytest.mark.parametrize("name", list(VARIANTS))
def test_barriers_and_shared_memory(name: str) -> None:
    spec, _ = VARIANTS[name]
    room = next(r for r in spec.regions if r.name == "barriers").slots
    assert check_barriers(spec.barriers, spec.named, room) == []
    assert spec.shared_bytes <= SHARED_LIMIT
    assert 128 * (spec.producer_registers + 2 * spec.consumer_registers) <= 384 * 168, "what the CTA starts with"
    text = spec.source().text
    for barrier in spec.barriers:
        arrivals = re.search(rf"mbarrier_init\(smem \+ {barrier.name.upper()} \+ 8 \* i, (\d+)\)", text)
        assert arrivals is not None
        assert int(arrivals[1]) == barrier.arrivals
        assert f"//   {barrier.name}[{barrier.slots}] ({barrier.arrivals})" in text


_C_TYPES = {ctypes.c_int: "int", ctypes.c_int64: "i64", ctypes.c_float: "float"}


@pytest.mark.parametrize(
    ("file", "structure"),
    [("bwd/pre.cuh", hopper_bwd._Pre), ("bwd/shared.cuh", hopper_bwd._Main), ("bwd/post.cuh", hopper_bwd._Post)],
)
def test_parameters_agree_with_the_source(file: str, structure: type[ctypes.Structure]) -> None:
    source = select_backward(EVERYTHING, 128, "bf16").source()
    text = dict(source.headers)[file]
    body = re.search(r"struct Params \{\n(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    found = []
    for line in body[1].splitlines():
        declaration = line.partition("//")[0].strip().rstrip(";")
        if not declaration:
            continue
        kind, _, names = declaration.replace("const ", "").partition(" ")
        found += [(name.strip(), "pointer" if kind.endswith("*") else kind) for name in names.split(",")]
    assert found == [(f[0], _C_TYPES.get(f[1], "pointer")) for f in structure._fields_]


def test_rules_of_a_spec() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory"):
        replace(select_backward(FULL, 256, "bf16"), slots=3)
    with pytest.raises(ValueError, match="head_dim is one of"):
        select_backward(FULL, 96, "bf16")
    assert "shared.ds = " in select_backward(FULL, 128, "bf16").text()
    assert select_backward(DOCUMENT, 64, "f16").as_json()["form"] == "causal+lts"
