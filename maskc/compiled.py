"""CompiledMask: a mask that is parsed, lowered and proved. Holds no data and needs neither torch nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maskc.diagnostics import Diagnostic
from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import MaskFn
from maskc.ir.verdict import CheckResult, Verdict

if TYPE_CHECKING:
    from maskc.binding.bound import BoundMask
    from maskc.codegen.bundle import Bundle


@dataclass(frozen=True, eq=False, repr=False)
class CompiledMask:
    """What `maskc.compile` returns.

    fn: the typed mask. verdict: what is proved about it. program: its lowering, None where the verdict is Unknown (the
    data then decide when they are bound). checks: the claims of the file. warnings: everything worth a second look.
    kernels: those that it was loaded with (`maskc.load`), and then no others run on a GPU.
    """

    fn: MaskFn
    verdict: Verdict
    program: IntervalProgram | None
    checks: tuple[CheckResult, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()
    kernels: Bundle | None = None

    @property
    def name(self) -> str:
        return self.fn.name

    def __repr__(self) -> str:
        inputs = ", ".join(f"{i.name}: {i.kind.value}" for i in self.fn.inputs)
        return f"CompiledMask({self.name}({inputs}), {_reads(self.program) if self.program else 'decided by each batch (W301)'})"

    def bind(
        self,
        *,
        nq: int | None = None,
        nk: int | None = None,
        batch: int | None = None,
        validate: bool = True,
        **inputs: object,
    ) -> BoundMask:
        """The mask with the data of one batch: the inputs of the file by name.

        Segments and spans take `maskc.segments(...)` / `maskc.spans(...)` or a list of them for a batch; vectors take
        lists, numpy arrays or tensors of [n], [batch, n] or [batch, heads, n]; scalars an int, or one per batch item.
        Sizes not given are taken from the inputs or, last, from q and k in `run`. Everything is validated in O(n) with
        at most one host synchronisation (none with `validate=False`, which promises that the data are right).

        Raises MaskcError (M4xx), naming input, index, value and rule.
        """
        import maskc.binding.bind as binding

        return binding.bind(self, nq=nq, nk=nk, batch=batch, validate=validate, inputs=inputs)


def _reads(program: IntervalProgram) -> str:
    vectors = [*(["the causal triangle"] if program.causal else []), *(name.upper() for name in program.vectors)]
    return f"proved, reads {', '.join(vectors) or 'nothing'}"
