"""How large the values of an expression may become, so that generated arithmetic is exact."""

from __future__ import annotations

from collections.abc import Iterable

from maskc.diagnostics import Span, error
from maskc.ir.nodes import Add, Const, Expr, Field, FloorDiv, IfElse, Max, Min, Mod, Mul, Scalar, SegAttr
from maskc.ir.printer import print_term

_INT32_MAX = 2**31 - 1
_LIMIT = 2**63 - 2**32  # so that a lookup of the value plus one is exact too

_Range = tuple[int, int]


def _value_range(e: Expr) -> _Range:
    """The least and the greatest value that `e` may have, whatever the data hold."""
    match e:
        case Const(value=value):
            return value, value
        case Add(terms=terms):
            ranges = [_value_range(t) for t in terms]
            return sum(lo for lo, _ in ranges), sum(hi for _, hi in ranges)
        case Mul(a=a, b=FloorDiv(a=x, b=b)) | Mul(a=FloorDiv(a=x, b=b), b=a) if a == b:  # x - b < b * (x // b) <= x
            (lo, hi), (_, most) = _value_range(x), _value_range(b)
            return lo - max(0, most - 1), hi
        case Mul(a=a, b=b):
            corners = [x * y for x in _value_range(a) for y in _value_range(b)]
            return min(corners), max(corners)
        case FloorDiv(a=a, b=b):
            divisors = [max(1, y) for y in _value_range(b)]
            corners = [x // y for x in _value_range(a) for y in divisors]
            return min(corners), max(corners)
        case Mod(b=b):
            return 0, max(0, _value_range(b)[1] - 1)
        case Min(terms=terms):
            ranges = [_value_range(t) for t in terms]
            return min(lo for lo, _ in ranges), min(hi for _, hi in ranges)
        case Max(terms=terms):
            ranges = [_value_range(t) for t in terms]
            return max(lo for lo, _ in ranges), max(hi for _, hi in ranges)
        case IfElse(then=then, orelse=orelse):
            ranges = [_value_range(t) for t in (then, orelse)]
            return min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
        case _:
            return _readable(e)


def _magnitude(e: Expr) -> int:
    """The greatest absolute value met in the last step of computing `e`, partial sums included."""
    terms = e.terms if isinstance(e, Add) else (e,)
    return sum(max(map(abs, _value_range(t))) for t in terms)


def _readable(e: Expr) -> _Range:
    """What any data may hold: positions and ordinals (-1 outside) are sizes, other inputs any 32-bit number."""
    match e:
        case Field() | Scalar():
            return -_INT32_MAX - 1, _INT32_MAX
        case SegAttr(attr="pos", index=index):
            lo, hi = _value_range(index)
            return lo - _INT32_MAX, hi
        case _:
            return -1, _INT32_MAX


def check_fits_int64(expressions: Iterable[Expr], span: Span | None = None) -> None:
    """Raise M609 for the first expression that some data could drive out of 64 bits; it points at `span` or at its own."""
    for e in expressions:
        if _magnitude(e) > _LIMIT:
            text = f"`{print_term(e)}` may need more than 64 bits"
            raise error("M609", text, e.span or span, "inputs are 32-bit: multiply fewer of them")
