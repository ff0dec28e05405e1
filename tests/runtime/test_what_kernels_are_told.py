"""What the Hopper backend tells its kernels, tensor by tensor: addresses, strides, boxes of maps, grids, and in which order."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.forward import forward_spec, schedule_spec
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import driver_api, hopper, hopper_bwd, mask_tables, ready
from tests.overlap.stand_in import GPU, on_gpu

PROCESSORS = 132
FULL = BoundaryVectors(300, 300, 1, 1, False)
CAUSAL = BoundaryVectors(300, 300, 1, 1, True)


@dataclass
class Launch:
    """maps: (address, dtype, strides, rows of the box) of each."""

    kernel: str
    grid: tuple[int, int, int]
    body: Any
    maps: list[tuple[int, torch.dtype, tuple[int, ...], int]]
    overlap_previous: bool = False

    @property
    def places(self) -> list[int]:
        return [at for at, *_ in self.maps]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Of calls on CPU tensors, as if they were on a GPU."""
    seen: list[Launch] = []

    def launch(kernel: str, grid: Any, threads: int, arguments: Any, **how: Any) -> None:
        body = type(arguments.body).from_buffer_copy(arguments.body)
        seen.append(Launch(kernel, grid, body, [pickle.loads(m) for m in arguments.maps], how.get("overlap_previous", False)))

    def tensor_map(pointer: int, dtype: torch.dtype, sizes: Any, strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
        return pickle.dumps((pointer, dtype, strides, box[1]))

    for module in (hopper, hopper_bwd, mask_tables, ready):
        monkeypatch.setattr(module, "launch", launch)
    for module in (hopper, hopper_bwd):
        monkeypatch.setattr(module, "multiprocessors", lambda device: PROCESSORS)
        monkeypatch.setattr(module, "work_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(hopper, "_forward_kernel", lambda spec: "forward")
    monkeypatch.setattr(mask_tables, "_schedule_kernel", lambda spec, name: name)
    monkeypatch.setattr(hopper, "tensor_map", tensor_map)
    monkeypatch.setattr(hopper, "why_not", lambda *_: None)
    monkeypatch.setattr(hopper_bwd, "_kernels", lambda spec: hopper_bwd._Kernels("pre", "main", "post"))  # type: ignore[arg-type]
    hopper._tile_map.cache_clear()
    yield seen
    hopper._tile_map.cache_clear()


def operand(rows: int, heads: int, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(batch, rows, heads, 128, dtype=dtype)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---------------------------------------------------------------- refusals


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")


@pytest.mark.usefixtures("on_hopper")
def test_what_the_kernels_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = on_gpu(operand(300, 2)), on_gpu(operand(300, 2))

    def code(*call: Tensor, v: BoundaryVectors = CAUSAL) -> str | None:
        found = hopper.why_not(v, *call)
        return None if found is None else found.code

    assert code(q, k, k) is None
    half, wide = k.to(torch.float16), on_gpu(torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16))
    assert [code(*call) for call in ((half, k, k), (q, half, k), (q, k, half), (q.float(), k.float(), k.float()))] == ["M522"] * 4
    assert code(q, k, wide) == "M523"
    for newer in ((10, 0), (8, 9), (9, 1)):
        monkeypatch.setattr(hopper, "capability", lambda device, newer=newer: newer)
        assert code(q, k, k) == "M521", "built for sm_90a alone"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("stray", ["lts", "elsewhere", "blocks"])
def test_a_part_of_the_mask_on_another_device_is_refused(stray: str) -> None:
    """The kernels read each of them by its address."""
    parts: dict[str, Any] = {
        "lts": torch.zeros(1, 1, 300, dtype=torch.int32),
        "elsewhere": torch.zeros(1, 1, 300, dtype=torch.bool),
        "blocks": torch.ones(1, 1, 3, 3, dtype=torch.bool),
    }
    made = {name: t if name == stray else on_gpu(t) for name, t in parts.items()}
    made["blocks"] = BlockTable(made["blocks"], 128, 128)
    q = on_gpu(operand(300, 2))
    found = hopper.why_not(BoundaryVectors(300, 300, 1, 1, True, **made), q, q, q)
    assert found is not None
    assert (found.code, "`cpu`" in found.message) == ("M520", True)


# ---------------------------------------------------------------- forward


def test_maps_of_the_forward(launches: list[Launch]) -> None:
    """A gated kernel finds own keys in tensors of their own, behind those of the buffer."""
    q, k, val = operand(300, 4), operand(300, 2), operand(300, 2)
    spec = forward_spec(hopper.mask_form(CAUSAL), 128, "bf16")
    out, _ = hopper.forward_with(spec, CAUSAL, q, k, val, 0.1)
    assert launches[-1].places == [t.data_ptr() for t in (q, k, val, out)]
    assert [rows for *_, rows in launches[-1].maps] == [spec.block_q, spec.block_kv, spec.block_kv, spec.block_q]


@pytest.mark.parametrize(("leave", "ctas"), [(0, PROCESSORS), (8, PROCESSORS - 8), (1000, 1)])
def test_the_forward_leaves_multiprocessors_free(launches: list[Launch], leave: int, ctas: int) -> None:
    q = operand(4096, 16)
    v = BoundaryVectors(4096, 4096, 1, 1, True)
    hopper.forward_with(forward_spec(hopper.mask_form(v), 128, "bf16"), v, q, q, q, 0.1, leave=leave)
    assert launches[-1].grid == (ctas, 1, 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_items_of_a_batch_may_share_a_mask(launches: list[Launch], batch: int) -> None:
    v = BoundaryVectors(300, 300, batch, 1, True, lts=torch.zeros(batch, 1, 300, dtype=torch.int32))
    q = operand(300, 2, batch=3)
    hopper.forward(v, q, q, q, 0.1)
    assert launches[-1].body.masked_batches == (batch > 1)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_a_table_of_blocks_that_batch_items_or_heads_share(launches: list[Launch], shape: tuple[int, int]) -> None:
    keep = torch.ones(*shape, 3, 3, dtype=torch.bool)
    v = BoundaryVectors(300, 300, 2, 3, True, blocks=BlockTable(keep, 128, 128))
    hopper.schedule(v, 128)
    mask = launches[0].body.mask
    assert (mask.table_batch, mask.table_head) == (9 * shape[1] * (shape[0] > 1), 9 * (shape[1] > 1))


def test_every_row_block_has_its_place_in_the_order(launches: list[Launch]) -> None:
    """Blocks by four and by 256, the last ones fewer."""
    for q_blocks in (1, 4, 5, 256, 257):
        launches.clear()
        spec = schedule_spec(hopper.mask_form(vectors(8)), 128)
        hopper.schedule(vectors(q_blocks * spec.block_q), 128)
        grids = {one.kernel: one.grid for one in launches}
        assert grids["row_runs"] == (1, -(-q_blocks // 4), 1)
        assert grids["row_order"] == (1, -(-q_blocks // 256), 1)


def vectors(n: int, count: int = 1) -> BoundaryVectors:
    made = [torch.zeros(1, 1, n, dtype=torch.int32) for _ in range(count)]
    return BoundaryVectors(n, n, 1, 1, True, **dict(zip(("lts", "lte", "ute", "uts"), made, strict=False)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_bounds_of_every_vector_have_room(count: int) -> None:
    """Two numbers for each vector and block of keys."""
    spec = schedule_spec(hopper.mask_form(vectors(8, count)), 128)
    offsets = mask_tables.tables_of(spec, 40 * spec.block_q, 99 * spec.block_kv, 2, 3).offsets
    assert offsets["packs"] - offsets["minmax"] >= 6 * 99 * count * 8


def test_heads_of_a_key_head_stay_together(launches: list[Launch]) -> None:
    """As many key heads as L2 holds, each with all of its query heads."""
    q, k = (torch.empty(1, 32_768, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    hopper.forward(BoundaryVectors(32_768, 32_768, 1, 1, True), q, k, k, 0.1)
    assert launches[-1].body.group_heads == 2 * 4


@pytest.mark.parametrize(("strides", "fits"), [((99, 130, 65, 1), False), ((99, 160, 80, 1), True), ((99, 160, 80, 2), False)])
def test_rows_begin_at_multiples_of_sixteen_bytes(strides: tuple[int, ...], fits: bool) -> None:
    assert hopper._fit(torch.Size((1, 4, 2, 64)), strides, 2) == fits


def test_a_counter_serves_one_stream_or_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of one stream follow each other; those of two, and of a graph that is replayed on any, may not."""
    state = SimpleNamespace(stream=5, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(hopper, "current_handle", lambda device: state.stream)
    monkeypatch.setattr(hopper, "_counters", {})
    device = torch.device("cpu")
    first = hopper.work_counter(device)
    assert hopper.work_counter(device) is first
    state.stream = 6
    second = hopper.work_counter(device)
    assert second is not first
    state.capturing = True
    captured = [hopper.work_counter(device) for _ in range(2)]
    assert len({t.data_ptr() for t in (first, second, *captured)}) == 4


# ---------------------------------------------------------------- backward


def backward(
    launches: list[Launch], v: BoundaryVectors = CAUSAL, heads: int = 2, kv_heads: int = 2, **more: Any
) -> tuple[dict[str, Any], dict[str, Launch]]:
    """(tensors by name, launches by kernel) of one call; `more` replaces tensors and adds options."""
    q, k = operand(v.nq, heads), operand(v.nk, kv_heads)
    call = {
        "q": q,
        "k": k,
        "val": k.clone(),
        "out": q.clone(),
        "lse": torch.zeros(2, heads, v.nq),
        "dout": q.clone(),
        "dlse": None,
    }
    gate, deterministic = more.pop("gate", None), more.pop("deterministic", False)
    call |= {name: more.pop(name) for name in list(more) if name in call}
    spec = select_backward(hopper.mask_form(v), 128, "bf16", deterministic=deterministic)
    if gate is not None:
        spec = hopper_bwd.BackwardSpec(**{**{f: getattr(spec, f) for f in spec.__dataclass_fields__}, "gated": True})
    dtype = more.pop("dtype", torch.bfloat16)
    launches.clear()
    call["dq"], call["dk"], call["dv"] = hopper_bwd.backward_with(
        spec, v, *(call[n] for n in ("q", "k", "val", "out", "lse", "dout", "dlse")), 0.1, dtype, gate=gate, **more
    )
    return call, {one.kernel: one for one in launches}


GATED: dict[str, Any] = {"gate": hopper_bwd.GateTables(), "parts": True}


def test_no_keys_at_all(launches: list[Launch]) -> None:
    made, seen = backward(launches, BoundaryVectors(300, 0, 1, 1, False))
    assert not seen
    assert not made["dq"].any()
    assert made["dq"].shape == made["q"].shape


def test_what_comes_with_a_gradient_may_lie_and_be_anyhow(launches: list[Launch]) -> None:
    """Kernels read lse and dlse in fp32, densely, dout in the dtype of q, and out and dout by strides of their own."""
    lse = torch.zeros(2, 300, 2).transpose(1, 2)
    made, seen = backward(launches, lse=lse, dout=operand(300, 2, dtype=torch.float32), out=heads_first(operand(300, 2)))
    pre, main = seen["pre"].body, seen["main"]
    assert pre.lse != lse.data_ptr()
    assert main.maps[1][1] == torch.bfloat16
    assert (pre.out_batch, pre.out_row, pre.out_head) == made["out"].stride()[:3]
    assert (pre.dout_batch, pre.dout_row, pre.dout_head) == (300 * 256, 256, 128)
    assert pre.dlse is None


@pytest.mark.parametrize(
    ("dlse", "as_it_is"),
    [
        (torch.zeros(2, 2, 300), True),
        (torch.zeros(2, 300, 2).transpose(1, 2), False),
        (torch.zeros(2, 2, 300, dtype=torch.float64), False),
        (torch.zeros(1).expand(2, 2, 300), False),
    ],
    ids=["dense", "strided", "fp64", "one number"],
)
def test_gradients_of_lse(launches: list[Launch], dlse: Tensor, as_it_is: bool) -> None:
    _, seen = backward(launches, dlse=dlse)
    assert (seen["pre"].body.dlse == dlse.data_ptr()) == as_it_is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_in_fp32(launches: list[Launch], dtype: torch.dtype) -> None:
    """Whatever dtype gradients are wanted in."""
    for grads in (torch.float32, torch.bfloat16):
        _, seen = backward(launches, out=operand(300, 2, dtype=dtype), dtype=grads)
        assert seen["pre"].body.out_is_f32 == (dtype == torch.float32)
        assert seen["post"].body.dq_is_f32 == (grads == torch.float32)


def test_maps_of_the_backward(launches: list[Launch]) -> None:
    spec = select_backward(hopper.mask_form(CAUSAL), 128, "bf16", deterministic=False)
    made, seen = backward(launches)
    assert seen["main"].places == [made[name].data_ptr() for name in ("q", "dout", "k", "val", "dk", "dv")]
    assert [rows for *_, rows in seen["main"].maps] == [spec.block_q] * 2 + [spec.block_kv] * 2 + [64] * 2


def test_a_gated_backward_has_maps_of_own_keys_and_whole_gradients(launches: list[Launch]) -> None:
    own, whole = (operand(128, 2), operand(128, 2)), (operand(128, 2), operand(128, 2))
    made, seen = backward(launches, **GATED, own=own, whole=whole)
    there = [made[name].data_ptr() for name in ("q", "dout", "k", "val")]
    assert seen["main"].places == [*there, *(t.data_ptr() for t in (*whole, *own))]
    made, seen = backward(launches, **GATED)
    assert seen["main"].places[6:] == [made["k"].data_ptr(), made["val"].data_ptr()], "else those of the buffer"


@pytest.mark.parametrize(("leave", "ctas"), [(0, PROCESSORS), (8, PROCESSORS - 8), (1000, 1)])
def test_the_backward_leaves_multiprocessors_free(launches: list[Launch], leave: int, ctas: int) -> None:
    _, seen = backward(launches, BoundaryVectors(1024, 4096, 1, 1, False), heads=4, kv_heads=4, leave=leave)
    assert seen["main"].grid == (ctas, 1, 1)


def test_nothing_waits_where_copies_need_multiprocessors(launches: list[Launch]) -> None:
    """A kernel that waits for a gated one would hold those that this leaves free."""
    for how, early in (({}, True), (GATED, False)):
        _, seen = backward(launches, **how)
        assert [seen[name].overlap_previous for name in ("pre", "main", "post")] == [False, True, early]


def test_a_gated_backward_deals_its_tiles_by_tables(launches: list[Launch]) -> None:
    """The order of key tiles, for which the ungated one counts blocks, is not made."""
    v = vectors(300)
    assert backward(launches, v)[1]["pre"].body.done is not None
    assert backward(launches, v, **GATED)[1]["pre"].body.done is None


@pytest.mark.parametrize("tiles", [1, 3, 4, 5])
def test_every_key_tile_is_looked_at(launches: list[Launch], tiles: int) -> None:
    """By four, the last ones fewer, behind blocks of rows."""
    v = BoundaryVectors(64, 128 * tiles, 1, 1, False, lts=torch.zeros(1, 1, 128 * tiles, dtype=torch.int32))
    _, seen = backward(launches, v)
    spec = select_backward(hopper.mask_form(v), 128, "bf16", deterministic=False)
    rows = 2 * 2 * -(-64 // spec.block_q)
    assert seen["pre"].grid == (rows + math.ceil(128 * tiles / spec.block_kv / 4), 1, 1)


@pytest.mark.parametrize("rows", [None, 96])
def test_parts_of_gradients_stay_apart(launches: list[Launch], rows: int | None) -> None:
    """[splits, B, Hk, rows, D] in fp32, and the kernel is told of their strides."""
    made, seen = backward(launches, heads=4, kv_heads=2, parts=True, rows=rows)
    main, length = seen["main"].body, rows or 300
    assert main.splits > 1
    assert made["dk"].shape == made["dv"].shape == (main.splits, 2, 2, length, 128)
    assert made["dk"].dtype == torch.float32
    assert (main.grad_batch, main.grad_head, main.grad_row) == (2 * length * 128, length * 128, 128)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_gradients_lie_as_keys_do(launches: list[Launch], kv_heads: int) -> None:
    """Where parts are summed, too."""
    made, seen = backward(launches, heads=4, kv_heads=kv_heads)
    main = seen["main"].body
    assert (main.splits > 1) == (kv_heads == 2)
    assert (main.grad_batch, main.grad_head, main.grad_row) == (300 * kv_heads * 128, 128, kv_heads * 128)
    assert made["dk"].shape == made["k"].shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_of_a_workspace_have_room(deterministic: bool) -> None:
    """For every unit a count of what is zeroed, and in deterministic mode for every block of rows whose turn it is."""
    v = vectors(8192)
    q, k = (torch.empty(64, 8192, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 4))
    spec = select_backward(hopper.mask_form(v), 128, "bf16", deterministic=deterministic)
    sizes = hopper_bwd._sizes(spec, 1, 1, q.shape, k.shape, torch.bfloat16, None, False, None, PROCESSORS)
    shape, at = sizes.shape, sizes.offsets
    held = {
        "dq": shape.row_blocks * spec.block_q * 128 * 4,
        "lse2": shape.row_blocks * spec.block_q * 4,
        "dpsum": shape.row_blocks * spec.block_q * 4,
        "dead_rows": shape.row_blocks * 4,
        "turns": shape.row_blocks * 4 * deterministic,
        "ticket": 4,
        "zeroed": shape.units * 4,
        "tiles": shape.mask_tiles * spec.tile_ints * 4,
        "order": shape.mask_tiles * 4,
    }
    assert set(at) == set(held)
    ends = [*sorted(at.values())[1:], sizes.bytes]
    room = {name: min(end for end in ends if end > start) - start for name, start in at.items() if held[name]}
    assert all(room[name] >= size for name, size in held.items() if size)
    assert all(start % 256 == 0 for start in at.values())


def test_accumulators_are_zeroed_ahead_where_the_kernel_does_so() -> None:
    """Else attn_bwd_pre zeroes those of all units."""
    v = BoundaryVectors(16_384, 16_384, 1, 1, True)
    q = torch.empty(2, 16_384, 64, 128, dtype=torch.bfloat16, device="meta")
    found = set()
    for deterministic in (False, True):
        spec = select_backward(hopper.mask_form(v), 128, "bf16", deterministic=deterministic)
        sizes = hopper_bwd._sizes(spec, 1, 1, q.shape, q.shape, torch.bfloat16, None, False, None, PROCESSORS)
        assert (sizes.main["ahead"] < sizes.shape.units) == spec.zeroes_ahead
        assert sizes.pre["ahead"] == sizes.main["ahead"]
        found.add(spec.zeroes_ahead)
    assert found == {False, True}


def test_vectors_that_heads_share_are_spread_for_the_backward(launches: list[Launch]) -> None:
    """It reads one number per mask head and key; `keep` holds what it points into."""
    lts, ute = torch.zeros(1, 1, 300, dtype=torch.int32), torch.zeros(1, 2, 300, dtype=torch.int32)
    v = BoundaryVectors(300, 300, 1, 2, True, lts=lts, ute=ute)
    made = hopper_bwd.MaskFields.of(v)
    by_address = {t.data_ptr(): t for t in made.keep}
    for name, t in (("lts", lts), ("ute", ute)):
        spread = by_address[made.fields[name]]
        assert spread.is_contiguous()
        assert torch.equal(spread, t.expand(1, 2, 300))


# ---------------------------------------------------------------- contexts


@contextmanager
def _nothing(_: int) -> Iterator[None]:
    yield


def test_devices_without_a_number_are_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(driver_api, "context_of", lambda device: seen.append(device) or _nothing(device))
    monkeypatch.setattr(driver_api, "current_handle", lambda device: 5)
    monkeypatch.setattr(driver_api, "configuration", lambda *how: how)
    monkeypatch.setattr(driver_api, "launch_configured", lambda kernel, configured, pointers: seen.append(configured[3]))
    arguments: Any = SimpleNamespace(placed=lambda: 0)
    kernel: Any = SimpleNamespace(allow_shared=lambda *_: None)
    for device, stream in ((torch.device("cuda"), None), (GPU, 9)):
        driver_api.launch(kernel, (1, 1, 1), 32, arguments, device=device, stream=stream)
    assert seen == [3, 5, 0, 9]
