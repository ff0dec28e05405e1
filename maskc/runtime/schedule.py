"""Schedules: which key chunk travels from whom to whom, in which step, and which chunks each rank attends to in it.

Every strategy is such a table, so one executor runs them all and the bytes it sends are known beforehand. The gradients
of keys and values go back along the same moves, last step first, and are added up on the way.

    all-gather  one step: every needed chunk comes straight from its owner
    staged      own chunks first, then groups of peers; partial results are merged
    ring        chunks wander from neighbour to neighbour as far as some rank still needs them

"gated", "copy-then-attend" and "sm-copy" have the moves of all-gather (`maskc.runtime.gated`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from maskc.diagnostics import MaskcError, error
from maskc.runtime.layout import Layout
from maskc.runtime.remember import derived

STRATEGIES = ("all-gather", "staged", "ring")
"""Exchanges, each with moves of its own."""
DIRECT = ("gated", "copy-then-attend", "sm-copy")
"""Ways to bring the chunks of all-gather into the memory of their readers, which all ranks must be able to reach."""
STAGES = 4
"""Groups of peers of the staged exchange."""


def check_strategy(strategy: str) -> None:
    """Raise M713 for what is neither a strategy nor "auto"."""
    if strategy not in (known := (*STRATEGIES, *DIRECT, "auto")):
        raise _unknown(strategy, known)


def _unknown(strategy: str, known: Sequence[str]) -> MaskcError:
    return error("M713", f"unknown strategy {strategy!r}", None, f"one of {', '.join(known)}")


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One key chunk (its K and V rows) from rank src to rank dst."""

    src: int
    dst: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Step:
    """`phases`: exchanges that precede the step, one after the other. `columns[r]`: key chunks rank r attends to, ascending."""

    phases: tuple[tuple[Move, ...], ...]
    columns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One phase as one rank sees it: what it sends, by (rank, chunk) sent to, and what it receives, by (rank, chunk)."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]

    @property
    def back(self) -> Route:
        """The same ways in the other direction, for gradients."""
        return Route(*(tuple(Move(m.dst, m.src, m.chunk) for m in moves) for moves in (self.receives, self.sends)))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Schedule:
    """The steps of one strategy for one mask."""

    strategy: str
    world: int
    steps: tuple[Step, ...]
    direct: bool
    """Every chunk comes straight from its owner."""

    def moves(self) -> Iterator[Move]:
        for step in self.steps:
            for phase in step.phases:
                yield from phase

    def rows_sent(self, keys: Layout) -> tuple[tuple[int, ...], ...]:
        """Rows of K (and as many of V) that travel once forward, [src][dst]; gradients travel the same way back."""
        table = [[0] * self.world for _ in range(self.world)]
        for move in self.moves():
            table[move.src][move.dst] += keys.size_of(move.chunk)
        return tuple(map(tuple, table))


@derived
def routes(schedule: Schedule, rank: int) -> tuple[tuple[Route, ...], ...]:
    """Routes of a rank per step and phase."""

    def route(phase: tuple[Move, ...]) -> Route:
        sends = sorted((m for m in phase if m.src == rank), key=lambda m: (m.dst, m.chunk))
        return Route(tuple(sends), tuple(sorted(m for m in phase if m.dst == rank)))

    return tuple(tuple(map(route, step.phases)) for step in schedule.steps)


def make_schedule(
    strategy: str,
    keys: Layout,
    needed: Sequence[frozenset[int]],
    *,
    node_size: int,
    prune: bool = True,
    hierarchical: bool = False,
) -> Schedule:
    """The schedule of a strategy.

    Args:
        needed: key chunks that each rank's rows can see; ranks only ever attend to these.
        node_size: ranks per node. prune: send only what is needed (with False, everything to everyone).
        hierarchical: a chunk crosses into a node once, to the rank of its owner's slot, and is passed on inside. The
            ring sends to neighbours only and has no use for it.
    """
    everything = frozenset(range(keys.chunk_count))
    sent = list(needed) if prune else [everything] * keys.world
    groups = _groups(strategy, keys, node_size, hierarchical)
    if groups is None:
        return _schedule(strategy, keys, _ring(keys, needed, sent))
    steps = []
    for group in groups:
        sources = map(group, range(keys.world))
        wanted = [frozenset(c for c in sent[r] if keys.owner[c] in owners) for r, owners in enumerate(sources)]
        phases = _relayed(keys, wanted, node_size) if hierarchical else (_direct(keys, wanted),)
        columns = tuple(tuple(sorted(needed[r] & wanted[r])) for r in range(keys.world))
        steps.append(Step(tuple(p for p in phases if p), columns))
    return _schedule(strategy, keys, steps)


