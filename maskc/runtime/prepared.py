"""Calls on a Hopper GPU of which all is known but addresses: their variants, sizes, and launches that were made before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import VECTORS, KernelSpec
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
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


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of a call: its results and workspace, and where the parts of that lie, in the order of `pre::Params`."""

    out: Fresh
    lse: Fresh
    grads: Fresh
    space: Fresh
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, q: Tensor, sizes: hopper_bwd.Sizes) -> _Memory:
        batch, rows, heads, _ = q.shape
        offsets = ("lse2", "dpsum", "dead_rows", "dq", "turns", "ticket", "zeroed", "tiles", "order")
        return cls(
            Fresh.of(q.shape, q.dtype),
            Fresh.of((batch, heads, rows), torch.float32),
            Fresh.of(sizes.stored, sizes.stored_dtype),
            Fresh.of((sizes.bytes,), torch.uint8),
            tuple(sizes.offsets[name] for name in offsets),
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """Calls of the same sizes, under masks of the same form and sizes.

    forwards, backwards: what a first call of a layout launched; the next ones, under whatever mask, give addresses alone.
    """

    forward_spec: KernelSpec
    forward_sizes: hopper.Sizes
    backward_spec: BackwardSpec
    backward_sizes: hopper_bwd.Sizes
    memory: _Memory
    forwards: dict[Layout, tuple[Ready, ...]] = field(default_factory=dict)
    backwards: dict[Layout, tuple[Ready, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, v: BoundaryVectors, q: Tensor, k: Tensor, scale: float, deterministic: bool) -> _Kind:
        """Of a mask; its own where it has a block table, which lies in more than some words of the structs."""
        forms = [t is None for t in v.tensors]
        key = v.nq, v.nk, v.batch, v.heads, v.causal, *forms, q.shape, k.shape, q.dtype, q.device, scale, deterministic
        found = _kinds.get(key) if v.blocks is None else None
        if found is None:
            found = cls._new(v, q, k, deterministic)
            if v.blocks is None:
                _kinds[key] = found
                if len(_kinds) > MOST_KINDS:
                    _kinds.pop(next(iter(_kinds)), None)
        return found

    @classmethod
    def _new(cls, v: BoundaryVectors, q: Tensor, k: Tensor, deterministic: bool) -> _Kind:
        form, head_dim, dtype = hopper.mask_form(v), q.shape[3], hopper.DTYPES[q.dtype]
        spec = forward_spec(form, head_dim, dtype, "input")
        back = select_backward(form, head_dim, dtype, deterministic=deterministic)
        sizes = hopper_bwd.Sizes.of(back, v, q, k, q.dtype)
        return cls(spec, hopper.Sizes.of(spec, v, q, k), back, sizes, _Memory.of(q, sizes))

    def keep(self, into: dict[Layout, tuple[Ready, ...]], layout: Layout, made: list[Ready]) -> None:
        into[layout] = tuple(made)
        if len(into) > MOST_LAYOUTS:
            into.pop(next(iter(into)), None)


_kinds: dict[tuple[object, ...], _Kind] = {}
MOST_KINDS = 64


@dataclass(frozen=True, eq=False, slots=True)
class Prepared(Call):
    """A call that `run` has checked, for tensors of the same sizes.

    It launches what is ready. That is nothing where the mask, strides or an address make the backend copy a tensor, nor
    where gradients come in more than their plain form (`dlse`).
    """

    kind: _Kind
    mask: hopper_bwd.MaskFields | None
    """Of the backward; None where it wants copies of the vectors, which it then makes each time."""
    tables: tuple[int, ...] | None
    """Where the parts of the schedule lie, in the order of `_ForwardParams`; None where there is none, or one of other sizes."""
    vectors: tuple[int, ...]
    keep: int

    @classmethod
    def of(cls, v: BoundaryVectors, schedule: Schedule, scale: float, deterministic: bool, q: Tensor, k: Tensor) -> Prepared:
        kind = _Kind.of(v, q, k, scale, deterministic)
        mask, own = hopper_bwd.MaskFields.of(v), {t.data_ptr() for t in v.tensors if t is not None}
        if v.blocks is not None:
            own.add(v.blocks.keep.data_ptr())
        as_it_is = all(t.data_ptr() in own for t in mask.keep)
        vectors = tuple([mask.fields.get(name, 0) for name in VECTORS])
        tables = _places(kind, schedule) if as_it_is else None
        return cls(
            v, schedule, scale, deterministic, kind, mask if as_it_is else None, tables, vectors, mask.fields.get("keep", 0)
        )

    def forward(self, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        layout, kind, tables = _layout(q, k, val), self.kind, self.tables
        at_q, at_k, at_val = q.data_ptr(), k.data_ptr(), val.data_ptr()
        ready = kind.forwards.get(layout)
        if ready is None or tables is None or (at_q | at_k | at_val) % 16:
            return self._first_forward(layout, q, k, val)
        device, memory = q.device, kind.memory
        out, lse, counter = memory.out.on(device), memory.lse.on(device), hopper.work_counter(device)
        at_out = out.data_ptr()
        minmax, unseen, *parts = tables
        words = *parts, counter.data_ptr(), 0, 0, at_out, lse.data_ptr()
        with context_of(q.get_device()):
            ready[0].start(current_handle(device), (at_q, at_k, at_val, at_out), (minmax, unseen), words)
        return out, lse

    def _first_forward(self, layout: Layout, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        kind, made = self.kind, list[Ready]()
        given = kind.forward_spec, self.v, q, k, val, self.scale, self.schedule
        results = hopper.forward_with(*given, sizes=kind.forward_sizes, by=keeping(made, FORWARD_WORDS))
        if _as_they_are(q, k, val):
            kind.keep(kind.forwards, layout, made)
        return results

    def backward(
        self, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout, kind = _layout(q, k, val, out, dout), self.kind
        at_q, at_k, at_val, at_out, at_dout = q.data_ptr(), k.data_ptr(), val.data_ptr(), out.data_ptr(), dout.data_ptr()
        ready = None if self.mask is None else kind.backwards.get(layout)
        given = q, k, val, out, lse, dout, dlse
        if ready is None or (at_q | at_k | at_val | at_out | at_dout) % 16 or not _plain(out, lse, dout, dlse, q.dtype):
            return self._first_backward(layout, *given)
        device, memory, sizes = q.device, kind.memory, kind.backward_sizes
        dq, dk, dv, space = memory.out.on(device), memory.grads.on(device), memory.grads.on(device), memory.space.on(device)
        at_dk, at_dv, base = dk.data_ptr(), dv.data_ptr(), space.data_ptr()
        lse2, dpsum, dead, acc, turns, ticket, zeroed, tiles, order = [base + offset for offset in memory.offsets]
        counter = hopper.work_counter(device) if sizes.falling else None
        done = 0 if counter is None else counter.data_ptr()
        rows, parts, vectors = (lse2, dpsum, dead), (turns, ticket, zeroed), self.vectors
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

    def _first_backward(
        self, layout: Layout, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind, made = self.kind, list[Ready]()
        given = self.v, q, k, val, out, lse, dout, dlse, self.scale, q.dtype
        how: dict[str, Any] = {"sizes": kind.backward_sizes, "mask": self.mask}
        results = hopper_bwd.backward_with(kind.backward_spec, *given, **how, by=keeping(made, BACKWARD_WORDS))
        if _plain(out, lse, dout, dlse, q.dtype) and _as_they_are(q, k, val, out, dout):
            kind.keep(kind.backwards, layout, made)
        return results


def _places(kind: _Kind, schedule: Schedule) -> tuple[int, ...] | None:
    """Where the parts of a schedule lie, in the order of `_ForwardParams`."""
    tables = kind.forward_sizes.tables
    if kind.forward_spec.packed and (not schedule or schedule[0].numel() != tables.bytes):
        return None
    base, at = schedule[0].data_ptr() if schedule else 0, tables.offsets
    return tuple([base + at[name] for name in ("minmax", "unseen", "packs", "runs", "run_counts", "order", "giants")])


def _as_they_are(*tensors: Tensor) -> bool:
    """Whether nothing is copied for them."""
    return all(hopper.addressable(t) is t for t in tensors)


def _layout(*tensors: Tensor) -> Layout:
    for t in tensors:
        if not t.is_contiguous():
            return tuple([t.stride() for t in tensors])
    return ()


def _plain(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the backward takes them as they are."""
    return dlse is None and out.dtype is dtype and dout.dtype is dtype and lse.is_contiguous()
