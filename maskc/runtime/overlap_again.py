"""A rank's calls that were made before, made again: what `maskc.runtime.overlap_replay` keeps of them, and from where."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.diagnostics import error
from maskc.runtime.driver_api import context_of
from maskc.runtime.driver_streams import is_capturing
from maskc.runtime.merge import Partial
from maskc.runtime.overlap_finish import Finish
from maskc.runtime.overlap_grads import Gradients
from maskc.runtime.overlap_kernels import TICK, mask_fields, schedule
from maskc.runtime.overlap_places import InPlace, Whole
from maskc.runtime.overlap_replay import (
    Addresses,
    Key,
    Now,
    Places,
    Replay,
    Replays,
    Space,
    Tape,
    addresses,
    ahead,
    backward_kernels,
    forward_kernel,
    key_of,
    numbers_of,
    plain,
    spoiled,
)
from maskc.runtime.protocol import Turn
from maskc.runtime.ready import Fresh, Ready
from maskc.runtime.transport import CudaQueues, Pair


class Again(Finish):
    """See `maskc.runtime.overlap.Overlapped`, which makes calls the first time."""

    @cached_property
    def _replays(self) -> Replays:
        return Replays()

    def _key(self, executor: str, *how: object, tensors: Sequence[Tensor]) -> Key:
        """() where calls are not made again."""
        if executor != "gated" or self.transport.gives is None or not isinstance(self.queues, CudaQueues):
            return ()
        return key_of(current_handle(self.device), *how, tensors=tensors)

    def _tape(self, local: BoundaryVectors, key: Key, tensors: Sequence[Tensor]) -> Tape | None:
        """For a call that can be made again. Kernels read its tensors, the first of which are queries, where they are."""
        runs = tensors[0].shape[1] > 0 and self.plan.rows > 0 and isinstance(self.queues, CudaQueues)
        if not (key and runs and plain(local, tensors)):
            return None
        assert isinstance(self.queues, CudaQueues)
        self.queues.on("compute")
        return Tape(self.queues)

    def _forward_again(self, found: Replay, tensors: tuple[Tensor, Tensor, Tensor], tag: int) -> Partial:
        self._open(found.tape)
        (q, k, v), (out, lse) = tensors, [fresh.on(self.device) for fresh in found.fresh]
        given = q.data_ptr(), out.data_ptr(), lse.data_ptr()
        self._play(found, self.transport.begin((), tag), (k, v), given)
        return out, lse

    def _backward_again(
        self, found: Replay, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], lse: Tensor, tag: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._open(found.tape)
        (q, k, v, out, dout), (dq, dk, dv, *left, space) = tensors, [fresh.on(self.device) for fresh in found.fresh]
        given = addresses((q, out, lse, dout, dq, dk, dv, space))
        self._play(found, self.transport.begin(self.plan.sources, tag), (k, v), given, Gradients(dq, left[0], left[1], True))
        return dq, dk, dv

    def _open(self, tape: Tape) -> None:
        """What is looked at before a call that needs nothing else."""
        if self._failed.value:
            self.finish()
        if is_capturing(tape.stream):
            refuse_capture()

    def _play(self, found: Replay, turn: Turn, own: Pair, given: Addresses, left: Gradients | None = None) -> None:
        self.epoch = turn.epoch
        found.tape.queues.compute = found.compute
        parts = (0, 0) if left is None else (left.dk.data_ptr(), left.dv.data_ptr())
        with context_of(self.device.index):
            found.tape.play(Now(numbers_of(turn), own, (own[0].data_ptr(), own[1].data_ptr()), given, parts, left))

    @cached_property
    def _failed(self) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.words.failed.data_ptr())

    # ---- what is kept

    def _keep_forward(
        self, local: BoundaryVectors, key: Key, tape: Tape, ready: Sequence[Ready], own: InPlace | None, tensors: Sequence[Tensor]
    ) -> None:
        """tensors: q, k, v, out, lse."""
        q, k, v, *results = tensors
        kernel, spoil = ready
        tape.put("attend", forward_kernel(kernel, tape.stream, self._places(own, (k, v))))
        tape.add(spoiled(spoil, tape.stream))
        keep = schedule(local, q.shape[3]), self._forward_tables(local, q)
        self._replays.keep(local, key, Replay(tape, tape.queues.compute, fresh_of(results), keep))

    def _keep_backward(
        self,
        local: BoundaryVectors,
        key: Key,
        tape: Tape,
        ready: Sequence[Ready],
        own: InPlace | None,
        whole: Whole | None,
        tensors: Sequence[Tensor],
        made: Gradients,
        deterministic: bool,
    ) -> None:
        """tensors: q, k, v, dk, dv."""
        q, k, v, *grads = tensors
        sizes, places = self.sizes(local, q, deterministic, made.given), self._places(own, (k, v))
        stores = None if whole is None else ahead(whole.results, grads)
        space = Space(sizes.parts, sizes.falling)
        tape.put("attend", backward_kernels(ready, tape.stream, places, stores, space))
        fresh = *fresh_of((made.dq, *grads, *made.pair)), Fresh.of((sizes.bytes,), torch.uint8)
        keep = mask_fields(local), self._backward_tables(local, q, deterministic, whole is not None)
        self._replays.keep(local, key, Replay(tape, tape.queues.compute, fresh, keep))

    def _places(self, own: InPlace | None, pair: Pair) -> Places:
        return Places(addresses(self._buffer()), None if own is None else ahead(own.pair, pair), round(self.timeout / TICK))


def fresh_of(tensors: Iterable[Tensor]) -> tuple[Fresh, ...]:
    return tuple(Fresh.of(t.shape, t.dtype) for t in tensors)


def refuse_capture() -> None:
    """A captured call would write and wait for the same epoch at every replay, so that its flags would be up already."""
    raise error("M722", "an overlapped call cannot be captured into a CUDA graph", None, "capture what is around it")
