"""Charts and tables as SVG and HTML text, made by hand: for pages that stand alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
INKS = ("var(--unmasked)", "var(--partial)", "var(--upper)", "var(--lower)", "var(--mark)", "var(--quiet)", "var(--ink)")
"""Series in order; every series has its own marker too, so colour is never alone."""
MARKERS = ("circle", "square", "diamond", "triangle", "cross", "ring", "bar")


@dataclass(frozen=True)
class Interval:
    """A value with its whiskers."""

    low: float
    value: float
    high: float


def number(x: float) -> str:
    """Three or four significant digits."""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else "–"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{max(0, 2 - math.floor(math.log10(abs(x))))}f}"


def whiskers(rows: Mapping[str, Interval], unit: str, line: float | None = None) -> str:
    """A row for every name: a dot at the value, a whisker from low to high, and a vertical line at `line`."""
    step, top, labels = 34, 22, _label_room(rows)
    high = max([r.high for r in rows.values()] + ([line] if line is not None else []))
    low = min([0.0] + [r.low for r in rows.values()])
    ticks = axis(low, high)
    scale = (WIDTH - labels - 70) / (ticks[-1] - ticks[0])

    def x(v: float) -> float:
        return labels + (v - ticks[0]) * scale

    height = step * len(rows)
    out = [_grid(x(t), -6, height, f"{t:,g}", -12) for t in ticks]
    if line is not None:
        out.append(f'<path d="M{x(line):.1f} -6V{height}" stroke="var(--ink)" stroke-width="1.4" stroke-dasharray="5 3"/>')
    for i, (name, r) in enumerate(rows.items()):
        y = i * step + step / 2
        said = f"{name}: {number(r.value)} {unit} ({number(r.low)} to {number(r.high)})"
        out.append(f"<g><title>{escape(said)}</title>")
        out.append(f'<text x="{labels - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        ends = "".join(f"M{x(v):.1f} {y - 6:.1f}v12" for v in (r.low, r.high))
        out.append(f'<path d="M{x(r.low):.1f} {y:.1f}H{x(r.high):.1f}{ends}" stroke="var(--unmasked)" stroke-width="1.8"/>')
        out.append(_marker("circle", x(r.value), y, "var(--unmasked)"))
        out.append(f'<text x="{max(x(r.high), x(r.value)) + 10:.1f}" y="{y + 4:.1f}">{number(r.value)}</text></g>')
    return _figure(out, height + 8, top, f"{unit}: {', '.join(rows)}")


def lines(series: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Series over the same categories, in the order of their first appearance."""
    categories = list(dict.fromkeys(c for values in series.values() for c in values))
    every = [v for values in series.values() for v in values.values()]
    height, top, left = 270, 20, 66
    ticks = axis(min(0.0, *every), max(every))
    scale = height / (ticks[-1] - ticks[0])
    step = (WIDTH - left - 30) / max(1, len(categories) - 1)

    def y(v: float) -> float:
        return height - (v - ticks[0]) * scale

    out = []
    for t in ticks:
        out.append(f'<path d="M{left} {y(t):.1f}H{WIDTH}" stroke="var(--line)"/>')
        out.append(f'<text class="quiet" x="{left - 10}" y="{y(t) + 4:.1f}" text-anchor="end">{t:,g}</text>')
    for i, c in enumerate(categories):
        out.append(f'<text class="quiet" x="{left + i * step:.1f}" y="{height + 22}" text-anchor="middle">{escape(c)}</text>')
    for i, (name, values) in enumerate(series.items()):
        ink = INKS[i % len(INKS)]
        points = [(left + categories.index(c) * step, y(v), c, v) for c, v in values.items()]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py, _, _ in points)
        out.append(f'<path d="M{path}" fill="none" stroke="{ink}" stroke-width="2"/>')
        for px, py, c, v in points:
            said = f"{name}, {c}: {number(v)} {unit}"
            out.append(f"<g><title>{escape(said)}</title>{_marker(MARKERS[i % len(MARKERS)], px, py, ink)}</g>")
    return legend(list(series)) + _figure(out, height + 30, top, f"{unit} of {', '.join(series)}")


