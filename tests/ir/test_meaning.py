"""What masks mean where tokens lie outside, segments are empty, indices run out: small truths written by hand."""

from __future__ import annotations

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from maskc.ir.evaluate import evaluate_column, masked_rows
from maskc.ir.nodes import MaskFn
from maskc.ir.reference import Env, dense
from maskc.ir.symbolic import prove
from maskc.ir.verdict import Proven, Refuted, Unknown


def mask(text: str) -> MaskFn:
    return parse_text(text).pick(None)


def picture(fn: MaskFn, env: Env) -> list[str]:
    """The oracle's rows; the proved program must give the same."""
    rows = dense(fn, env)
    verdict = prove(fn)
    assert isinstance(verdict, Proven)
    for k in range(env.nk):
        masked = masked_rows(verdict.program, env, k, evaluate_column(fn, verdict.program, env, k))
        assert masked == [not row[k] for row in rows]
    return ["".join("01"[v] for v in row) for row in rows]


DOC = "input doc : segments\n"


def test_a_token_outside_sees_nothing_and_is_not_seen() -> None:
    env = Env(4, 4, sets={"doc": [(0, 2), (2, 3)]})
    assert picture(mask(DOC + "mask m = same(doc)"), env) == ["1100", "1100", "0010", "0000"]


def test_not_same_is_true_outside() -> None:
    env = Env(4, 4, sets={"doc": [(0, 2)]})
    assert picture(mask(DOC + "mask m = k <= q and not same(doc)"), env) == ["0000", "0000", "1110", "1111"]


def test_attributes_of_outside_tokens_make_a_comparison_false_in_both_polarities() -> None:
    env = Env(3, 3, sets={"doc": [(0, 2)]})
    assert picture(mask(DOC + "mask m = doc.pos[k] >= 1"), env) == ["010"] * 3
    assert picture(mask(DOC + "mask m = not (doc.pos[k] >= 1)"), env) == ["100"] * 3


def test_a_bool_of_an_outside_token_is_false_and_its_negation_true() -> None:
    text = DOC + "input image : spans within doc\ninput noised : bool per image\nmask m = k <= q and not noised[k]"
    env = Env(3, 3, vectors={"noised": [True]}, sets={"doc": [(0, 3)], "image": [(1, 2)]})
    assert picture(mask(text), env) == ["100", "100", "101"]


def test_row_side_reads_outside() -> None:
    """`doc.start[q] <= k` is false for rows in the padded tail, and so is its negation."""
    env = Env(4, 4, sets={"doc": [(0, 1), (1, 3)]})
    assert picture(mask(DOC + "mask m = doc.start[q] <= k"), env) == ["1111", "0111", "0111", "0000"]
    assert picture(mask(DOC + "mask m = not (doc.start[q] <= k)"), env) == ["0000", "1000", "1000", "0000"]
    assert picture(mask(DOC + "mask m = k < doc.end[q]"), env) == ["1000", "1110", "1110", "0000"]


def test_ordinals_of_empty_segments_count() -> None:
    env = Env(3, 3, sets={"doc": [(0, 1), (1, 1), (1, 3)]})
    assert picture(mask(DOC + "mask m = doc[q] == doc[k] + 1"), env) == ["000"] * 3
    assert picture(mask(DOC + "mask m = doc[q] == doc[k] + 2"), env) == ["000", "100", "100"]
    assert picture(mask(DOC + "mask m = doc[q] > doc[k]"), env) == ["000", "100", "100"]


def test_first_and_last_are_the_non_empty_ones() -> None:
    text = "input part : segments\nmask m = k <= q and q in last(part)"
    env = Env(4, 4, sets={"part": [(0, 1), (1, 3), (3, 3)]})
    assert picture(mask(text), env) == ["0000", "1100", "1110", "0000"]
    nothing = Env(2, 2, sets={"part": []})
    assert picture(mask(text), nothing) == ["00", "00"]


def test_an_edge_inside_its_parent() -> None:
    text = DOC + "input part : segments within doc\nmask m = same(doc) and q in last(part)"
    env = Env(5, 5, sets={"doc": [(0, 3), (3, 5)], "part": [(0, 1), (1, 3)]})  # the second doc has no part
    assert picture(mask(text), env) == ["00000", "11100", "11100", "00000", "00000"]