def _schedule(strategy: str, keys: Layout, steps: Sequence[Step]) -> Schedule:
    kept = tuple(s for s in steps if any(s.columns) or s.phases)
    direct = all(m.src == keys.owner[m.chunk] for s in kept for phase in s.phases for m in phase)
    return Schedule(strategy, keys.world, kept, direct)


class _Distance:
    """Owners at cyclic distances [first, last) behind a rank."""

    def __init__(self, world: int, first: int, last: int) -> None:
        self.world, self.first, self.last = world, first, last

    def __call__(self, rank: int) -> frozenset[int]:
        return frozenset((rank - d) % self.world for d in range(self.first, self.last))


class _Node:
    """Owners in the rank's node, or outside it; without the rank itself."""

    def __init__(self, world: int, node_size: int, inside: bool) -> None:
        self.world, self.node_size, self.inside = world, node_size, inside

    def __call__(self, rank: int) -> frozenset[int]:
        return frozenset(
            r for r in range(self.world) if r != rank and (r // self.node_size == rank // self.node_size) == self.inside
        )


def _groups(strategy: str, keys: Layout, node_size: int, hierarchical: bool) -> Sequence[_Distance | _Node] | None:
    """Which owners' chunks a rank takes in each step; None for the ring."""
    world = keys.world
    match "all-gather" if strategy in DIRECT else strategy:
        case "all-gather":
            return [_Distance(world, 0, world)]
        case "staged" if hierarchical:
            return [_Distance(world, 0, 1), _Node(world, node_size, True), _Node(world, node_size, False)]
        case "staged":
            stages = min(STAGES, world - 1)
            edges = [1 + (world - 1) * i // stages for i in range(stages + 1)] if stages else [1]
            return [_Distance(world, 0, 1), *(_Distance(world, a, b) for a, b in pairwise(edges))]
        case "ring":
            return None
        case _:
            raise _unknown(strategy, (*STRATEGIES, *DIRECT))


def _direct(keys: Layout, wanted: Sequence[frozenset[int]]) -> tuple[Move, ...]:
    """Every chunk straight from its owner."""
    return _sorted((keys.owner[c], r, c) for r, chunks in enumerate(wanted) for c in chunks if keys.owner[c] != r)


def _relayed(keys: Layout, wanted: Sequence[frozenset[int]], node_size: int) -> tuple[tuple[Move, ...], ...]:
    """First into every node that wants the chunk, to the slot of its owner; then on to the ranks of the node."""
    across: set[tuple[int, int, int]] = set()
    inside: set[tuple[int, int, int]] = set()
    for rank, chunks in enumerate(wanted):
        node = rank // node_size
        for c in chunks:
            owner = keys.owner[c]
            holder = owner if owner // node_size == node else node * node_size + owner % node_size
            if holder != owner:
                across.add((owner, holder, c))
            if holder != rank:
                inside.add((holder, rank, c))
    return _sorted(across), _sorted(inside)


def _ring(keys: Layout, needed: Sequence[frozenset[int]], sent: Sequence[frozenset[int]]) -> tuple[Step, ...]:
    """Step t: rank r takes from r - 1 the chunks of owner r - t that r or a later rank of the round wants."""
    world = keys.world
    reach = [0] * keys.chunk_count  # how far from its owner a chunk is wanted
    for rank, chunks in enumerate(sent):
        for c in chunks:
            reach[c] = max(reach[c], (rank - keys.owner[c]) % world)
    steps = []
    for t in range(max(reach, default=0) + 1):
        moves = _sorted(((o + t - 1) % world, (o + t) % world, c) for c, o in enumerate(keys.owner) if 0 < t <= reach[c])
        columns = tuple(tuple(c for c in keys.chunks_of((r - t) % world) if c in needed[r]) for r in range(world))
        steps.append(Step((moves,) if moves else (), columns))
    return tuple(steps)


def _sorted(moves: Iterable[tuple[int, int, int]]) -> tuple[Move, ...]:
    """(src, dst, chunk) in ascending order. Plain tuples compare fast, and there may be a million."""
    return tuple(Move(*move) for move in sorted(moves))
