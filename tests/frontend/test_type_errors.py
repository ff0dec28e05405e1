"""Every error of names, types and units: its code, the exact place, the help line."""

from __future__ import annotations

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from tests.frontend.marked import assert_errors, errors_of

DOC = "input doc : segments\n"
TWO = "input doc : segments\ninput image : spans within doc\n"

ONE = [
    # M101 names
    ("input window : int\nmask m = k <= q < k + «windw»", "M101", "did you mean `window`?"),
    ("mask m = k <= «q_idx»", "M101", "the row is called `q`"),
    ("mask m = «kv_idx» <= q", "M101", "the key is called `k`"),
    ("mask m = «b» == 0 or k <= q", "M101", "one batch item"),
    ("mask m = k <= q and «True»", "M101", "did you mean `true`?"),
    ("mask m = «xyz» <= q", "M101", "declare it"),
    (DOC + "mask m = same(«dok»)", "M101", "did you mean `doc`?"),
    (DOC + "mask m = k in «dok»", "M101", "did you mean `doc`?"),
    (DOC + "mask m = «dok».start[k] <= q", "M101", "did you mean `doc`?"),
    (DOC + "mask m = «dok»[k] == doc[q]", "M101", "did you mean `doc`?"),
    (DOC + "input p : int per «dok»\nmask m = doc[k] == p[k]", "M101", "did you mean `doc`?"),
    ("input p : int per «keys»\nmask m = k < p[k]", "M101", "did you mean `key`?"),
    ("input p : bool per «block»\nmask m = p[k]", "M101", "per block(128, 128)"),
    ("input image : spans within «dok»\nmask m = same(image)", "M101", ""),
    ("let near(a, b) = abs(a - b) < 8\nmask m = «neer»(q, k)", "M101", "did you mean `near`?"),
    ("let f(t) = t < «w»\nmask m = k <= q", "M101", ""),
    # M102 a set needs a token
    (DOC + "mask m = «doc.start» <= k <= q", "M102", "`doc.start[k]` or `doc.start[q]`"),
    (DOC + "mask m = «doc» == 1", "M102", "same(doc)"),
    (DOC + "input p : int per key where p[k] <= «doc.len»\nmask m = same(doc) and k < p[k]", "M102", ""),
    (DOC + "input p : int per doc where p <= «doc.pos»\nmask m = same(doc) and k < p[k]", "M102", "doc.len"),
    (TWO + "input p : int per image where p <= «doc.len»\nmask m = same(doc) and k < p[k]", "M102", ""),
    # M103 a vector needs an index
    (DOC + "input p : int per doc\nmask m = same(doc) and k < «p»", "M103", "write `p[k]`"),
    ("input p : int per row\nmask m = k < «p»", "M103", "write `p[q]`"),
    ("input p : bool per head\nmask m = k <= q or «p»", "M103", "write `p[h]`"),
    ("input keep : bool per block(64, 32)\nmask m = «keep»", "M103", "keep[q // 64, k // 32]"),
    # M104 attributes
    (DOC + "mask m = doc.«strat»[k] <= q", "M104", "did you mean `start`?"),
    (DOC + "mask m = doc.«id»[k] == 0", "M104", "`doc[k]`"),
    (DOC + "mask m = doc.«xyz»[k] == 0", "M104", "`doc.start`"),
    # M105 indices
    ("input s : bool per head\nmask m = s[«k»]", "M105", "write `s[h]`"),
    ("input s : bool per head\nmask m = s[«0»]", "M105", "write `s[h]`"),
    ("input s : int per head\nmask m = k <= q < k + s[«h - 1»]", "M105", "write `s[h]`"),
    ("input s : int per key\nmask m = s[«h»] == 0", "M105", "use `k` or `q`"),
    ("input s : int per key\nmask m = s[«q - k»] == 0", "M105", "use `k` or `q`"),
    (DOC + "mask m = doc[«doc[k]»] == 0", "M105", ""),
    (DOC + "mask m = doc.start[«q // 4»] == 0", "M105", ""),
    (DOC + "mask m = «doc[q, k]» == 0", "M105", ""),
    (DOC + "mask m = «doc.len[k]» in doc", "M105", ""),
    ("input w : int\nmask m = «w»[k] == 0", "M105", "write `w`"),
    ("let f(t) = t < 3\nmask m = «f»[k]", "M105", "write `f(k)`"),
    # M106 numbers and conditions
    ("mask m = «q»", "M106", "compare it"),
    ("mask m = «k + 1» and k <= q", "M106", ""),
    ("mask m = not «k»", "M106", ""),
    (DOC + "mask m = «same(doc)» + 1 <= q", "M106", "if ... then"),
    (DOC + "mask m = «same(doc)» == 1", "M106", ""),
    (DOC + "mask m = «same(doc) < (k <= q)»", "M106", "=="),
    ("mask m = if «k» then true else false", "M106", ""),
    ("mask m = «if k <= q then true else 3»", "M106", ""),
    ("const A = «true»\nmask m = k < A", "M106", ""),
    # M107 units side by side
    (DOC + "mask m = «doc[k] < q»", "M107", "did you mean `doc.start[k]`?"),
    (DOC + "mask m = «q >= doc[k]»", "M107", "did you mean `doc.start[k]`?"),
    (DOC + "mask m = same(doc) and «doc.pos[k] < doc[q]»", "M107", "did you mean `doc.pos[q]`?"),
    (DOC + "mask m = same(doc) and «k < doc.len[k]»", "M107", "did you mean `doc.end[k]`?"),
    (DOC + "mask m = same(doc) and «doc.pos[k] <= q»", "M107", "did you mean `k`?"),
    (DOC + "mask m = 0 <= «doc[k] <= q» < nq", "M107", ""),
    (TWO + "mask m = «doc[k] == image[q]»", "M107", ""),
    ("mask m = «q // 4 <= k»", "M107", ""),
    ("mask m = «q - k < k // 2»", "M107", ""),
    (DOC + "mask m = min(k, «doc[k]») <= q", "M107", ""),
    (DOC + "mask m = «(if k < 5 then q else doc.pos[q])» < 8", "M107", ""),
    # M108 arithmetic on units
    ("mask m = «q + k» < 100", "M108", "`q - k`"),
    (DOC + "mask m = «doc[k] + doc[q]» < 3", "M108", ""),
    (DOC + "mask m = «doc[k] + k» < 3", "M108", ""),
    (DOC + "mask m = «doc.len[k] - q» < 3", "M108", ""),
    (TWO + "mask m = «doc[k] - image[k]» < 3", "M108", ""),
    # M109, M110 names
    ("const W = 4\ninput «W» : int\nmask m = q < W", "M109", ""),
    ("mask m = k <= q\nmask «m» = k < q", "M109", ""),
    ("let f(a, «a») = a < 3\nmask m = f(q)", "M109", ""),
    ("input «q» : int\nmask m = k <= q", "M110", ""),
    ("let «nk» = 3\nmask m = k <= q", "M110", ""),
    ("const «min» = 3\nmask m = k <= q", "M110", ""),
    ("let f(«k») = k < 3\nmask m = k <= q", "M110", ""),
    ("input «scale» : int\nmask m = k <= q < k + scale", "M110", ""),
    ("input «validate» : bool per key\nmask m = validate[k]", "M110", ""),
    ("input «head» : segments\nmask m = same(head)", "M110", ""),
    # M111 circles
    ("let «a» = b or k <= q\nlet b = a\nmask m = b", "M111", ""),
    ("let «a» = a\nmask m = a", "M111", ""),
    ("const «A» = B\nconst B = A + 1\nmask m = k < B", "M111", ""),
    ("let «f»(t) = f(t - 1)\nmask m = f(q)", "M111", ""),
    ("mask «m» = k <= q and m", "M111", ""),
    ("input a : spans within «a»\nmask m = same(a)", "M111", ""),
    # M112 constants
    ("input n : int\nconst W = «n» + 1\nmask m = k <= q < k + W + n", "M112", "other constants"),
    ("const W = «q»\nmask m = k <= W", "M112", ""),
    ("mask m = k <= «99999999999»", "M112", "2147483647"),
    ("const A = 2000000000\nconst B = «A + A»\nmask m = k <= B", "M112", ""),
    ("input keep : bool per block(«0», 128)\nmask m = keep[q // 1, k // 128]", "M112", ""),
    ("input w : int = «nq»\nmask m = k <= w", "M112", ""),
    ("const B = «x»\ninput t : bool per block(B, 9)\ninput x : int\nmask m = k < x and t[q // 9, k // 9]", "M112", ""),
    # M113 divisors
    ("input b : int\nmask m = q // «b» >= k // b", "M113", "where b >= 1"),
    ("input b : int where b >= 0\nmask m = q % «b» >= k", "M113", "where b >= 1"),
    ("input b : int\ninput x : int per key where b >= 1\nmask m = q // «b» == k // b and k < x[k]", "M113", "where b >= 1"),
    ("mask m = q // «0» >= k", "M113", ""),
    ("mask m = q // «(1 - 3)» >= k", "M113", ""),
    ("mask m = q // «k» >= k", "M113", "name it"),
    (DOC + "mask m = same(doc) and q % «doc.len[k]» >= k", "M113", "name it"),
    # M114 functions
    ("mask m = «abs» <= k", "M114", "abs(q - k)"),
    ("mask m = «abs(q, k)» < 3", "M114", ""),
    ("mask m = «min(q)» < 3", "M114", ""),
    (DOC + "mask m = «first(doc)»", "M114", "k in first(doc)"),
    ("let near(a, b) = abs(a - b) < 8\nmask m = «near(q)»", "M114", "near(a, b)"),
    ("let near(a, b) = abs(a - b) < 8\nmask m = «near»", "M114", "near(a, b)"),
    ("let c = k <= q\nmask m = «c(q)»", "M114", "write `c`"),
    ("input p : int per key\nmask m = «p(k)» < q", "M114", "write `p[k]`"),
    # M115 unused inputs
    ("input «doc» : segments\nmask m = k <= q", "M115", ""),
    ("input «a» : int\nassume a >= 1\nmask m = k <= q", "M115", ""),
    # M116 sets
    ("input doc : int per key\nmask m = same(«doc»)", "M116", ""),
    (DOC + "mask m = «same(doc[k])»", "M116", "same(doc)"),
    ("input a : int\nmask m = k in «a»", "M116", ""),
    ("input a : int\nmask m = «a».start[k] <= q", "M116", ""),
    ("input a : int\ninput p : int per «a»\nmask m = p[k] <= a", "M116", ""),
    ("input a : int\ninput s : spans within «a»\nmask m = same(s) and k < a", "M116", ""),
    ("mask m = same(«q»)", "M116", ""),
    ("mask m = k in «first»", "M116", "input doc : segments"),
    ("input a : int\ncheck isolated by «a»\nmask m = k < a", "M116", ""),
    # M120 block tables
    ("input t : bool per block(128, 128)\nmask m = k <= q or «t[q // 128, k // 128]»", "M120", "`and`"),
    ("input t : bool per block(128, 128)\nmask m = not «t[q // 128, k // 128]»", "M120", "`and`"),
    ("input t : bool per block(128, 128)\nmask m = «t[q // 64, k // 128]»", "M120", "t[q // 128, k // 128]"),
    ("input t : bool per block(128, 128)\nmask m = «t[k // 128, q // 128]»", "M120", "t[q // 128, k // 128]"),
    ("input t : bool per block(128, 128)\nmask m = «t[q // 128]»", "M120", "t[q // 128, k // 128]"),
    ("input t : bool per block(9, 9)\nlet u = «t[q // 9, k // 9]»\nmask m = if u then true else false", "M120", ""),
    ("input t : bool per block(9, 9)\nassume «t[q // 9, k // 9]»\nmask m = t[q // 9, k // 9]", "M120", ""),
    # M121 facts
    ("input e : int per key where «e[k] > q»\nmask m = k <= q < e[k]", "M121", ""),
    (DOC + "assume «same(doc)»\nmask m = same(doc)", "M121", ""),
    (DOC + "input p : int per doc where «p <= doc.end[k]»\nmask m = same(doc) and k < p[k]", "M121", "doc.len"),
    ("input e : int per key\ninput c : int per head where «c <= e[k]»\nmask m = k <= q < e[k] + c[h]", "M121", ""),
    # M122 rows and keys
    ("input a : sorted int per row\ninput b : int per key\nmask m = a[q] == b[k] and «b[q]» > 0", "M122", "per row"),
    ("input a : sorted int per row\ninput b : int per key\nmask m = «a[k]» == b[k]", "M122", "per key"),
    ("assume nq <= nk\ninput b : int per key\nmask m = «b[q]» == b[k]", "M122", "per row"),
    # M123 defaults
    ("input w : int = «0» where w >= 1\nmask m = k <= q < k + w", "M123", ""),
    ("input w : int per key = «0»\nmask m = k <= q < w[k]", "M123", ""),
    (DOC.replace("segments", "segments = «3»") + "mask m = same(doc)", "M123", ""),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "code", "help_part"), ONE, ids=[c[0].replace("\n", "; ") for c in ONE])
