"""The KV index in Python against brute force on the dense mask, and against the tile classes of `maskc.tiles`."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.spec import CAUSAL, DIAG, HIDDEN, LTE, LTS, SKIP, TAIL, UNSEEN, UTE, UTS, KernelSpec, MaskForm
from maskc.tiles import TileClass, classify
from tests.codegen.mirror import KvIndex

GROUP, TILE_KV = 64, 16
Case = tuple[KvIndex, BoundaryVectors]


@st.composite
def masks(draw: st.DrawFn) -> Case:
    """A spec with small tiles and one mask of its form; bounds are piecewise constant so that all classes come up."""
    form = MaskForm(
        causal=draw(st.booleans()),
        blocks=draw(st.integers(0, 3)) == 0,
        diag=draw(st.integers(0, 3)) == 0,
        **dict.fromkeys(("lts",), draw(st.booleans())),
    )
    form = replace(form, lte=form.lts and draw(st.booleans()), ute=draw(st.booleans()))
    form = replace(form, uts=form.ute and draw(st.booleans()))
    groups = draw(st.integers(1, 3))
    sizes = {"block_q": GROUP * groups, "block_kv": TILE_KV, "warp_groups": groups}
    spec = KernelSpec(64, form=form, row_groups=draw(st.sampled_from((1, groups))), **sizes)
    rows, cols = draw(st.integers(1, 300)), draw(st.integers(1, 120))

    def steps(low: list[int] | None = None) -> list[int]:
        out: list[int] = []
        while len(out) < cols:
            out += [draw(st.integers(0, rows))] * draw(st.integers(1, 40))
        return out[:cols] if low is None else [max(a, b) for a, b in zip(low, out, strict=False)][:cols]

    vectors: dict[str, list[int]] = {}
    if form.lts:
        vectors["lts"] = steps()
    if form.lte:
        vectors["lte"] = steps(vectors["lts"])
    if form.uts:
        vectors["uts"] = steps()
    if form.ute:
        vectors["ute"] = steps(vectors.get("uts"))
    if form.diag:
        vectors["diag"] = steps()
    keep, blocks = None, None
    if form.blocks:
        shape = (-(-rows // spec.block_q), -(-cols // TILE_KV))
        keep = [[draw(st.booleans()) for _ in range(shape[1])] for _ in range(shape[0])]
        blocks = BlockTable(torch.tensor(keep).view(1, 1, *shape), spec.block_q, TILE_KV)
    tensors = {name: torch.tensor(v, dtype=torch.int32).view(1, 1, -1) for name, v in vectors.items()}
    v = BoundaryVectors(rows, cols, 1, 1, form.causal, blocks=blocks, **tensors)
    return KvIndex(spec, rows, cols, vectors, keep), v


def masked_by_tag(tag: int, m: KvIndex, q: int, k: int) -> bool:
    """What the consumer's tests do with element (q, k): only those that the tag names."""

    def at(name: str, absent: int) -> int:
        return m.vectors[name][k] if name in m.vectors else absent

    low = bool(tag & (LTS | LTE))
    low &= not tag & LTS or q >= at("lts", 0)
    low &= not tag & LTE or q < at("lte", m.rows)
    high = bool(tag & (UTS | UTE))
    high &= not tag & UTS or q >= at("uts", 0)
    high &= not tag & UTE or q < at("ute", 0)
    return bool(tag & CAUSAL and q < k) or low or high or bool(tag & DIAG and q < at("diag", 0))


@settings(max_examples=150, deadline=None)
@given(masks())
def test_queue_is_every_visible_tile_with_tests_that_reproduce_the_mask(case: Case) -> None:
    m, v = case
    spec = m.spec
    masked = v.masked()[0, 0]
    unseen = masked.all(0)
    for i in range(-(-m.rows // spec.block_q)):
        queued = m.queue(i)
        assert [b for b, _ in queued] == sorted((b for b, _ in queued), reverse=True)
        tags = dict(queued)
        for block in range(-(-m.cols // TILE_KV)):
            c0, c1 = block * TILE_KV, min((block + 1) * TILE_KV, m.cols)
            for group in range(spec.row_groups):
                height = spec.block_q // spec.row_groups
                r0 = i * spec.block_q + group * height
                r1 = min(r0 + height, m.rows)
                tile = masked[r0:r1, c0:c1]
                tag = tags[block] >> 8 * group & 0xFF if block in tags else SKIP
                if tag == SKIP or (spec.row_groups > 1 and tag == HIDDEN):
                    assert tile.all(), "a visible element in a block that is not queued"
                    continue
                if tag == 0:
                    assert not tile.any()
                    assert c1 - c0 == TILE_KV
                got = [[masked_by_tag(tag, m, q, k) for k in range(c0, c1)] for q in range(r0, r1)]
                assert torch.equal(torch.tensor(got), tile)
                assert bool(tag & TAIL) == (c1 - c0 < TILE_KV)
                assert bool(tag & UNSEEN) == (tag != 0 and bool(unseen[c0:c1].any()))


@settings(max_examples=150, deadline=None)
@given(masks())
def test_classes_are_those_of_the_other_backends(case: Case) -> None:
    m, v = case
    height = m.spec.block_q // m.spec.row_groups
    if v.blocks is not None and m.spec.row_groups > 1:
        return  # its entries are of whole tiles
    wanted = classify(v, height, TILE_KV)[0, 0]
    for i in range(wanted.shape[0]):
        for block in range(wanted.shape[1]):
            tag = m.tag_of_rows(i * height, min((i + 1) * height, m.rows), block)
            if m.keep is not None and not m.keep[i][block]:
                tag = SKIP
            cls = TileClass.SKIP if tag == SKIP else TileClass.PARTIAL if tag & ~(TAIL | UNSEEN) else TileClass.UNMASKED
            assert cls == TileClass(int(wanted[i, block])), (i, block)
