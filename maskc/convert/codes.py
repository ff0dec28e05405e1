"""Codes of the converters: the first line is the title, the rest the text of `maskc explain`."""

from __future__ import annotations

CODES: dict[str, str] = {
    "M450": """A mask of another library is not column-wise.
maskc keeps at most two runs of masked rows per key (beside the free triangle of rows before the key). The message names
the first key that needs more, and its masked rows. Nothing is approximated: store the tokens in an order that joins the
runs, or make two calls and merge them by their log-sum-exp.""",
    "M451": """Data of another library are malformed.
Shape, dtype, range or combination of arguments is not one that the library itself defines; the message names the
argument, the value and the rule.""",
    "M452": """A mask is too large to be read element by element.
A dense mask, a `mask_mod` and a `BlockMask` say nothing about a column as a whole, so all nq x nk elements are looked at.
Above the limit write the mask as a .mask file, which is read in O(n), or raise `limit=`.""",
    "M453": """The other library's format cannot hold this mask.
Formats differ in what they express: `cu_seqlens` holds documents only, FlashMask two runs of masked rows per key without a
free triangle on top, and only FlexAttention has block tables. The message names the first key that does not fit.""",
}
