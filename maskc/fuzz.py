"""`maskc fuzz`: a mask on random inputs that obey its facts, in every way it can run, against dense attention in fp64.

The oracle is the predicate itself, element by element (`maskc.ir.reference`). What is compared with it: the boundary
vectors, every backend that this machine has with its gradients, and every context-parallel strategy on two and three
ranks. Ranks are walked through in one process, so their local masks, schedules and merges are tested, not the wire.

Sizes grow, so the first failure is a small one. Which cases are made depends on the seed alone.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.constructors import segments, spans
from maskc.boundary import BoundaryVectors
from maskc.compiled import CompiledMask
from maskc.diagnostics import MaskcError
from maskc.ir.lower import needs_hole_free
from maskc.ir.nodes import InputKind, MaskFn
from maskc.ir.reference import Env, dense
from maskc.ir.samples import describe, random_env
from maskc.ir.search import heads_of
from maskc.runtime import ops
from maskc.runtime.localize import localized
from maskc.runtime.merge import Partial, empty, merge
from maskc.runtime.plan import plan
from maskc.runtime.schedule import STRATEGIES

HEADS, KV_HEADS = 4, 2
TOLERANCE = 1e-10  # of fp64 results, which are of order one
DRAWS = 8  # of inputs for one case
FLEX_EVERY = 20  # cases: FlexAttention is traced anew for each size on a CPU

NOT_HERE = ""  # of a way to run that refuses a case, such as small blocks of a table on a GPU

Results = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Failure:
    """The smallest failing case. way: what ran; what: which result is wrong, and where."""

    way: str
    what: str
    nq: int
    nk: int
    seed: int
    inputs: tuple[tuple[str, str], ...]

    def render(self) -> str:
        sizes = f"n = {self.nq}" if self.nq == self.nk else f"nq = {self.nq}, nk = {self.nk}"
        given = "".join(f", {name} = {text}" for name, text in self.inputs)
        return f"{self.way} is wrong: {self.what}\nsmallest case found: {sizes}{given} (seed {self.seed})"


@dataclass(frozen=True, slots=True)
class Report:
    """ways: cases that agreed, by what ran. refused: cases whose data need more masked runs than there are (M416)."""

    mask: str
    ways: dict[str, int]
    refused: int
    failure: Failure | None

    def render(self) -> str:
        counts = ", ".join(f"{way} {n}" for way, n in self.ways.items())
        lines = [f"{self.mask}: cases that agree with dense fp64: {counts or 'none'}"]
        if self.refused:
            lines.append(f"{self.refused} cases were refused at binding, with the column that does not fit (M416)")
        return "\n".join([*lines, self.failure.render()] if self.failure is not None else lines)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One input with tensors, in fp64. hidden: the oracle's masked cells, bool [1, mask heads, nq, nk]."""

    bound: BoundMask
    vectors: BoundaryVectors
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    scale: float = 0.37
    rng: random.Random = field(default_factory=random.Random)


def fuzz(
    mask: CompiledMask, *, cases: int = 40, largest: int = 24, seed: int = 0, tick: Callable[[str], None] = lambda _: None
) -> Report:
    """Run `cases` random inputs of 1 to `largest` rows and keys; stops at the first that is wrong.

    tick: called at the start of each case with its size, for a progress bar.
    """
    agreed: Counter[str] = Counter()
    refused = 0
    ways = dict(_ways())
    for i in range(cases):
        rng = random.Random(seed * 1_000_003 + i)
        n = 1 + i * largest // max(1, cases)
        tick(f"{n} tokens")
        env = _environment(mask.fn, rng, n)
        if env is None:
            continue
        try:
            case = _case(mask, env, rng)
        except MaskcError as e:
            if e.code == "M415":
                raise  # no data could help
            if e.code == "M416":
                refused += 1
                continue
            return Report(mask.name, dict(agreed), refused, _failure(mask.fn, env, seed, "binding", str(e)))
        for way, (run, every) in ways.items():
            if i % every == 0:
                what = run(case)
                if what == NOT_HERE:
                    continue
                if what is not None:
                    return Report(mask.name, dict(agreed), refused, _failure(mask.fn, env, seed, way, what))
                agreed[way] += 1
    return Report(mask.name, dict(agreed), refused, None)


def _failure(fn: MaskFn, env: Env, seed: int, way: str, what: str) -> Failure:
    return Failure(way, what, env.nq, env.nk, seed, describe(fn, env))


# ---------------------------------------------------------------- cases


