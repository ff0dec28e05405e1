"""The codes of syntax errors (M0xx), of names, types and units (M1xx), and the warnings beside them (W1xx).

First line: the title. "Wrong" holds a file that raises the code, "Right" what to write instead; tests compile both.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "M001": """Unexpected character or token

Something stands where the grammar has no place for it, often a sign of another language: conditions are combined with
`and`, `or`, `not`, and compared with `<= < == != >= >`. Numbers are integers.

Wrong:
    mask m = k <= q & k >= 0
Right:
    mask m = k <= q and k >= 0
""",
    "M002": """Something is missing

An operator has no right-hand side, or a declaration stops before it is complete.

Wrong:
    mask m = k <= q and
Right:
    mask m = k <= q
""",
    "M003": """Unbalanced brackets

A bracket is never closed, closes nothing, or is closed by one of another kind.

Wrong:
    mask m = (k <= q
Right:
    mask m = (k <= q)
""",
    "M004": """Reserved word used as a name

The words of the language (use const input let mask check assume from where within per if then else and or not in true
false) cannot be names.

Wrong:
    input mask : int
    mask m = k < mask
Right:
    input limit : int
    mask m = k < limit
""",
    "M005": """Not a type, a check or a place

The types are `segments`, `spans` (each maybe `within` another), `int`, `int per X`, `sorted int per X`, `bool per X`
and `bool per block(a, b)`, where X is `row`, `key`, `head` or a declared set. The checks are `causal`,
`isolated by SET` and `no_empty_row`. After `in` stands a set, `first(SET)` or `last(SET)`.

Wrong:
    input doc : segment
    mask m = same(doc)
Right:
    input doc : segments
    mask m = same(doc)
""",
    "M006": """Misspelt word of the language

A file is made of `use`, `const`, `input`, `let`, `mask`, `check` and `assume` declarations; this word starts none of
them, or stands where only words such as `and` or `where` can.

Wrong:
    maks m = k <= q
Right:
    mask m = k <= q
""",
    "M007": """Expression nested too deeply

More than 100 levels of brackets, or a sum or product of more than 100 terms. Name parts of it with `let`.
""",
    "M008": """String without an end

Strings stand in double quotes and end on the line they start on.

Wrong:
    use causal from "std:causal
    mask m = causal
Right:
    use causal from "std:causal"
    mask m = causal
""",
    "M009": """A mask file cannot be read

The file does not exist, is a folder, may not be read, or is not UTF-8 text. `std:NAME` names a file of the packaged
standard set.
""",
    "M101": """Unknown name

A name is neither a coordinate (`q k h nq nk`), nor declared in the file, nor brought in by `use`.

Wrong:
    input window : int where window >= 1
    mask m = k <= q < k + windw
Right:
    input window : int where window >= 1
    mask m = k <= q < k + window
""",
    "M102": """A set needs a token

`doc.start` is a different number for every segment: say of which token, `doc.start[k]` or `doc.start[q]`. The bare
`doc.len` has a meaning only in the `where` of an input that is `per doc`; and a set by itself is no value.

Wrong:
    input doc : segments
    mask m = doc.start <= k <= q
Right:
    input doc : segments
    mask m = doc.start[q] <= k <= q
""",
    "M103": """A vector needs an index

An input `per key`, `per row`, `per head` or per set holds many values: say which, `prefix[k]`. A block table is read as
`keep[q // 128, k // 128]`. Without an index a vector may stand only in a `where` over the same axis.

Wrong:
    input evict : int per key
    mask m = k <= q < evict
Right:
    input evict : int per key
    mask m = k <= q < evict[k]
""",
    "M104": """Unknown attribute

Segments and spans have the attributes `start`, `end` (one past the last token), `len` and `pos` (offset of the token
in its segment). The number of a segment is the plain `doc[k]`.

Wrong:
    input doc : segments
    mask m = doc.first[q] <= k <= q
Right:
    input doc : segments
    mask m = doc.start[q] <= k <= q
""",
    "M105": """Wrong index

Sets and inputs `per key`, `per row` or per set are read at a token (`k`, `q`, or a position computed from them), inputs
`per head` at `h`; a single number takes no index.

Wrong:
    input streaming : bool per head
    mask m = k <= q and not streaming[k]
Right:
    input streaming : bool per head
    mask m = k <= q and not streaming[h]
""",
    "M106": """A number where a condition must stand, or the other way round

`and`, `or`, `not`, `if` and a mask itself take conditions; comparisons and arithmetic take numbers.

Wrong:
    input window : int
    mask m = k <= q and window
Right:
    input window : int
    mask m = k <= q and window >= 1
""",
    "M107": """Numbers of different units side by side

Positions (`q`, `k`, `doc.start[k]`), lengths (`doc.pos[k]`, `q - k`), numbers of segments (`doc[k]`) and block numbers
(`q // 16`) cannot be compared with each other: such a comparison is an id taken for an offset, or an offset for a
length. Plain integers and int inputs fit anywhere.

Wrong:
    input doc : segments
    mask m = doc[k] < q
Right:
    input doc : segments
    mask m = doc.start[k] < q
""",
    "M108": """Arithmetic that has no meaning for these units

position - position is a length, position + length a position, number of a segment - number of a segment a count; but
two positions do not add, and neither do numbers of segments and positions.

Wrong:
    mask m = q + k < 100
Right:
    mask m = q - k < 100
""",
    "M109": """Declared twice

Constants, inputs, `let`s, masks and imported names of a file share one set of names.

Wrong:
    const W = 4
    input W : int
    mask m = q < W
Right:
    const W = 4
    input V : int
    mask m = q < W + V
""",
    "M110": """This name is taken

`q k h nq nk same first last abs min max` are words of the language. Inputs are given to `maskc.run` and `bind` by
keyword, so they cannot have the name of another parameter of these functions.

Wrong:
    input scale : int
    mask m = k <= q < k + scale
Right:
    input stride : int
    mask m = k <= q < k + stride
""",
    "M111": """Circular definition

A `let`, constant or mask is defined by itself, or a set lies within itself. There is no recursion.

Wrong:
    let a = b or k <= q
    let b = a
    mask m = b
Right:
    let a = k <= q
    let b = a
    mask m = b
""",
    "M112": """Not a constant that fits

Constants, defaults and block sizes are computed when the file is compiled, from numbers and other constants; every
number fits in 32 bits.

Wrong:
    input n : int
    const W = n + 1
    mask m = k <= q < k + W
Right:
    const N = 3
    const W = N + 1
    mask m = k <= q < k + W
""",
    "M113": """Divisor that may be zero or negative

`//` rounds down and `%` has the sign of its divisor. So that both mean one thing everywhere, a divisor is a constant
>= 1, or a single `int` input that its own `where` or an `assume` bounds below by 1.

Wrong:
    input block_size : int
    mask m = q // block_size >= k // block_size
Right:
    input block_size : int where block_size >= 1
    mask m = q // block_size >= k // block_size
""",
    "M114": """Wrong use of a function or of a `let` with parameters

`same(S)`, `first(S)` and `last(S)` (after `in`) take one set, `abs` one number, `min` and `max` two or more; a `let`
takes as many arguments as it has parameters.

Wrong:
    let near(a, b) = abs(a - b) < 8
    mask m = near(q)
Right:
    let near(a, b) = abs(a - b) < 8
    mask m = near(q, k)
""",
    "M115": """Input that no mask uses

Data would be bound for it and change nothing: usually a condition was forgotten, and documents or padding leak. Remove
the input or use it.

Wrong:
    input doc : segments
    mask m = k <= q
Right:
    input doc : segments
    mask m = same(doc) and k <= q
""",
    "M116": """A set must stand here

`same`, `in`, `first`, `last`, `within`, `isolated by` and attributes need an input declared `segments` or `spans`.

Wrong:
    input doc : int per key
    mask m = same(doc)
Right:
    input doc : segments
    mask m = same(doc)
""",
    "M117": """A file named by `use` cannot be read

Paths are relative to the file that contains the `use`; `std:NAME` names a packaged mask.

Wrong:
    use causal from "no_such_file.mask"
    mask m = causal
Right:
    use causal from "std:causal"
    mask m = causal
""",
    "M118": """Files use each other in a circle

Move what they share into a file of its own.
""",
    "M119": """This cannot be imported

`use` brings in masks, `let`s and constants by name. The inputs they read come along by themselves: they are merged with
an input of the same name and type, and must not meet anything else of that name.

Wrong:
    use casual from "std:causal"
    mask m = casual
Right:
    use causal from "std:causal"
    mask m = causal
""",
    "M120": """Block table in the wrong place

A `bool per block(a, b)` input is combined with the tiles of the kernel as it is: it can only stand as a top-level `and`
term of a mask, read as `keep[q // a, k // b]`.

Wrong:
    input keep : bool per block(128, 128)
    mask m = k <= q or keep[q // 128, k // 128]
Right:
    input keep : bool per block(128, 128)
    mask m = k <= q and keep[q // 128, k // 128]
""",
    "M121": """Fact that cannot be checked element by element

`where` and `assume` are checked in one pass when data are bound. A fact speaks of rows, of keys, of heads or of whole
segments, never of pairs of them.

Wrong:
    input evict : int per key where evict[k] > q
    mask m = k <= q < evict[k]
Right:
    input evict : int per key where evict[k] > k
    mask m = k <= q < evict[k]
""",
    "M122": """Rows and keys mixed up

The file says that rows and keys are two sequences (it has inputs `per row` and inputs `per key`, or a fact that relates
`nq` and `nk`), so an input `per key` cannot be read at a row, nor one `per row` at a key. In a file that says nothing of
the kind such a read means self attention, and the mask needs nq == nk.

Wrong:
    input row_pair : sorted int per row
    input key_pair : int per key
    mask m = row_pair[q] == key_pair[q]
Right:
    input row_pair : sorted int per row
    input key_pair : int per key
    mask m = row_pair[q] == key_pair[k]
""",
    "M123": """Default that cannot stand

Only a single `int` input has a default, a constant that satisfies the facts of the input.

Wrong:
    input window : int = 0 where window >= 1
    mask m = k <= q < k + window
Right:
    input window : int = 1024 where window >= 1
    mask m = k <= q < k + window
""",
    "M124": """Which mask?

A file may declare several masks; name one, as in `gemma3.mask:local`. The only mask of a file may also be called by the
name of the file, or by none.
""",
    "M125": """Definitions expand too far

`let`s are put in place of their names. When each uses the one before it twice, the mask doubles with every step.
""",
    "W101": """Never used

A constant, `let` or imported name that nothing in the file uses, perhaps a leftover or a condition that was forgotten.
""",
    "W102": """Window with one side

The mask bounds how far back a row sees and nothing else, so every row sees the whole future. A causal window is
`k <= q < k + window`, a symmetric one `abs(q - k) <= window`.
""",
}
