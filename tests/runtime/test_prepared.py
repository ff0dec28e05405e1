"""Calls whose launches were made before: what the kernels are given is what a first call gives them, address by address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import MaskcError
from maskc.runtime import driver_api, hopper, hopper_bwd, ops, prepared, ready
from maskc.runtime.prepared import MOST_LAYOUTS, Prepared

ROWS, DIM = 300, 128
WORKSPACE = ("lse2", "dpsum", "dead_rows", "turns", "ticket", "zeroed", "tiles", "order")


@dataclass
class Driver:
    """Launches as a driver would see them."""

    seen: list[tuple[object, ...]] = field(default_factory=list)
    repeated: int = 0
    """Of the launches, those that were ready."""
    bodies: dict[int, type[ctypes.Structure]] = field(default_factory=dict)
    """By size: that of each kernel is another."""

    def launch(self, kernel: str, grid: Any, threads: int, arguments: Any, *, shared: int = 0, **how: Any) -> None:
        self.bodies[ctypes.sizeof(arguments.body)] = type(arguments.body)
        maps = [int.from_bytes(m[:8], "little") for m in arguments.maps]
        self.note(kernel, (grid, threads, shared, how.get("overlap_previous", False)), maps, arguments.body)

    def repeat(self, kernel: str, configured: Any, pointers: int) -> None:
        grid, threads, shared, stream, cluster, overlap_previous = configured
        assert (stream, cluster) == (5, None)
        room = next(r for r in driver_api._rooms.known.values() if r.pointers == pointers)
        slots = room.slots
        body = self.bodies[len(room.contents) - (slots[-1] - slots[0])].from_address(slots[-1])
        maps = [int.from_bytes(ctypes.string_at(at, 8), "little") for at in slots[:-1]]
        self.repeated += 1
        self.note(kernel, (grid, threads, shared, overlap_previous), maps, body)

    def note(self, kernel: str, how: tuple[object, ...], maps: list[int], body: ctypes.Structure) -> None:
        self.seen.append((kernel, how, maps, dict(words(body))))

    def taken(self, tensors: dict[str, Tensor]) -> list[tuple[object, ...]]:
        """What was seen since, with names for the addresses of tensors and places in the workspace."""
        seen, self.seen = self.seen, []
        names = {t.data_ptr(): name for name, t in tensors.items()}
        base = next((body["dq"] for _, _, _, body in seen if "ticket" in body), 0)

        def named(name: str, value: Any, forward: bool) -> object:
            if not forward and (name in WORKSPACE or (name in ("dq", "acc") and value == base)):
                return "workspace", value and value - base
            if name in ("dk", "dv"):  # of the parts that are summed to them
                return names.get(value, "parts")
            return names.get(value, value)

        return [
            (kernel, how, [names[at] for at in maps], {name: named(name, x, i == 0) for name, x in body.items()})
            for i, (kernel, how, maps, body) in enumerate(seen)
        ]


def words(body: ctypes.Structure) -> Iterator[tuple[str, object]]:
    for name, _ in body._fields_:  # type: ignore[misc]
        value = getattr(body, name)
        if isinstance(value, ctypes.Structure):
            yield from ((f"{name}.{inner}", x) for inner, x in words(value))
        else:
            yield name, value


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """CPU tensors in place of a GPU's."""
    made = Driver()
    counter = torch.zeros(2, dtype=torch.int32)
    for module in (hopper, hopper_bwd):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(module, "work_counter", lambda device: counter)
    for module in (hopper, hopper_bwd, ready):
        monkeypatch.setattr(module, "launch", made.launch)
    monkeypatch.setattr(ready, "launch_configured", made.repeat)
    monkeypatch.setattr(ready, "configuration", lambda *how: how)
    monkeypatch.setattr(ready, "replace_address", lambda slot, at: ctypes.c_uint64.from_address(slot).__setattr__("value", at))
    monkeypatch.setattr(prepared, "context_of", lambda device: nullcontext())
    monkeypatch.setattr(prepared, "current_handle", lambda device: 5)
    monkeypatch.setattr(hopper, "_forward_kernel", lambda spec: spec.name)
    monkeypatch.setattr(hopper, "tensor_map", lambda pointer, *_: pointer.to_bytes(8, "little") + bytes(120))
    monkeypatch.setattr(hopper, "why_not", lambda *args: None)
    monkeypatch.setattr(hopper_bwd, "_kernels", lambda spec: hopper_bwd._Kernels("pre", "main", "post"))  # type: ignore[arg-type]
    monkeypatch.setitem(ops.BY_DEVICE, "cpu", "hopper")
    monkeypatch.setattr(prepared, "_kinds", {})
    hopper._tile_map.cache_clear()
    return made


def mask(form: str) -> BoundaryVectors:
    lts = torch.full((1, 1, ROWS), 200, dtype=torch.int32)
    keep = BlockTable(torch.ones(1, 1, 3, 3, dtype=torch.bool), 128, 128)
    return BoundaryVectors(ROWS, ROWS, 1, 1, True, lts if form == "vectors" else None, blocks=keep if form == "blocks" else None)


