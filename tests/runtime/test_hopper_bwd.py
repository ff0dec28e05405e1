"""Decisions of the Hopper backward that need no GPU."""

from __future__ import annotations

import pytest
import torch

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import hopper, hopper_bwd
from maskc.runtime.driver_api import Arguments
from maskc.runtime.hopper_bwd import Dealing, _Shape, heads_per_cta, heads_together


@pytest.mark.parametrize(
    ("ratio", "heads_per_mask", "tiles", "near", "expected"),
    [
        (1, 1, 10, 99, 1),
        (4, 32, 10_000, 99, 4),  # enough tiles: all query heads of a kv head in one CTA
        (4, 32, 100, 99, 1),  # 400 CTAs at most: as many as there can be
        (4, 32, 200, 99, 2),
        (14, 14, 10_000, 99, 14),
        (14, 1, 10_000, 99, 1),  # a mask of its own for every query head
        (6, 2, 10_000, 99, 2),
        (7, 7, 40, 99, 1),
        (7, 7, 512, 99, 7),
        (12, 12, 512, 99, 4),
        (64, 64, 10_000, 99, 64),
        (14, 14, 300, 99, 7),
        (64, 64, 2048, 99, 32),  # 16 items a multiprocessor while more than about 4 heads stay together
        (64, 64, 512, 99, 8),
        (64, 64, 200, 99, 4),
        (64, 64, 64, 99, 4),
        (64, 64, 10, 99, 2),
        (64, 64, 2048, 8, 8),  # those that L2 holds
        (64, 64, 2048, 1, 4),
        (4, 4, 10_000, 1, 4),
        (14, 14, 10_000, 5, 7),
    ],
)
def test_heads_of_a_cta(ratio: int, heads_per_mask: int, tiles: int, near: int, expected: int) -> None:
    heads = heads_per_cta(ratio, heads_per_mask, tiles, 132, near)
    assert heads == expected
    assert ratio % heads == heads_per_mask % heads == 0


def test_heads_together_fit_the_cache() -> None:
    assert heads_together(8192 * 128) == 4
    assert heads_together(1 << 30) == 1


def test_short_tiles_come_last_where_they_are_few() -> None:
    def dealing(heads: int, form: MaskForm, deterministic: bool = False) -> Dealing:
        spec = select_backward(form, 128, "bf16", deterministic=deterministic)
        return _Shape(1, 8192, 8192, heads, heads, 128, 64, 64, 1, 1).dealing(spec, 132)

    assert dealing(512, MaskForm(lts=True)) == Dealing()
    assert dealing(16, MaskForm(causal=True)) == Dealing(4)
    assert dealing(16, MaskForm(lts=True)) == Dealing(4, falling=True)
    assert dealing(16, MaskForm(lts=True), deterministic=True) == Dealing(4)
    assert dealing(16, MaskForm(lts=True, uts=True, ute=True)) == Dealing(8, falling=True), "a tile may be seen by all rows"
    assert dealing(6, MaskForm(lts=True, uts=True, ute=True)) == Dealing(6, falling=True)
    assert dealing(16, MaskForm(lts=True, ute=True)) == Dealing(4, falling=True)
    assert dealing(512, MaskForm(lts=True, uts=True, ute=True)) == Dealing()


