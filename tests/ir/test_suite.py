"""Every mask of the suite: proved or refused as its name says, as the program that a golden file shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_file, parse_text
from maskc.ir.checks import run_checks
from maskc.ir.lower import needs_hole_free
from maskc.ir.nodes import Check, Compare, MaskFn, Size
from maskc.ir.printer import print_fn, print_program
from maskc.ir.reader import read_fn, read_program
from maskc.ir.reference import Env, visible
from maskc.ir.symbolic import prove
from maskc.ir.verdict import Proven, Refuted

SUITE = sorted((Path(__file__).parent.parent / "data" / "suite").glob("*.mask"))
FORMS = {  # vectors beside the causal flag ("C")
    "01_full": "",
    "02_causal": "C",
    "03_sliding_window": "C lts",
    "04_doc_causal": "C lts",
    "05_doc_full": "lts ute",
    "06_share_question": "C lts",
    "07_global_window": "lts uts ute",
    "08_causal_blockwise": "C lts uts ute",
    "09_doc_prefix": "lts ute",
    "10_prefix_lm": "ute",
    "11_qk_sparse": "C ute",
    "12_random_eviction": "C lts",
    "13_doc_window": "C lts",
    "14_sinks_window": "C lts",
    "15_chunked": "C lts",
    "16_gemma3_global": "lts ute",
    "17_gemma3_local": "lts ute",
    "18_block_causal": "lts ute",
    "20_block_diffusion": "lts lte ute",
    "21_prefix_tree": "C lts",
    "22_transfusion": "lts ute",
    "23_fixed_sparse": "C lts",
    "24_longformer_causal": "C lts",
    "25_key_padding": "C lts",
    "26_left_padding": "C lts",
    "27_bottom_right": "ute",
    "28_duo_heads": "C lts",
    "29_fid": "lts lte ute",
    "31_symmetric_window_doc": "lts ute",
    "32_row_style": "C lts",
    "34_teacher_forcing_interleaved": "lts ute",
    "35_parallel_drafts_dflash": "lts ute",
    "37_cross_pairs": "lts ute",
    "94_packed_blockwise_causal": "C lts uts ute",
}
REFUSED = ("90_bad_dilated", "91_bad_scatter", "92_bad_packed_block_diffusion")


def mask(stem: str) -> MaskFn:
    path = next(p for p in SUITE if p.stem == stem)
    return parse_file(path).pick(None)


def test_every_file_is_expected() -> None:
    assert {p.stem for p in SUITE} == {*FORMS, *REFUSED}


@pytest.mark.parametrize("stem", FORMS)
def test_proved(stem: str, golden: Callable[[str, str], None]) -> None:
    fn = mask(stem)
    assert read_fn(print_fn(fn)) == fn
    verdict = prove(fn)
    assert isinstance(verdict, Proven)
    program = verdict.program
    assert read_program(print_program(program)) == program
    assert " ".join(("C" if program.causal else "", *program.vectors)).strip() == FORMS[stem]
    golden(f"ir/{stem}.txt", print_fn(fn) + print_program(program))


@pytest.mark.parametrize("stem", ["90_bad_dilated", "91_bad_scatter"])
def test_inadmissible(stem: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(MaskcError) as caught:
        prove(mask(stem))
    (d,) = caught.value.diagnostics
    assert d.code == "M201"
    assert d.span is not None
    assert [label for label, _ in d.notes] == ["example"]
    golden(f"ir/{stem}.txt", d.render().replace(d.span.source.path, f"{stem}.mask") + "\n")


def test_refuted_with_a_real_column() -> None:
    """The column is confirmed by the oracle and no smaller size is tried in vain."""
    fn = mask("92_bad_packed_block_diffusion")
    verdict = prove(fn)
    assert isinstance(verdict, Refuted)
    found = verdict.counterexample
    inputs = dict(found.inputs)
    ends = [0]
    for length in inputs["doc"].strip("[]").split(", "):
        ends.append(ends[-1] + int(length))
    doc = list(pairwise(ends))
    env = Env(found.nq, found.nk, {"L": int(inputs["L"])}, {}, {"doc": doc})
    assert found.nk == 8 == 2 * env.scalars["L"]
    masked = [not visible(fn, env, q, found.column) for q in range(found.nq)]
    assert masked == [any(lo <= q < hi for lo, hi in found.masked_runs) for q in range(found.nq)]
    assert len(found.masked_runs) == 3
    assert f"n = 8, L = 4, doc = {inputs['doc']}, key {found.column}: masked rows " in found.text


CAUSAL = {s for s, form in FORMS.items() if form.startswith("C")}
NOT_ISOLATED = {"21_prefix_tree"}  # its `end` says nothing of keys outside every doc
EMPTY_ROWS = {
    "03_sliding_window": "nq > nk + window",
    "07_global_window": "nq > nk + window",
    "11_qk_sparse": "dropped tokens",
    "12_random_eviction": "nq > nk",
    "23_fixed_sparse": "nq > nk",
    "25_key_padding": "length 0",
    "26_left_padding": "padding",
    "34_teacher_forcing_interleaved": "tokens in neither span",
    "37_cross_pairs": "a pair without keys",
}


@pytest.mark.parametrize("stem", FORMS)
def test_claims(stem: str) -> None:
    fn = mask(stem)
    docs = [d.name for d in fn.inputs if d.name in ("doc", "sample")]
    checks = (Check("causal"), Check("no_empty_row"), *(Check("isolated", d) for d in docs))
    results = {r.check: r for r in run_checks(replace(fn, checks=checks))}
    wanted = {
        Check("causal"): "proved" if stem in CAUSAL else "refuted",
        Check("no_empty_row"): "refuted" if stem in EMPTY_ROWS else "proved",
        **{Check("isolated", d): "refuted" if stem in NOT_ISOLATED else "proved" for d in docs},
    }
    assert {c: r.status for c, r in results.items()} == wanted
    assert all(r.detail for r in results.values() if r.status == "refuted")


def test_rectangles_may_be_ruled_out() -> None:
    fn = replace(mask("03_sliding_window"), checks=(Check("no_empty_row"),))
    (result,) = run_checks(fn)
    assert result.detail == "nq = 2, nk = 1, window = 1, row 1 sees no key (if rows and keys are one sequence: `assume nq == nk`)"
    square = replace(fn, assumes=(Compare("==", Size("nq"), Size("nk")),))
    assert [r.status for r in run_checks(square)] == ["proved"]


@pytest.mark.parametrize(
    ("declared", "condition", "status"),
    [
        ("doc : segments", "doc.pos[k] >= 0", "proved"),
        ("doc : segments", "doc.pos[k - 1] >= 0", "refuted"),
        ("image : spans", "image.pos[k] >= 0", "refuted"),
        ("x : int per key", "(x[k + 1] < 0 or x[k + 1] >= 0)", "refuted"),
        ("x : int per key", "(x[k] < 0 or x[k] >= 0)", "proved"),
    ],
)
def test_reads_outside_leave_rows_empty(declared: str, condition: str, status: str) -> None:
    """A comparison that reads outside is false, and so is its negation: that no row breaks it says nothing."""
    fn = parse_text(f"input {declared}\nmask m = k <= q and {condition}\ncheck no_empty_row").pick(None)
    assert [r.status for r in run_checks(fn)] == [status]


@pytest.mark.parametrize(
    ("facts", "condition"),
    [
        ("input w : int where w >= k", "q <= w"),
        ("assume k < 3", "q < 3"),
        ("input x : int per key\nassume k < 3", "q < 3 and x[k] == x[k]"),
    ],
)
def test_facts_about_keys_say_nothing_of_rows_beyond(facts: str, condition: str) -> None:
    fn = parse_text(f"{facts}\nmask m = k >= 0 and {condition}\ncheck no_empty_row").pick(None)
    assert [r.status for r in run_checks(fn)] == ["refuted"]
    square = replace(fn, assumes=(*fn.assumes, Compare("==", Size("nq"), Size("nk"))))
    assert [r.status for r in run_checks(square)] == ["proved"]


def test_a_claim_that_fails_names_the_smallest_input() -> None:
    fn = replace(mask("06_share_question"), checks=(Check("isolated", "part"),))
    (result,) = run_checks(fn)
    assert result.status == "refuted"
    assert result.detail == "n = 2, sample = [2], part = [1, 1], row 1 sees key 0, which is not in its `part`"


def test_who_needs_hole_free_segments() -> None:
    needs = {stem: needs_hole_free(mask(stem)) for stem in FORMS}
    assert {stem: names for stem, names in needs.items() if names} == {"32_row_style": frozenset({"doc"})}
    verdict = prove(mask("29_fid"))
    assert isinstance(verdict, Proven)
    assert verdict.program.tiling == ("part",)
