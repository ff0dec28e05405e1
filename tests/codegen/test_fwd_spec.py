"""Forward specs: text, limits, shared memory, the barrier table, and structs that C and Python read alike."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import pytest

from maskc.codegen.forward import forward_source, forward_spec, schedule_source
from maskc.codegen.roles import check_barriers, forward_barriers, forward_named
from maskc.codegen.spec import HEAD_DIMS, SHARED_LIMIT, KernelSpec, MaskForm, WgmmaShape
from maskc.runtime import hopper, mask_tables

EVERYTHING = MaskForm(lts=True, lte=True, uts=True, ute=True, diag=True, causal=True, blocks=True)
FORMS = (MaskForm(), MaskForm(causal=True), MaskForm(causal=True, lts=True), EVERYTHING)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_shared_memory_and_barriers(form: MaskForm, head_dim: int) -> None:
    spec = forward_spec(form, head_dim, "bf16")
    assert spec.shared_bytes <= SHARED_LIMIT
    ends = [0, *(r.offset + r.size for r in spec.regions)]
    assert all(r.offset >= end for r, end in zip(spec.regions, ends, strict=False)), "regions overlap"
    assert all(spec.smem[name].offset % 1024 == 0 and spec.smem[name].stride % 1024 == 0 for name in "qkv")
    assert spec.pack_bytes % 16 == 0, "bulk copies move multiples of 16 bytes"
    room = spec.smem["barriers"].slots
    assert check_barriers(forward_barriers(spec), forward_named(spec), room) == []


def test_barrier_check_sees_faults() -> None:
    spec = KernelSpec(128)
    table, named = forward_barriers(spec), forward_named(spec)
    room = spec.smem["barriers"].slots
    assert check_barriers(table, named, room + 1)
    assert check_barriers(table[:-1], named, room - 2), "a full barrier without its empty one"
    assert check_barriers((replace(table[0], index=1), *table[1:]), named, room)
    assert check_barriers(table, (*named, replace(named[0], name="again")), room)


def test_barrier_rows_are_the_code() -> None:
    spec = KernelSpec(128, form=MaskForm(causal=True, lts=True))
    source = forward_source(spec)
    text = source.text
    for b in forward_barriers(spec):
        assert f"i < {b.slots}; ++i) mbarrier_init(sh.{b.name}(i), {b.arrivals});" in text
        assert f"{b.name}[{b.slots}] | {b.arrivals} |" in text
        shared = dict(source.headers)["fwd/shared.cuh"]
        assert f"{b.name}(int slot) const {{ return base + {spec.smem['barriers'].offset + 8 * b.index} + slot * 8; }}" in shared


def test_text_form_and_hash() -> None:
    a, b = KernelSpec(128), KernelSpec(128, form=MaskForm(lts=True))
    assert a == KernelSpec(128)
    assert len({a, b, KernelSpec(128)}) == 2
    lines = a.text().splitlines()
    assert all(" = " in line for line in lines)
    assert "head_dim = 128" in lines
    assert f"shared = {a.shared_bytes}" in lines
    assert a.as_json()["form"] == "full"
    assert str(b.form) == "lts"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"head_dim": 96}, "head_dim"),
        ({"block_q": 64}, "64 rows a warp group"),
        ({"block_kv": 100}, "multiple of 16"),
        ({"k_slots": 4}, "bytes of shared memory"),
        ({"queue_runs": 20}, "queue slot"),
        ({"queue": "schedule"}, "closed form"),
    ],
)
def test_rules_of_a_spec(change: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(KernelSpec(128), **change)


def test_where_the_next_item_is_taken_late() -> None:
    packed, causal = (
        KernelSpec(128, form=MaskForm(lts=True), block_kv=64),
        KernelSpec(128, form=MaskForm(lts=True, causal=True), block_kv=64),
    )
    assert [(s.late, s.first_at_once) for s in (packed, causal)] == [(True, True), (True, False)]
    for other in (KernelSpec(128), KernelSpec(128, form=MaskForm(causal=True)), replace(packed, gated=True)):
        assert (other.late, other.first_at_once, "progress" in other.smem) == (False, False, False)


def test_register_split_fits_the_entry_registers() -> None:
    for groups in (1, 2, 3):
        spec = KernelSpec(64, block_q=64 * groups, warp_groups=groups)
        at_entry = min(65536 // spec.threads // 8 * 8, 255)
        assert spec.producer_registers + groups * spec.consumer_registers <= (at_entry + 1) * (groups + 1)


def test_wgmma_names_differ() -> None:
    shapes = [WgmmaShape(n, a, m, k) for n in (64, 128) for a in (False, True) for m in (False, True) for k in (False, True)]
    assert len({s.name for s in shapes}) == len(shapes)


_C_TYPES = {
    "int": ctypes.c_int32, "i64": ctypes.c_int64, "float": ctypes.c_float, "MaskTables": mask_tables.MaskTables,
}  # fmt: skip


def struct_fields(text: str, name: str) -> list[tuple[str, object]]:
    """(field, ctypes type) of a C struct of the templates: pointers, arrays, several names a line."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert body
    out: list[tuple[str, object]] = []
    for line in body[1].splitlines():
        code = line.split("//")[0].strip().rstrip(";")
        if not code:
            continue
        kind, names = re.fullmatch(r"(?:const )?(\w+\*?) (.*)", code).groups()  # type: ignore[union-attr]
        for item in names.strip().split(", "):
            field, array = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", item).groups()  # type: ignore[union-attr]
            one = ctypes.c_void_p if kind.endswith("*") else _C_TYPES[kind]
            out.append((field, one * int(array) if array else one))
    return out


def test_structs_are_the_same_in_c_and_python() -> None:
    spec = KernelSpec(128, form=EVERYTHING)
    headers = dict(forward_source(spec).headers)
    schedule = schedule_source(spec)
    for text, name, structure in (
        (headers["device/kv_index.cuh"], "MaskTables", mask_tables.MaskTables),
        (headers["fwd/shared.cuh"], "Params", hopper._ForwardParams),
        (schedule.text, "Params", mask_tables.ScheduleParams),
    ):
        wanted = [(f, ctypes.sizeof(t), t) for f, t in struct_fields(text, name)]  # type: ignore[arg-type]
        got = [(f[0], ctypes.sizeof(f[1]), f[1]) for f in structure._fields_]
        assert [(f, s) for f, s, _ in got] == [(f, s) for f, s, _ in wanted], name
