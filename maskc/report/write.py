"""What `maskc explain --html` does: choose the masks, bind them, write one page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from maskc.binding.bind import bind
from maskc.binding.bound import BoundMask
from maskc.compiled import CompiledMask
from maskc.diagnostics import error
from maskc.files import unwritable
from maskc.frontend import parse_file, split_target
from maskc.inputs import Inputs, bind_inputs, read_inputs
from maskc.report.cases import TOKENS_WITHOUT_DATA, Subject, standard
from maskc.report.gallery import EXAMPLES, example
from maskc.report.page import explain_page
from maskc.report.progress import progress
from maskc.targets import compile_fn

GALLERY_UNIT = 256
"""The gallery plans its masks at 256 times the tokens that it shows: 32,768."""


def write_explain(path: Path, target: str | None, inputs: Path | None, gallery: bool) -> str:
    """Write the page of a target, of the standard set (`gallery`), or of both; returns a line that says what was written.

    Without `gallery` the standard masks come along too, to compare with, but not planned. Masks of a file that the target
    does not single out are all shown, bound to the same data.
    """
    if target is None and not gallery:
        raise error("M540", "explain --html needs a mask to show, or --gallery")
    if target is None and inputs is not None:
        raise error("M540", "--inputs are the data of one mask; name it before them")
    own = [] if target is None else list(subjects(target, inputs))
    count = len(own) + len(EXAMPLES)
    with progress("explaining", 2 * count) as tick:
        text = explain_page(chain(own, standard(GALLERY_UNIT if gallery else 1)), own[0].name if own else "standard masks", tick)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise unwritable(path, e) from None
    return f"{path}: {count} {'mask' if count == 1 else 'masks'}, {len(text.encode()) / 1e6:.1f} MB"


def subjects(target: str, inputs: Path | None) -> Iterator[Subject]:
    """The masks that a target names, bound to the data of a file, or to the standard set's own where there is none."""
    file, name = split_target(target)
    parsed = parse_file(file)
    given = None if inputs is None else read_inputs(inputs)  # once: it may be a pipe
    for fn in parsed.masks if name is None else (parsed.pick(name),):
        bound = _bound(compile_fn(fn, parsed.warnings), str(file), given)
        v = bound.vectors()
        if v.nq == 0 or v.nk == 0:
            raise error("M540", f"a page of `{fn.name}` needs a row and a key at least; these data have {v.nq} and {v.nk}")
        yield Subject(fn.name, "yours", bound)


def _bound(compiled: CompiledMask, file: str, given: Inputs | None) -> BoundMask:
    if given is not None:
        return bind_inputs(compiled, given)
    library = [file.removeprefix("std:"), f"{file.removeprefix('std:')}:{compiled.fn.name}"] if file.startswith("std:") else []
    for name in library:
        if name in EXAMPLES:
            e = example(name)
            return bind(compiled, nq=e.nq, nk=e.nk, batch=None, validate=True, inputs=e.inputs)
    if needed := [d.name for d in compiled.fn.inputs if d.default is None]:
        hint = "give --inputs JSON with the data of one batch"
        raise error("M540", f"a page of `{compiled.fn.name}` needs data: {', '.join(needed)}", compiled.fn.span, hint)
    return bind(compiled, nq=TOKENS_WITHOUT_DATA, nk=TOKENS_WITHOUT_DATA, batch=None, validate=True, inputs={})
