"""The public functions: the only module that sees text, data and runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskc import targets
from maskc.compiled import CompiledMask
from maskc.diagnostics import Diagnostic, MaskcError, MaskcTypeError, MaskcWarning
from maskc.ir.verdict import Proven, Unknown

if TYPE_CHECKING:
    from torch import Tensor

    from maskc.binding.bound import BoundMask
    from maskc.runtime.plan import AttentionPlan


def compile_target(target: str | Path, *, strict: bool = False) -> CompiledMask:
    """Parse, lower and prove a mask: a file, "file.mask:name" for one of several, or "std:name" of the standard set.

    Needs no data, no GPU and not torch. What is worth a second look is warned of (`MaskcWarning`) and kept in
    `.warnings`; with `strict` a mask that is neither proved nor refuted (W301) is an error.

    Raises MaskcError with everything that is wrong: M0xx, M1xx in the text, M201 for a form that no row intervals can
    hold, M301 with the smallest column that needs more than two masked runs, M302 for too many cases, M303 for a claim that
    does not hold.
    """
    return _announced(targets.load(target), strict)


def compile_text(text: str, name: str | None = None, *, strict: bool = False) -> CompiledMask:
    """As `compile`, from the text of a file; `name` picks one of several masks."""
    for what, given in (("text", text), ("name", name)):
        if not isinstance(given, str) and (what == "text" or given is not None):
            raise MaskcTypeError(Diagnostic("M511", f"the {what} of a mask is {type(given).__name__}, not str"))
    return _announced(targets.load_text(text, name), strict)


compile = compile_target  # noqa: A001  (the public name)


def load(folder: str | Path) -> CompiledMask:
    """The mask and the kernels that `maskc compile FILE -o folder` wrote: nothing is parsed, proved or compiled again.

    Needs neither NVRTC nor the front end. On a Hopper GPU exactly these kernels run; a call that needs another head
    dim, dtype or form is refused (M612). Raises M608 where the folder is damaged or of another version of maskc.
    """
    from maskc import __version__
    from maskc.codegen.bundle import load_bundle

    if not isinstance(folder, str | Path):
        raise MaskcTypeError(Diagnostic("M511", f"a folder is named by a path; this is {type(folder).__name__}"))
    bundle = load_bundle(Path(folder), __version__)
    bundle.install()
    verdict = (
        Unknown("it was undecided when its kernels were built") if bundle.program is None else Proven(bundle.program, (), 0, 0)
    )
    return CompiledMask(bundle.fn, verdict, bundle.program, kernels=bundle)


def run(
    spec: str | Path | CompiledMask | BoundMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    *,
    plan: AttentionPlan | None = None,
    strategy: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    **inputs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of q over k and v under a mask, differentiable; runs exactly or raises before any work.

    Args:
        spec: a bound mask; or a compiled one, a path or "std:name", whose inputs are then given by keyword.
        q, k, v: [B, Sq, Hq, D], [B, Sk, Hk, D], [B, Sk, Hk, Dv], or packed without B; fp64, fp32, bf16 or fp16 (on
            Hopper bf16 or fp16), any strides. Query head h reads kv head h // (Hq // Hk).
        group: a process group; with several ranks q, k, v are this rank's rows, in the order of `plan` (without one the
            contiguous equal split, the last rank short).
        strategy: how keys travel between ranks: "auto", "all-gather", "staged", "ring", or into each other's memory
            ("gated", "copy-then-attend", "sm-copy").
        scale: factor on the scores, 1 / sqrt(D) by default.
        deterministic: gradients that are bitwise the same in every run.
        backend: "auto" follows the tensors: "cpu"; for CUDA tensors "hopper", or "flex" (torch's FlexAttention) where
            the GPU is no Hopper one.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype (under `torch.autocast` in its), 0 in rows that see nothing; with `return_lse`
        also lse [B, Hq, Sq] (packed [Hq, T]), the natural log of the sum of exponentials, fp32 (fp64 for fp64), -inf in
        those rows.

    Raises:
        MaskcTypeError: an argument that `run` does not have (M501) or of the wrong type (M510, M511).
        MaskcError: M4xx where data do not fit the mask or the tensors, M5xx for tensors and backends, M6xx where a kernel
            cannot be built, loaded or launched, M7xx between ranks.
    """
    import maskc.runtime.run as runtime  # of all forms the one that takes least where it is there already

    if isinstance(spec, str | Path):
        from maskc.binding.modes import outside

        spec = _announced(outside("compile and bind the mask")(targets.load)(spec), strict=False)
    if isinstance(spec, CompiledMask):
        runtime.check_keywords(inputs, [d.name for d in spec.fn.inputs])
        spec = spec.bind(**inputs)  # type: ignore[arg-type]
    elif inputs:
        from maskc.binding.bound import BoundMask

        if isinstance(spec, BoundMask):
            runtime.check_keywords(inputs, ())
    return runtime.run(
        spec,
        q,
        k,
        v,
        group,
        plan=plan,
        strategy=strategy,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        backend=backend,
    )


def _announced(mask: CompiledMask, strict: bool) -> CompiledMask:
    if strict and (undecided := [w for w in mask.warnings if w.code == "W301"]):
        raise MaskcError(undecided)
    for warning in mask.warnings:
        warnings.warn(warning.render(), MaskcWarning, stacklevel=3)
    return mask