def test_an_index_out_of_range_makes_a_comparison_false() -> None:
    text = "input f : int per key\nmask m = f[k + 1] <= q"
    env = Env(3, 3, vectors={"f": [0, 1, 2]})
    assert picture(mask(text), env) == ["000", "100", "110"]


def test_a_sorted_vector_of_rows() -> None:
    text = "input r : sorted int per row\ninput c : int per key\nmask m = r[q] == c[k]"
    env = Env(4, 3, vectors={"r": [0, 0, 2, 5], "c": [2, 0, 1]})
    assert picture(mask(text), env) == ["010", "010", "100", "000"]


def test_a_sorted_vector_of_segments() -> None:
    text = DOC + "input level : sorted int per doc\nmask m = level[q] >= 2"
    env = Env(5, 5, vectors={"level": [0, 2, 2]}, sets={"doc": [(0, 2), (2, 3), (3, 4)]})
    assert picture(mask(text), env) == ["00000", "00000", "11111", "11111", "00000"]


def test_choices_read_the_chosen_side_only() -> None:
    text = DOC + "mask m = q < (if k in doc then doc.end[k] else 1)"
    env = Env(3, 3, sets={"doc": [(0, 2)]})
    assert picture(mask(text), env) == ["111", "110", "000"]


def test_extrema_need_all_their_reads() -> None:
    text = DOC + "mask m = q < max(doc.end[k], 1)"
    env = Env(3, 3, sets={"doc": [(0, 2)]})
    assert picture(mask(text), env) == ["110", "110", "000"]


def test_remainders_beside_blocks_and_negations_that_keep_their_context() -> None:
    text = "mask m = q // 3 == k // 3 and q % 3 >= k % 3"
    assert picture(mask(text), Env(4, 4)) == ["1000", "1100", "1110", "0001"]
    text = "mask m = k <= q and not (q // 2 == k // 2 and q % 2 == 1)"
    assert picture(mask(text), Env(4, 4)) == ["1000", "0000", "1110", "1100"]
    text = DOC + "mask m = k <= q and not (doc.pos[q] < 1 and same(doc))"
    assert picture(mask(text), Env(3, 3, sets={"doc": [(0, 2)]})) == ["000", "110", "111"]


def test_breadth_first_tree_beside_the_triangle() -> None:
    """Children of a node are neighbours in breadth-first order: key 1 is seen by rows 1 and 3 of 0-(1,2), 1-3, 2-4."""
    text = """
        input lo : int per key where lo[k] > k
        input hi : int per key where hi[k] >= lo[k]
        mask tree = k <= q and (q == k or lo[k] <= q < hi[k])
    """
    env = Env(5, 5, vectors={"lo": [1, 3, 4, 5, 5], "hi": [5, 4, 5, 5, 5]})
    assert picture(mask(text), env) == ["10000", "11000", "10100", "11010", "10101"]
    verdict = prove(mask(text))
    assert isinstance(verdict, Proven)
    assert verdict.program.causal


# ---------------------------------------------------------------- refusals

REFUSED = {
    "mask m = 2 * q <= k": "2 * q",
    "mask m = q * q <= k": "q * q",
    "mask m = q % 3 == 0": "q % 3",
    "input f : int per row\nmask m = f[q] <= k": "f[q]",
    "input f : bool per row\nmask m = k <= q and f[q]": "f[q]",
    "input s : spans\nmask m = k <= q and q in s": "q in s",
    "input s : spans\nmask m = s[q] <= s[k]": "s[q]",
    DOC + "mask m = doc.pos[q] < 3": "doc.pos[q]",
    DOC + "mask m = doc.len[q] < 3": "doc.len[q]",
    DOC + "input p : segments within doc\nmask m = q in last(p)": "q in last(p)",
    DOC + "input n : int per doc\nmask m = n[q] < k": "n[q]",
    "input s : spans\ninput n : sorted int per s\nmask m = n[q] < k": "n[q]",
}


