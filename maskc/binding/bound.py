"""What binding makes: normalised inputs, and the mask of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maskc.binding.data import move, moved
from maskc.binding.modes import lasting
from maskc.binding.streams import Kept, Making, gpu_tensors
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.compiled import CompiledMask
from maskc.diagnostics import MaskcError, error
from maskc.handles import Handled
from maskc.ir.nodes import BoolConst, MaskFn
from maskc.ir.verdict import Unknown

if TYPE_CHECKING:
    from maskc.binding.facts import Fact


@dataclass(frozen=True, eq=False, slots=True)
class SegmentTable:
    """Segments or spans of a batch in order: half-open [start, end) per ordinal.

    both: starts and ends, contiguous int32 [2, batch or 1, m] with m >= 1. Segments are disjoint and starts never decrease.
    given: int32 [batch or 1], how many there are, where not m in each item; items with fewer end in empty ones that start
    and end where the last one ends. edges: where the segments of the one item begin and end, if there are few, side by side
    from 0 on, and the host knows them.
    """

    both: Tensor
    given: Tensor | None = None
    edges: tuple[int, ...] | None = None

    @property
    def starts(self) -> Tensor:
        """int32 [batch or 1, m]."""
        return self.both[0]

    @property
    def ends(self) -> Tensor:
        """int32 [batch or 1, m]."""
        return self.both[1]

    @property
    def counts(self) -> Tensor:
        """int32 [batch or 1]."""
        return self.both.new_full(self.both.shape[1:2], self.size) if self.given is None else self.given

    @property
    def batch(self) -> int:
        return self.both.shape[1]

    @property
    def size(self) -> int:
        return self.both.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.both,) if self.given is None else (self.both, self.given)


@dataclass(frozen=True, eq=False, slots=True)
class BoundInputs:
    """Every input that was given, by name, on one device.

    sets: segments and spans. vectors: int32 or bool [batch or 1, heads or 1, n], contiguous; n is 1 for `per head` and
    the size of the table for a vector per segment, whose entries past the count are meaningless (but sorted, if the
    vector is). scalars: Python ints, or int32 [batch] where items differ ([1] where a GPU holds it unread). blocks:
    tables of `bool per block`.
    """

    device: torch.device
    sets: dict[str, SegmentTable] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | Tensor] = field(default_factory=dict)
    blocks: dict[str, BlockTable] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of them, in the order of the fields."""
        sets = [t for table in self.sets.values() for t in table.tensors]
        numbers = [s for s in self.scalars.values() if isinstance(s, Tensor)]
        return (*sets, *self.vectors.values(), *numbers, *(table.keep for table in self.blocks.values()))

    def to(self, device: torch.device) -> BoundInputs:
        """The same inputs on another device; see `data.moved`."""
        if device == self.device:
            return self
        there = iter(moved(self.tensors, device))
        sets = {n: SegmentTable(next(there), next(there) if t.given is not None else None, t.edges) for n, t in self.sets.items()}
        vectors = {n: next(there) for n in self.vectors}
        scalars = {n: next(there) if isinstance(s, Tensor) else s for n, s in self.scalars.items()}
        blocks = {n: replace(t, keep=next(there)) for n, t in self.blocks.items()}
        return BoundInputs(device, sets, vectors, scalars, blocks)


class Reordered(NamedTuple):
    """A mask whose keys lie in another order, which may differ between mask heads.

    mask: bound, known by its `vectors` alone. old: int32 [batch, heads, nk], where each key came from; new: where each
    key went.
    """

    mask: BoundMask
    vectors: BoundaryVectors
    old: Tensor
    new: Tensor


Prepare = Callable[[CompiledMask, BoundInputs, int, int], BoundaryVectors]
Reorder = Callable[[BoundaryVectors], Reordered]
MakeSchedule = Callable[[BoundaryVectors, int], tuple[Tensor, ...]]


MOST_CALLS = 64
"""Different calls that a mask remembers having checked: decoding makes one for each length."""


