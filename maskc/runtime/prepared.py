"""Calls on a Hopper GPU of which all is known but addresses: their variants, sizes, and launches that were made before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskc.binding.streams import current_handle, tensors_of
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
"""That a call keeps launches for."""

# Words of the kernels' structs that each call gives: from this field on, so many.
FORWARD_WORDS: tuple[Words, ...] = ((("counter", 5),),)
BACKWARD_WORDS: tuple[Words, ...] = ((("out", 14),), (("dq", 17),), (("acc", 2),))


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
class Prepared(Call):
    """A call that `run` has checked, for tensors of the same sizes.

    What a first call of a layout launches is kept: the next ones give addresses alone. Not where strides or an address make
    the backend copy a tensor, nor where gradients come in more than their plain form (`dlse`).
    """

    forward_spec: KernelSpec
    forward_sizes: hopper.Sizes
    backward_spec: BackwardSpec
    backward_sizes: hopper_bwd.Sizes
    backward_mask: hopper_bwd.MaskFields | None
    """None where the backward wants copies of the vectors, which it then makes each time."""
    memory: _Memory
    mask_words: tuple[int, ...]
    forwards: dict[Layout, tuple[Ready, ...]] = field(default_factory=dict)
    backwards: dict[Layout, tuple[Ready, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, v: BoundaryVectors, schedule: Schedule, scale: float, deterministic: bool, q: Tensor, k: Tensor) -> Prepared:
        form, head_dim, dtype = hopper.mask_form(v), q.shape[3], hopper.DTYPES[q.dtype]
        spec = forward_spec(form, head_dim, dtype, "input")
        back = select_backward(form, head_dim, dtype, deterministic=deterministic)
        sizes, back_sizes = hopper.Sizes.of(spec, v, q, k), hopper_bwd.Sizes.of(back, v, q, k, q.dtype)
        mask, own = hopper_bwd.MaskFields.of(v), {t.data_ptr() for t in tensors_of(v)}
        as_it_is = all(t.data_ptr() in own for t in mask.keep)
        kept, words = mask if as_it_is else None, tuple(mask.fields.get(name, 0) for name in (*VECTORS, "keep"))
        return cls(v, schedule, scale, deterministic, spec, sizes, back, back_sizes, kept, _Memory.of(q, back_sizes), words)

    def forward(self, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        layout = _layout(q, k, val)
        at_q, at_k, at_val = q.data_ptr(), k.data_ptr(), val.data_ptr()
        ready = self.forwards.get(layout)
        if ready is None or (at_q | at_k | at_val) % 16:
            return self._first_forward(layout, q, k, val)
        device = q.device
        out, lse, counter = self.memory.out.on(device), self.memory.lse.on(device), hopper.work_counter(device)
        at_out = out.data_ptr()
        words = counter.data_ptr(), 0, 0, at_out, lse.data_ptr()
        with context_of(q.get_device()):
            ready[0].start(current_handle(device), (at_q, at_k, at_val, at_out), words)
        return out, lse

    def _first_forward(self, layout: Layout, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        made: list[Ready] = []
        given = self.forward_spec, self.v, q, k, val, self.scale, self.schedule
        results = hopper.forward_with(*given, sizes=self.forward_sizes, by=keeping(made, FORWARD_WORDS))
        if self.schedule or not self.forward_spec.packed:
            self._keep(self.forwards, layout, made, q, k, val)
        return results

    def backward(
        self, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = _layout(q, k, val, out, dout)
        at_q, at_k, at_val, at_out, at_dout = q.data_ptr(), k.data_ptr(), val.data_ptr(), out.data_ptr(), dout.data_ptr()
        ready = self.backwards.get(layout)
        given = q, k, val, out, lse, dout, dlse
        if ready is None or (at_q | at_k | at_val | at_out | at_dout) % 16 or not _plain(out, lse, dout, dlse, q.dtype):
            return self._first_backward(layout, *given)
        device, memory, sizes = q.device, self.memory, self.backward_sizes
        dq, dk, dv, space = memory.out.on(device), memory.grads.on(device), memory.grads.on(device), memory.space.on(device)
        at_dk, at_dv, base = dk.data_ptr(), dv.data_ptr(), space.data_ptr()
        lse2, dpsum, dead, acc, turns, ticket, zeroed, tiles, order = [base + offset for offset in memory.offsets]
        counter = hopper.work_counter(device) if sizes.falling else None
        done = 0 if counter is None else counter.data_ptr()
        rows, parts = (lse2, dpsum, dead), (turns, ticket, zeroed)
        pre, main, post = ready
        with context_of(q.get_device()):
            stream = current_handle(device)
            pre.start(stream, (), (at_out, at_dout, lse.data_ptr(), 0, *rows, acc, *parts, tiles, order, done))
            stores = (at_k, at_val) if sizes.grads_f32 else (at_dk, at_dv)
            words = acc, *rows, tiles, order if sizes.falling else 0, *self.mask_words, *parts, at_dk, at_dv
            main.start(stream, (at_q, at_dout, at_k, at_val, *stores), words)
            post.start(stream, (), (acc, dq.data_ptr()))
        if sizes.shape.splits > 1:
            dk, dv = (t.sum(0).to(q.dtype) for t in (dk, dv))
        return dq, dk, dv

    def _first_backward(
        self, layout: Layout, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        made: list[Ready] = []
        given = self.v, q, k, val, out, lse, dout, dlse, self.scale, q.dtype
        how: dict[str, Any] = {"sizes": self.backward_sizes, "mask": self.backward_mask}
        results = hopper_bwd.backward_with(self.backward_spec, *given, **how, by=keeping(made, BACKWARD_WORDS))
        if _plain(out, lse, dout, dlse, q.dtype):
            self._keep(self.backwards, layout, made, q, k, val, out, dout)
        return results

    def _keep(self, into: dict[Layout, tuple[Ready, ...]], layout: Layout, made: list[Ready], *tensors: Tensor) -> None:
        """Where nothing was copied for them."""
        if self.backward_mask is not None and all(hopper.addressable(t) is t for t in tensors):
            into[layout] = tuple(made)
            if len(into) > MOST_LAYOUTS:
                into.pop(next(iter(into)), None)


def _layout(*tensors: Tensor) -> Layout:
    for t in tensors:
        if not t.is_contiguous():
            return tuple([t.stride() for t in tensors])
    return ()


def _plain(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the backward takes them as they are."""
    return dlse is None and out.dtype is dtype and dout.dtype is dtype and lse.is_contiguous()