def test_one_error(marked: str, code: str, help_part: str) -> None:
    assert_errors(parse_text, marked, code, help_part)


def test_all_errors_of_an_expression_in_one_run() -> None:
    marked = DOC + "mask m = «q + k» < 3 and «doc.start» <= k and not «wind» and same(«doc2»)"
    assert_errors(parse_text, marked, "M108 M102 M101 M101")


def test_an_error_in_a_let_is_reported_once() -> None:
    assert_errors(parse_text, "let a = «q + k»\nmask m = a < 3 and a < 4\nmask n = a < 5", "M108")


def test_an_error_that_depends_on_arguments_says_where_it_was_used() -> None:
    (error,) = assert_errors(parse_text, "let next(t) = «t + k»\nmask a = next(1) <= q\nmask b = next(q) <= 3", "M108")
    assert ("used by", "`next(q)` at <text>:3:10") in error.notes


@pytest.mark.parametrize(
    "nested", ["({})", "not {}", "(if q < 3 then {} else k < q)", "f({})", "(k < q or {})", "({} and q < k)"]
)
def test_the_deepest_legal_nesting(nested: str) -> None:
    """Just below the limits nothing overflows; above them there is a coded error."""
    codes = set()
    for depth in range(30, 110):
        text = "q <= k"
        for _ in range(depth):
            text = nested.format(text)
        found = {d.code for d in errors_of(parse_text, f"let f(t) = t or k < q\nmask m = {text}\nmask n = f(k < q)")}
        assert found <= {"M007", "M125"}
        codes |= found
    assert "M007" in codes


