"""`maskc fmt`: stable, meaning-preserving, keeps comments."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.diagnostics import MaskcError, SourceFile
from maskc.frontend import ast
from maskc.frontend.fmt import format_text
from maskc.frontend.parser import parse
from tests.frontend.programs import files, scrambled
from tests.frontend.test_files import SUITE


def tree(text: str) -> ast.Module:
    parsed = parse(SourceFile("<text>", text))
    assert not parsed.errors
    return parsed.module


def comments(text: str) -> list[str]:
    return [c.rstrip() for c in re.findall(r"#[^\n]*", text)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_formatting_keeps_the_tree_and_the_comments_and_is_stable(data: st.DataObject) -> None:
    text = data.draw(scrambled(data.draw(files())))
    once = format_text(text)
    assert tree(once) == tree(text)
    assert comments(once) == comments(text)
    assert format_text(once) == once
    assert not re.search(r"[ \t\r]$|\n\n\n|\A\n|\t", once, re.MULTILINE)


@pytest.mark.parametrize("path", SUITE, ids=lambda p: p.stem)
def test_suite(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    once = format_text(text)
    assert tree(once) == tree(text)
    assert format_text(once) == once


def test_layout() -> None:
    text = """

# head
const   A=3  input b:int#x
   input   long_name  :  int per  key  where  -b<= k ,b>=1

   # inner


mask m=(  # why
 k<=q
    and not(b<- A)   # t
    # a comment
 or doc . start [ k ]<=f ( k,q-1 )
)
let a=keep[q//128,k//128] let bcd(t)=t%-2
mask long =
 noisy(q) and
 not k in first( doc )
  or (k<q
  and   ( if k<q then true else false))"""
    wanted = """\
# head
const A = 3
input b         : int  #x
input long_name : int per key where -b <= k, b >= 1

# inner

mask m = (  # why
    k <= q
    and not (b < -A)  # t
    # a comment
    or doc.start[k] <= f(k, q - 1)
  )
let a      = keep[q // 128, k // 128]
let bcd(t) = t % -2
mask long =
     noisy(q) and
     not k in first(doc)
  or (k < q
    and (if k < q then true else false))
"""
    assert format_text(text) == wanted


@pytest.mark.parametrize("text", ["", "\n \n", "# only a comment"])
def test_almost_nothing(text: str) -> None:
    assert format_text(text) == (f"{text}\n" if "#" in text else "")


def test_a_broken_file_is_not_touched() -> None:
    with pytest.raises(MaskcError) as e:
        format_text("mask m = k =< q", "a.mask")
    assert e.value.code == "M001"
    assert "a.mask:1:12" in str(e.value)
