"""Every syntax error: its code, the exact place, the help line."""

from __future__ import annotations

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from tests.frontend.marked import assert_errors, errors_of

ONE = [
    # slips
    ("mask m = k «=<» q", "M001", "write `<=`"),
    ("mask m = k «=>» q", "M001", "write `>=`"),
    ("mask m = k <= q «&» k >= 0", "M001", "write `and`"),
    ("mask m = k <= q «&&» k >= 0", "M001", "write `and`"),
    ("mask m = k <= q «|» k >= 0", "M001", "write `or`"),
    ("mask m = k <= q «||» k >= 0", "M001", "write `or`"),
    ("mask m = «!»(k <= q)", "M001", "write `not`"),
    ("mask m = «~»(k <= q)", "M001", "write `not`"),
    ("mask m = k «=» q", "M001", "write `==`"),
    ("mask m = k =«==» q", "M001", "remove one `=`"),
    ("mask m = k «<>» q", "M001", "write `!=`"),
    ("mask m = k «≤» q", "M001", "write `<=`"),
    ("mask m = k <= q «/» 2", "M001", "write `//`"),
    ("mask m = k «**» 2 <= q", "M001", "product"),
    ("mask m = k <= 1«.»5", "M001", "integers"),
    ("mask m = k <= q«;»", "M001", "no separator"),
    ("mask m = k <= q «\\»\n and k > 0", "M001", "line ends mean nothing"),
    ("mask m = k «@» q", "M001", ""),
    ("mask m = k <= q«\u00a0»and k > 0", "M001", "write a plain space"),
    ("mask m = k <= q «¤»", "M001", ""),
    ("mask m = «{»k <= q}", "M001", "group with `(`"),
    ("use a from «'»x'", "M001", "double quotes"),
    ("«//» causal\nmask m = k <= q", "M006", "comments begin with `#`"),
    ("«def» m(b, h, q, k):", "M006", "no functions"),
    ("mask m = lambda «q», k: q >= k", "M001", "no functions"),
    ("mask m = return «k» <= q", "M001", "no functions"),
    ("mask m = k <= q «if» k > 0 else true", "M001", "(if ..."),
    ("mask m«:» k <= q", "M001", "write `mask m = ...`"),
    ("input window «=» 4", "M001", "`input window : int = ...`"),
    # incomplete
    ("mask m = k <= q «and»", "M002", "must follow"),
    ("mask m = k <= q «and»\n# the end\n", "M002", "must follow"),
    ("mask m = «not»", "M002", "must follow"),
    ("mask m «=»", "M002", "must follow"),
    ("mask «m»", "M002", ""),
    ("«mask»", "M002", ""),
    ("mask m = if k <= q then «true»", "M002", ""),
    ("mask m = («)»", "M002", ""),
    ("mask m = k <= q and «or» k > 0", "M002", ""),
    ("input «x»", "M002", ""),
    ("input x «:»", "M002", ""),
    ("let f«(»a,", "M003", ""),
    ("mask m = k < «*» 2", "M002", ""),
    ("mask m = k <= «not» q", "M002", ""),
    ("mask m = k <= q and «if» k then true else false", "M001", "(if ..."),
    # brackets
    ("mask m = «(»k <= q", "M003", "add the matching `)`"),
    ("mask m = doc«[»k == 0", "M003", "add the matching `]`"),
    ("mask m = (k <= q)«)»", "M003", "remove it"),
    ("mask m = doc[k«)» == 0", "M003", "write `]`"),
    ("mask m = (k <= q«]»", "M003", "write `)`"),
    # reserved words
    ("input «mask» : int", "M004", "try `mask_`"),
    ("input «where» : int", "M004", "try `where_`"),
    ("let f(«if») = 3", "M004", ""),
    ("mask m = k <= q and «mask»", "M004", ""),
    ("mask m = «use» + 1 < k", "M004", ""),
    ("mask m = k < «per»", "M004", ""),
    # types and checks
    ("input doc : «segment»", "M005", "did you mean `segments`?"),
    ("input doc : «ints»", "M005", "did you mean `int`?"),
    ("input doc : «tensor»", "M005", "write `segments`"),
    ("input doc : segments within a per «key»", "M005", ""),
    ("input doc : int within «a»", "M005", ""),
    ("input x : «bool»", "M005", "write `bool per key`"),
    ("input x : «sorted int»", "M005", "write `sorted int per row`"),
    ("input x : «sorted» bool per key", "M005", "sorted int"),
    ("input x : «int per block(1, 2)»", "M005", "bool per block"),
    ("input x : int «pre» key", "M005", "did you mean `per`?"),
    ("check «casual»", "M005", "did you mean `causal`?"),
    ("«check isolated»", "M005", "check isolated by doc"),
    ("check causal «doc»", "M005", "check isolated by doc"),
    ("mask m = k in «frist»(doc)", "M005", "did you mean `first`?"),
    # misspelt words
    ("«mas» m = k <= q", "M006", "did you mean `mask`?"),
    ("«k» <= q", "M006", "a file is made of"),
    ("mask m = k <= q «adn» k >= 0", "M006", "did you mean `and`?"),
    ("mask m = k <= q\n«inputt» w : int", "M006", "did you mean `input`?"),
    ("mask m = if k <= q «them» true else false", "M006", "did you mean `then`?"),
    # the rest
    ("use a from «\"x»", "M008", "close it"),
    ("use a «form» \"x\"", "M006", "did you mean `from`?"),
    ("input w : int «>=» 1", "M001", "follow `where`"),
    ("mask m = doc.start«(»k) <= q", "M001", "brackets"),
    ("input w «int»", "M001", ""),
    ("mask «=» k <= q", "M001", ""),
    ("let f(«)» = 3", "M001", ""),
    ("mask m = k «q»", "M001", ""),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "code", "help_part"), ONE, ids=[c[0] for c in ONE])