def test_reserved_call_keywords_are_free_for_lets_and_masks() -> None:
    names = [m.name for m in parse_text("let scale = k <= q\nmask batch = scale\nmask v = scale").masks]
    assert names == ["batch", "v"]


def test_doubling_definitions_are_refused() -> None:
    lets = "let a0(t) = t + 1\n" + "".join(f"let a{i + 1}(t) = a{i}(a{i}(t)) - a{i}(t)\n" for i in range(40))
    with pytest.raises(MaskcError) as e:
        parse_text(lets + "mask m = a40(k) <= q")
    assert {d.code for d in e.value.diagnostics} == {"M125"}
    lets = "let a0 = k\n" + "".join(f"let a{i + 1} = min(a{i}, a{i})\n" for i in range(40))
    with pytest.raises(MaskcError) as e:
        parse_text(lets + "mask m = a40 <= q")
    assert {d.code for d in e.value.diagnostics} == {"M125"}
    lets = "let a0 = k\n" + "".join(f"let a{i + 1} = min(a{i}, {i})\n" for i in range(400))
    with pytest.raises(MaskcError) as e:
        parse_text(lets + "mask m = a400 <= q")
    assert {d.code for d in e.value.diagnostics} == {"M125"}


def test_unused_definitions_are_warnings() -> None:
    file = parse_text("const A = 3\nlet b = k <= q\nlet c(t) = t < 1\nmask m = k <= q")
    assert [(w.code, w.span.text if w.span else "") for w in file.warnings] == [("W101", "A"), ("W101", "b"), ("W101", "c")]


