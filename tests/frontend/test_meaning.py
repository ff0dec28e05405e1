"""What an expression means once typed: random ones against Python's own reading, `let`s and imports by example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_file, parse_text
from maskc.ir import nodes as ir
from maskc.ir.reference import Env, visible
from tests.frontend.marked import assert_errors, errors_of
from tests.frontend.programs import HEADER, USED, Pair, conditions

small_ints = st.integers(-4, 4)


@settings(max_examples=200, deadline=None)
@given(conditions(), st.tuples(small_ints, small_ints, st.integers(1, 4)), st.data())
def test_expressions_mean_what_python_says(expression: Pair, scalars: tuple[int, int, int], data: st.DataObject) -> None:
    """Same operators, same precedence, same rounding: the text is read by maskc and by Python."""
    text = f"{HEADER}mask m = {expression.mask}\nmask other = {USED}"
    refused = {d.code for d in errors_of(parse_text, text)}
    assert refused <= {"M112"}  # constants beyond 32 bits
    assume(not refused)
    fn = parse_text(text).masks[0]
    nq, nk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    f = data.draw(st.lists(small_ints, min_size=nq, max_size=nq))
    g = data.draw(st.lists(small_ints, min_size=nk, max_size=nk))
    t = data.draw(st.lists(st.booleans(), min_size=nk, max_size=nk))
    x, y, b = scalars
    env = Env(nq, nk, {"x": x, "y": y, "b": b}, {"f": f, "g": g, "t": t})
    for q in range(nq):
        for k in range(nk):
            names: dict[str, Any] = {"x": x, "y": y, "b": b, "f": f, "g": g, "t": t, "nq": nq, "nk": nk, "q": q, "k": k}
            names |= {"small": x <= g[k], "twice": lambda v: v + v, "near": lambda v, w: abs(v - w) <= 2}
            assert visible(fn, env, q, k) == eval(expression.python, names), (q, k)


def body(text: str) -> ir.Pred:
    return parse_text(text).masks[-1].body


@pytest.mark.parametrize(
    ("with_let", "without"),
    [
        ("let c = k <= q\nmask m = c and q < 9", "mask m = k <= q and q < 9"),
        ("let w = q - k\nmask m = 0 <= w < 4", "mask m = 0 <= q - k < 4"),
        ("let near(a, b) = a - b < 4\nmask m = near(q, k)", "mask m = q - k < 4"),
        ("let f(t) = t // 2\nlet g(t) = f(t + 1)\nmask m = g(q) >= f(k)", "mask m = (q + 1) // 2 >= k // 2"),
        ("const A = 2 * B + 1\nconst B = 3\nmask m = k <= q < k + A", "mask m = k <= q < k + 7"),
        ("const A = if 2 < 1 then 5 else max(1, 6)\nmask m = q < A", "mask m = q < 6"),
        ("mask a = k <= q\nmask b = a and q < 9", "mask b = k <= q and q < 9"),
        ("mask b = a and q < 9\nmask a = k <= q\nmask c = b", "mask b = k <= q and q < 9"),
        ("mask m = (q < 1 or q < 2) or q < 3", "mask m = q < 1 or q < 2 or q < 3"),
        ("mask m = +q >= +1", "mask m = q >= 1"),
        ("mask m = not not (q < 1)", "mask m = q < 1"),
    ],
)
def test_definitions_are_substituted(with_let: str, without: str) -> None:
    assert body(with_let) == body(without)


def test_a_let_does_not_capture_the_names_of_its_user() -> None:
    """Parameters are bound to values, not to texts."""
    assert body("let f(a) = a - 1\nlet g(a) = f(a * 2)\nmask m = g(q) < 0") == body("mask m = q * 2 - 1 < 0")


def test_where_speaks_of_items_and_tokens() -> None:
    fn = parse_text(
        "input doc : segments\ninput p : int per doc where 0 <= p <= doc.len\ninput e : int per key where e > k\n"
        "mask m = same(doc) and k < e[k] and p[k] > 0"
    ).masks[0]
    item = ir.Item("doc")
    p = ir.Field("p", item)
    facts = (ir.Compare("<=", ir.Const(0), p), ir.Compare("<=", p, ir.SegAttr("doc", "len", item)))
    assert fn.input("p").where == (ir.And(facts),)
    assert fn.input("e").where == (ir.Compare(">", ir.Field("e", ir.Col()), ir.Col()),)


def test_tables_stand_beside_the_body() -> None:
    text = "const B = 64\ninput t : bool per block(B, 2 * B)\nlet kept = t[q // B, k // 128]\nmask m = kept and k <= q and kept"
    fn = parse_text(text).masks[0]
    assert (fn.tables, fn.body, fn.input("t").block) == (("t",), ir.Compare("<=", ir.Col(), ir.Row()), (64, 128))


def test_spans_point_at_the_use_of_scalars_and_into_lets() -> None:
    fn = parse_text("input w : int\nlet near = q < k + w\nmask m = near and q < w").masks[0]
    assert isinstance(fn.body, ir.And)
    assert [t.span.text for t in fn.body.terms if t.span] == ["q < k + w", "q < w"]
    last = fn.body.terms[1]
    assert isinstance(last, ir.Compare)
    assert last.b.span is not None
    assert last.b.span.where() == "<text>:3:23"


def test_parents_come_before_children() -> None:
    text = "input p : int per part\ninput part : spans within doc\ninput doc : segments\nmask m = same(part) and k < p[k]"
    assert [d.name for d in parse_text(text).masks[0].inputs] == ["doc", "part", "p"]


def test_inputs_may_be_called_like_axes() -> None:
    fn = parse_text("input key : int per key\ninput head : int\nmask m = key[k] <= q + head").masks[0]
    assert [d.name for d in fn.inputs] == ["key", "head"]


@pytest.mark.parametrize(
    ("text", "square"),
    [
        ("mask m = k <= q", False),
        ("input doc : segments\nmask m = same(doc)", True),
        ("input drop : spans\nmask m = k in drop", True),
        ("input doc : segments\ninput e : int per key where e[k] <= doc.end[k]\nmask m = q < e[k]", True),
        ("input doc : segments\nassume nq <= nk\nmask m = same(doc)", False),
        ("input doc : segments\nassume nq == nk\nmask m = same(doc)", True),
        ("input doc : segments\ninput n : int\nassume nq == nk == n\nmask m = same(doc) and k < n", True),
        ("input a : int per key\nmask m = a[q] == a[k]", True),
        ("input a : sorted int per row\nmask m = a[q] == a[k]", True),
        ("input a : sorted int per row\ninput b : int per key\nmask m = a[q] == b[k]", False),
        ("input a : int per key\nmask m = q < a[k]", False),
        ("input s : int where nk == s + nq\ninput doc : segments\nmask m = same(doc) and k < s", False),
    ],
)
def test_square(text: str, square: bool) -> None:
    assert parse_text(text).masks[0].square is square


def test_only_the_masks_that_use_a_set_are_square() -> None:
    file = parse_text("input doc : segments\nmask a = k <= q\nmask b = same(doc) and a")
    assert [m.square for m in file.masks] == [False, True]


# ---------------------------------------------------------------- use


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "window.mask").write_text(
        "input doc : segments\ninput window : int where window >= 1\nassume nk >= 1\nconst W = 4\n"
        "let inside(t) = t - W < window\nlet near = q < k + window\nmask doc_window = same(doc) and k <= q and near\n"
    )
    return tmp_path


def test_use_brings_masks_with_their_inputs_and_assumptions(folder: Path) -> None:
    (folder / "a.mask").write_text('use doc_window from "lib/window.mask"\nmask m = doc_window and q < 9')
    fn = parse_file(folder / "a.mask").pick()
    other = parse_file(folder / "lib" / "window.mask").pick("doc_window")
    assert fn.inputs == other.inputs
    assert fn.assumes == other.assumes
    assert fn.square
    assert isinstance(fn.body, ir.And)
    assert isinstance(other.body, ir.And)
    assert fn.body.terms[:3] == other.body.terms


def test_use_brings_only_what_is_read(folder: Path) -> None:
    (folder / "a.mask").write_text('use inside, near from "lib/window.mask"\nmask m = near and inside(q)')
    assert [d.name for d in parse_file(folder / "a.mask").pick().inputs] == ["window"]


def test_use_joins_inputs_of_one_name(folder: Path) -> None:
    (folder / "a.mask").write_text(
        'use near from "lib/window.mask"\ninput window : int = 8 where window <= 64\nmask m = near and k <= q < k + window'
    )
    window = parse_file(folder / "a.mask").pick().input("window")
    assert window.default == 8
    assert [w.span.text for w in window.where if w.span] == ["window <= 64", "window >= 1"]


def test_use_of_use_and_of_the_standard_set(folder: Path) -> None:
    (folder / "b.mask").write_text('use near from "lib/window.mask"\nuse causal from "std:causal"\nlet both = near and causal')
    (folder / "a.mask").write_text('use both from "b.mask"\nmask m = both')
    assert parse_file(folder / "a.mask").pick().body == body("input window : int\nmask m = q < k + window and k <= q")


@pytest.mark.parametrize("last", ["mask m = x{} <= q", "mask m = x{}(k) <= q"])
def test_names_may_stand_in_any_order(last: str) -> None:
    """Long chains of names, each above the one it rests on. Chains of macros have a limit, which is an error and no crash."""
    n = 1500
    parameter = "(k)" if "(" in last else ""
    chain = "\n".join(f"let x{i + 1}{parameter.replace('k', 't')} = x{i}{parameter.replace('k', 't')} + 1" for i in range(n))
    lines = [*reversed(chain.splitlines()), f"let x0{parameter.replace('k', 't')} = {'t' if parameter else 'k'}"]
    text = "\n".join([last.format(n), *lines])
    if parameter:
        assert [d.code for d in errors_of(parse_text, text)] == ["M125"]
    else:
        assert parse_text(text).pick().body == body(f"mask m = k + {n} <= q")


def test_parents_stand_before_children() -> None:
    chain = "\n".join(f"input s{i + 1} : segments within s{i}" for i in reversed(range(1200)))
    inputs = parse_text(f"{chain}\ninput s0 : segments\nmask m = same(s1200)").pick().inputs
    assert [d.name for d in inputs] == [f"s{i}" for i in range(1201)]


def test_files_may_use_files_up_to_a_depth(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.mask").write_text(f'use m from "{i + 1}.mask"\nlet n = m\nmask m{i} = n')
    errors = errors_of(parse_file, tmp_path / "0.mask")
    assert "M118" in {d.code for d in errors}


def test_an_assumption_comes_along_term_by_term(folder: Path) -> None:
    """Of `assume B >= 1 and C >= 1` what speaks of B holds wherever B is read: it divides."""
    (folder / "b.mask").write_text("input B : int\ninput C : int\nassume B >= 1 and C >= 1\nlet block(t) = t // B + C - C")
    (folder / "c.mask").write_text("input B : int\ninput C : int\nassume B >= 1 and C >= 1\nlet block(t) = t // B\nlet c = C")
    for name, wanted in (("b", ["B >= 1", "C >= 1"]), ("c", ["B >= 1"])):
        (folder / "a.mask").write_text(f'use block from "{name}.mask"\nmask m = block(q) == block(k)')
        assert [a.span.text for a in parse_file(folder / "a.mask").pick().assumes if a.span] == wanted


@pytest.mark.parametrize("where", ["", " where N >= 1"])
def test_a_divisor_that_is_given_to_another_file(folder: Path, where: str) -> None:
    """What the other file says of its own N does not count."""
    (folder / "b.mask").write_text("input N : int where N >= 1\nlet block(t, b) = t // b\nmask m = block(q, N) == k // N")
    (folder / "a.mask").write_text(f'use block from "b.mask"\ninput N : int{where}\nmask m = block(q, N) == block(k, N)')
    errors = errors_of(parse_file, folder / "a.mask")
    assert [(d.code, d.span.text) for d in errors if d.span] == ([] if where else [("M113", "N")])


USE_ERRORS = [
    ('use «nothing» from "lib/window.mask"\nmask m = nothing', "M119"),
    ('use «doc» from "lib/window.mask"\nmask m = same(doc)', "M119"),
    ('use near from «"lib/windows.mask"»\nmask m = near', "M117"),
    ('use near from «"std:nothing"»\nmask m = near', "M117"),
    ('use near from «"lib"»\nmask m = near', "M117"),
    ('use near from «"li\0b.mask"»\nmask m = near', "M117"),
    ('use near from «"loop.mask"»\nmask m = near', "M117"),
    ('use near from «"c1.mask"»\nmask m = near', "M117"),
    ('use near from «"bad.mask"»\nmask m = near', "M117"),
    ('use «near» from "lib/window.mask"\ninput window : int per key\nmask m = near and k < window[k]', "M119"),
    ('use «near» from "lib/window.mask"\nconst window = 3\nmask m = near and k < window', "M119"),
    ('use near from "lib/window.mask"\nlet «near» = true\nmask m = near', "M109"),
]


@pytest.mark.parametrize(("marked", "code"), USE_ERRORS, ids=[c[0].split("\n")[0] for c in USE_ERRORS])
def test_use_errors(folder: Path, marked: str, code: str) -> None:
    (folder / "loop.mask").symlink_to(folder / "loop.mask")
    (folder / "bad.mask").write_bytes(b"mask near = k <= q # \xff\xfe")

    def compile_here(text: str) -> None:
        (folder / "a.mask").write_text(text)
        parse_file(folder / "a.mask")

    assert_errors(compile_here, marked, code)


def test_circular_use(folder: Path) -> None:
    (folder / "a.mask").write_text('use b from "b.mask"\nmask a = b')
    (folder / "b.mask").write_text('use a from "./lib/../a.mask"\nmask b = a')
    with pytest.raises(MaskcError) as e:
        parse_file(folder / "a.mask")
    assert [d.code for d in e.value.diagnostics] == ["M118"]
    (folder / "self.mask").write_text('use x from "self.mask"\nmask x = k <= q')
    with pytest.raises(MaskcError) as e:
        parse_file(folder / "self.mask")
    assert e.value.code == "M118"


def test_errors_of_a_used_file_point_into_it(folder: Path) -> None:
    (folder / "lib" / "window.mask").write_text("let near = q < k + windw")
    (folder / "a.mask").write_text('use near from "lib/window.mask"\nmask m = near')
    with pytest.raises(MaskcError) as e:
        parse_file(folder / "a.mask")
    (d,) = e.value.diagnostics
    assert d.code == "M101"
    assert d.span is not None
    assert d.span.where() == f"{folder / 'lib' / 'window.mask'}:1:20"


# ---------------------------------------------------------------- files


def test_a_byte_order_mark_and_windows_line_ends_are_fine(folder: Path) -> None:
    (folder / "w.mask").write_bytes(b"\xef\xbb\xbfconst A = 3\r\nmask m = k <= q + A\r\n")
    assert parse_file(folder / "w.mask").pick().body == body("mask m = k <= q + 3")


def test_picking_a_mask() -> None:
    two = parse_file("std:gemma3")
    assert two.pick("local").name == "local"
    for wrong in (None, "gemma3", "locl"):
        with pytest.raises(MaskcError) as e:
            two.pick(wrong)
        assert e.value.code == "M124"
    one = parse_text("mask inner = k <= q", "folder/outer.mask")
    assert {one.pick(n).name for n in (None, "inner", "outer")} == {"inner"}
    with pytest.raises(MaskcError):
        parse_text("let a = k <= q").pick()


@pytest.mark.parametrize("path", ["no/such/file.mask", "std:nothing", ".", "x\0y"])
def test_unreadable_files(path: str) -> None:
    with pytest.raises(MaskcError) as e:
        parse_file(path)
    assert e.value.code == "M009"
