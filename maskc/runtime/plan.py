"""The context-parallel plan: which rank holds which rows, and what has to travel. Made without any communication.

A plan is plain frozen data: it pickles, hashes, is equal on all ranks that made it from equal inputs, and knows nothing
of process groups. It can be made one step ahead in a data-loader worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from maskc.diagnostics import error
from maskc.handles import Handled
from maskc.runtime import chunking
from maskc.runtime import layout as layouts
from maskc.runtime import plan_arguments as arguments
from maskc.runtime.arcs import arcs
from maskc.runtime.balance import RUN_TIME, Assignment, Effort, balance, with_owner
from maskc.runtime.layout import Layout, Range
from maskc.runtime.machine import DEFAULT_MACHINE, Machine
from maskc.runtime.node_balance import Problem, Traffic, balance_nodes
from maskc.runtime.plan_arguments import Order, Spec
from maskc.runtime.plan_data import DataContract
from maskc.runtime.plan_parts import MaskPart, Masks
from maskc.runtime.plan_specs import segments_of, sizes_of, spec_name, tilings_of, vectors_digest, vectors_of
from maskc.runtime.remember import derived
from maskc.runtime.schedule import Schedule, make_schedule
from maskc.runtime.tile_work import TileCosts, TileWork, tabled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Direction: TypeAlias = Literal["forward", "backward"]
CHUNK_LIMIT = 4096
NODE_EPSILON = 0.02
"""Load band of the swaps between nodes when `epsilon` is not given."""


@dataclass(frozen=True, eq=True)
class AttentionPlan(Handled, DataContract):
    """Chunks, owners, workloads, bounds and transfers of one batch; see the module and `DataContract` for its methods.

    rows, keys: layouts of the query rows and of the key columns (the same object's data where nq == nk).
    parts: the masks of the model. documents: per batch item (one entry where all agree), what tiles the rows, or None.
    segments: names of the masks' segments inputs that are not within another; without `documents`, what they could be.
    workloads, lower_bound, proven_bound: joint over the masks by weight, in tile costs; `optimal` is the certificate.
    prune, hierarchical, overlap, keep_keys: independent switches of how K, V and their gradients travel.
    """

    world: int
    nodes: int
    order: str
    method: str
    rows: Layout
    keys: Layout
    parts: tuple[MaskPart, ...]
    documents: tuple[tuple[Range, ...], ...] | None
    segments: tuple[str, ...]
    workloads: tuple[int, ...]
    lower_bound: int
    proven_bound: int
    costs: TileCosts
    tile: tuple[int, int]
    epsilon_ppm: int
    heads: int | None
    heads_kv: int | None
    head_dim: int | None
    prune: bool
    hierarchical: bool
    overlap: bool
    keep_keys: bool
    version: str

    @cached_property
    def digest(self) -> str:
        """Hex digest of every field: equal exactly for equal plans."""
        return _hash(repr([(f.name, getattr(self, f.name)) for f in fields(self)]))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"AttentionPlan({self.rows.length} rows, {self.rows.chunk_count} chunks, {self.world} ranks, {self.order}, "
            f"imbalance {self.imbalance:.4f}, digest {self.digest[:12]})"
        )

    @property
    def node_size(self) -> int:
        """Ranks per node."""
        return self.world // self.nodes

    @property
    def makespan(self) -> int:
        return max(self.workloads)

    @property
    def imbalance(self) -> float:
        """Makespan over mean workload."""
        total = sum(self.workloads)
        return self.makespan * self.world / total if total else 1.0

    @property
    def optimal(self) -> bool:
        """No assignment of these chunks has a smaller makespan."""
        return self.makespan == self.proven_bound

    def part(self, spec: Spec | int = 0) -> int:
        """Number of the mask in this plan.

        Raises:
            MaskcError: M706 when the plan was made for other data or another mask, M717 for what is no mask.
        """
        if isinstance(spec, int):
            if not 0 <= spec < len(self.parts):
                raise error("M706", f"there is no mask {spec}: the plan was made for {len(self.parts)}, counted from 0")
            return spec
        found = vectors_digest(vectors_of(arguments.mask_of(spec), self.rows.length, self.keys.length))
        for i, part in enumerate(self.parts):
            if part.digest == found:
                return i
        held = ", ".join(f"{p.name} ({p.digest[:8]})" for p in self.parts)
        raise error(
            "M706",
            f"the plan was made for {held}; this is `{spec_name(spec)}` with other data ({found[:8]})",
            None,
            "make a plan for every batch, from the same bound mask that runs",
        )

    def part_workloads(self, part: int = 0) -> tuple[int, ...]:
        """Workload per rank under one mask alone."""
        loads, workloads = [0] * self.world, self.parts[self.part(part)].workloads
        for chunk, rank in enumerate(self.rows.owner):
            loads[rank] += workloads[chunk]
        return tuple(loads)

    def needed(self, rank: int, part: int = 0) -> frozenset[int]:
        """Key chunks that some row of the rank can see."""
        self.rows.chunks_of(rank)  # refuses ranks that do not exist
        return _needed(self, self.part(part))[rank]

    def received(self, part: int = 0) -> tuple[int, ...]:
        """Rows of K (and as many of V) that each rank needs from others."""
        sizes, owner = np.diff(self.keys.bounds), np.array(self.keys.owner, dtype=np.int64)
        foreign = _reads(self, self.part(part)) & (owner != np.arange(self.world)[:, None])
        return tuple((foreign @ sizes).tolist())

    def schedule(self, strategy: str, part: int = 0) -> Schedule:
        """Steps and moves of a strategy ("all-gather", "staged", "ring") for one mask."""
        return _schedule(self, strategy, self.part(part))

    def traffic(
        self, strategy: str = "all-gather", part: int = 0, direction: Direction = "forward", batch: int = 1, itemsize: int = 2
    ) -> tuple[tuple[int, ...], ...]:
        """Bytes from rank to rank, [src][dst], of one attention call; exactly what `maskc.run` sends.

        Backward, K and V travel once more and their gradients go back along the same ways, in fp32 (fp64 for fp64).

        Raises:
            MaskcError: M715 when the plan was made without `heads_kv` and `head_dim`, M713 for another direction, M717 for a
                batch below 0 or an itemsize below 1.
        """
        if self.heads_kv is None or self.head_dim is None:
            raise error("M715", "bytes depend on the model", None, "make the plan with heads_kv= and head_dim=")
        if direction not in get_args(Direction):
            raise error("M713", f"unknown direction {direction!r}", None, "forward or backward")
        rows = self.schedule(strategy, part).rows_sent(self.keys)
        batch, itemsize = arguments.count_of("batch", batch, 0), arguments.count_of("itemsize", itemsize)
        elements = 2 * self.heads_kv * self.head_dim * batch
        gradient = 0 if direction == "forward" else max(4, itemsize)
        return tuple(
            tuple(elements * (rows[a][b] * itemsize + rows[b][a] * gradient) for b in range(self.world))
            for a in range(self.world)
        )


def plan(
    specs: Spec | Sequence[Spec],
    *,
    world_size: int | None = None,
    group: ProcessGroup | None = None,
    weights: Sequence[int] | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim: int | None = None,
    nodes: int = 1,
    chunk: int | None = None,
    order: Order = "balanced",
    epsilon: float | None = None,
    nq: int | None = None,
    nk: int | None = None,
    documents: str | None = None,
    assign: Sequence[int] | None = None,
    prune: bool = True,
    hierarchical: bool | None = None,
    overlap: bool = True,
    keep_keys: bool = False,
    costs: TileCosts | None = None,
    effort: Effort = RUN_TIME,
    machine: Machine = DEFAULT_MACHINE,
) -> AttentionPlan:
    """A plan for the masks of one batch: pure integers, no communication, equal on every rank.

    Args:
        specs: the bound mask, or all masks of the model; they share one assignment. weights: layers per mask.
        world_size, group: number of ranks, or the group to count.
        heads, heads_kv, head_dim: sizes of the model, for bytes, predicted times, and what is fastest by them.
        nodes: the ranks stand in this many nodes of equal size, node by node.
        chunk: rows per chunk, >= 1 (multiples of 128 suit the GPU kernels, of 384 best). By default ranks hold a few long pieces
            (arcs.py), or about 8 or 4 equal chunks, what is fastest by the model, with few rows on the fullest rank first.
        order: how rows are dealt out. With "balanced", workloads are equal and, across nodes, traffic is small.
        epsilon: load band of traffic-saving swaps of order "balanced", 0.02 = 2 %. By default only across nodes; given,
            also between ranks.
        nq, nk: sizes, where the masks do not know them. documents: the segments input that `positions` goes by.
        assign: the rank of every chunk, to fix the assignment by hand; it takes the place of an order.
        prune: a rank gets the chunks that its rows see, else all of them. hierarchical: a chunk enters a node once (default:
            when nodes > 1). overlap: exchange during compute.
        keep_keys: strategies by which ranks write keys into each other's memory do not do so again for a backward, where those
            of its forward still lie in the key buffer, which all calls under this plan share: after a recomputed forward,
            or in the last layer.
        costs: of tiles, in which work is counted. effort: after which balancing ends. machine: rates for predicted times, by
            which pieces are chosen.

    Raises:
        MaskcError: M701, M702, M705, M711 to M717; see `maskc explain`.
    """
    masks, world, assign = arguments.masks_of(specs), arguments.world_of(world_size, group), arguments.owners_of(assign)
    nodes, weights = arguments.nodes_of(nodes, world), arguments.weights_of(weights, len(masks))
    chunk = arguments.size_of("chunk", chunk, code="M702")
    heads, heads_kv = arguments.size_of("heads", heads), arguments.size_of("heads_kv", heads_kv)
    head_dim = arguments.size_of("head_dim", head_dim)
    arguments.check_order(order, assign)
    arguments.check_epsilon(epsilon, order, assign)
    costs = TileCosts() if costs is None else costs
    for name, value, kind in (("costs", costs, TileCosts), ("effort", effort, Effort), ("machine", machine, Machine)):
        arguments.check_kind(name, value, kind)
    arguments.check_switches(prune=prune, hierarchical=hierarchical, overlap=overlap, keep_keys=keep_keys)
    sizes = sizes_of(masks, arguments.size_of("nq", nq, 0), arguments.size_of("nk", nk, 0))
    vectors = tuple(vectors_of(m, *sizes) for m in masks)
    tilings = tilings_of(masks, sizes[0], documents)
    segments = tuple(sorted({name for mask in masks for name in segments_of(mask)}))
    if order == "zigzag-document":
        arguments.check_documents(tilings, segments)

    batch = Masks(masks, vectors, weights, costs)

    def drafted(rows: Layout, keys: Layout, works: tuple[TileWork, ...], method: str) -> AttentionPlan:
        return AttentionPlan(
            world=world,
            nodes=nodes,
            order=order if assign is None else "given",
            method=method,
            rows=rows,
            keys=keys,
            parts=batch.parts(works),
            documents=tilings,
            segments=segments,
            workloads=(0,) * world,
            lower_bound=0,
            proven_bound=0,
            costs=costs,
            tile=works[0].tile,
            epsilon_ppm=round((NODE_EPSILON if epsilon is None else epsilon) * 1_000_000),
            heads=heads,
            heads_kv=heads_kv,
            head_dim=head_dim,
            prune=prune,
            hierarchical=nodes > 1 if hierarchical is None else hierarchical,
            overlap=overlap,
            keep_keys=keep_keys,
            version=_version(),
        )

    def made(size: int | None) -> AttentionPlan:
        rows, keys = _layouts(order, sizes, world, size, assign, tilings)
        works = batch.works(rows, keys)
        draft = drafted(rows, keys, works, "as given" if assign is not None else order)
        if order == "balanced" and assign is None:
            return _balanced(draft, works, effort, machine, epsilon is not None)
        return assigned(draft, _judge(draft, effort), draft.method)

    def in_arcs() -> AttentionPlan:
        tile = tabled(sizes[0])
        work, needs = batch.by_tile(tile)
        unit = machine.compute_seconds(1 / batch.items, costs, (tile, tile), heads, head_dim)
        price = machine.apart(0.0, tile, heads_kv, head_dim) / machine.apart(unit, 0, heads_kv, head_dim)
        rows = arcs(work, needs, world, tile, sizes[0], price)
        draft = drafted(rows, rows, batch.works(rows, rows), "arcs")
        joint = _joint(draft)
        mean = -(-sum(joint) // world)
        return assigned(draft, with_owner(Assignment(rows.owner, (0,) * world, mean, mean), joint, rows.owner), draft.method)

    if chunk is not None or assign is not None:
        return made(chunk)
    fine, coarse = (
        chunking.default_chunk(sizes[0], world, per_rank, CHUNK_LIMIT) for per_rank in (chunking.FINE, chunking.COARSE)
    )
    if order != "balanced" or nodes > 1 or epsilon is not None or fine == coarse:
        return made(fine)
    first = made(fine)
    others = [made(coarse)]
    if sizes[0] == sizes[1] and 1 < world <= sizes[0] // (chunking.FINE * chunking.TILE):
        others.append(in_arcs())
    return _best(first, others, machine, batch.items)


def _best(first: AttentionPlan, others: Sequence[AttentionPlan], machine: Machine, items: int) -> AttentionPlan:
    """The fastest by the model of those that leave the ranks as few rows and as even work as the first, or that itself."""

    def rows(p: AttentionPlan) -> int:
        return max(map(p.rows.local_length, range(p.world)))

    def seconds(p: AttentionPlan) -> float:
        """Of the layers and one batch item, on the rank that takes longest."""
        compute = partial(machine.compute_seconds, costs=p.costs, tile=p.tile, heads=p.heads, head_dim=p.head_dim)
        arriving = np.sum([part.weight * np.array(p.received(i)) for i, part in enumerate(p.parts)], axis=0).tolist()
        ranks = zip(p.workloads, arriving, strict=True)
        return max(machine.apart(compute(work / items), keys, p.heads_kv, p.head_dim) for work, keys in ranks)

    def as_even(p: AttentionPlan) -> bool:
        within = p.imbalance <= max(first.imbalance, 1 + chunking.EVEN) and rows(p) <= rows(first)
        return within and p.rows.chunk_count <= CHUNK_LIMIT

    return min([first, *filter(as_even, others)], key=seconds)


def _balanced(
    draft: AttentionPlan, works: Sequence[TileWork], effort: Effort, machine: Machine, save_traffic: bool
) -> AttentionPlan:
    joint = _joint(draft)
    if draft.nodes == 1 and not (save_traffic and draft.world > 1):
        found = balance(joint, draft.world, effort)
        for name, owner in layouts.usual_owners(draft.rows.chunk_count, draft.world).items():
            usual = with_owner(found, joint, owner)
            if usual.makespan <= found.makespan:  # as even, and neighbours stay together
                return assigned(draft, usual, f"HCC-IPO, {name} is as even")
        return assigned(draft, found, "HCC-IPO")
    nodes = draft.nodes if draft.nodes > 1 else draft.world
    square = draft.rows.bounds == draft.keys.bounds
    sizes = np.array([draft.keys.size_of(c) for c in range(draft.keys.chunk_count)], dtype=np.int64)
    needs = tuple((p.weight, w.need) for p, w in zip(draft.parts, works, strict=True))
    if not square:  # keys stay where they are, so swapping rows cannot be priced by chunk
        return assigned(draft, balance(joint, draft.world, effort), "HCC-IPO")
    if save_traffic:  # the caller named the price; inside the band the least traffic is best
        cost: Callable[[int, int], float] = _inflow_alone
    else:
        cost = machine.step_cost(draft.costs, draft.tile, draft.heads, draft.heads_kv, draft.head_dim)
    problem = Problem(
        np.array(joint, dtype=np.int64), Traffic(sizes, needs), nodes, draft.world // nodes, draft.epsilon_ppm, effort
    )
    chosen = balance_nodes(problem, cost)
    return assigned(draft, chosen.assignment, f"HCC-IPO, {chosen.method}")


def _inflow_alone(makespan: int, inflow: int) -> float:
    return inflow


def assigned(p: AttentionPlan, a: Assignment, method: str) -> AttentionPlan:
    """The plan with its row chunks owned as `a` says, and its key chunks too where both axes are cut alike."""
    alike = p.rows.bounds == p.keys.bounds
    return replace(
        p,
        rows=replace(p.rows, owner=a.owner),
        keys=replace(p.keys, owner=a.owner) if alike else p.keys,
        method=method,
        workloads=a.workloads,
        lower_bound=a.lower_bound,
        proven_bound=a.proven_bound,
    )


def _judge(draft: AttentionPlan, effort: Effort) -> Assignment:
    """The given owners, with the bounds that any assignment of these chunks obeys."""
    joint = _joint(draft)
    given = with_owner(balance(joint, draft.world, effort), joint, draft.rows.owner)
    top = given.makespan  # with more chunks a rank it may be below the bounds of equal counts
    return replace(given, lower_bound=min(given.lower_bound, top), proven_bound=min(given.proven_bound, top))


def _joint(draft: AttentionPlan) -> list[int]:
    return [sum(p.weight * p.workloads[i] for p in draft.parts) for i in range(draft.rows.chunk_count)]


# ---------------------------------------------------------------- parts of `plan`


def _layouts(
    order: str,
    sizes: tuple[int, int],
    world: int,
    chunk: int | None,
    assign: Sequence[int] | None,
    documents: tuple[tuple[Range, ...], ...] | None,
) -> tuple[Layout, Layout]:
    nq, nk = sizes
    if assign is not None:
        size = chunk or max(1, -(-nq // max(1, len(assign))))
        bounds = layouts.even_bounds(nq, size)
        if len(bounds) - 1 != len(assign):
            raise error("M702", f"assign has {len(assign)} owners; {nq} rows in chunks of {size} are {len(bounds) - 1} chunks")
        rows = Layout(world, bounds, tuple(assign))
        return rows, rows if nk == nq else layouts.contiguous(nk, world, chunk)
    assert chunk is not None
    match order:
        case "contiguous":
            rows = layouts.contiguous(nq, world, chunk)
        case "zigzag":
            rows = layouts.zigzag(nq, world, chunk)
        case "zigzag-document":
            assert documents is not None
            rows = layouts.zigzag_documents(documents[0], nq, world, chunk)
        case _:
            bounds = layouts.even_bounds(nq, chunk)
            rows = Layout(world, bounds, tuple(i % world for i in range(len(bounds) - 1)))
    if rows.chunk_count > CHUNK_LIMIT:
        raise error("M714", f"{rows.chunk_count} chunks; a plan holds at most {CHUNK_LIMIT}", None, "choose a larger chunk")
    return rows, rows if nk == nq else layouts.contiguous(nk, world, chunk)


def _version() -> str:
    import maskc

    return maskc.__version__


# ---------------------------------------------------------------- derived tables


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@derived
def _needed(p: AttentionPlan, part: int) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(np.flatnonzero(row).tolist()) for row in _reads(p, part))


@derived
def _reads(p: AttentionPlan, part: int) -> NDArray[np.bool_]:
    """Bool [ranks, key chunks]: what some row of the rank can see."""
    seen = [0] * p.world
    for chunk, rank in enumerate(p.rows.owner):
        seen[rank] |= p.parts[part].need[chunk]
    count = p.keys.chunk_count
    words = [np.frombuffer(bits.to_bytes(-(-count // 8), "little"), dtype=np.uint8) for bits in seen]
    return np.unpackbits(np.stack(words), axis=1, count=count, bitorder="little").astype(np.bool_)


@derived
def _schedule(p: AttentionPlan, strategy: str, part: int) -> Schedule:
    return make_schedule(
        strategy, p.keys, _needed(p, part), node_size=p.node_size, prune=p.prune, hierarchical=p.hierarchical and p.nodes > 1
    )
