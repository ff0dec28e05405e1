"""Calls on a Hopper GPU of which all is known but addresses: their variants, sizes, and launches that were made before."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    packed: bool
    bytes: int
    parts: tuple[int, ...]
    """Of a schedule: whether there is one, its size, and where what the forward reads lies in it, as `_ForwardParams` has it."""
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
        sizes, back_sizes = hopper.Sizes.of(spec, v, q, k), hopper_bwd.Sizes.of(back, v, q, k, q.dtype)
        at = sizes.tables.offsets
        parts = tuple(at[name] for name in ("minmax", "unseen", "packs", "runs", "run_counts", "order", "giants"))
        return cls(spec, sizes, back, back_sizes, _Memory.of(q, back_sizes), spec.packed, sizes.tables.bytes, parts)

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
    vectors: tuple[int, ...] | None
    """Where they lie, as the kernels read them; None where one must be copied for that each time, or the table of blocks."""
    keep: int
    tables: tuple[int, ...] | None
    """Where the parts of the schedule lie, as `_Kind.parts` has them; None where nothing is ready for this mask."""

    @classmethod
    def of(cls, v: BoundaryVectors, schedule: Schedule, scale: float, deterministic: bool, q: Tensor, k: Tensor) -> Prepared:
        kind = _Kind.of(v, q, k, scale, deterministic)
        vectors, keep = _where(v), 0 if v.blocks is None else v.blocks.keep.data_ptr()
        tables = None
        if vectors is not None and (not kind.packed or (schedule and schedule[0].numel() == kind.bytes)):
            base = schedule[0].data_ptr() if schedule else 0
            tables = tuple([base + part for part in kind.parts])
        return cls(v, schedule, scale, deterministic, kind, vectors, keep, tables)

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
        ready, vectors = kind.backwards.get(layout), self.vectors
        given = q, k, val, out, lse, dout, dlse
        misaligned = (at_q | at_k | at_val | at_out | at_dout) % 16
        if ready is None or vectors is None or misaligned or not _plain(out, lse, dout, dlse, q.dtype):
            return self._first_backward(layout, *given)
        device, memory, sizes = q.device, kind.memory, kind.backward_sizes
        dq, dk, dv, space = memory.out.on(device), memory.grads.on(device), memory.grads.on(device), memory.space.on(device)
        at_dk, at_dv, base = dk.data_ptr(), dv.data_ptr(), space.data_ptr()
        lse2, dpsum, dead, acc, turns, ticket, zeroed, tiles, order = [base + offset for offset in memory.offsets]
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

    def _first_backward(
        self, layout: Layout, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind, made = self.kind, list[Ready]()
        given = self.v, q, k, val, out, lse, dout, dlse, self.scale, q.dtype
        results = hopper_bwd.backward_with(
            kind.backward_spec, *given, sizes=kind.backward_sizes, by=keeping(made, BACKWARD_WORDS)
        )
        if _plain(out, lse, dout, dlse, q.dtype) and _as_they_are(q, k, val, out, dout):
            kind.keep(kind.backwards, layout, made)
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


def _plain(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the backward takes them as they are."""
    return dlse is None and out.dtype is dtype and dout.dtype is dtype and lse.is_contiguous()