def _environment(fn: MaskFn, rng: random.Random, n: int) -> Env | None:
    """Inputs whose larger size is n, or None where a few draws found none that obey the facts."""
    for _ in range(DRAWS):
        short = n if fn.square or rng.random() < 0.5 else rng.randint(1, n)
        nq, nk = (n, short) if rng.random() < 0.5 else (short, n)
        env = random_env(fn, rng, nq, nk, needs_hole_free(fn), heads=len(heads_of(fn)))
        if env is not None:
            return env
    return None


def _case(mask: CompiledMask, env: Env, rng: random.Random) -> Case:
    bound = mask.bind(nq=env.nq, nk=env.nk, **_values(mask.fn, env))  # type: ignore[arg-type]
    hidden = ~torch.tensor([dense(mask.fn, env, h) for h in heads_of(mask.fn)], dtype=torch.bool)
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    q, dout = draw(1, env.nq, HEADS, 16), draw(1, env.nq, HEADS, 16)
    k, v = draw(1, env.nk, KV_HEADS, 16), draw(1, env.nk, KV_HEADS, 16)
    shaped = hidden.view(1, -1, env.nq, env.nk)
    return Case(bound, bound.vectors(env.nq, env.nk), shaped, q, k, v, dout, draw(1, HEADS, env.nq), rng=rng)


def _values(fn: MaskFn, env: Env) -> dict[str, object]:
    """An environment as keywords of `bind`."""
    out: dict[str, object] = {}
    for d in fn.inputs:
        if d.is_set:
            make = segments if d.kind is InputKind.SEGMENTS else spans
            out[d.name] = make(ranges=torch.tensor(list(env.sets[d.name]), dtype=torch.int64).view(-1, 2))
        elif d.kind is InputKind.BLOCKS:
            out[d.name] = torch.tensor(env.tables[d.name], dtype=torch.bool)
        elif d.per is None:
            out[d.name] = env.scalars[d.name]
        else:
            dtype = torch.bool if d.kind is InputKind.BOOL else torch.int64
            out[d.name] = torch.tensor(list(env.vectors[d.name]), dtype=dtype)
    return out


# ---------------------------------------------------------------- ways to run


Way = tuple[Callable[[Case], str | None], int]
"""(the run: what is wrong, None, or NOT_HERE; every how many cases)."""


def _ways() -> Iterator[tuple[str, Way]]:
    yield "vectors", (_check_vectors, 1)
    yield "cpu", (_check_cpu, 1)
    for strategy in STRATEGIES:
        yield strategy, (_ranks(strategy), 2)
    yield "flex", (_check_flex, FLEX_EVERY)
    if torch.cuda.is_available():
        yield "gpu", (_check_gpu, 1)


def _check_vectors(case: Case) -> str | None:
    wrong = (case.vectors.masked() != case.hidden).nonzero()
    if len(wrong) == 0:
        return None
    _, head, q, k = wrong[0].tolist()
    seen = "sees" if bool(case.hidden[0, head, q, k]) else "does not see"
    return f"row {q} {seen} key {k}" + (f" (head {head})" if case.hidden.shape[1] > 1 else "")


def _check_cpu(case: Case) -> str | None:
    return _compare(_through_ops(case, "cpu"), _reference(case, torch.float64), None)


def _check_flex(case: Case) -> str | None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        out, lse = ops.forward(case.vectors, case.q, case.k, case.v, case.scale, backend="flex")
    return _compare({"out": out, "lse": lse}, _reference(case, torch.float64), None)


def _check_gpu(case: Case) -> str | None:
    """The backend of this GPU in bf16, head dim 64, judged by what dense attention in bf16 gets."""
    from dataclasses import replace

    from maskc.binding.bound import on_device
    from maskc.runtime import flex

    device = torch.device("cuda", torch.cuda.current_device())
    wide = [torch.nn.functional.pad(x, (0, 48)) for x in (case.q, case.k, case.v, case.dout)]
    low = [x.to(torch.bfloat16) for x in wide]
    exact = replace(case, q=low[0].double(), k=low[1].double(), v=low[2].double(), dout=low[3].double())
    gpu = [x.to(device) for x in low]
    moved = replace(case, vectors=on_device(case.vectors, device), q=gpu[0], k=gpu[1], v=gpu[2], dout=gpu[3])
    moved = replace(moved, dlse=case.dlse.to(device, torch.float32))
    backend = "flex" if flex.needed(device) else "hopper"
    if ops.backend_module(backend).why_not(moved.vectors, moved.q, moved.k, moved.v) is not None:
        return NOT_HERE
    got = _through_ops(moved, backend)
    return _compare({n: x.cpu() for n, x in got.items()}, _reference(exact, torch.float64), _reference(exact, torch.bfloat16))


