"""The codes of form and proof with their explanations, for `maskc explain CODE`."""

from __future__ import annotations

CODES: dict[str, str] = {
    "M201": """This condition cannot be written as row ranges per key

For every key, the rows that may see it must be found as a few ranges. A condition can be turned into ranges if, read
from top to bottom, its row side never goes back: the row `q` itself, `q // B`, the number of a document `doc[q]`,
`doc.start[q]`, a `sorted` vector. Whatever belongs to the row's own segment (`doc.pos[q]`, an int per doc) is fine
beside `same(doc)`, where it is the key's own; `q % B` is fine beside `q // B == k // B`.

    input kind : int per key
    mask scatter = kind[q] == kind[k]      # M201: kind = 0 1 0: key 0 is seen by rows 0 and 2

What to do: if equal values are neighbours, declare `input kind : segments` and write `same(kind)`. If values never
decrease, declare `sorted int per row`. For `doc.pos[q]` or a per-doc value of the row, add `same(doc)`. Patterns that
really skip rows again and again (a dilated window) have no column form.
""",
    "M301": """A key needs more than two masked runs

The rows that a key is hidden from are stored as at most two ranges, beside the free triangle of rows before the key
(used when no row sees a later key). For this mask there are inputs that obey every declared fact and still need more;
the smallest that was found is printed, with the masked rows of one key.

    mask bands = k <= q < k + 2 or k + 4 <= q < k + 6 or k + 8 <= q < k + 10
                                          # M301: masked between the bands and after them, three runs besides q < k

What to do: state what you know of the inputs in `where` or `assume` (the counterexample may be one that cannot happen),
store the tokens in an order that joins the runs, or make two calls and merge them by their log-sum-exp.
""",
    "M302": """The mask has too many cases

`and` over `or` is multiplied out into cases, each of which gives one range of rows per key. More than 256 cases are
refused; no known mask needs more than five.

What to do: factor common conditions out of the `or`s, replace a long `or` over constants by a vector or a block table,
or split the mask.
""",
    "M303": """A claim of the file does not hold

`check causal`, `check isolated by S` and `check no_empty_row` are decided by the prover for every input that obeys the
declared facts. The smallest input that was found to break the claim is printed.

    input doc : segments
    mask m = k <= q
    check isolated by doc        # M303: n = 2, doc = [1, 1], row 1 sees key 0, which is not in its `doc`

`no_empty_row` does not count rows outside of a `segments` input, which are padding, and speaks of one key or more.

What to do: correct the mask, or drop the claim.
""",
    "M304": """A step of the proof was not confirmed

Under `maskc check` and `--emit proof` every entailment that a proof uses comes with a certificate (facts with
multipliers whose sum is a negative constant), and sympy expands each sum again. One that does not come out is a bug of
the prover, and the mask is refused rather than trusted.

What to do: please report the mask. It can still be compiled without the check; its vectors are then compared with the
predicate by `--check 2`.
""",
    "W301": """The mask is neither proved nor refuted

The prover did not find a tree of cases in which every key has at most two masked runs, and no small input needs more.
The mask is compiled all the same: when data are bound, the ranges of every key are sorted and counted (one pass over
the keys), and a batch that needs more than two masked runs is an error before the first kernel. `--strict` refuses such
masks at once.

What to do: state what you know of the inputs in `where` or `assume`.
""",
    "W302": """A claim is neither proved nor refuted

The prover could not decide a `check`, and no small input breaks it. The mask is compiled; the claim is not relied on.

What to do: state what you know of the inputs in `where` or `assume`, or drop the claim.
""",
}
