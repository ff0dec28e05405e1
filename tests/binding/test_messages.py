"""What is wrong with bound data is said with the input, the index, the value and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import maskc
from maskc import segments, spans

DOC = "input doc : segments\nmask m = same(doc)"
PARTS = "input doc : segments\ninput part : segments within doc\nmask m = same(doc) and same(part)"
PREFIX = (
    "input doc : segments\ninput prefix : int per doc where 0 <= prefix <= doc.len\n"
    "mask m = same(doc) and (k <= q or doc.pos[k] < prefix[k])"
)
EVICT = "input evict : int per key where evict[k] > k\nmask m = k <= q < evict[k]"
TREE = "input doc : segments\ninput end : int per key where k < end[k] <= doc.end[k]\nmask m = k <= q < end[k]"
PAIRS = "input rows : sorted int per row\ninput keys : int per key\nmask m = rows[q] == keys[k]"
WINDOW = "input window : int where window >= 1\nmask m = k <= q < k + window"
PREFIX_LM = "input prefix : int where 0 <= prefix <= nk\nmask m = k <= q or k < prefix"
ORDER = "input doc : segments\nmask m = doc[q] >= doc[k]"
BLOCKS = "input keep : bool per block(4, 4)\nmask m = keep[q // 4, k // 4]"
FLAGS = "input noised : bool per key\nmask m = k <= q and not noised[k]"
HEADS = "input wide : bool per head\nmask m = k <= q and (wide[h] or q < k + 4)"
DIVIDED = "input c : int where 0 <= c // b\ninput b : int where b >= 1\nmask m = q < c and q // b == k // b"
CHAIN = """input x : int per key where x[k] <= b
input b : int where b <= c
input c : int where c <= 0
mask m = q < x[k]
mask other = q < c"""
HEADS_WINDOW = "input w : int per head where w >= 1\nmask m = k <= q < k + w[h]"
ASSUMED = (
    "input doc : segments\ninput e : int per doc\nassume e[k] >= doc.len[k]\nmask m = same(doc) and k <= q < doc.start[k] + e[k]"
)
IMAGES = "input image : spans\nmask m = k <= q or same(image)"
NOISED = (
    "input doc : segments\ninput image : spans\ninput noised : bool per image\n"
    "mask m = same(doc) and (same(image) or (k <= q and not noised[k]))"
)

ROWS: list[tuple[str, str, dict[str, Any], str]] = [
    # ends and offsets
    (
        "M401",
        DOC,
        {"nk": 8192, "doc": segments(cu_seqlens=[0, 3145, 8194])},
        "segments `doc` end at 8194, the batch has 8192 keys",
    ),
    ("M403", DOC, {"doc": segments(cu_seqlens=[1, 4])}, "segments `doc`: cu_seqlens[0] = 1: offsets start at 0"),
    ("M403", DOC, {"doc": segments(cu_seqlens=[0, 5, 3, 9])}, "cu_seqlens[2] = 3 after 5: offsets never decrease"),
    ("M403", DOC, {"doc": segments(cu_seqlens=[])}, "cu_seqlens is empty"),
    ("M403", DOC, {"doc": segments(lengths=[4, -2])}, "segments `doc`: lengths[1] = -2: a length is not negative"),
    ("M403", DOC, {"doc": segments(lengths=[[4, 2], [3, -1]])}, "lengths[1][1] = -1"),
    ("M408", DOC, {"doc": segments(lengths=[2**31 - 1, 1])}, "reaches token 2147483648, past 2^31 - 1"),
    # tokens
    ("M404", DOC, {"doc": segments(ids=[3, 3, 1, 3])}, "ids[3] = 3 comes back after another id"),
    ("M404", DOC, {"doc": segments(ids=[3, -1, 3])}, "ids[2] = 3 comes back"),
    ("M405", DOC, {"doc": segments(positions=[1, 2])}, "positions[0] = 1: the first token starts a segment"),
    ("M405", DOC, {"doc": segments(positions=[0, 1, 3])}, "positions[2] = 3 after 1"),
    ("M408", DOC, {"doc": segments(eos=[0, 2])}, "eos[1] = 2 is not a truth value"),
    # ranges
    ("M419", IMAGES, {"image": spans(ranges=[(5, 3)])}, "spans `image`: ranges[0] = (5, 3)"),
    ("M419", IMAGES, {"image": spans(ranges=[(0, 4), (3, 6)])}, "ranges[1] starts at 3, before the one ahead of it ends at 4"),
    ("M413", IMAGES, {"image": spans(ranges=[(0, 4, 1)])}, "has rows of 3 numbers; each is a pair"),
    ("M413", IMAGES, {"image": spans(ranges=[(0, 7), (7,), (7, 9)])}, "has rows of 1 and 2 numbers; each is a pair"),
    # nesting, order, holes
    (
        "M406",
        PARTS,
        {"doc": segments(lengths=[4, 4]), "part": segments(lengths=[2, 4, 2])},
        "part 1 holds tokens [2, 6), which lie in no one `doc`",
    ),
    ("M407", PAIRS, {"rows": [0, 2, 1], "keys": [0]}, "rows[2] = 1 after rows[1] = 2, but `sorted` was declared"),
    (
        "M409",
        ORDER,
        {"doc": segments(ids=[0, -1, 1])},
        "`doc` leaves tokens [1, 2) outside, but `m` compares the order of segments",
    ),
    ("M409", ORDER, {"doc": segments(ranges=[(2, 5)])}, "`doc` leaves tokens [0, 2) outside"),
    # facts
    ("M402", EVICT, {"evict": [5] * 3 + [2]}, "evict[3] = 2, but `evict[k] > k` was declared (<text>:1:33)"),
    (
        "M402",
        PREFIX,
        {"doc": segments(lengths=[3, 5]), "prefix": [1, 6]},
        "prefix[1] = 6, doc.len[1] = 5, but `0 <= prefix <= doc.len` was declared",
    ),
    (
        "M402",
        TREE,
        {"doc": segments(lengths=[2, 2]), "end": [2, 2, 4, 5]},
        "end[3] = 5, doc.end[3] = 4, but `k < end[k] <= doc.end[k]`",
    ),
    ("M402", WINDOW, {"window": 0}, "window = 0, but `window >= 1` was declared"),
    ("M402", WINDOW, {"window": [3, 0]}, "window = 0 in batch item 1"),
    ("M402", PREFIX_LM, {"prefix": 9, "nk": 8}, "prefix = 9, nk = 8, but `0 <= prefix <= nk`"),
    ("M402", EVICT, {"evict": [[9, 9], [9, 1]]}, "evict[1] = 1 in batch item 1"),
    ("M402", EVICT, {"evict": [[[9, 9], [0, 9]]]}, "evict[0] = 0 in head 1"),
    ("M402", "assume nq <= nk\nmask m = k <= q + (nk - nq)", {"nq": 5, "nk": 3}, "nq = 5, nk = 3, but `nq <= nk` was assumed"),
    ("M402", "input w : int where w >= k\nmask m = k <= q < k + w", {"w": 3, "nk": 9}, "w = 3, k = 4, but `w >= k`"),
    ("M402", HEADS_WINDOW, {"w": [3, 0], "nk": 4}, "w[1] = 0, but `w >= 1` was declared"),
    ("M402", DIVIDED, {"c": 3, "b": 0, "nk": 4}, "b = 0, but `b >= 1` was declared"),
    ("M402", DIVIDED, {"c": 3, "b": torch.tensor([2, 0]), "nk": 4}, "b = 0 in batch item 1, but `b >= 1` was declared"),
    (
        "M402",
        ASSUMED,
        {"doc": segments(lengths=[3, 2]), "e": [3, 1]},
        "e[3] = 1, doc.len[3] = 2, but `e[k] >= doc.len[k]` was assumed",
    ),
    ("M402", "input e : int per key where e[k] >= 0 or k < 2\nmask m = k <= q < e[k]", {"e": [-1, -1, -1]}, "e[2] = -1, but"),
    # names
    ("M410", PREFIX, {"doc": segments(lengths=[3])}, "input `prefix` of mask `m` is missing"),
    ("M410", DOC, {}, "bind(doc=maskc.segments(lengths=[...]))"),
    ("M411", DOC, {"doc": segments(lengths=[3]), "dox": 1}, "has no input `dox`"),
    ("M411", DOC, {"doc": segments(lengths=[3]), "dox": 1}, "did you mean `doc`?"),
    ("M411", "mask m = k <= q", {"doc": segments(lengths=[3])}, "it has no inputs"),
    # kinds
    ("M412", DOC, {"doc": [0, 3, 6]}, "input `doc` is segments, not [0, 3, 6]"),
    ("M412", DOC, {"doc": spans(lengths=[3])}, "was declared `segments`, not spans"),
    ("M412", EVICT, {"evict": torch.ones(4)}, "holds float32 numbers, not integers"),
    ("M412", EVICT, {"evict": ["a", "b"]}, "cannot be read as integers: ['a', 'b']"),
    ("M412", WINDOW, {"window": 1.5}, "holds float32 numbers"),
    ("M412", EVICT, {"evict": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)}, "is a quantized tensor"),
    ("M412", EVICT, {"evict": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "is a nested tensor"),
    ("M412", DOC, {"doc": torch.nested.nested_tensor([torch.ones(1)])}, "is segments, not a nested tensor"),
    ("M412", EVICT, {"evict": [torch.tensor([1, 2]), 3]}, "cannot be read as integers: [tensor([1, 2])"),
    ("M413", EVICT, {"evict": [torch.tensor([1, 2]), torch.tensor([3])]}, "input `evict` has rows of 1 and 2 values"),
    (
        "M412",
        NOISED,
        {"doc": segments(ids=torch.zeros(6, device="meta")), "image": spans(lengths=(4, 0)), "noised": [[1, 0], [1]]},
        "segments `doc`: ids is a meta tensor",
    ),
    ("M413", DOC, {"doc": segments(ids=[[0, 0, 1], [0, 1]])}, "segments `doc`: ids has rows of 2 and 3 values"),
    ("M412", DOC, {"doc": segments(ranges=[[[0, 1], [1, 3]], [[0, 5, 6]]])}, "ranges mixes lists of different shapes"),
    ("M412", EVICT, {"evict": np.array(["4", "5"])}, "cannot be read as integers: array(['4', '5']"),
    ("M412", DOC, {"doc": segments(ids=[True, True, False])}, "segments `doc`: ids holds truth values, not integers"),
    ("M412", DOC, {"doc": segments(lengths=torch.tensor([True, False]))}, "give eos="),
    ("M412", DOC, {"doc": segments(ranges=np.ones((2, 2), bool))}, "ranges holds truth values"),
    ("M413", DOC, {"doc": segments(ids=torch.zeros(0, 4, dtype=torch.int64))}, "ids is for no batch item"),
    ("M412", WINDOW, {"window": True}, "is one int"),
    ("M408", WINDOW, {"window": 2**31}, "= 2147483648 does not fit in 32 bits"),
    ("M408", EVICT, {"evict": [5, 2**40]}, "[1] = 1099511627776 does not fit in 32 bits"),
    ("M408", FLAGS, {"noised": [0, 1, 2]}, "[2] = 2 is not a truth value"),
    # sizes
    ("M413", EVICT, {"evict": [9, 9, 9], "nk": 4}, "nk = 4 by bind, 3 by `evict`"),
    ("M413", PREFIX, {"doc": segments(lengths=[3, 5]), "prefix": [1]}, "input `prefix` holds 1 values, `doc` has 2 segments"),
    (
        "M413",
        PREFIX,
        {"doc": segments(ids=[0, 0, 1]), "prefix": [1, 1, 1]},
        "input `prefix` holds 3 values, `doc` has 2 segments",
    ),
    ("M413", EVICT, {"evict": [[[[9]]]]}, "has 4 axes, not [n], [batch, n] or [batch, heads, n]"),
    ("M413", HEADS, {"wide": [[[1]]], "nk": 4}, "has 3 axes, not [heads] or [batch, heads]"),
    ("M413", PREFIX, {"doc": [segments(lengths=[3])] * 2, "prefix": [[1]] * 3}, "batch = 2 by `doc`, 3 by `prefix`"),
    ("M413", EVICT, {"evict": [[9, 9]] * 2, "batch": 3}, "batch = 3 by bind, 2 by `evict`"),
    ("M413", DOC, {"doc": [segments(ids=[0, 0]), segments(ids=[0])]}, "has items of 1 and 2 tokens"),
    (
        "M413",
        BLOCKS,
        {"keep": [[1, 1]], "nq": 8, "nk": 8},
        "block table `keep` is 1 x 2, 8 rows and 8 keys in blocks of 4 x 4 make 2 x 2",
    ),
    (
        "M413",
        PREFIX,
        {"doc": segments(lengths=[[1, 2], [1, 2]]), "prefix": [[0, 1], [0]]},
        "input `prefix` holds 1 values for batch item 1, where `doc` has 2 segments",
    ),
    ("M413", EVICT, {"evict": [[9, 9], [9]]}, "input `evict` has rows of 1 and 2 values"),
    ("M413", HEADS, {"wide": [[1, 0], [1]], "nk": 4}, "input `wide` has rows of 1 and 2 values"),
    ("M413", "mask m = k <= q", {"nq": -1, "nk": 4}, "nq = -1 of mask `m` is no size"),
    ("M413", "mask m = k <= q", {"nq": 4, "nk": 4.0}, "nk = 4.0 of mask `m` is no size"),
    ("M413", "mask m = k <= q", {"nq": 4, "nk": 4, "batch": 0}, "batch = 0 of mask `m` is no size"),
    ("M412", WINDOW, {"window": [], "nk": 4}, "is one int (or one for each batch item), not an empty list"),
    ("M408", BLOCKS, {"keep": [[1, 1], [0, 2]], "nq": 8, "nk": 8}, "block table `keep`[1][1] = 2 is not a truth value"),
    ("M414", DOC, {"doc": segments(lengths=[3]), "nq": 3, "nk": 4}, "there are 3 rows and 4 keys"),
    ("M415", WINDOW, {"window": 3}, "no input says how many keys"),
    (
        "M415",
        "mask m = k <= q <= k + 128 * h",
        {"nq": 4, "nk": 4},
        "no input says how many heads mask `m` is for, which reads `h`",
    ),
]


@pytest.mark.parametrize(("code", "text", "inputs", "message"), ROWS, ids=[f"{row[0]}-{i}" for i, row in enumerate(ROWS)])
def test_messages(code: str, text: str, inputs: dict[str, Any], message: str) -> None:
    mask = maskc.compile_text(text)
    with pytest.raises(maskc.MaskcError) as caught:
        mask.bind(**inputs).vectors()
    assert caught.value.code == code
    assert message in str(caught.value)


def test_what_a_proof_rests_on_must_be_given() -> None:
    """`m` reads x alone, whose fact speaks of b, whose fact speaks of c: that no row sees a key follows from all three."""
    from maskc.targets import load_text

    with pytest.raises(maskc.MaskcError, match="input `c` of mask `m` is missing"):
        load_text(CHAIN, "m").bind(x=[2, 2], b=7)
    with pytest.raises(maskc.MaskcError, match="b = 7, c = -1, but `b <= c` was declared"):
        load_text(CHAIN, "m").bind(x=[2, 2], b=7, c=-1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: segments(), "segments(...) takes exactly one form, found nothing"),
        (lambda: spans([3, 4]), "spans(...) takes exactly one form, found [3, 4] without a name"),
        (lambda: segments(ids=[0], pad="x"), "segments(ids=, pad='x'): `pad` is one of the ids, an integer"),
        (lambda: segments(ids=[0], pad=1.5), "segments(ids=, pad=1.5): `pad` is one of the ids, an integer"),
        (lambda: segments(ids=[0], pad=2**63), "an integer of 64 bits"),
        (lambda: segments(lengths=[1], ids=[0]), "found lengths and ids"),
        (lambda: spans(lengths=[1], pad=0), "`pad` belongs to `ids`"),
    ],
)
def test_exactly_one_form(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert isinstance(caught.value, maskc.MaskcError)
    assert caught.value.code == "M412"
    assert message in str(caught.value)


def test_all_faults_in_one_go() -> None:
    mask = maskc.compile_text(PREFIX)
    with pytest.raises(maskc.MaskcError) as caught:
        mask.bind(doc=segments(cu_seqlens=[1, 4, 3]), prefix=[1.5, 2.5], nq=9)
    assert [d.code for d in caught.value.diagnostics] == ["M412"]
    with pytest.raises(maskc.MaskcError) as caught:
        mask.bind(doc=segments(cu_seqlens=[1, 4, 3]), prefix=[1, 9], nq=9)
    assert [d.code for d in caught.value.diagnostics] == ["M403", "M403", "M402"]


def test_places_point_at_the_declaration() -> None:
    with pytest.raises(maskc.MaskcError) as caught:
        maskc.compile_text(EVICT).bind(evict=[1, 1])
    assert caught.value.diagnostics[0].span is not None
    assert caught.value.diagnostics[0].span.text == "evict[k] > k"
    assert "1 | input evict : int per key where evict[k] > k\n" in str(caught.value)


def test_facts_about_outside_tokens_are_not_checked() -> None:
    """Tokens 2 and 3 lie in no document, so `end[k] <= doc.end[k]` says nothing about them."""
    vectors = maskc.compile_text(TREE).bind(doc=segments(lengths=[2]), end=[2, 2, 9, 9], nq=4).vectors()
    assert vectors.nk == 4


def test_later_sizes_are_checked_when_they_come() -> None:
    spec = maskc.compile_text(PREFIX_LM).bind(prefix=9)
    assert spec.vectors(9, 9).nk == 9
    with pytest.raises(maskc.MaskcError, match="prefix = 9, nk = 8"):
        spec.vectors(8, 8)


def test_validation_can_be_left_out() -> None:
    """Then the data are taken at their word, and no read ever leaves its tensor."""
    mask = maskc.compile_text(PREFIX)
    assert mask.bind(doc=segments(cu_seqlens=[0, 7, 3, 5]), prefix=[99, -3, 5], validate=False).vectors(5, 5).nk == 5


@pytest.mark.parametrize(
    "kind",
    [
        list,
        np.array,
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int16),
        lambda x: np.array(x, np.uint8),
        lambda x: np.array(x[::-1])[::-1],
        lambda x: np.array(x, ">i4"),
        lambda x: np.array(x, object),
    ],
)
def test_lists_arrays_and_tensors(kind: Callable[[list[int]], Any]) -> None:
    mask = maskc.compile_text(PREFIX)
    vectors = mask.bind(doc=segments(lengths=kind([3, 5])), prefix=kind([1, 2])).vectors()
    want = mask.bind(doc=segments(lengths=[3, 5]), prefix=[1, 2]).vectors()
    assert torch.equal(vectors.masked(), want.masked())


def test_a_batch_as_a_list_of_tensors() -> None:
    mask = maskc.compile_text(EVICT)
    vectors = mask.bind(evict=[torch.tensor([2, 3]), torch.tensor([4, 2])]).vectors(3, 2)
    assert torch.equal(vectors.masked(), mask.bind(evict=[[2, 3], [4, 2]]).vectors(3, 2).masked())


def test_what_is_printed_is_short() -> None:
    """A notebook shows a mask in a line, not as a tree of expressions and tensors."""
    gemma = maskc.compile("std:gemma3:local")
    assert repr(gemma) == "CompiledMask(local(doc: segments, image: spans, window: int), proved, reads LTS, UTE)"
    assert repr(maskc.compile("std:causal")) == "CompiledMask(causal(), proved, reads the causal triangle)"
    bound = gemma.bind(doc=segments(lengths=[5, 6]), image=maskc.spans(ranges=[(1, 3)]), window=4)
    assert repr(bound) == "BoundMask(local, batch=1, heads=1, doc=<2, end at 11>, image=<1, end at 3>, window=4)"
    batch = maskc.compile("std:doc_prefix").bind(doc=segments(lengths=[[5, 6], [11]]), prefix=[[1, 2], [3]], nq=11)
    assert repr(batch) == "BoundMask(doc_prefix, nq=11, nk=11, batch=2, heads=1, doc=<up to 2, end at 11>, prefix=<2 x 1 x 2>)"