def _through_ops(case: Case, backend: str) -> Results:
    arguments = case.vectors, case.q, case.k, case.v
    out, lse = ops.forward(*arguments, case.scale, backend=backend)
    grads = ops.backward(*arguments, out, lse, case.dout, _finite(case.dlse, lse), case.scale, backend=backend)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def _ranks(strategy: str) -> Callable[[Case], str | None]:
    def run(case: Case) -> str | None:
        world, order = case.rng.choice((2, 3)), case.rng.choice(("balanced", "contiguous", "zigzag"))
        chunk = case.rng.choice((1, 2, 3, None))
        got = _spread(case, world, strategy, order, chunk)
        what = _compare(got, _reference(case, torch.float64), None)
        return None if what is None else f"{what} ({world} ranks, order {order}, chunk {chunk})"

    return run


def _spread(case: Case, world: int, strategy: str, order: str, chunk: int | None) -> Results:
    """Every rank's steps, one rank after the other: what `maskc.runtime.executor` does, without the exchanges."""
    p = plan(case.vectors, world_size=world, order=order, chunk=chunk)  # type: ignore[arg-type]
    got = {n: torch.zeros_like(x) for n, x in (("out", case.dout), ("dq", case.q), ("dk", case.k), ("dv", case.v))}
    got["lse"] = torch.full_like(case.dlse, -torch.inf)
    for rank in range(world):
        chunks = p.rows.chunks_of(rank)
        rows = p.shard(torch.arange(p.rows.length), rank, 0)
        if len(rows) == 0:
            continue
        q, dout, dlse = case.q[:, rows], case.dout[:, rows], case.dlse[:, :, rows]
        parts = []
        total: Partial = empty(1, len(rows), HEADS, case.v.shape[3], q.dtype, q.device)
        for step in p.schedule(strategy).steps:
            columns = step.columns[rank]
            if not columns:
                continue
            local = localized(case.vectors, p.rows, chunks, p.keys, columns, q.device)
            keys = torch.cat([torch.arange(*p.keys.bounds[c : c + 2]) for c in columns])
            parts.append((local, keys))
            total = merge(total, ops.forward(local, q, case.k[:, keys], case.v[:, keys], case.scale))
        out, lse = total
        got["out"][:, rows], got["lse"][:, :, rows] = out, lse
        for local, keys in parts:
            dq, dk, dv = ops.backward(local, q, case.k[:, keys], case.v[:, keys], out, lse, dout, _finite(dlse, lse), case.scale)
            got["dq"][:, rows] += dq
            got["dk"][:, keys] += dk
            got["dv"][:, keys] += dv
    return got


# ---------------------------------------------------------------- the answer


def _finite(dlse: Tensor, lse: Tensor) -> Tensor:
    """No gradient for the log-sum-exp of rows that see nothing."""
    return dlse.masked_fill(lse == -torch.inf, 0.0).to(lse.dtype)


def _reference(case: Case, dtype: torch.dtype) -> Results:
    """Dense attention and its gradients in `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, case.v))
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    hidden = case.hidden.repeat_interleave(HEADS // case.hidden.shape[1], 1)
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, keys) * case.scale).masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    total = (out * case.dout.to(dtype)).sum() + (seen * _finite(case.dlse, lse).to(dtype)).sum()
    grads = torch.autograd.grad(total, (q, k, v))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


def _compare(got: Results, wanted: Results, naive: Results | None) -> str | None:
    """What is wrong, or None. naive: the same in low precision, whose error twice over is allowed."""
    for name, x in got.items():
        y = wanted[name]
        error = torch.where(x.double() == y, 0.0, (x.double() - y).abs()).nan_to_num(torch.inf)
        allowed = TOLERANCE * (1 + float(y[y.isfinite()].abs().max() if y.isfinite().any() else 0))
        if naive is not None:
            distance = (naive[name].double() - y)[y.isfinite()].abs()
            top = float(y[y.isfinite()].abs().max()) if y.isfinite().any() else 0.0
            allowed = 2 * float(distance.max() if distance.numel() else 0) + 2**-6 * top + 1e-4
        if error.numel() and float(error.max()) > allowed:
            place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
            return f"{name}{place} is {float(x[tuple(place)]):.6g}, dense attention gives {float(y[tuple(place)]):.6g}"
    return None
