"""What a plan reads off its masks: sizes, documents, vectors, digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from maskc.boundary import VECTOR_NAMES, BoundaryVectors
from maskc.diagnostics import error
from maskc.runtime import layout as layouts
from maskc.runtime.layout import Range
from maskc.runtime.localize import on_host
from maskc.runtime.plan_arguments import Spec
from maskc.runtime.remember import derived


def sizes_of(masks: Sequence[Spec], nq: int | None, nk: int | None) -> tuple[int, int]:
    """(nq, nk) that the masks agree on, or that are given. Raises M705, M711."""

    def agreed(name: str, given: int | None) -> int:
        known = {size for m in masks if (size := getattr(m, name)) is not None} | ({given} - {None})
        if len(known) > 1:
            raise error("M705", f"masks of one plan must agree on {name}, got {sorted(n for n in known if n is not None)}")
        if not known:
            hint = f"give {name}= to `bind` or to `plan`; in a JSON file of inputs it is the key {name}"
            raise error("M711", f"no mask says what {name} is", None, hint)
        (size,) = known
        assert size is not None
        return size

    return agreed("nq", nq), agreed("nk", nk)


def tilings_of(masks: Sequence[Spec], length: int, name: str | None) -> tuple[tuple[Range, ...], ...] | None:
    """Documents per batch item, gaps included: one item where all agree, None where no mask has such an input."""
    if not isinstance(name, str | None):
        raise error("M712", f"documents is {name!r}, not the name of a segments input")
    for mask in masks:
        top = segments_of(mask)
        chosen = name if name is not None else top[0] if len(top) == 1 else None
        if isinstance(mask, BoundaryVectors) or chosen is None or chosen not in mask.inputs.sets:
            continue
        table = mask.inputs.sets[chosen]
        items = tuple(
            tuple(layouts.tiling(list(zip(a, b, strict=True)), length))
            for a, b in zip(table.starts.tolist(), table.ends.tolist(), strict=True)
        )
        return items[:1] if len(set(items)) == 1 else items
    if name is not None:
        raise error("M712", f"no mask of the plan has a segments input `{name}`")
    return None


def segments_of(mask: Spec) -> tuple[str, ...]:
    """Names of its segments inputs that are not within another."""
    if isinstance(mask, BoundaryVectors):
        return ()
    return tuple(d.name for d in mask.compiled.fn.inputs if d.is_set and d.within is None and d.kind.value == "segments")


def vectors_of(spec: Spec, nq: int | None, nk: int | None) -> BoundaryVectors:
    """The vectors of a spec for the whole sequence, on the device of its inputs."""
    return spec if isinstance(spec, BoundaryVectors) else spec.vectors(nq, nk)


def spec_name(spec: Spec) -> str:
    """What messages call it."""
    return "vectors" if isinstance(spec, BoundaryVectors) else spec.compiled.name


@derived
def vectors_digest(v: BoundaryVectors) -> str:
    """Digest of what the mask hides: sizes, vectors, block table. Remembered per object (vectors are never changed)."""
    v = on_host(v)
    h = hashlib.sha256(repr((v.nq, v.nk, v.batch, v.heads, v.causal)).encode())
    for name, t in zip(VECTOR_NAMES, v.tensors, strict=True):
        if t is not None:
            h.update(name.encode() + t.contiguous().numpy().tobytes())
    if v.blocks is not None:
        keep = v.blocks.keep.to(torch.uint8).contiguous()
        h.update(repr((v.blocks.block_q, v.blocks.block_kv, tuple(keep.shape))).encode() + keep.numpy().tobytes())
    return h.hexdigest()
