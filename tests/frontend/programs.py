"""Hypothesis strategies: random expressions with their Python reading, random mask files, random layouts of a text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypothesis import strategies as st

HEADER = """input x : int
input y : int where y <= 5
input b : int where b >= 1
input f : int per row
input g : int per key where g[k] >= -9
input t : bool per key
let twice(v) = v + v
let near(v, w) = abs(v - w) <= 2
let small = x <= g[k]
"""
USED = "x + y + b + f[q] + g[k] + twice(0) < 99 or t[k] or small or near(x, y)"


@dataclass(frozen=True)
class Pair:
    """One expression in the mask language and in Python; equal texts unless a construct is spelt differently."""

    mask: str
    python: str

    def wrap(self) -> Pair:
        return Pair(f"({self.mask})", f"({self.python})")


def _join(draw: st.DrawFn, op: str, *terms: Pair) -> Pair:
    """Operands with or without brackets: precedence has to agree as well."""
    shown = [t.wrap() if draw(st.booleans()) else t for t in terms]
    return Pair(f" {op} ".join(t.mask for t in shown), f" {op} ".join(t.python for t in shown))


@st.composite
def _atom(draw: st.DrawFn) -> Pair:
    text = draw(st.sampled_from(["x", "y", "b", "f[q]", "g[k]", "nq", "nk", "0", "1", "2", "3"]))
    return Pair(text, text)


@st.composite
def numbers(draw: st.DrawFn, depth: int = 3) -> Pair:
    if depth == 0:
        return draw(_atom())
    below = numbers(depth - 1)
    kind = draw(st.sampled_from(["atom", "sum", "product", "div", "minus", "abs", "min", "twice", "if"]))
    match kind:
        case "sum":
            return _join(draw, draw(st.sampled_from("+-")), draw(below), draw(below))
        case "product":
            return _join(draw, "*", draw(below), draw(below))
        case "div":
            divisor = draw(st.sampled_from(["1", "2", "3", "b"]))
            return _join(draw, draw(st.sampled_from(["//", "%"])), draw(below), Pair(divisor, divisor))
        case "minus":
            p = draw(below).wrap() if draw(st.booleans()) else draw(_atom())
            return Pair(f"-{p.mask}", f"-{p.python}")
        case "abs" | "twice":
            p = draw(below)
            return Pair(f"{kind}({p.mask})", f"{kind}({p.python})")
        case "min":
            name, a, c = draw(st.sampled_from(["min", "max"])), draw(below), draw(below)
            return Pair(f"{name}({a.mask}, {c.mask})", f"{name}({a.python}, {c.python})")
        case "if":
            c, a, z = draw(conditions(depth - 1)), draw(below), draw(below)
            return Pair(f"(if {c.mask} then {a.mask} else {z.mask})", f"(({a.python}) if ({c.python}) else ({z.python}))")
        case _:
            return draw(_atom())


@st.composite
def conditions(draw: st.DrawFn, depth: int = 3) -> Pair:
    if depth == 0:
        text = draw(st.sampled_from(["true", "false", "t[k]", "small", "k <= q"]))
        return Pair(text, {"true": "True", "false": "False"}.get(text, text))
    below = conditions(depth - 1)
    kind = draw(st.sampled_from(["compare", "compare", "and", "or", "not", "near", "if", "equal"]))
    match kind:
        case "compare":
            terms = [draw(numbers(depth - 1)) for _ in range(draw(st.integers(2, 3)))]
            ops = [draw(st.sampled_from(["<=", "<", "==", "!=", ">=", ">"])) for _ in terms[1:]]
            text = "".join(f" {op} {{{i + 1}}}" for i, op in enumerate(ops))
            return Pair(("{0}" + text).format(*(t.mask for t in terms)), ("{0}" + text).format(*(t.python for t in terms)))
        case "and" | "or":
            return _join(draw, kind, *(draw(below) for _ in range(draw(st.integers(2, 3)))))
        case "not":
            p = draw(below)
            return Pair(f"not {p.mask}", f"not {p.python}")
        case "near":
            a, c = draw(numbers(depth - 1)), draw(numbers(depth - 1))
            return Pair(f"near({a.mask}, {c.mask})", f"near({a.python}, {c.python})")
        case "if":
            c, a, z = draw(below), draw(below), draw(below)
            return Pair(f"(if {c.mask} then {a.mask} else {z.mask})", f"(({a.python}) if ({c.python}) else ({z.python}))")
        case _:
            a, c = draw(below).wrap(), draw(below).wrap()
            op = draw(st.sampled_from(["==", "!="]))
            return Pair(f"{a.mask} {op} {c.mask}", f"{a.python} {op} {c.python}")


@st.composite
def files(draw: st.DrawFn) -> str:
    """A mask file that types: a few declarations of every kind."""
    masks = "".join(f"mask m{i} = {draw(conditions(2)).mask}\n" for i in range(draw(st.integers(0, 3))))
    extra = draw(st.sampled_from(["", "check causal\n", "assume nk >= 1\n", "const UNUSED = 2 * 3\n", "check no_empty_row\n"]))
    return f"{HEADER}{masks}{extra}mask last_one = {USED}\n"


_TOKEN = re.compile(r'#[^\n]*|"[^"\n]*"|\w+|<=|>=|==|!=|//|\S')
_TRIVIA = ["", " ", "  ", "\n", "\n\n", "\n\n\n", " # note\n", "\n# alone\n\n", "\t", "\r\n"]


@st.composite
def scrambled(draw: st.DrawFn, text: str) -> str:
    """The same tokens with other blanks, line breaks and comments between them."""
    out = [draw(st.sampled_from(_TRIVIA))]
    tokens = _TOKEN.findall(text)
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        gap = draw(st.sampled_from(_TRIVIA))
        glued = token[-1] not in "()[],." and following[:1] not in tuple("()[],.")
        out += [token, gap if gap or not glued else " "]
    return "".join(out)
