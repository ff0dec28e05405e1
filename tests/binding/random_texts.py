"""Random mask files: every atom of the language as a user writes it, under and/or/not/if, with the inputs it needs.

With facts about those inputs, also about several at once, and claims about the mask.
"""

from __future__ import annotations

import random
import re

DECLARED = {
    "doc": "input doc : segments",
    "part": "input part : segments within doc",
    "image": "input image : spans within doc",
    "drop": "input drop : spans",
    "w": "input w : int where w >= 1",
    "g": "input g : int",
    "b": "input b : int where b >= 1",
    "d": "input d : int = 2",
    "evict": "input evict : int per key where evict[k] > k",
    "lo": "input lo : int per key",
    "keep": "input keep : bool per key",
    "ord": "input ord : sorted int per key",
    "rank": "input rank : sorted int per row",
    "prefix": "input prefix : int per doc where 0 <= prefix <= doc.len",
    "level": "input level : sorted int per doc",
    "cnt": "input cnt : int per doc",
    "noised": "input noised : bool per image",
    "icnt": "input icnt : int per image",
    "st": "input st : bool per head",
    "hw": "input hw : int per head",
    "tb": "input tb : bool per block(3, 2)",
}

# OP stands for a comparison, SET for a set, SEG for segments, N for a small number.
FREE = """
k <= q; q OP k + N; q OP g; k OP g; q < k + w; abs(q - k) OP w; q // 3 OP k // 3; q // b OP k // b; q OP evict[k]; q OP lo[k]
q - lo[k] OP k; rank[q] OP k; rank[q + N] OP k; st[h]; hw[h] OP q - k; q OP k + hw[h]; keep[k]; keep[k - 1]; keep[k + 1]
q % 3 OP k % 3; k % 2 == N; q OP min(k + N, g); q OP max(k - N, lo[k], d); evict[k - 1] OP q; lo[k + 2] OP q; q OP nk - 2
q + nk OP k + nq; k < d; 0 <= q - k < w; q OP (if keep[k] then lo[k] else k); q OP (if k < g then g else k + d); q OP k * g
q + 1 OP 2 * k; q OP lo[k] // b; q OP lo[k] % b; (q - g) // b OP (k - d) // b; q OP g * g; true; false; ord[k] OP q
(q - N) // 3 == (k + N) // 3 and q % 3 OP k % 3; q OP lo[N]; min(q - k, lo[k]) OP N; lo[k] OP lo[k]; ord[q + N] OP ord[k] - g
"""
WITH_SETS = """
same(SET); same(doc); same(part); k in SET; q in SEG; k in first(SEG); k in last(SEG); q in first(SEG); q in last(SEG)
k in first(image); k in last(drop); doc.pos[q] // 2 OP doc.pos[k] // 2; SET.pos[k] OP N; SEG.pos[q] OP N
doc.pos[q] OP doc.pos[k]; doc.pos[k] OP prefix[k]; doc.pos[q] OP prefix[q]; SEG[q] OP SEG[k]; SEG[q] OP SEG[k] + N
doc[q - 1] OP doc[k]; doc[q] OP doc[k - 1]; doc[q] OP cnt[k]; image[q] == image[k]; SEG.start[q] OP k; SEG.end[q] OP k + N
rank[q] OP rank[k]; ord[q] OP ord[k]; ord[q] OP g; level[q] OP N; level[q] OP level[k]; noised[k]; icnt[k] OP doc.pos[k]
q OP SET.start[k]; q OP SET.end[k]; q < SET.start[k] + w; q OP (if k in SET then SET.end[k] else k)
noised[q] == noised[k]; SET.len[k] OP N; doc.len[q] OP N; doc.start[k - 1] OP q; doc.start[k + 1] <= q; keep[doc.start[k]]
q < lo[doc.start[k]]; k in drop and q OP drop.end[k]; doc.pos[q] % 2 == doc.pos[k] % 2; doc.pos[q] // b == doc.pos[k] // b
doc.pos[q] % b OP N; q - doc.start[k] OP prefix[k]; min(prefix[k], doc.pos[k]) OP N; keep[q]; SET.pos[k] OP SET.pos[k]
same(doc) and (if keep[q] then lo[q] else q) OP k; SEG.start[N] OP q; q in first(SEG) and k in last(SEG)
"""
FACTS = """
g OP N; g % 2 == 0; nq OP g or g OP N; w OP g + N; b <= w; lo[k] OP N or lo[k] OP k; lo[k - 1] <= lo[k]; lo[k] OP evict[k] - N
lo[k] // b OP N; abs(lo[k]) OP g; evict[k] OP lo[k + 1]; hw[h] OP N; rank[q] OP q; ord[k] OP lo[k]; keep[k] or lo[k] OP N
lo[k] OP SET.end[k]; lo[k] OP SET.start[k] + w; doc.len[k] OP N; icnt[k] OP image.len[k]; cnt[k] OP prefix[k]; level[k] % 2 == 0
if keep[k] then lo[k] OP k else lo[k] OP N; nq OP nk; nk % 2 == 0; not (cnt[k] OP doc.start[k]); g * g OP w; noised[k] or k OP N
"""