def test_one_error(marked: str, code: str, help_part: str) -> None:
    assert_errors(parse_text, marked, code, help_part)


def test_all_errors_of_a_file_in_one_run() -> None:
    marked = """
# three broken declarations, one that is fine
input doc : «segment»
mask a = k «=<» q
let fine = k <= q
mask b = fine and («not»
mask c = fine and «unknown»
"""
    assert_errors(parse_text, marked, "M005 M001 M002 M101")


def test_names_of_broken_declarations_are_not_unknown() -> None:
    assert_errors(parse_text, "input w : int «>=» 1\nmask m = k <= q < k + w", "M001")


def test_broken_names_are_still_meant() -> None:
    text = "input doc : segment\nmask m = same(dok)"
    assert [(d.code, d.help) for d in errors_of(parse_text, text)] == [
        ("M005", "did you mean `segments`?"),
        ("M101", "did you mean `doc`?"),
    ]


def test_a_keyword_inside_a_comment_or_string_starts_nothing() -> None:
    assert_errors(parse_text, '# mask input let\nuse causal from "std:causal"\nmask m = causal and # mask\n  k «=<» q', "M001")


@pytest.mark.parametrize(
    "text", ["(" * 5000 + "k" + ")" * 5000, "not " * 5000 + "true", "-" * 5000 + "1 < k", "1" + "+ 1" * 5000 + " < k"]
)
def test_deep_nesting_is_an_error_not_a_crash(text: str) -> None:
    found = errors_of(parse_text, f"mask m = {text}")
    assert [d.code for d in found] == ["M007"]


def test_wide_is_not_deep() -> None:
    text = "mask m = " + " and ".join(f"k != {i}" for i in range(2000))
    assert len(parse_text(text).masks[0].body.terms) == 2000  # type: ignore[union-attr]


def test_several_declarations_on_one_line() -> None:
    assert_errors(parse_text, "const A = 3 let b = k «=<» A mask m = b let c = «|» k", "M001 M001")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", "  # nothing\n\n"])
def test_an_empty_file_has_no_masks(text: str) -> None:
    assert parse_text(text).masks == ()


def test_of_a_long_line_the_part_at_fault_is_shown() -> None:
    many = " and ".join(f"q != {i}" for i in range(60))
    with pytest.raises(MaskcError) as caught:
        parse_text(f"mask m = {many} and foo and {many}")
    *_, line, carets, _ = str(caught.value).splitlines()
    assert len(line) < 180
    assert line[carets.index("^") : carets.rindex("^") + 1] == "foo"
