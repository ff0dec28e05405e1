"""`CompiledMask.bind`: the inputs of one batch, normalised and checked in O(n), as a BoundMask."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from maskc.binding.bound import BoundInputs, BoundMask, SegmentTable, check_sizes, square_only
from maskc.binding.checks import Checks
from maskc.binding.constructors import SetSource
from maskc.binding.data import INT32_MAX, INT32_MIN, Named, few, integers, move, on_host, rows, tensors_in
from maskc.binding.facts import Declared, Fact, check_fact, check_hole_free, check_sorted, check_within, declared
from maskc.binding.modes import lasting, outside
from maskc.binding.sets import build_table
from maskc.boundary import BlockTable
from maskc.compiled import CompiledMask
from maskc.diagnostics import Diagnostic, MaskcError, error, shortened
from maskc.ir.lower import needs_hole_free
from maskc.ir.nodes import InputDecl, InputKind, MaskFn

_HOST = torch.device("cpu")


@outside("bind the mask")
@lasting
def bind(
    mask: CompiledMask,
    *,
    nq: int | None,
    nk: int | None,
    batch: int | None,
    validate: bool,
    inputs: Mapping[str, object],
) -> BoundMask:
    """See `CompiledMask.bind`."""
    fn, said = mask.fn, declared(mask)
    _check_names(fn, said, inputs)
    check_sizes(fn, nq=nq, nk=nk, batch=batch)
    if fn.square and nq is not None and nk is not None and nq != nk:
        raise square_only(fn, nq, nk)
    home = device = _device(fn, inputs)
    if validate and home.type != "cpu":
        inputs = on_host(inputs)
        device = _device(fn, inputs)
    binder = _Binder(fn, said, home, device, Checks(validate))
    for size, value in (("nq", nq), ("nk", nk)):
        if value is not None:
            binder.pin(size, value, "bind")
    if batch is not None:
        binder.agree("batch", batch, "bind")
    for decl in fn.inputs:
        binder.collect(decl, inputs)
    binder.checks.stop()
    if said.any_head and "heads" not in binder.agreed:
        hint = "let an input say what a head does, as in `input window : int per head`, read as `window[h]`"
        raise error("M415", f"no input says how many heads mask `{fn.name}` is for, which reads `h`", fn.span, hint)
    bound = binder.result(mask)
    bound.check_early()
    return bound


def _check_names(fn: MaskFn, said: Declared, inputs: Mapping[str, object]) -> None:
    if inputs.keys() <= said.names and inputs.keys() >= said.required:
        return
    names = [d.name for d in fn.inputs]
    wrong = []
    for name in inputs:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            listed = ", ".join(f"`{d}`" for d in names)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {listed}" if names else "it has no inputs"
            wrong.append(Diagnostic("M411", f"mask `{fn.name}` has no input `{name}`", fn.span, hint))
    for name in sorted(said.required - set(inputs), key=names.index):
        decl = fn.input(name)
        if decl.default is None:
            wrong.append(Diagnostic("M410", f"input `{name}` of mask `{fn.name}` is missing", decl.span, _how_to_give(decl)))
    if wrong:
        raise MaskcError(wrong)


def _how_to_give(decl: InputDecl) -> str:
    if decl.is_set:
        return f"bind({decl.name}=maskc.{decl.kind.value}(lengths=[...])), or one of cu_seqlens=, ids=, positions=, eos=, ranges="
    return f"bind({decl.name}=...)" if decl.per is None and decl.block is None else f"bind({decl.name}=[...])"


def _device(fn: MaskFn, inputs: Mapping[str, object]) -> torch.device:
    """The device of the inputs: that of their GPU tensors, else the CPU."""
    given = [(t.device, name) for name, value in inputs.items() for t in tensors_in(value)]
    homes = {device: name for device, name in given if device.type not in ("cpu", "meta")}  # no numbers: refused when read
    if len(homes) > 1:
        listed = " and ".join(f"`{name}` on {device}" for device, name in homes.items())
        raise error("M418", f"inputs of mask `{fn.name}` are on different devices: {listed}", None, "move them to one")
    return next(iter(homes), _HOST)


@dataclass(eq=False)
class _Binder:
    """Normalised inputs as they come in, and what they agree on. home: where they end; device: where they are checked."""

    fn: MaskFn
    said: Declared
    home: torch.device
    device: torch.device
    checks: Checks
    sets: dict[str, SegmentTable] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, int | Tensor] = field(default_factory=dict)
    blocks: dict[str, BlockTable] = field(default_factory=dict)
    agreed: dict[str, tuple[int, str]] = field(default_factory=dict)  # nq, nk, batch, heads -> (value, who said so)

    # ------------------------------------------------------------ sizes

    def pin(self, size: str, value: int, who: str) -> None:
        """Nq or nk follow from `who`."""
        for name in ("nq", "nk") if self.fn.square else (size,):
            known, by = self.agreed.setdefault(name, (value, who))
            if known != value:
                raise self._conflict(f"{'nq = nk' if self.fn.square else name} = {known} by {by}, {value} by {who}")

    def agree(self, axis: str, value: int, who: str) -> None:
        """The batch or head axis of an input; 1 goes with everything."""
        known, by = self.agreed.get(axis, (1, ""))
        if known == 1 and value != 1:
            self.agreed[axis] = (value, who)
        elif value not in (1, known):
            raise self._conflict(f"{axis} = {known} by {by}, {value} by {who}")

    def _conflict(self, message: str) -> MaskcError:
        return error("M413", f"sizes of mask `{self.fn.name}` disagree: {message}", self.fn.span)

    # ------------------------------------------------------------ one input

    def collect(self, decl: InputDecl, inputs: Mapping[str, object]) -> None:
        """Normalise one input; what is wrong with it does not stop the others."""
        try:
            if decl.name in inputs:
                self._take(decl, inputs[decl.name])
            elif decl.default is not None:
                self.scalars[decl.name] = decl.default
        except MaskcError as e:
            self.checks.fail(*e.diagnostics)

    def _take(self, decl: InputDecl, value: object) -> None:
        match decl.kind:
            case InputKind.SEGMENTS | InputKind.SPANS:
                self._take_set(decl, value)
            case InputKind.BLOCKS:
                self._take_blocks(decl, value)
            case _ if decl.per is None:
                self._take_scalar(decl, value)
            case _:
                self._take_vector(decl, value)

    def _take_set(self, decl: InputDecl, value: object) -> None:
        sources = list(value) if isinstance(value, list | tuple) else [value]
        sets = [s for s in sources if isinstance(s, SetSource)]
        if not sets or len(sets) < len(sources):
            raise error("M412", f"input `{decl.name}` is {decl.kind.value}, not {_shown(value)}", decl.span, _how_to_give(decl))
        if wrong := next((s.kind for s in sets if s.kind != decl.kind.value), None):
            raise error(
                "M412", f"input `{decl.name}` was declared `{decl.kind.value}`, not {wrong}", decl.span, _how_to_give(decl)
            )
        table, tokens = build_table(decl, sets if isinstance(value, list | tuple) else sets[0], self.checks, self.device)
        self.agree("batch", table.batch, f"`{decl.name}`")
        if tokens is not None:
            self.pin("nk", tokens, f"`{decl.name}`")
        self.sets[decl.name] = table

    def _take_scalar(self, decl: InputDecl, value: object) -> None:
        what = Named(f"input `{decl.name}`", decl.span)
        if isinstance(value, int) and not isinstance(value, bool):
            if not INT32_MIN <= value <= INT32_MAX:
                raise what.error("M408", f"= {value} does not fit in 32 bits")
            self.scalars[decl.name] = value
            return
        given = move(integers(value, what), self.device)
        if given.ndim > 1 or given.dtype == torch.bool:
            raise what.error("M412", f"is one int (or one for each batch item), not {_shown(value)}")
        number = self._fits(given.reshape(-1), what)
        if number.numel() == 0:
            raise what.error("M412", "is one int (or one for each batch item), not an empty list")
        self.agree("batch", number.shape[0], f"`{decl.name}`")
        if number.shape[0] == 1 and self.device.type == "cpu":
            self.scalars[decl.name] = int(number)
        else:
            self.scalars[decl.name] = _own(number, value)

    def _take_vector(self, decl: InputDecl, value: object) -> None:
        what = Named(f"input `{decl.name}`", decl.span)
        numbers = few(value) if decl.kind is InputKind.INT and getattr(value, "ndim", 1) == 1 else None
        if numbers and min(numbers) >= INT32_MIN and max(numbers) <= INT32_MAX:
            given, lengths = torch.tensor(numbers, dtype=torch.int32), None
        else:
            given, lengths = rows(value, what, "last")
        if lengths is not None and (given.ndim != 2 or decl.per in ("key", "row", "head")):
            found = " and ".join(map(str, sorted(set(lengths))))
            raise what.error("M413", f"has rows of {found} values", "give rows of one length")
        vector = move(given, self.device)
        most = 2 if decl.per == "head" else 3
        if not 1 <= vector.ndim <= most:
            shape = "[heads] or [batch, heads]" if decl.per == "head" else "[n], [batch, n] or [batch, heads, n]"
            raise what.error("M413", f"has {vector.ndim} axes, not {shape}")
        if decl.per == "head":
            vector = (vector if vector.ndim == 2 else vector[None])[..., None]
        else:
            vector = vector.reshape((1,) * (3 - vector.ndim) + vector.shape) if vector.ndim != 2 else vector[:, None]
        if not vector.shape[0] or not vector.shape[1]:
            raise what.error("M413", "is for no head" if vector.shape[0] else "is for no batch item")
        self.agree("batch", vector.shape[0], f"`{decl.name}`")
        self.agree("heads", vector.shape[1], f"`{decl.name}`")
        vector = self._truths(vector, what) if decl.kind is InputKind.BOOL else self._fits(vector, what)
        match decl.per:
            case "key" | "row":
                self.pin("nk" if decl.per == "key" else "nq", vector.shape[2], f"`{decl.name}`")
            case "head" | None:
                pass
            case of if of in self.sets:
                if lengths is not None:
                    self._each_its_own(decl, lengths, self.sets[of])
                vector = self._per_segment(decl, vector, self.sets[of], given.ndim == 1)
            case _:
                return  # its segments were refused
        if decl.sorted:
            check_sorted(decl, vector, self.sets[decl.per].counts if decl.per in self.sets else None, self.checks)
        self.vectors[decl.name] = _own(vector.contiguous(), value)

    def _each_its_own(self, decl: InputDecl, lengths: list[int], table: SegmentTable) -> None:
        """Lists of unequal lengths: each batch item has as many values as segments."""
        given = move(torch.tensor(lengths, dtype=torch.int32), self.device)
        if table.batch not in (1, len(lengths)):
            return  # said already: the batches differ
        self.checks.forbid(
            lambda: given != table.counts,
            [given, table.counts],
            lambda at, v: Diagnostic(
                "M413",
                f"input `{decl.name}` holds {v[0]} values for batch item {at[0]}, where `{decl.per}` has {v[1]} segments",
                decl.span,
                "one value per segment",
            ),
        )

    def _per_segment(self, decl: InputDecl, vector: Tensor, table: SegmentTable, exact: bool) -> Tensor:
        """A vector with one value per segment, as long as its table."""
        given, edges = vector.shape[2], table.edges
        if edges is None or (given != len(edges) - 1 if exact else given < len(edges) - 1):
            most = table.counts.amax().reshape(1)
            self.checks.forbid(
                lambda: (most != given) if exact else (most > given),
                [most],
                lambda at, v: Diagnostic(
                    "M413",
                    f"input `{decl.name}` holds {given} values, `{decl.per}` has {v[0]} segments",
                    decl.span,
                    "one value per segment",
                ),
            )
        if given >= table.size:
            return vector[..., : table.size] if given > table.size else vector
        last = vector[..., -1:] if given else vector.new_zeros(*vector.shape[:2], 1)
        return torch.cat((vector, last.expand(-1, -1, table.size - given)), 2)

    def _take_blocks(self, decl: InputDecl, value: object) -> None:
        what = Named(f"block table `{decl.name}`", decl.span)
        keep = move(integers(value, what), self.device)
        if not 2 <= keep.ndim <= 4:
            raise what.error("M413", f"has {keep.ndim} axes, not [nQ, nK], [batch, nQ, nK] or [batch, heads, nQ, nK]")
        keep = keep[:, None] if keep.ndim == 3 else keep.reshape((1,) * (4 - keep.ndim) + keep.shape)
        self.agree("batch", keep.shape[0], f"`{decl.name}`")
        self.agree("heads", keep.shape[1], f"`{decl.name}`")
        assert decl.block is not None
        self.blocks[decl.name] = BlockTable(self._truths(keep, what).contiguous(), *decl.block)

    def _fits(self, t: Tensor, what: Named) -> Tensor:
        """As int32."""
        if t.dtype == torch.int32:
            return t
        if t.dtype == torch.bool:
            raise what.error("M412", "holds truth values, not integers")
        within = t.clamp(INT32_MIN, INT32_MAX)
        self.checks.forbid(
            lambda: within != t,
            [t],
            lambda at, v: _element(what, at, t.shape, f"{v[0]} does not fit in 32 bits"),
        )
        return within.to(torch.int32)

    def _truths(self, t: Tensor, what: Named) -> Tensor:
        """As bool; integers must be 0 or 1."""
        if t.dtype != torch.bool:
            self.checks.forbid(
                lambda: (t != 0) & (t != 1),
                [t],
                lambda at, v: _element(what, at, t.shape, f"{v[0]} is not a truth value"),
            )
        return t != 0

    # ------------------------------------------------------------ all inputs

    def result(self, mask: CompiledMask) -> BoundMask:
        """Everything that concerns several inputs; then the one read."""
        program = mask.program
        inputs = BoundInputs(self.device, self.sets, self.vectors, self.scalars, self.blocks)
        nq, nk = (self.agreed[size][0] if size in self.agreed else None for size in ("nq", "nk"))
        batch, heads = (self.agreed.get(axis, (1, ""))[0] for axis in ("batch", "heads"))
        if not self.checks.enabled:  # nothing to compare, and nothing to read
            return BoundMask(mask, inputs, nq, nk, batch, heads, {}, {})
        self._check_sets(needs_hole_free(self.fn) if program is None else program.hole_free)
        later = self._check_facts(inputs, nq, nk)
        sets = self.sets.items()
        totals = self._read({n: t.ends.amax() if t.edges is None else t.edges[-1] for n, t in sets})
        counts = self._read({n: t.counts.amax() if t.edges is None else len(t.edges) - 1 for n, t in sets})
        fill = self._read({name: _filled(self.fn, self.sets, name) for name in (() if program is None else program.tiling)})
        single = self._read({n: s for n, s in self.scalars.items() if isinstance(s, Tensor) and s.shape[0] == 1})
        self.checks.finish()
        self.scalars.update(single)
        self._trim(counts)
        return BoundMask(mask, inputs.to(self.home), nq, nk, batch, heads, totals, fill, later)

    def _check_sets(self, ordered: Collection[str]) -> None:
        """Nesting, and no holes in those whose order counts."""
        for decl in self.fn.inputs:
            if decl.name in self.sets:
                if decl.within in self.sets:
                    check_within(decl, self.sets[decl.name], self.sets[decl.within], self.checks)
                if decl.name in ordered:
                    check_hole_free(self.fn, decl, self.sets[decl.name], self.checks)

    def _check_facts(self, inputs: BoundInputs, nq: int | None, nk: int | None) -> tuple[Fact, ...]:
        """Check what can be checked now; the facts that need a size which is not known yet are returned."""
        known = {size for size, value in (("nq", nq), ("nk", nk)) if value is not None}
        later = []
        for fact in self.said.facts_of({*self.sets, *self.vectors, *self.scalars}):
            if fact.sizes <= known:
                check_fact(self.fn, fact, inputs, nq, nk, self.checks)
            else:
                later.append(fact)
        return tuple(later)

    def _read(self, numbers: Mapping[str, Tensor | int]) -> dict[str, int]:
        """What is not known yet is filled in by the one read."""
        found: dict[str, int] = {}
        for name, number in numbers.items():
            if isinstance(number, int):
                found[name] = number
            else:
                self.checks.read(number, partial(found.__setitem__, name))
        return found

    def _trim(self, sizes: Mapping[str, int]) -> None:
        """Cut tables with too much room, and the vectors per segment, to the largest count of a batch item."""
        for name, size in sizes.items():
            room, table = max(1, size), self.sets[name]
            if room == table.size:
                continue
            self.sets[name] = SegmentTable(table.both[..., :room].contiguous(), table.counts)
            for decl in self.fn.inputs:
                if decl.per == name and decl.name in self.vectors:
                    self.vectors[decl.name] = self.vectors[decl.name][..., :room].contiguous()


def _filled(fn: MaskFn, sets: Mapping[str, SegmentTable], name: str) -> Tensor | int:
    """Of the batch item with the largest gap: tokens of the parent outside every segment, or without parent tokens inside."""

    def inside(table: SegmentTable) -> Tensor:
        return (table.ends.to(torch.int64) - table.starts).sum(1)

    parent = fn.input(name).within
    if parent is None and (edges := sets[name].edges) is not None:
        return edges[-1]
    return inside(sets[name]).amin() if parent is None else (inside(sets[parent]) - inside(sets[name])).amax()


def _own(t: Tensor, value: object) -> Tensor:
    """A tensor that shares no memory with what the user gave: a buffer that is filled anew must not change what was checked."""
    shared = isinstance(value, Tensor) and t.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return t.clone() if shared else t


def _element(what: Named, at: tuple[int, ...], shape: torch.Size, rule: str) -> Diagnostic:
    """M408 of one element: "`evict`[37] = 2147483648 ...", with the batch item and head where there are several."""
    lead = next((i for i, n in enumerate(shape) if n > 1), len(shape) - 1)
    place = "".join(f"[{i}]" for i in at[lead:])
    return Diagnostic("M408", f"{what.text}{place} = {rule}", what.span)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    return shortened(repr(value))
