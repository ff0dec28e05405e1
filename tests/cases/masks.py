"""The mask and the inputs of every case of tests/data/mask_cases.json, as its description names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maskc import segments, spans

CAUSAL_DOC = "input doc : segments\nmask m = same(doc) and k <= q"
WINDOW = "input window : int where window >= 1\n"
IMAGES = "input image : spans\nmask m = k <= q or same(image)"
CHUNKED = "input doc : segments\nconst CHUNK = 3\nmask m = same(doc) and k <= q and doc.pos[q] // CHUNK == doc.pos[k] // CHUNK"
TREE = "input doc : segments\ninput end : int per key where k < end[k] <= doc.end[k]\nmask m = k <= q < end[k]"


@dataclass(frozen=True)
class Written:
    """A mask text and its inputs."""

    text: str
    inputs: dict[str, Any] = field(default_factory=dict)


def docs(**form: Any) -> Written:
    return Written(CAUSAL_DOC, {"doc": segments(**form)})


CASES: dict[str, Written] = {
    "R01": docs(positions=[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]),
    "R02": docs(positions=[0, 1, 2, 0, 1, 2]),
    "R04": docs(lengths=[1, 1, 1, 2]),
    "R05": docs(ids=[1, 1, 2, 2, 2, 0], pad=0),
    "R06": docs(ids=[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0, 0], pad=0),
    "R08": Written(
        "input doc : segments\ninput real : bool per key\nmask m = same(doc) and k <= q and real[k]",
        {"doc": segments(positions=[0, 1, 2, 0, 1, 2]), "real": [1] * 6},
    ),
    "R09": Written(WINDOW + "mask m = k <= q < k + window", {"window": 3}),
    "R10": Written(WINDOW + "mask m = k <= q <= k + window", {"window": 3}),
    "R11": Written(WINDOW + "mask m = abs(q - k) < window", {"window": 3}),
    "R13": Written(WINDOW + "mask m = q - k <= window", {"window": 2}),
    "R14": Written("input window : int\nmask m = k <= q < k + window", {"window": 0}),
    "R15": Written(WINDOW + "input sinks : int\nmask m = k <= q and (q - k <= window or k <= sinks)", {"window": 3, "sinks": 2}),
    "R17": Written(IMAGES, {"image": spans(ranges=[(2, 5), (6, 8)])}),
    "R49": Written(
        WINDOW + "input image : spans\nmask m = (k <= q < k + window) or same(image)",
        {"window": 2, "image": spans(ranges=[(2, 5), (6, 8)])},
    ),
    "R19": Written(IMAGES, {"image": spans(ids=[-1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1])}),
    "R20": Written(CHUNKED, {"doc": segments(ids=[-1, -1, 0, 0, 0, 0, 0, 0])}),
    "R21": Written(CHUNKED, {"doc": segments(lengths=[8])}),
    "R22": Written(
        "const BLOCK = 2\ninput doc : segments\nmask m = same(doc) and doc.pos[q] // BLOCK >= doc.pos[k] // BLOCK",
        {"doc": segments(lengths=[4, 5])},
    ),
    "R24": Written("const BLOCK = 2\nmask m = q // BLOCK >= k // BLOCK"),
    "R25": Written(
        "const PAIR = 2\ninput prefix : int where prefix >= 0\n"
        "mask m = k <= q or (k >= prefix and (k - prefix) // PAIR <= (q - prefix) // PAIR)",
        {"prefix": 4},
    ),
    "R26": Written("mask m = k <= q + (nk - nq)"),
    "R28": Written("input length : int where length >= 0\nmask m = k <= q < length", {"length": 5}),
    "R29": Written("input pad : int where 0 <= pad <= nk\nmask m = pad <= k <= q", {"pad": 2}),
    "R31": Written(
        "input lo : int per key where k < lo[k]\ninput hi : int per key where lo[k] <= hi[k]\n"
        "mask m = k <= q and (q == k or lo[k] <= q < hi[k])",
        {"lo": [1, 3, 4, 4, 5], "hi": [5, 4, 5, 4, 5]},
    ),
    "R32": Written(TREE, {"doc": segments(lengths=[5]), "end": [5, 3, 3, 5, 5]}),
    "R33": Written(
        "const B = 2\ninput L : int where 1 <= L, nk == 2 * L\nlet noisy(t) = t < L\nlet blk(t) = (t - L) // B\n"
        "mask m = (noisy(q) and noisy(k) and q // B == k // B) or (noisy(q) and not noisy(k) and q // B > blk(k))\n"
        "  or (not noisy(q) and not noisy(k) and blk(q) >= blk(k))",
        {"L": 4},
    ),
    "R35": Written(
        "input part : segments\nmask m = k <= q and (same(part) or k in first(part))", {"part": segments(lengths=[3, 2, 2])}
    ),
    "R36": Written(
        "input pack : segments\ninput part : segments within pack\n"
        "mask m = k <= q and same(pack) and (same(part) or k in first(part))",
        {"pack": segments(lengths=[5, 4]), "part": segments(lengths=[2, 2, 1, 1, 2, 1])},
    ),
    "R37": Written(
        "const B = 2\ninput S : int where S >= 0, nk == S + nq\ninput anchor : sorted int per row\n"
        "mask m = (k < S and k < anchor[q]) or (k >= S and q // B == (k - S) // B)",
        {"S": 3, "anchor": [1, 1, 2, 2]},
    ),
    "R39": Written(
        "input row_pair : sorted int per row\ninput key_pair : int per key\nmask m = row_pair[q] == key_pair[k]",
        {"row_pair": [1, 3], "key_pair": [1, 1, 1, 3, 3, 3, 3, 3]},
    ),
    "R41": docs(ids=[0, 0, 0, -1, 1, 1, -1, -1]),
    "R43": docs(lengths=[4, 12]),
    "R44": Written(
        WINDOW + "input doc : segments\nmask m = same(doc) and k <= q < k + window",
        {"window": 3, "doc": segments(lengths=[4, 8])},
    ),
    "R45": docs(ids=[0, 0, 1, 1, -1, -1]),
    "R46": Written(
        "input part : segments\nmask m = k <= q and (same(part) or q in last(part))", {"part": segments(lengths=[2, 2, 2])}
    ),
    "R48": Written("input drop : spans\nmask m = k <= q and not same(drop)", {"drop": spans(ranges=[(2, 5)])}),
}