@pytest.mark.parametrize(
    ("text", "guilty"),
    [
        ("input w : int\nmask m = q - k <= w", "q - k <= w"),
        ("input w : int\nmask m = q < k + w and k >= 3", "q < k + w"),
        ("input w : int\nmask m = k + w > q", "k + w > q"),
        ("input w : int\nmask m = k <= q < k + w", None),
        ("input w : int\nmask m = abs(q - k) <= w", None),
        ("input w : int\nmask m = k - q <= w", None),
        ("input w : int\ninput doc : segments\nmask m = q < k + w and same(doc)", None),
        ("input e : int per key\nmask m = q < e[k]", None),
        ("mask m = q < 2 * k", None),
    ],
)
def test_one_sided_windows_are_warned_about(text: str, guilty: str | None) -> None:
    found = [(w.code, w.span.text if w.span else "") for w in parse_text(text).warnings]
    assert found == ([("W102", guilty)] if guilty else [])


def test_a_file_of_lets_is_a_library() -> None:
    file = parse_text("input doc : segments\nlet inside = same(doc)\nconst A = 3")
    assert file.masks == ()
    assert file.warnings == ()


@pytest.mark.parametrize(
    "text",
    [
        "let f(s) = same(s) and k <= q\n" + DOC + "mask m = f(doc)",
        "let f(s) = s.start[q] <= k and s[q] == s[k] and k in s and q in last(s)\n" + DOC + "mask m = f(doc)",
        "let at(v, t) = v[t]\ninput e : int per key\nmask m = q < at(e, k)",
        "let inner(s) = same(s)\nlet outer(s) = inner(s)\n" + DOC + "mask m = outer(doc)",
    ],
)
def test_sets_and_vectors_may_be_arguments(text: str) -> None:
    assert len(parse_text(text).masks) == 1


