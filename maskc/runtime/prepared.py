"""Calls on a Hopper GPU of which all is known but addresses: their variants, sizes, and launches that were made before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import VECTORS
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import hopper, hopper_bwd
from maskc.runtime.driver_api import context_of
from maskc.runtime.ops import Call, Schedule
from maskc.runtime.ready import Fresh, Ready, Words, keeping

Layout = tuple[tuple[int, ...], ...]
"""The strides of some tensors; () where all are contiguous."""
MOST_LAYOUTS = 16
"""That launches are kept for."""

# Words of the kernels' structs that each call gives, of runs of fields: the first, and how many.
FORWARD_WORDS: tuple[Words, ...] = ((("mask.minmax", 2), ("packs", 10)),)
BACKWARD_WORDS: tuple[Words, ...] = ((("out", 14 + len(VECTORS)),), (("dq", 12 + len(VECTORS)),), (("acc", 2),))


class _Forward:
    """Forwards of one kind: what their sizes settle, and by layout what a call launched.

    parts: of a schedule, where what the kernel reads lies in it, as `_ForwardParams` has it. A layout that came once has ()
    in `ready`: many sizes come once, as in decoding, and what the second call launches is kept.
    """

    out: Fresh
    lse: Fresh

    def __init__(self, v: BoundaryVectors, q: Tensor, k: Tensor) -> None:
        self.spec = forward_spec(hopper.mask_form(v), q.shape[3], hopper.DTYPES[q.dtype], "input")
        self.sizes = hopper.Sizes.of(self.spec, v, q, k)
        at = self.sizes.tables.offsets
        self.parts = [at[name] for name in ("minmax", "unseen", "packs", "runs", "run_counts", "order", "giants")]
        self.ready: dict[Layout, tuple[Ready, ...]] = {}

    def keep(self, layout: Layout, made: list[Ready], q: Tensor) -> None:
        batch, rows, heads, _ = q.shape
        self.out, self.lse = Fresh.of(q.shape, q.dtype), Fresh.of((batch, heads, rows), torch.float32)
        _put(self.ready, layout, made)


class _Backward:
    """The same of backwards. parts: of a workspace, see `hopper_bwd.Sizes`."""

    dq: Fresh
    grads: Fresh
    space: Fresh

    def __init__(self, v: BoundaryVectors, q: Tensor, k: Tensor, deterministic: bool) -> None:
        form, dtype = hopper.mask_form(v), hopper.DTYPES[q.dtype]
        self.spec = select_backward(form, q.shape[3], dtype, deterministic=deterministic)
        self.sizes = hopper_bwd.Sizes.of(self.spec, v, q, k, q.dtype)
        self.parts = self.sizes.parts
        self.ready: dict[Layout, tuple[Ready, ...]] = {}

    def keep(self, layout: Layout, made: list[Ready], q: Tensor) -> None:
        sizes = self.sizes
        self.dq, self.space = Fresh.of(q.shape, q.dtype), Fresh.of((sizes.bytes,), torch.uint8)
        self.grads = Fresh.of(sizes.stored, sizes.stored_dtype)
        _put(self.ready, layout, made)


def _put(into: dict[Layout, tuple[Ready, ...]], layout: Layout, made: list[Ready]) -> None:
    into[layout] = tuple(made)
    if len(into) > MOST_LAYOUTS:
        into.pop(next(iter(into)), None)


class _Kind:
    """Calls of the same sizes under masks of the same form and sizes, whichever these are."""

    def __init__(self, v: BoundaryVectors, q: Tensor, k: Tensor) -> None:
        self.forward = _Forward(v, q, k)
        self.backward: _Backward | None = None

    @classmethod
    def of(cls, v: BoundaryVectors, q: Tensor, k: Tensor, scale: float, deterministic: bool) -> _Kind:
        """Of a mask; its own where it has a block table, which lies in more than some words of the structs."""
        if v.blocks is not None:
            return cls(v, q, k)
        forms = [t is None for t in v.tensors]
        key = v.nq, v.nk, v.batch, v.heads, v.causal, *forms, q.shape, k.shape, q.dtype, q.device, scale, deterministic
        found = _kinds.get(key)
        if found is None:
            found = _kinds[key] = cls(v, q, k)
            if len(_kinds) > MOST_KINDS:
                _kinds.pop(next(iter(_kinds)), None)
        return found


_kinds: dict[tuple[object, ...], _Kind] = {}
MOST_KINDS = 64


@dataclass(frozen=True, eq=False, slots=True)
class Prepared(Call):
    """A call that `run` has checked, for tensors of the same sizes.

    It launches what is ready. That is nothing where the mask, strides or an address make the backend copy a tensor, nor
    where gradients come in more than their plain form (`dlse`).
    """

    kind: _Kind
    vectors: tuple[int, ...] | None
    """Where they lie, as the kernels read them; None where one must be copied for that each time, or the table of blocks."""
    keep: int
    tables: tuple[int, ...] | None
    """Where the parts of the schedule lie, as `_Forward.parts` has them; None where nothing is ready for this mask."""

    @classmethod
    def of(cls, v: BoundaryVectors, schedule: Schedule, scale: float, deterministic: bool, q: Tensor, k: Tensor) -> Prepared:
        kind = _Kind.of(v, q, k, scale, deterministic)
        vectors, keep = _where(v), 0 if v.blocks is None else v.blocks.keep.data_ptr()
        tables = None
        of = kind.forward
        if vectors is not None and (not of.spec.packed or (schedule and schedule[0].numel() == of.sizes.tables.bytes)):
            base = schedule[0].data_ptr() if schedule else 0
            tables = tuple([base + part for part in of.parts])
        return cls(v, schedule, scale, deterministic, kind, vectors, keep, tables)

    def forward(self, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        layout, of, tables = _layout(q, k, val), self.kind.forward, self.tables
        at_q, at_k, at_val = q.data_ptr(), k.data_ptr(), val.data_ptr()
        ready = of.ready.get(layout)
        if not ready or tables is None or (at_q | at_k | at_val) % 16:
            return self._plain_forward(layout, q, k, val)
        device = q.device
        out, lse, counter = of.out.on(device), of.lse.on(device), hopper.work_counter(device)
        at_out = out.data_ptr()
        minmax, unseen, *parts = tables
        words = *parts, counter.data_ptr(), 0, 0, at_out, lse.data_ptr()
        with context_of(q.get_device()):
            ready[0].start(current_handle(device), (at_q, at_k, at_val, at_out), (minmax, unseen), words)
        return out, lse

    def _plain_forward(self, layout: Layout, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        of, made = self.kind.forward, list[Ready]()
        simple = self.tables is not None and _as_they_are(q, k, val)
        again = simple and layout in of.ready
        by = keeping(made, FORWARD_WORDS) if again else None
        results = hopper.forward_with(of.spec, self.v, q, k, val, self.scale, self.schedule, sizes=of.sizes, by=by)
        if again:
            of.keep(layout, made, q)
        elif simple:
            _put(of.ready, layout, made)
        return results

    def backward(
        self, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout, of, vectors = _layout(q, k, val, out, dout), self.kind.backward, self.vectors
        at_q, at_k, at_val, at_out, at_dout = q.data_ptr(), k.data_ptr(), val.data_ptr(), out.data_ptr(), dout.data_ptr()
        given = q, k, val, out, lse, dout, dlse
        ready = of and of.ready.get(layout)
        misaligned = (at_q | at_k | at_val | at_out | at_dout) % 16
        if of is None or not ready or vectors is None or misaligned or not _simple(out, lse, dout, dlse, q.dtype):
            return self._plain_backward(layout, *given)
        device, sizes = q.device, of.sizes
        dq, dk, dv, space = of.dq.on(device), of.grads.on(device), of.grads.on(device), of.space.on(device)
        at_dk, at_dv, base = dk.data_ptr(), dv.data_ptr(), space.data_ptr()
        lse2, dpsum, dead, acc, turns, ticket, zeroed, tiles, order = [base + offset for offset in of.parts]
        counter = hopper.work_counter(device) if sizes.falling else None
        done = 0 if counter is None else counter.data_ptr()
        rows, parts = (lse2, dpsum, dead), (turns, ticket, zeroed)
        pre, main, post = ready
        with context_of(q.get_device()):
            stream = current_handle(device)
            pre.start(stream, (), (at_out, at_dout, lse.data_ptr(), 0, *rows, acc, *parts, tiles, order, done, *vectors))
            stores = (at_k, at_val) if sizes.grads_f32 else (at_dk, at_dv)
            words = acc, *rows, tiles, order if sizes.falling else 0, *vectors, self.keep, *parts, at_dk, at_dv
            main.start(stream, (at_q, at_dout, at_k, at_val, *stores), words)
            post.start(stream, (), (acc, dq.data_ptr()))
        if sizes.shape.splits > 1:
            dk, dv = (t.sum(0).to(q.dtype) for t in (dk, dv))
        return dq, dk, dv

    def _plain_backward(
        self, layout: Layout, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        of, made = self.kind.backward, list[Ready]()
        if of is None:
            of = self.kind.backward = _Backward(self.v, q, k, self.deterministic)
        simple = self.vectors is not None and _simple(out, lse, dout, dlse, q.dtype) and _as_they_are(q, k, val, out, dout)
        again = simple and layout in of.ready
        by = keeping(made, BACKWARD_WORDS) if again else None
        given = self.v, q, k, val, out, lse, dout, dlse, self.scale, q.dtype
        results = hopper_bwd.backward_with(of.spec, *given, sizes=of.sizes, by=by)
        if again:
            of.keep(layout, made, q)
        elif simple:
            _put(of.ready, layout, made)
        return results


def _where(v: BoundaryVectors) -> tuple[int, ...] | None:
    """Addresses of the vectors, 0 for those that are not there, if each has a value for every batch item, head and key."""
    if v.blocks is not None and not v.blocks.keep.is_contiguous():
        return None
    whole, out = (v.batch, v.heads, v.nk), []
    for t in v.tensors:
        if t is not None and (t.shape != whole or not t.is_contiguous()):
            return None
        out.append(0 if t is None else t.data_ptr())
    return tuple(out)


def _as_they_are(*tensors: Tensor) -> bool:
    """Whether nothing is copied for them."""
    return all(hopper.addressable(t) is t for t in tensors)


def _layout(*tensors: Tensor) -> Layout:
    for t in tensors:
        if not t.is_contiguous():
            return tuple([t.stride() for t in tensors])
    return ()


def _simple(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the backward takes them as they are."""
    return dlse is None and out.dtype is dtype and dout.dtype is dtype and lse.is_contiguous()