def operands(heads_kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads that share key heads have parts of dK and dV summed, the others' are stored by maps."""
    q, k, val = (torch.zeros(2, ROWS, heads, DIM, dtype=torch.bfloat16) for heads in (4, heads_kv, heads_kv))
    return q, k, val


def joined(heads_kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """As one projection gives them."""
    q, k, val = torch.zeros(2, ROWS, 4 + 2 * heads_kv, DIM, dtype=torch.bfloat16).split((4, heads_kv, heads_kv), 2)
    return q, k, val


def heads_first(heads_kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, val = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(heads_kv))
    return q, k, val


def calls(form: str, deterministic: bool = False, heads_kv: int = 2) -> tuple[ops.Call, Prepared]:
    """A plain one and a prepared one, of the same mask."""
    v, (q, k, _) = mask(form), operands(heads_kv)
    spec = hopper.forward_spec(hopper.mask_form(v), DIM, "bf16")
    tables = (torch.zeros(hopper.Sizes.of(spec, v, q, k).tables.bytes, dtype=torch.uint8),) if spec.packed else ()
    return ops.Call(v, tables, 0.25, deterministic), Prepared.of(v, tables, 0.25, deterministic, q, k)


def run(
    call: ops.Call, qkv: tuple[Tensor, Tensor, Tensor], dout: Tensor | None = None, dlse: Tensor | None = None
) -> dict[str, Tensor]:
    """Both directions; every tensor by its name."""
    q, k, val = qkv
    out, lse = call.forward(q, k, val)
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = call.backward(q, k, val, out, lse, dout, dlse)
    for of, made in ((q, out), (q, dq), (k, dk), (val, dv)):
        assert (made.shape, made.dtype) == (of.shape, of.dtype)
        assert made.is_contiguous()
    return {"q": q, "k": k, "val": val, "out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}


def twice(call: ops.Call, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """What is launched the second time is kept."""
    run(call, qkv)
    run(call, qkv)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("layout", [operands, joined, heads_first])
@pytest.mark.parametrize("form", ["vectors", "none", "blocks"])
def test_what_is_ready_is_what_the_backend_launches(
    driver: Driver, form: str, layout: Callable[[int], tuple[Tensor, Tensor, Tensor]], heads_kv: int, deterministic: bool
) -> None:
    plain, call = calls(form, deterministic, heads_kv)
    want = driver.taken(run(plain, layout(heads_kv)))
    assert [kernel for kernel, *_ in want[1:]] == ["pre", "main", "post"]
    for repeated in (0, 0, 4, 8):
        assert driver.taken(run(call, layout(heads_kv))) == want
        assert driver.repeated == repeated


def test_what_comes_once_is_not_kept(driver: Driver) -> None:
    _, call = calls("vectors")
    q, k, val = operands()
    call.forward(q, k, val)
    assert (call.kind.forward.ready, call.kind.backward) == ({(): ()}, None)
    run(call, joined())
    assert call.kind.backward is not None
    assert [*call.kind.forward.ready.values(), *call.kind.backward.ready.values()] == [()] * 3


def shifted(x: Tensor) -> Tensor:
    """The same at an address that no map can hold."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_what_must_be_copied_is_not_ready(driver: Driver) -> None:
    _, call = calls("vectors")
    q, k, val = operands()
    zero = q.new_zeros(1)
    twice(call, (q, k, val))
    for n, x in (("k", shifted(k)), ("val", zero.expand(k.shape)), ("val", shifted(val))):
        driver.repeated = 0
        run(call, (q, x, val) if n == "k" else (q, k, x))
        run(call, (q, x, val) if n == "k" else (q, k, x))
        assert driver.repeated == 0, n
    for dout in (shifted(q), zero.expand(q.shape), q.float()):
        driver.repeated = 0
        run(call, (q, k, val), dout)
        run(call, (q, k, val), dout)
        assert driver.repeated == 2, "the two forwards"
    driver.repeated = 0
    run(call, (q, k, val), dlse=torch.zeros(2, 4, ROWS))
    assert driver.repeated == 1
    run(call, (q, k, val))
    assert driver.repeated == 5


def test_a_saved_result_that_came_back_otherwise(driver: Driver) -> None:
    """Hooks on saved tensors may give back what is equal but lies elsewhere or in another dtype."""
    _, call = calls("vectors")
    q, k, val = operands()
    twice(call, (q, k, val))
    out, lse = call.forward(q, k, val)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    driver.repeated = 0
    for o, s in ((out.float(), lse), (out, strided), (shifted(out), lse)):
        call.backward(q, k, val, o, s, q, None)
    assert driver.repeated == 0
    call.backward(q, k, val, out, lse, q, None)
    assert driver.repeated == 3


def test_a_mask_whose_vectors_are_copied_launches_nothing_that_is_ready(driver: Driver) -> None:
    """Though others of its form and sizes do: its copies are gone after each call."""
    q, k, _ = operands()
    whole = torch.full((1, 2, ROWS), 200, dtype=torch.int32)
    v = BoundaryVectors(ROWS, ROWS, 1, 2, True, lts=whole)
    spec = hopper.forward_spec(hopper.mask_form(v), DIM, "bf16")
    tables = (torch.zeros(hopper.Sizes.of(spec, v, q, k).tables.bytes, dtype=torch.uint8),)
    for lts, repeated in ((whole[:, :1], 0), (whole, 4), (whole[:, :1], 0)):
        driver.repeated = 0
        call = Prepared.of(replace(v, lts=lts), tables, 0.25, False, q, k)
        for _ in range(3):
            driver.repeated = 0
            run(call, operands())
        assert driver.repeated == repeated


@pytest.mark.parametrize("made_anew", ["tables", "table of blocks"])
def test_what_each_call_makes_anew_is_not_ready(driver: Driver, made_anew: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, call = calls("blocks")
    v = call.v
    if made_anew == "tables":
        tables = call.schedule
        monkeypatch.setattr(hopper, "schedule_for", lambda spec, v: tables)
        call = Prepared.of(v, (), 0.25, False, *operands()[:2])
    else:
        wide = torch.ones(1, 1, 3, 6, dtype=torch.bool)[..., ::2]
        v = BoundaryVectors(ROWS, ROWS, 1, 1, True, blocks=BlockTable(wide, 128, 128))
        call = Prepared.of(v, call.schedule, 0.25, False, *operands()[:2])
    twice(call, operands())
    run(call, operands())
    assert driver.repeated == (3 if made_anew == "tables" else 0), "a backward needs no tables of the forward"


def test_the_last_layouts_are_ready(driver: Driver) -> None:
    _, call = calls("none")
    q, k, _ = operands()
    wide = torch.zeros(2, ROWS, 64, DIM, dtype=torch.bfloat16)

    def many(count: int) -> list[Tensor]:
        return [wide[:, :, : 2 + i].contiguous()[:, :, :2] for i in range(1, count + 1)]

    for val in many(MOST_LAYOUTS) * 2:
        call.forward(q, k, val)
    assert driver.repeated == 0
    call.forward(q, k, many(1)[0])
    assert driver.repeated == 1
    call.forward(q, k, k)  # one more
    call.forward(q, k, many(1)[0])
    assert driver.repeated == 1
    assert len(call.kind.forward.ready) == MOST_LAYOUTS


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", ["vectors", "none"])
def test_what_is_ready_serves_other_masks_of_the_same_sizes(driver: Driver, form: str, deterministic: bool) -> None:
    twice(calls(form, deterministic)[1], operands())
    plain, call = calls(form, deterministic)  # other vectors, other tables
    want = driver.seen.clear() or driver.taken(run(plain, operands()))
    assert driver.repeated == 0
    assert driver.taken(run(call, operands())) == want
    assert driver.repeated == 4


def test_masks_of_other_kinds_share_nothing(driver: Driver) -> None:
    q, k, _ = operands()
    v = mask("vectors")
    assert v.lts is not None
    other = [
        replace(v, causal=False),
        replace(v, lte=v.lts),
        replace(v, lts=None, ute=v.lts),
        replace(v, heads=2, lts=v.lts.expand(1, 2, ROWS).contiguous()),
        replace(v, batch=2, lts=v.lts.expand(2, 1, ROWS).contiguous()),
        mask("none"),
        *(mask("blocks") for _ in range(2)),  # its own, even if it is equal
    ]
    kinds = [Prepared.of(m, (), 0.25, False, q, k).kind for m in (v, *other)]
    for change in ({"scale": 0.5}, {"deterministic": True}, {"q": q.half()}, {"q": q[:, :, :2]}, {"k": k[:, :, :1]}):
        given = {"scale": 0.25, "deterministic": False, "q": q, "k": k} | change
        kinds.append(Prepared.of(v, (), given["scale"], given["deterministic"], given["q"], given["k"]).kind)  # type: ignore[arg-type]
    assert len(set(map(id, kinds))) == len(kinds)
    assert Prepared.of(mask("vectors"), (), 0.25, False, q, k).kind is kinds[0]


def test_the_last_kinds_are_known(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_KINDS", 2)
    q, k, _ = operands()
    first, *_ = [Prepared.of(mask("vectors"), (), scale, False, q, k).kind for scale in (0.1, 0.2, 0.3)]
    assert len(prepared._kinds) == 2
    assert Prepared.of(mask("vectors"), (), 0.1, False, q, k).kind is not first


def test_a_schedule_of_another_mask_is_refused_by_every_call(driver: Driver) -> None:
    twice(calls("vectors")[1], operands())
    q, k, val = operands()
    wrong = Prepared.of(mask("vectors"), (torch.zeros(64, dtype=torch.uint8),), 0.25, False, q, k)
    with pytest.raises(MaskcError, match="M526"):
        wrong.forward(q, k, val)