def test_accumulators_are_zeroed_a_processor_ahead() -> None:
    """Items whose unit another item zeroes come after it; where it begins, every multiprocessor has had an item since."""
    for units, tiles, group in ((512, 64, 1), (128, 256, 1), (40, 3, 8), (32, 64, 8), (1000, 1, 1), (4, 1024, 1)):
        shape = _Shape(1, 8192, 128 * tiles, units, units, 128, tiles, tiles, 1, 1)
        ahead = shape.ahead(Dealing(group), 132)
        if ahead == units:
            continue
        # All items of a unit lie in its group.
        begin = [u // group * group * tiles for u in range(units)]
        assert all(begin[u + ahead] - begin[u] >= max(132, group * tiles) for u in range(units - ahead))
        assert ahead % group == 0
        assert group == ahead or (ahead - group) * tiles < 132, "no more than that"


Launches = list[tuple[str, tuple[int, int, int], object]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches of the backward as (kernel, grid, parameters), none of which happens."""
    seen: Launches = []

    def launch(kernel: str, grid: tuple[int, int, int], threads: int, arguments: Arguments, **_: object) -> None:
        seen.append((kernel, grid, arguments.body))

    monkeypatch.setattr(hopper_bwd, "launch", launch)
    monkeypatch.setattr(hopper_bwd, "_kernels", lambda spec: hopper_bwd._Kernels("pre", "main", "post"))
    monkeypatch.setattr(hopper, "tensor_map", lambda *args: bytes(128))
    monkeypatch.setattr(hopper_bwd, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper_bwd, "work_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    return seen


def call(v: BoundaryVectors, heads: int, kv_heads: int, **options: object) -> tuple[torch.Tensor, ...]:
    q = torch.zeros(2, v.nq, heads, 128, dtype=torch.bfloat16)
    k = torch.zeros(2, v.nk, kv_heads, 128, dtype=torch.bfloat16)
    lse = torch.zeros(2, heads, v.nq)
    return hopper_bwd.backward(v, q, k, k, q, lse, q[:, :1].expand_as(q), None, 0.1, **options)


def test_what_is_launched(launches: Launches) -> None:
    """Four query heads to two kv heads, one mask head per query head: each kv head's two parts are summed at the end."""
    lts = torch.zeros(1, 4, 300, dtype=torch.int32)
    grads = call(BoundaryVectors(200, 300, 1, 4, True, lts=lts), 4, 2)
    assert [t.dtype for t in grads] == [torch.bfloat16] * 3
    assert [tuple(t.shape) for t in grads] == [(2, 200, 4, 128), (2, 300, 2, 128), (2, 300, 2, 128)]
    row_blocks, tiles = 2 * 4 * 4, 4 * 3  # 64 rows; 128 keys
    assert [(name, grid) for name, grid, _ in launches] == [
        ("pre", (row_blocks + tiles // 4, 1, 1)),
        ("main", (2 * 2 * 2 * 3, 1, 1)),
        ("post", (row_blocks, 1, 1)),
    ]
    main = launches[1][2]
    assert (main.splits, main.heads, main.grads_f32, main.mask_batch, main.mask_heads) == (2, 1, 1, 1, 4)
    assert main.order != 0
    assert launches[0][2].done is not None, "key tiles are put in order"
    assert launches[0][2].lts == lts.data_ptr()
    assert launches[0][2].ahead == main.ahead == 8, "few units: attn_bwd_pre zeroes the accumulators of all"


def test_nothing_to_order(launches: Launches) -> None:
    lts = torch.zeros(1, 1, 300, dtype=torch.int32)
    call(BoundaryVectors(200, 300, 1, 1, True), 2, 2, grad_dtype=torch.float32)
    call(BoundaryVectors(200, 300, 1, 1, True, lts=lts), 2, 2, deterministic=True)
    assert [name for name, _, _ in launches] == ["pre", "main", "post"] * 2
    assert [launches[i][2].done for i in (0, 3)] == [None, None]
    assert launches[1][2].grads_f32 == launches[2][2].dq_is_f32 == 1
    assert launches[4][2].grads_f32 == launches[5][2].dq_is_f32 == 0


def test_no_rows_at_all(launches: Launches) -> None:
    grads = call(BoundaryVectors(0, 300, 1, 1, True), 2, 2)
    assert not launches
    assert all(not g.any() for g in grads)


def test_block_tables_of_any_layout(launches: Launches) -> None:
    keep = torch.zeros(3, 2, 1, 1, dtype=torch.bool).permute(2, 3, 1, 0)  # [1, 1, 2, 3], not contiguous
    v = BoundaryVectors(200, 300, 1, 1, False, blocks=BlockTable(keep, 128, 128))
    call(v, 2, 2)
    main = launches[-2][2]
    assert main.keep not in (0, keep.data_ptr())
    assert (main.keep_batch, main.keep_heads, main.keep_rows, main.keep_cols, main.keep_block_q) == (1, 1, 2, 3, 128)
