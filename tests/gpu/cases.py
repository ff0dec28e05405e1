"""The conformance cases: a pairwise cover of masks, shapes, head layouts, dtypes and call forms, by name."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from itertools import combinations, cycle
from typing import Any

from tests.gpu.inputs import FORMS, NAMES

BENCHMARK = (
    "full", "causal", "sliding_window", "causal_document", "document", "share_question", "global_sliding_window",
    "causal_blockwise", "prefix_lm_document", "prefix_lm_causal", "qk_sparse", "random_eviction",
)  # fmt: skip
MASKS = (*(f"suite:{n}" for n in NAMES), *(f"bench:{n}" for n in BENCHMARK), *(f"form:{f}" for f in FORMS))
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {  # class -> (nq, nk) to take in turn
    "tiny": ((1, 1), (31, 31), (61, 61), (2, 2), (32, 32)),
    "tile": ((127, 127), (128, 128), (129, 129), (132, 132), (96, 96)),
    "tiles": ((300, 300), (1000, 1000), (1025, 1025), (799, 799), (257, 257)),
    "long": ((4097, 4097), (4224, 4224), (2049, 2049), (16385, 16385)),
    "wide": ((128, 799), (113, 203), (1, 192), (108, 256), (256, 1023), (1023, 1024), (127, 128)),
    "tall": ((799, 128), (1024, 203), (239, 1), (130, 128), (128, 127), (1024, 1023)),
}
HEADS: dict[str, tuple[tuple[int, int], ...]] = {  # class -> (query heads, kv heads) to take in turn
    "mha": ((4, 4), (1, 1), (6, 6)),
    "mqa": ((4, 1), (14, 1)),
    "gqa": ((6, 2), (12, 2), (28, 4)),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": MASKS,
    "shape": tuple(SHAPES),
    "heads": tuple(HEADS),
    "mask_heads": ("1", "kv", "q"),
    "head_dim": (64, 128, 256),
    "dtype": ("bf16", "fp16"),
    "batch": (1, 2, 3),
    "strided": (False, True),
    "lse_grad": (False, True),
    "deterministic": (False, True),
}
MOST_CELLS = 6 * 10**8  # batch * heads * nq * nk: the reference is dense


@dataclass(frozen=True)
class Case:
    mask: str
    nq: int
    nk: int
    batch: int
    heads: int
    kv_heads: int
    mask_heads: int
    head_dim: int
    dtype: str
    strided: bool
    lse_grad: bool
    deterministic: bool
    direction: str = "fwd"
    seed: int = 0

    @property
    def name(self) -> str:
        flags = "".join(f"-{f}" for f in ("strided", "lse_grad", "deterministic") if getattr(self, f))
        shape = f"{self.batch}x{self.nq}x{self.nk}"
        heads = f"h{self.heads}.{self.kv_heads}.{self.mask_heads}"
        return f"{self.direction}-d{self.head_dim}-{self.dtype}/{self.mask}/{shape}/{heads}{flags}"

    @property
    def group(self) -> tuple[str, int, str]:
        return self.direction, self.head_dim, self.dtype

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _allowed(row: dict[str, Any]) -> bool:
    """Suite masks with segments are square; only random forms and random eviction have mask heads of their own."""
    kind, name = row["mask"].split(":")
    if row["shape"] in ("wide", "tall") and kind != "form":
        rectangular = name[:2] in ("01", "02", "03", "07", "10", "12", "23", "25", "26", "37") or name in ("full", "causal")
        if not rectangular and not (row["shape"] == "wide" and name[:2] in ("27", "35")):
            return False
    if name == "28_duo_heads" and row["heads"] == "mha":
        return False  # two mask heads must divide the query heads
    own_heads = kind == "form" or name == "random_eviction"
    return own_heads or row["mask_heads"] == "1"


def pairwise(factors: dict[str, tuple[Any, ...]], seed: int = 0, tries: int = 60) -> list[dict[str, Any]]:
    """Rows such that every allowed pair of values of two factors occurs in some row (greedy, seeded)."""
    rng = random.Random(seed)
    names = list(factors)
    open_pairs: set[tuple[str, Any, str, Any]] = set()
    for a, b in combinations(names, 2):
        open_pairs |= {(a, x, b, y) for x in factors[a] for y in factors[b]}

    def gain(row: dict[str, Any]) -> int:
        return sum((a, row[a], b, row[b]) in open_pairs for a, b in combinations(names, 2))

    rows: list[dict[str, Any]] = []
    for a, x, b, y in sorted(open_pairs, key=repr):
        if (a, x, b, y) not in open_pairs:
            continue
        found = []
        for _ in range(40 * tries):
            row = {n: rng.choice(factors[n]) for n in names} | {a: x, b: y}
            if _allowed(row):
                found.append(row)
            if len(found) == tries:
                break
        if not found:
            continue  # the pair itself is not allowed
        best = max(found, key=gain)
        rows.append(best)
        open_pairs -= {(p, best[p], q, best[q]) for p, q in combinations(names, 2)}
    return rows


def all_cases(seed: int = 0) -> list[Case]:
    """Every row of the cover, once forward and once backward; sizes and head counts of a class are taken in turn."""
    shapes = {name: cycle(values) for name, values in SHAPES.items()}
    layouts = {name: cycle(values) for name, values in HEADS.items()}
    cases: list[Case] = []
    for number, row in enumerate(pairwise(FACTORS, seed)):
        heads, kv_heads = next(layouts[row["heads"]])
        nq, nk = next(shapes[row["shape"]])
        name = row["mask"].split(":")[1]
        if name.startswith("20_"):
            nq = nk = nk + nk % 2  # noisy and clean halves
        batch = row["batch"]
        while batch * heads * nq * nk > MOST_CELLS and (batch > 1 or heads > 4):
            batch, (heads, kv_heads) = 1, (4, 4 if heads == kv_heads else 1 if kv_heads == 1 else 2)
        mask_heads = {"1": 1, "kv": kv_heads, "q": heads}[row["mask_heads"]]
        if name.startswith("28_"):
            mask_heads = 2
        case = Case(
            row["mask"], nq, nk, batch, heads, kv_heads, mask_heads, row["head_dim"], row["dtype"],
            row["strided"], row["lse_grad"], False, seed=number,
        )  # fmt: skip
        cases += [case, replace(case, direction="bwd", deterministic=row["deterministic"])]
    return cases


if __name__ == "__main__":
    for case in all_cases():
        print(case.name)