def bars(groups: Mapping[str, Mapping[str, Interval]], unit: str, line: float | None = None) -> str:
    """Horizontal bars, grouped: a bar for every series of a group, its value at the end; whiskers where low or high differ."""
    series = list(dict.fromkeys(s for values in groups.values() for s in values))
    thick, gap, labels = 15, 14, _label_room(groups)
    every = [v for values in groups.values() for v in values.values()]
    ticks = axis(min(0.0, *(v.low for v in every)), max([v.high for v in every] + ([line] if line is not None else [])))
    scale = (WIDTH - labels - 70) / (ticks[-1] - ticks[0])

    def x(v: float) -> float:
        return labels + (v - ticks[0]) * scale

    height = sum(len(values) * thick + gap for values in groups.values())
    out = [_grid(x(t), -6, height, f"{t:,g}", -12) for t in ticks]
    y = gap / 2
    for group, values in groups.items():
        middle = y + len(values) * thick / 2 + 4
        out.append(f'<text x="{labels - 12}" y="{middle:.1f}" text-anchor="end">{escape(group)}</text>')
        for name, v in values.items():
            ink = INKS[series.index(name) % len(INKS)]
            left, right = sorted((x(0.0), x(v.value)))
            said = f"{group}, {name}: {number(v.value)} {unit}"
            out.append(f"<g><title>{escape(said)}</title>")
            out.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(0.5, right - left):.1f}" height="{thick - 2}" fill="{ink}"/>'
            )
            if v.low != v.high:
                out.append(f'<path d="M{x(v.low):.1f} {y + 6.5:.1f}H{x(v.high):.1f}" stroke="var(--ink)" stroke-width="1.6"/>')
            at = max(x(v.value), x(v.high)) + 6
            out.append(f'<text x="{at:.1f}" y="{y + 11:.1f}" style="font-size:12px">{number(v.value)}</text></g>')
            y += thick
        y += gap
    if line is not None:
        out.append(f'<path d="M{x(line):.1f} -6V{height}" stroke="var(--ink)" stroke-width="1.4" stroke-dasharray="5 3"/>')
    return legend(series) + _figure(out, height + 8, 24, f"{unit} of {', '.join(series)}")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; the first column is names. Long texts break into lines."""

    def cell(value: object) -> str:
        text = _cell(value)
        kind = ' class="text"' if len(text) > 30 else ""
        return f"<td{kind}>{escape(text)}</td>"

    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join(f"<tr><th>{escape(_cell(row[0]))}</th>{''.join(map(cell, row[1:]))}</tr>" for row in rows)
    return f'<div class="scroll"><table class="numbers"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    marks = [_marker(MARKERS[i % len(MARKERS)], 7, 7, INKS[i % len(INKS)]) for i in range(len(names))]
    items = "".join(
        f'<li><svg viewBox="0 0 14 14" style="width:14px;flex:none">{mark}</svg>{escape(name)}</li>'
        for mark, name in zip(marks, names, strict=True)
    )
    return f'<ul class="legend">{items}</ul>'


def axis(low: float, high: float) -> list[float]:
    """Seven round ticks or so that cover [low, high]."""
    span = max(high - low, 1e-9)
    raw = span / 7
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(i * step, 12) for i in range(first, last + 1)]


def _label_room(names: Iterable[str]) -> float:
    """Pixels for the longest label at the left."""
    return 20 + 7.4 * max(map(len, names))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _grid(x: float, top: float, bottom: float, text: str, text_y: float) -> str:
    return (
        f'<path d="M{x:.1f} {top}V{bottom}" stroke="var(--line)"/>'
        f'<text class="quiet" x="{x:.1f}" y="{text_y}" text-anchor="middle">{text}</text>'
    )


def _marker(kind: str, x: float, y: float, ink: str) -> str:
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{ink}"/>',
        "square": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{ink}"/>',
        "diamond": f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5-5.5 5.5-5.5-5.5z" fill="{ink}"/>',
        "triangle": f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 10h-11z" fill="{ink}"/>',
        "cross": f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{ink}" stroke-width="2.4" fill="none"/>',
        "ring": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--paper)" stroke="{ink}" stroke-width="2"/>',
        "bar": f'<rect x="{x - 5:.1f}" y="{y - 2:.1f}" width="10" height="4" fill="{ink}"/>',
    }
    return shapes[kind]


def _figure(parts: Sequence[str], height: float, top: float, title: str) -> str:
    said = escape(title)
    size = f'viewBox="0 {-top} {WIDTH} {height + top:.0f}" width="{WIDTH}" height="{height + top:.0f}"'
    picture = f'<svg {size} role="img" aria-label="{said}">{"".join(parts)}</svg>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{said}">{picture}</div>'