@dataclass(frozen=True, eq=False, repr=False)
class BoundMask(Handled):
    """A compiled mask with the data of one batch. Made by `CompiledMask.bind`; `maskc.run` takes it.

    nq, nk: sizes where they were given or follow from an input of that length, else None (then `run` decides). batch,
    heads: 1 where no input depends on them; heads is the number of mask heads, which divides the query heads. totals:
    how many tokens each segment or span input reaches, and fill: how far those that must have no gap fill their parent
    (both empty where `validate=False` left the data unread). later: facts that wait for the sizes. given: the vectors
    themselves, where there is no mask file (see `from_vectors`).

    What is made on a GPU is kept for all streams, see `streams`.
    """

    compiled: CompiledMask
    inputs: BoundInputs
    nq: int | None
    nk: int | None
    batch: int
    heads: int
    totals: dict[str, int]
    fill: dict[str, int]
    later: tuple[Fact, ...] = ()
    given: BoundaryVectors | None = None
    _made: Making | None = field(init=False)
    _vectors: Kept[tuple[int, int, str], BoundaryVectors] = field(default_factory=Kept)
    _schedules: Kept[tuple[int, int, str, int], tuple[Tensor, ...]] = field(default_factory=Kept)
    _reordered: Kept[tuple[int, int, str], Reordered] = field(default_factory=Kept)
    _calls: Kept[tuple[object, ...], Any] = field(default_factory=Kept)

    def __post_init__(self) -> None:
        on_gpu = self.inputs.device.type != "cpu"
        object.__setattr__(self, "_made", Making.of(gpu_tensors((self.inputs.tensors, self.given))) if on_gpu else None)
        super().__post_init__()

    def __repr__(self) -> str:
        """Sizes, and each input in a few words; waits for no device."""
        sizes = {"nq": self.nq, "nk": self.nk, "batch": self.batch, "heads": self.heads}
        parts = [self.compiled.name, *(f"{name}={size}" for name, size in sizes.items() if size is not None)]
        for name, table in self.inputs.sets.items():
            reach = f", end at {self.totals[name]}" if name in self.totals else ""
            parts.append(f"{name}=<up to {table.size}{reach}>" if table.batch > 1 else f"{name}=<{table.size}{reach}>")
        parts += [f"{name}=<{' x '.join(map(str, t.shape))}>" for name, t in self.inputs.vectors.items()]
        parts += [f"{name}={'<per item>' if isinstance(x, Tensor) else x}" for name, x in self.inputs.scalars.items()]
        parts += [f"{name}=<blocks of {t.block_q} x {t.block_kv}>" for name, t in self.inputs.blocks.items()]
        return f"BoundMask({', '.join(parts)})"

    @classmethod
    def from_vectors(cls, v: BoundaryVectors, name: str = "vectors") -> BoundMask:
        """A mask that is known by its boundary vectors alone; what they hold is taken as it is."""
        compiled = CompiledMask(MaskFn(name, (), BoolConst(True)), Unknown("its boundary vectors were given"), None)
        return cls(compiled, BoundInputs(v.device), v.nq, v.nk, v.batch, v.heads, {}, {}, given=v)

    def vectors(
        self,
        nq: int | None = None,
        nk: int | None = None,
        device: torch.device | str | None = None,
        prepare: Prepare | None = None,
    ) -> BoundaryVectors:
        """The boundary vectors for nq query rows and nk keys, on `device` (default: that of the inputs); kept for later.

        Sizes that neither the caller nor an input gives are the tokens that the segments reach; nq follows nk then.
        `prepare` makes the vectors of a proved mask on `device` instead of torch (a kernel does it in one launch).
        Raises MaskcError (M4xx) where the data do not fit the sizes.
        """
        rows, keys = self._sizes(nq, nk)
        place = self.inputs.device if device is None else _indexed(torch.device(device))
        key = rows, keys, str(place)
        if key in self._vectors:
            return self._vectors[key]
        return self._vectors.keep(key, self._make(rows, keys, place, prepare))

    def kept_vectors(self, nq: int, nk: int, device: torch.device) -> BoundaryVectors | None:
        """What `vectors` has made before, or None."""
        return self._vectors.get((nq, nk, str(device)))

    def schedule(self, v: BoundaryVectors, head_dim: int, make: MakeSchedule | None) -> tuple[Tensor, ...]:
        """What a backend's `schedule` makes of these vectors for a head dimension; kept for later.

        Without `make` what is kept, or () for the backend to make it in the call.
        """
        key = v.nq, v.nk, str(v.device), head_dim
        if key in self._schedules:
            return self._schedules[key]
        return () if make is None else self._schedules.keep(key, make(v, head_dim))

    def call(self, signature: tuple[object, ...]) -> Any:
        """What `maskc.run` has checked before under this signature, or None."""
        return self._calls.get(signature)

    def keep_call(
        self, signature: tuple[object, ...], call: object, v: BoundaryVectors, device: torch.device, head_dim: int | None
    ) -> None:
        """Keep what holds nothing but the vectors for `device` and, of a head dim, their schedule; where those are kept."""
        held: list[tuple[Kept[Any, Any], object]] = [(self._vectors, (v.nq, v.nk, str(device)))]
        if head_dim is not None:
            held.append((self._schedules, (v.nq, v.nk, str(v.device), head_dim)))
        if all(key in kept for kept, key in held):
            makings = [kept.made(key) for kept, key in held]
            self._calls.found[signature] = call, Making.joined([making for making in makings if making is not None])
            if len(self._calls.found) > MOST_CALLS:
                self._calls.found.pop(next(iter(self._calls.found)), None)

    def reordered(self, v: BoundaryVectors, make: Reorder | None) -> Reordered | None:
        """What `make` makes of these vectors; kept for later. Without `make` what is kept, or None."""
        key = v.nq, v.nk, str(v.device)
        if key in self._reordered:
            return self._reordered[key]
        return None if make is None else self._reordered.keep(key, make(v))

    def check_early(self) -> None:
        """What can be said as soon as the data are bound, where the sizes are known by then."""
        if self.nk is not None:
            self._check_totals(self.nk)
            if self.nq is not None and not self._provable(self.nk):
                self.vectors()

    def _sizes(self, nq: int | None, nk: int | None) -> tuple[int, int]:
        fn = self.compiled.fn
        for name, asked, bound in (("nq", nq, self.nq), ("nk", nk, self.nk)):
            if asked is not None and bound is not None and asked != bound:
                raise error("M413", f"mask `{fn.name}` was bound for {name} = {bound}, not {asked}", fn.span)
        keys = nk if nk is not None else self.nk
        if keys is None:
            if not self.totals:
                hint = "give bind(nq=, nk=); maskc.run takes them from q and k"
                raise error("M415", f"no input says how many keys mask `{fn.name}` is for", fn.span, hint)
            keys = max(self.totals.values())
        rows = nq if nq is not None else self.nq if self.nq is not None else keys
        if fn.square and rows != keys:
            raise square_only(fn, rows, keys)
        return rows, keys

    @lasting
    def _make(self, nq: int, nk: int, device: torch.device, prepare: Prepare | None) -> BoundaryVectors:
        if self._made is not None:
            self._made.wait()
        if self.given is not None:
            return on_device(self.given, device)
        check_sizes(self.compiled.fn, nq=nq, nk=nk)
        self._check_totals(nk)
        if self.later:
            self._check_later(nq, nk)
        provable = self._provable(nk)
        if provable and prepare is not None:
            return prepare(self.compiled, self.inputs.to(device), nq, nk)
        from maskc.binding.columns import boundary_vectors

        program = self.compiled.program if provable else None
        return on_device(boundary_vectors(self.compiled.fn, program, self.inputs, nq, nk), device)

    def _check_later(self, nq: int, nk: int) -> None:
        from maskc.binding.checks import Checks
        from maskc.binding.facts import check_fact

        checks = Checks()
        for fact in self.later:
            check_fact(self.compiled.fn, fact, self.inputs, nq, nk, checks)
        checks.finish()

    def _check_totals(self, nk: int) -> None:
        fn = self.compiled.fn
        for name, total in self.totals.items():
            if total > nk:
                decl = fn.input(name)
                hint = f"ending before {nk} is fine: the tail is outside"
                raise error("M401", f"{decl.kind.value} `{name}` end at {total}, the batch has {nk} keys", decl.span, hint)

    def _provable(self, nk: int) -> bool:
        """Whether the proved program is exact for these data; else the visible intervals are folded."""
        program = self.compiled.program
        if program is None:
            return False
        wanted = {name: nk if self.compiled.fn.input(name).within is None else 0 for name in program.tiling}
        return all(self.fill.get(name) == full for name, full in wanted.items())