@pytest.mark.parametrize("text", REFUSED)
def test_inadmissible_atoms_are_pointed_at(text: str) -> None:
    with pytest.raises(MaskcError) as caught:
        prove(mask(text))
    (d,) = caught.value.diagnostics
    assert d.code == "M201"
    assert d.span is not None
    assert d.span.text == REFUSED[text]
    assert f"`{REFUSED[text]}`" in d.message
    assert d.help


def test_too_many_cases() -> None:
    pairs = " and ".join(f"(k == {i} or q == {i + 20})" for i in range(9))
    with pytest.raises(MaskcError) as caught:
        prove(mask(f"mask m = {pairs}"))
    assert caught.value.code == "M302"


def test_three_bands_are_refuted() -> None:
    verdict = prove(mask("mask bands = k <= q < k + 2 or k + 4 <= q < k + 6 or k + 8 <= q < k + 10"))
    assert isinstance(verdict, Refuted)
    assert verdict.counterexample.text == "n = 11, key 0: masked rows 2-3 | 6-7 | 10 (seen by 0-1, 4-5, 8-9)"
    why = "rows 0-1 by `k <= q < k + 2`; rows 4-5 by `k + 4 <= q < k + 6`; rows 8-9 by `k + 8 <= q < k + 10`"
    assert verdict.counterexample.why == why


def test_empty_gaps_between_neighbours_do_not_count() -> None:
    """Also where the limit of the rows cuts between them."""
    verdict = prove(mask("mask m = k == q or k == q - 1 or k == q - 2 or k == q - 3"))
    assert isinstance(verdict, Proven)
    assert verdict.program.vectors == ("lts",)
    assert verdict.splits == 0


def test_unknown_has_a_reason() -> None:
    """Three runs that no small input shows, because a far band needs more rows than the search tries."""
    verdict = prove(mask("mask far = k <= q < k + 2 or k + 40 <= q < k + 60 or k + 80 <= q < k + 90"))
    assert verdict == Unknown("a column has more than two masked runs that the facts do not rule out")


BANDS = "mask m = not (2 <= q < 2 + {0}) and not (4 <= q < 4 + {0}) and not (6 <= q < 6 + {0})"


@pytest.mark.parametrize("how", ["input a : int per key where {}", "input a : int per key\nassume {}"])
def test_counterexamples_obey_facts_about_every_key(how: str) -> None:
    """Where a[k] leaves no band, or one band that swallows the others, no key has three masked runs."""
    fn = mask(how.format("a[k] <= 0 or a[k] >= 4") + "\n" + BANDS.format("a[k]"))
    assert isinstance(prove(fn), Unknown)
    assert isinstance(prove(mask(how.format("a[k] <= 0 or a[k] >= 1") + "\n" + BANDS.format("a[k]"))), Refuted)


def test_counterexamples_obey_facts_about_a_scalar_and_every_key() -> None:
    verdict = prove(mask("input w : int where w <= nk - 1 - k or w >= 4\n" + BANDS.format("w")))
    assert isinstance(verdict, Unknown)


def test_facts_may_read_what_is_declared_later() -> None:
    """The search draws one input after the other; a divisor may be drawn before it is known to be one."""
    facts = "input a : int per key where a[k] <= c[k], a[k] // b >= 0\ninput c : int per key\ninput b : int where b >= 1\n"
    verdict = prove(mask(facts + BANDS.format("a[k]") + " and k < c[k] + b"))
    assert isinstance(verdict, Refuted)


def test_block_tables_do_not_disturb_the_search_for_counterexamples() -> None:
    bands = "(k <= q < k + 1 or k + 2 <= q < k + 3 or k + 4 <= q < k + 5)"
    verdict = prove(mask(f"input tb : bool per block(3, 2)\nmask m = tb[q // 3, k // 2] and {bands}"))
    assert isinstance(verdict, Refuted)
    assert verdict.counterexample.text == "n = 6, key 0: masked rows 1 | 3 | 5 (seen by 0, 2, 4)"
    with pytest.raises(MaskcError, match=r"example: kind = 0 -1 0: key 0 is seen by rows 0 and 2"):
        prove(
            mask("input tb : bool per block(1, 1)\ninput kind : int per key\nmask m = tb[q // 1, k // 1] and kind[q] == kind[k]")
        )
