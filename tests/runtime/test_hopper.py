"""The Hopper backend without a GPU: refusals, tables, what a call would launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper, mask_tables, ready


def vectors(n: int = 300, batch: int = 1, heads: int = 1, **parts: int) -> BoundaryVectors:
    made = {name: torch.full((batch, heads, n), value, dtype=torch.int32) for name, value in parts.items()}
    return BoundaryVectors(n, n, batch, heads, "ute" not in parts, **made)


def operand(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class Launch:
    """What reached the driver: kernel name, grid, threads, a copy of the struct, tensor maps, shared memory."""

    def __init__(
        self, kernel: str, grid: Any, threads: int, arguments: Any, *, device: Any, shared: int = 0, cluster: Any = None
    ) -> None:
        self.kernel, self.grid, self.threads, self.shared, self.cluster = kernel, grid, threads, shared, cluster
        self.body = type(arguments.body).from_buffer_copy(arguments.body)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    seen: list[Launch] = []
    monkeypatch.setattr(mask_tables, "_known", {})
    for module in (hopper, mask_tables, ready):
        monkeypatch.setattr(module, "launch", lambda *args, **more: seen.append(Launch(*args, **more)))
    monkeypatch.setattr(hopper, "_forward_kernel", lambda spec: spec.name)
    monkeypatch.setattr(mask_tables, "_schedule_kernel", lambda spec, name: name)
    monkeypatch.setattr(hopper, "tensor_map", lambda pointer, dtype, sizes, strides, box: bytes(128))
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "work_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(hopper, "why_not", lambda v, q, k, val: None)
    return seen


# ---------------------------------------------------------------- refusals


def test_tensors_on_the_cpu_are_refused() -> None:
    q = operand(1, 300, 2, 128)
    found = hopper.why_not(vectors(lts=7), q, q, q)
    assert found is not None
    assert found.code == "M520"
    with pytest.raises(MaskcError, match="M520"):
        hopper.forward(vectors(lts=7), q, q, q, 0.1)


def test_vectors_on_another_device_are_refused() -> None:
    found = hopper._device_diagnostic(vectors(lts=7), torch.device("cuda", 0))
    assert found is not None
    assert found.code == "M520"
    assert "`cpu`" in found.message
    assert "`cuda:0`" in found.message
    assert hopper._device_diagnostic(vectors(lts=7), torch.device("cpu")) is None
    assert hopper._device_diagnostic(vectors(), torch.device("cuda", 0)) is None  # causal alone has no vectors


@pytest.mark.parametrize(
    ("dim", "value_dim", "hint"), [(80, 80, "pad both to 128"), (64, 128, "pad both to 128"), (320, 320, "largest is 256")]
)
def test_head_dims_name_the_nearest(dim: int, value_dim: int, hint: str) -> None:
    found = hopper._head_dim_diagnostic(dim, value_dim)
    assert found.code == "M523"
    assert hint in (found.help or "")
    assert str(dim) in found.message


@pytest.mark.parametrize(
    ("block_q", "block_kv", "dim", "fits"),
    [(128, 128, 128, True), (256, 64, 256, True), (128, 64, 128, False), (192, 128, 64, False)],
)
def test_block_sizes_are_multiples_of_the_tile(block_q: int, block_kv: int, dim: int, fits: bool) -> None:
    keep = torch.ones(1, 1, -(-300 // block_q), -(-300 // block_kv), dtype=torch.bool)
    v = BoundaryVectors(300, 300, 1, 1, False, blocks=BlockTable(keep, block_q, block_kv))
    found = hopper._block_table_diagnostic(v, dim)
    assert (found is None) == fits
    if found is not None:
        assert found.code == "M524"
        assert f"({block_q}, {block_kv})" in found.message


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_is_positive(launches: list[Launch], scale: float) -> None:
    q = operand(1, 300, 2, 128)
    with pytest.raises(MaskcError, match="M525"):
        hopper.forward(vectors(lts=7), q, q, q, scale)
    assert launches == [], "refused before any launch"


def test_output_dtype(launches: list[Launch]) -> None:
    q = operand(1, 300, 2, 128)
    assert hopper.forward(vectors(lts=7), q, q, q, 0.1, out_dtype=torch.float32)[0].dtype == torch.float32
    with pytest.raises(MaskcError, match="M522"):
        hopper.forward(vectors(lts=7), q, q, q, 0.1, out_dtype=torch.float64)


# ---------------------------------------------------------------- what is launched


def test_launches_of_a_mask_with_vectors(launches: list[Launch]) -> None:
    q, k = operand(3, 300, 12, 128), operand(3, 300, 4, 128)
    v = vectors(300, batch=3, heads=2, lts=200)
    out, lse = hopper.forward(v, q, k, k, 0.25)
    assert (out.shape, lse.shape) == (q.shape, (3, 12, 300))
    assert [(one.kernel, one.grid, one.threads) for one in launches] == [
        ("kv_bounds", (6, 5, 1), 64),
        ("row_runs", (6, 1, 1), 128),
        ("row_order", (6, 1, 1), 256),
        ("attn_fwd", (72, 1, 1), 512),
    ]
    body = launches[-1].body
    assert (body.items, body.heads, body.kv_ratio, body.mask_ratio, body.masked_batches) == (72, 12, 3, 6, 1)
    assert body.group_heads % body.kv_ratio == 0
    assert (body.mask.rows, body.mask.cols, body.mask.masks, body.mask.mask_heads) == (300, 300, 6, 2)
    assert body.scale_log2 == pytest.approx(0.25 * 1.4426950408889634)
    made = launches[0].body
    assert made.vectors[0] == v.lts.data_ptr()  # type: ignore[union-attr]
    assert (made.batch_stride[0], made.head_stride[0]) == (600, 300)
    assert made.packs == body.packs, "the forward reads what the schedule wrote"


class Again:
    """What launches that are ready tell the driver: kernels, their geometry, and the struct by its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, Any, Any]] = []
        monkeypatch.setattr(ready, "configuration", lambda grid, threads, *_: (grid, threads))
        monkeypatch.setattr(ready, "launch_configured", self.note)
        monkeypatch.setattr(mask_tables, "context_of", lambda device: nullcontext())
        monkeypatch.setattr(mask_tables, "current_handle", lambda device: 5)

    def note(self, kernel: str, configured: Any, pointers: int) -> None:
        body = mask_tables.ScheduleParams.from_address(ctypes.c_void_p.from_address(pointers).value or 0)
        self.seen.append((kernel, configured, mask_tables.ScheduleParams.from_buffer_copy(body)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("parts", [{"lts": 200}, {"lts": 200, "lte": 250, "uts": 3, "ute": 9}], ids=str)
def test_tables_of_sizes_that_were_made_before(
    launches: list[Launch], parts: dict[str, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same launches, with the addresses of the vectors and tables at hand."""
    again = Again(monkeypatch)
    for _ in range(2):
        hopper.schedule(vectors(300, batch=3, heads=2, **parts), head_dim)
    assert again.seen == [], "what is launched the second time is kept"
    v = vectors(300, batch=3, heads=2, **parts)
    (tables,) = hopper.schedule(v, head_dim)
    assert len(again.seen) == 3
    launches.clear()
    mask_tables._known.clear()
    (others,) = hopper.schedule(v, head_dim)
    assert tables.shape == others.shape
    moved = tables.data_ptr() - others.data_ptr()
    for (kernel, configured, body), want in zip(again.seen, launches, strict=True):
        assert (kernel, configured) == (want.kernel, (want.grid, want.threads))
        for of in (want.body, want.body.mask):
            for name in {name for name, _ in of._fields_} & {*mask_tables.PARTS}:
                setattr(of, name, getattr(of, name) + moved)
        assert bytes(body) == bytes(want.body)


@pytest.mark.parametrize("odd", ["broadcast", "strided", "elsewhere", "blocks"])
def test_tables_of_odd_vectors_are_always_made_anew(launches: list[Launch], odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(monkeypatch)
    v = vectors(300, batch=2, heads=2, lts=200)
    assert v.lts is not None
    match odd:
        case "broadcast":
            v = replace(v, lts=v.lts[:1])
        case "strided":
            v = replace(v, lts=v.lts.transpose(0, 1).contiguous().transpose(0, 1))
        case "elsewhere":
            v = replace(v, elsewhere=torch.zeros(2, 2, 300, dtype=torch.bool))
        case "blocks":
            v = replace(v, blocks=BlockTable(torch.ones(2, 2, 3, 3, dtype=torch.bool), 128, 128))
    for _ in range(3):
        hopper.schedule(v, 128)
    assert (len(launches), again.seen, mask_tables._known) == (9, [], {})


def test_tables_of_the_last_sizes_are_known(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again(monkeypatch)
    for _ in range(2):
        for sizes in ({"batch": 2}, {"heads": 2}, {"heads": 3}, {"batch": 2, "heads": 3}, {"batch": 3, "heads": 2}):
            hopper.schedule(vectors(100, lts=9, **sizes), 128)
    assert again.seen == [], "each of sizes of its own"
    monkeypatch.setattr(mask_tables, "_known", {})
    monkeypatch.setattr(mask_tables, "MOST_KNOWN", 2)
    for n in (100, 200, 200, 300, 300, 300, 200):
        hopper.schedule(vectors(n, lts=9), 128)
    assert len(again.seen) == 6
    for _ in range(2):
        hopper.schedule(vectors(100, lts=9), 128)
    assert len(again.seen) == 6
    assert len(mask_tables._known) == 2


@pytest.mark.parametrize("sizes", [(0, 300), (300, 0), (0, 0)], ids=str)
def test_no_rows_or_keys_at_all(launches: list[Launch], sizes: tuple[int, int]) -> None:
    q, k = operand(2, sizes[0], 2, 128), operand(2, sizes[1], 2, 128)
    out, lse = hopper.forward(BoundaryVectors(*sizes, 1, 1, False), q, k, k, 0.1)
    assert launches == []
    assert not out.any()
    assert (lse == -math.inf).all()


def test_a_given_schedule_is_used(launches: list[Launch]) -> None:
    q = operand(1, 300, 2, 128)
    v = vectors(lts=200)
    tables = hopper.schedule(v, 128)
    launches.clear()
    hopper.forward(v, q, q, q, 0.1, schedule=tables)
    assert [one.kernel for one in launches] == ["attn_fwd"]
    base = tables[0].data_ptr()
    assert base <= launches[0].body.order < base + tables[0].numel()


def test_the_schedule_of_another_mask_is_refused(launches: list[Launch]) -> None:
    q = operand(1, 300, 2, 128)
    tables = hopper.schedule(vectors(lts=200, ute=3), 128)
    launches.clear()
    with pytest.raises(MaskcError, match="M526"):
        hopper.forward(vectors(lts=200), q, q, q, 0.1, schedule=tables)
    assert launches == [], "refused before any launch"


@pytest.mark.parametrize("causal", [False, True])
def test_closed_forms_need_no_tables(launches: list[Launch], causal: bool) -> None:
    v = BoundaryVectors(4096, 4096, 1, 1, causal)
    q = operand(1, 4096, 8, 128)
    assert hopper.schedule(v, 128) == ()
    hopper.forward(v, q, q, q, 0.1)
    assert [one.kernel for one in launches] == ["attn_fwd"]
    assert launches[0].grid == (132, 1, 1), "persistent: one CTA per multiprocessor"
    assert launches[0].body.group_heads == (8 if causal else 1)


def test_tables_of_broadcast_vectors_and_block_tables(launches: list[Launch]) -> None:
    v = vectors(300, lts=3)
    keep = torch.ones(2, 3, 2, 3, dtype=torch.bool).transpose(0, 1).contiguous().transpose(0, 1)
    v = BoundaryVectors(300, 300, 2, 3, True, lts=v.lts, blocks=BlockTable(keep, 256, 128))
    hopper.schedule(v, 128)
    body = launches[0].body
    assert (body.batch_stride[0], body.head_stride[0]) == (0, 0)
    assert (body.mask.table_batch, body.mask.table_head, body.mask.table_cols) == (18, 6, 3)
    assert (body.mask.table_q_ratio, body.mask.table_kv_ratio) == (2, 1)


def test_tables_do_not_overlap() -> None:
    spec = forward_spec(hopper.mask_form(vectors(lts=1)), 128, "bf16")
    tables = mask_tables.tables_of(spec, 3 * spec.block_q, 5 * spec.block_kv, 2, 3)
    offsets = tables.offsets
    at = [offsets[name] for name in mask_tables.PARTS]
    assert at == sorted(at)
    assert all(a % 256 == 0 for a in at)
    assert offsets["packs"] - offsets["minmax"] >= 6 * 5 * 8
    assert offsets["unseen"] - offsets["packs"] >= 6 * 5 * spec.pack_bytes
    assert tables.bytes >= offsets["run_counts"]


# ---------------------------------------------------------------- operands


def test_operands_that_a_tensor_map_cannot_hold_are_copied() -> None:
    x = torch.zeros(2, 10, 4, 128, dtype=torch.bfloat16)
    assert hopper.addressable(x) is x
    assert hopper.addressable(x[:, ::2]).data_ptr() == x.data_ptr(), "strides alone are no reason"
    wide = torch.zeros(2, 10, 4, 384, dtype=torch.bfloat16)[..., 128:256]
    assert hopper.addressable(wide) is wide
    for odd in (x[:, :, :1].expand(2, 10, 4, 128), x.transpose(1, 3), torch.zeros(2, 10, 4, 132, dtype=torch.bfloat16)[..., 4:]):
        copy = hopper.addressable(odd)
        assert copy.is_contiguous()
        assert torch.equal(copy, odd)
    bytes_ = torch.zeros(2 * 5 * 4 * 64 + 1, dtype=torch.bfloat16)
    shifted = bytes_[1:].view(2, 5, 4, 64)
    assert hopper.addressable(shifted).data_ptr() % 16 == 0


def test_structs_have_no_holes_that_the_c_side_lacks() -> None:
    assert ctypes.sizeof(mask_tables.MaskTables) == 3 * 8 + 2 * 8 + 9 * 4 + 4
    assert ctypes.sizeof(hopper._ForwardParams) == ctypes.sizeof(mask_tables.MaskTables) + 10 * 8 + 2 * 4 + 6 * 4


@pytest.mark.parametrize(
    ("rows", "heads", "together"),
    [(8192, 16, 16), (8192, 24, 8), (8192, 32, 8), (32_768, 4, 4), (32_768, 6, 2)],
)
def test_heads_that_are_worked_on_together(launches: list[Launch], rows: int, heads: int, together: int) -> None:
    """All of them where items are few and K and V of all are no more than 64 MB; otherwise as many as 32 MB hold."""
    q = torch.empty(1, rows, heads, 128, dtype=torch.bfloat16)
    hopper.forward(BoundaryVectors(rows, rows, 1, 1, True), q, q, q, 0.1)
    assert launches[-1].body.group_heads == together
    hopper.forward(BoundaryVectors(rows, rows, 1, 1, False), q, q, q, 0.1)
    assert launches[-1].body.group_heads == 1


def test_a_tensor_map_is_encoded_in_a_context_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may have none, or that of another GPU; once for an address, sizes and strides."""
    log: list[object] = []

    @contextmanager
    def context_of(device: int) -> Iterator[None]:
        log.append(device)
        yield
        log.append("left")

    monkeypatch.setattr(hopper, "context_of", context_of)
    monkeypatch.setattr(hopper, "tensor_map", lambda *args: log.append("map") or bytes(128))
    shape, strides = torch.Size((1, 64, 2, 64)), (8192, 128, 64, 1)
    for _ in range(2):
        hopper._tile_map(1 << 40, torch.bfloat16, shape, strides, 64, 1)
    assert log == [1, "map", "left"]
    assert hopper._tile_map((1 << 40) + 8, torch.bfloat16, shape, strides, 64, 1) is None, "misaligned"
    assert hopper._tile_map(1 << 40, torch.bfloat16, shape, (8192, 128, 64, 2), 64, 1) is None, "not dense"