def check_sizes(fn: MaskFn, **sizes: object) -> None:
    """Raise M413 unless nq, nk and batch are integers (or None) that a size may be: nq and nk from 0 on, batch from 1."""
    for name, size in sizes.items():
        least = 1 if name == "batch" else 0
        if type(size) is int and least <= size < 2**31:
            continue  # which asking for an Integral would take longer to say
        if size is not None and (isinstance(size, bool) or not isinstance(size, Integral) or not least <= int(size) < 2**31):
            raise error("M413", f"{name} = {size!r} of mask `{fn.name}` is no size", fn.span, f"an int from {least} to 2^31 - 1")


def square_only(fn: MaskFn, nq: int, nk: int) -> MaskcError:
    """The error of a mask whose segments serve rows and keys alike, on a rectangle."""
    hint = "declare inputs `per row` and `per key`, or say `assume nq <= nk` in the file"
    return error(
        "M414",
        f"mask `{fn.name}` uses one set of segments for rows and keys, but there are {nq} rows and {nk} keys",
        fn.span,
        hint,
    )


def _indexed(device: torch.device) -> torch.device:
    """A CUDA device by number: "cuda" is the current one."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def on_device(v: BoundaryVectors, device: torch.device) -> BoundaryVectors:
    """The vectors on another device; see `data.move`."""
    if v.device == device:
        return v

    def there(t: Tensor | None) -> Tensor | None:
        return None if t is None else move(t, device)

    blocks = v.blocks
    if blocks is not None:
        blocks = replace(blocks, keep=move(blocks.keep, device))
    lts, lte, uts, ute, diag = (there(t) for t in v.tensors)
    return replace(v, lts=lts, lte=lte, uts=uts, ute=ute, diag=diag, blocks=blocks, elsewhere=there(v.elsewhere))