def _atoms(text: str) -> list[str]:
    return [atom.strip() for atom in text.replace("\n", ";").split(";") if atom.strip()]


_FREE, _SETS, _FACTS = _atoms(FREE), _atoms(WITH_SETS), _atoms(FACTS)
_FILL = {"OP": ("<=", "<", "==", "!=", ">=", ">"), "SET": ("doc", "part", "image", "drop"), "SEG": ("doc", "part"), "N": "0123"}


def random_text(seed: int) -> str:
    """One file of one mask, admissible or not."""
    r = random.Random(seed)
    sets = r.random() < 0.75
    body = _condition(r, r.choice((1, 2, 2, 3)), sets)
    start = r.random()
    if start < 0.3:
        body = f"k <= q and {body}"
    elif start < 0.5 and sets:
        body = f"same(doc) and {body}"
    elif start < 0.6:
        body = f"tb[q // 3, k // 2] and {body}"
    used = {name for name in DECLARED if re.search(rf"\b{name}\b", body)}
    while more := {n for n in DECLARED for d in used if re.search(rf"(within|per) {n}\b", DECLARED[d])} - used:
        used |= more
    lines = [text for name, text in DECLARED.items() if name in used]
    r.shuffle(lines)
    known = [f for f in _FACTS if set(re.findall(r"[a-z]+", f)) & DECLARED.keys() <= used and ("SET" not in f or "doc" in used)]
    lines += [f"assume {_filled(r, f, 'doc')}" for f in r.sample(known, min(len(known), r.choice((0, 0, 0, 1, 2))))]
    claims = ["check causal", "check no_empty_row", *(f"check isolated by {s}" for s in ("doc", "drop") if s in used)]
    return "\n".join([*lines, f"mask m = {body}", *(c for c in claims if r.random() < 0.12)]) + "\n"


def _condition(r: random.Random, depth: int, sets: bool) -> str:
    if depth == 0 or r.random() < 0.2:
        return ("not " if r.random() < 0.25 else "") + _atom(r, sets)
    parts = [_condition(r, depth - 1, sets) for _ in range(r.choice((2, 2, 3)))]
    if r.random() < 0.08:
        return f"(if {_atom(r, sets)} then {parts[0]} else {parts[1]})"
    return ("not " if r.random() < 0.15 else "") + f"({(' and ' if r.random() < 0.6 else ' or ').join(parts)})"


def _atom(r: random.Random, sets: bool) -> str:
    return f"({_filled(r, r.choice(_FREE + 2 * _SETS if sets else _FREE))})"


def _filled(r: random.Random, atom: str, of: str | None = None) -> str:
    for word, choices in _FILL.items():
        while re.search(rf"\b{word}\b", atom):
            choice = of if of is not None and word == "SET" else r.choice(choices)
            atom = re.sub(rf"\b{word}\b", choice, atom, count=1)
    return atom
