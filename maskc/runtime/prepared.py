"""Calls on a Hopper GPU of which all is known but addresses: their variants, sizes and what both settle."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from maskc.binding.streams import tensors_of
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import KernelSpec
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from maskc.runtime import hopper, hopper_bwd
from maskc.runtime.ops import Call, Schedule


@dataclass(frozen=True, eq=False, slots=True)
class Prepared(Call):
    """A call that `run` has checked, for tensors of the same sizes and strides."""

    forward_spec: KernelSpec
    forward_sizes: hopper.Sizes
    backward_spec: BackwardSpec
    backward_sizes: hopper_bwd.Sizes
    backward_mask: hopper_bwd.MaskFields | None
    """None where the backward wants copies of the vectors, which it then makes each time."""

    @classmethod
    def of(cls, v: BoundaryVectors, schedule: Schedule, scale: float, deterministic: bool, q: Tensor, k: Tensor) -> Prepared:
        form, head_dim, dtype = hopper.mask_form(v), q.shape[3], hopper.DTYPES[q.dtype]
        spec = forward_spec(form, head_dim, dtype, "input")
        back = select_backward(form, head_dim, dtype, deterministic=deterministic)
        sizes, back_sizes = hopper.Sizes.of(spec, v, q, k), hopper_bwd.Sizes.of(back, v, q, k, q.dtype)
        mask, own = hopper_bwd.MaskFields.of(v), {t.data_ptr() for t in tensors_of(v)}
        as_it_is = all(t.data_ptr() in own for t in mask.keep)
        return cls(v, schedule, scale, deterministic, spec, sizes, back, back_sizes, mask if as_it_is else None)

    def forward(self, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        return hopper.forward_with(self.forward_spec, self.v, q, k, val, self.scale, self.schedule, sizes=self.forward_sizes)

    def backward(
        self, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = self.v, q, k, val, out, lse, dout, dlse, self.scale, q.dtype
        return hopper_bwd.backward_with(self.backward_spec, *given, sizes=self.backward_sizes, mask=self.backward_mask)
