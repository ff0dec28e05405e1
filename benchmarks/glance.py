"""The picture at the top of README.md: a mask as the kernels see it, and gains over FlexAttention from the records."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

import maskc
from benchmarks.records import ROOT, gmean, length, results
from benchmarks.tables_kernels import gains
from maskc.inputs import bind_file
from maskc.tiles import TileClass, classify

FILE = ROOT / "docs" / "glance.svg"
MASK, DATA = "examples/doc_prefix.mask", "examples/packed_8k.json"
SEQLEN = 32768
WIDTH, HEIGHT, TOP = 830, 330, 46
SIDE, LEFT = 256, 16
TITLE, NAMES, BARS, ROOM = 400, 478, 488, 290
"""Where the title begins, where the names of masks end, where their bars begin, and how long the longest is."""
SAYS = "The tiles of a mask of packed documents, most of them never loaded; gains over FlexAttention, mask by mask"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .quiet { fill: #59636e } .head { font-weight: 600 }
.UNMASKED { fill: #1f6fb4 } .PARTIAL { fill: #d7780f } .SKIP { fill: #eceae4 } path { stroke: #1f2328 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .quiet { fill: #9198a1 } .UNMASKED { fill: #55a3e0 } .PARTIAL { fill: #f0a03c } .SKIP { fill: #262b33 }
path { stroke: #f0f6fc } }
"""


def glance() -> str:
    """The SVG. Raises NoData without gains at its length."""
    parts = [*_mask(), *_gains()]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{SAYS}">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def _mask() -> Iterator[str]:
    """Tiles of 128 x 128, equal neighbours of a row as one."""
    vectors = bind_file(maskc.compile(ROOT / MASK), ROOT / DATA).vectors()
    classes = classify(vectors, 128, 128)[0, 0].tolist()
    step, every = SIDE / len(classes), [c for row in classes for c in row]
    yield _text(LEFT, 20, f"{MASK.rpartition('/')[2]} over {vectors.nq:,} packed tokens", "head")
    yield _text(LEFT, 37, "rows down, keys across, tiles of 128 x 128", "quiet")
    yield _rect(LEFT, TOP, SIDE, SIDE, "SKIP")
    for i, row in enumerate(classes):
        at = 0
        for kind, same in groupby(row):
            count = len(list(same))
            if kind != TileClass.SKIP:
                yield _rect(LEFT + at * step, TOP + i * step, count * step, step, TileClass(kind).name)
            at += count
    words = {TileClass.UNMASKED: "no test", TileClass.PARTIAL: "tested", TileClass.SKIP: "never loaded"}
    x = float(LEFT)
    for kind, word in words.items():
        yield _rect(x, TOP + SIDE + 10, 11, 11, kind.name)
        label = f"{100 * every.count(kind) / len(every):.0f} % {word}"
        yield _text(x + 16, TOP + SIDE + 20, label)
        x += 34 + 7 * len(label)


def _gains() -> Iterator[str]:
    found = gains(SEQLEN)
    tokens, device = length(SEQLEN), str(results("attention")["device"]).removeprefix("NVIDIA ")
    scale, step = ROOM / max(found.values()), SIDE / (len(found) + 1)
    yield _text(TITLE, 20, f"{gmean(found.values()):.2f} times as fast as FlexAttention (geometric mean)", "head")
    yield _text(TITLE, 37, f"forward and backward, {tokens} tokens, bf16, one {device}", "quiet")
    for i, (mask, gain) in enumerate(found.items()):
        y = TOP + i * step
        yield _text(NAMES, y + step / 2 + 4, mask, "", "end")
        yield _rect(BARS, y + 2, gain * scale, step - 5, "UNMASKED")
        yield _text(BARS + gain * scale + 6, y + step / 2 + 4, f"{gain:.2f}", "quiet")
    end = TOP + len(found) * step
    yield f'<path d="M{BARS + scale:g} {TOP - 2:g}V{end + 3:g}" stroke-dasharray="4 3" fill="none"/>'
    yield _text(BARS + scale, end + 16, "FlexAttention", "quiet", "middle")