@pytest.mark.parametrize(
    "text",
    [
        DOC + "mask m = same(doc) and doc.pos[k] < doc.len[k] // 2",
        DOC + "mask m = same(doc) and doc[q] - doc[k] <= 1 and doc[k] + 1 >= 0",
        DOC + "mask m = same(doc) and q - doc.start[q] >= doc.pos[k] and doc.start[k] + doc.len[k] == doc.end[k]",
        "mask m = (q // 4) * 4 <= k and q // 4 - k // 4 < 2 and q // 4 + 1 > k // 4",
        "mask m = nk - 1 - k <= q and -k + q < 9 and q % 4 == k % 4",
        "mask m = max(q - k, k - q) <= 3 and min(q, 7) <= k",
        "mask m = (if k < 4 then k else 4) <= q",
        "input b : int where 1 <= b <= nk\nmask m = q // b == k // b",
        "input b : int\nassume b > 0\nmask m = q // b == k // b",
        DOC + "input p : int per doc\ninput r : int per doc where 0 <= r <= p <= doc.len\nmask m = same(doc) and k < r[k]",
        "input e : int per key where e > k\nmask m = k <= q < e[k]",
        "input b : bool per key\nmask m = b[q] == b[k]",
        "input seg : segments\nmask m = seg[q] == seg[k]",
    ],
)  # fmt: skip
def test_sensible_units_pass(text: str) -> None:
    assert len(parse_text(text).masks) == 1
