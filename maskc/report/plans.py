"""What context parallelism makes of a mask, for a page: local rows, assignments stage by stage, work per chunk pair.

Every number comes from the planner itself (`maskc.runtime`); a page only adds up and moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from maskc.boundary import BoundaryVectors
from maskc.report.encode import ranks, runs
from maskc.report.predicate import Json
from maskc.runtime.balance import RUN_TIME, Assignment, balance, greedy
from maskc.runtime.layout import Layout, even_bounds, usual_owners
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.node_balance import Problem, Traffic, by_blocks, by_swaps, swap_traffic
from maskc.runtime.plan import NODE_EPSILON, plan
from maskc.runtime.tile_work import TileCosts, TileWork, per_chunk, tile_size, tile_work
from maskc.tiles import TileClass, classify

Ints = NDArray[np.int64]
LOCAL_RANKS = (2, 3, 4, 8)
CHUNKS_A_RANK = 4
PLAN_RANKS = (2, 4, 8, 16)
PLAN_CHUNKS = (2, 4, 8)
"""kappa: chunks a rank."""
USUAL = {"contiguous": "contiguous", "zigzag": "dual chunk"}
WORLD, NODES = 8, 2
"""Ranks and nodes of the time line."""


class Works:
    """Tile work of one mask by chunk edges, each worked out once."""

    def __init__(self, v: BoundaryVectors) -> None:
        self.v = v
        self._made: dict[int, TileWork] = {}

    def of(self, chunk: int) -> TileWork:
        """For row chunks, and key chunks, of this many tokens."""
        if chunk not in self._made:
            rows, keys = (_plain(n, chunk) for n in (self.v.nq, self.v.nk))
            self._made[chunk] = tile_work(self.v, rows, keys)
        return self._made[chunk]


def localization(v: BoundaryVectors) -> dict[str, Json]:
    """Per number of ranks the planner's own layout: chunk edges, owners, workloads."""
    out: dict[str, Json] = {}
    for world in LOCAL_RANKS:
        chunk = chunk_size(v.nq, world * CHUNKS_A_RANK)
        if -(-v.nq // chunk) < world:
            continue
        p = plan(v, world_size=world, chunk=chunk)
        out[str(world)] = {
            "bounds": runs(p.rows.bounds),
            "owner": ranks(p.rows.owner),
            "loads": list(p.parts[0].workloads),
        }
    return out


def plans(v: BoundaryVectors) -> dict[str, Json]:
    """Chunk workloads and assignments for every choice of ranks and chunks a rank; keys are "P,kappa"."""
    works = Works(v)
    options: dict[str, Json] = {}
    for world in PLAN_RANKS:
        for kappa in PLAN_CHUNKS:
            bounds = even_bounds(v.nq, chunk_size(v.nq, world * kappa))
            if -(-(len(bounds) - 1) // world) == kappa:
                options[f"{world},{kappa}"] = _assignments(works, world, bounds)
    return {"nq": v.nq, "nk": v.nk, "epsilon": NODE_EPSILON, "options": options}


def chunk_size(n: int, chunks: int) -> int:
    """ceil(n / chunks), in multiples of the tile (128), or of 8 where chunks are shorter, so that tiles fit into chunks."""
    size = max(1, -(-n // chunks))
    unit = 128 if size > 64 else 8 if size > 8 else 1
    return -(-size // unit) * unit


def _plain(n: int, chunk: int) -> Layout:
    bounds = even_bounds(n, chunk)
    return Layout(1, bounds, (0,) * (len(bounds) - 1))


def _assignments(works: Works, world: int, bounds: tuple[int, ...]) -> Json:
    count = len(bounds) - 1
    work = works.of(bounds[1])
    loads = work.cost(TileCosts())
    weights = loads.tolist()
    nodes = NODES if world >= 2 * NODES else 1
    first = balance(weights, world)
    ways: dict[str, Ints] = {USUAL[n]: np.array(o, dtype=np.int64) for n, o in usual_owners(count, world).items()}
    ways["heap"] = _owners(greedy(weights, world))
    ways["LPT"] = _owners(balance(weights, world, pairs=False))
    ways["stage 1"] = _owners(first)
    traffic = None
    if works.v.nq == works.v.nk:
        sizes = np.diff(np.array(bounds, dtype=np.int64)).astype(np.int64)
        traffic = Traffic(sizes, ((1, work.need),))
        if nodes > 1:
            problem = Problem(loads, traffic, nodes, world // nodes, round(NODE_EPSILON * 1_000_000), RUN_TIME)
            ways["stage 2"] = swap_traffic(problem, ways["stage 1"])
            ways["stage 3"] = _owners(by_swaps(problem, first).assignment)
            ways["node first"] = _owners(by_blocks(problem, first).assignment)
    return {
        "chunk": bounds[1] - bounds[0],
        "nodes": nodes,
        "loads": list(weights),
        "lower": first.lower_bound,
        "proven": first.proven_bound,
        "ways": {
            name: {
                "owner": ranks(owner.tolist()),
                "inflow": None if traffic is None else traffic.inflows(owner * nodes // world, nodes).tolist(),
            }
            for name, owner in ways.items()
        },
    }


def _owners(a: Assignment) -> Ints:
    return np.array(a.owner, dtype=np.int64)


def communication(v: BoundaryVectors) -> Json:
    """The planner's assignment over two nodes, and the work of every pair of row chunk and key chunk; None if too short.

    `work[i][j]` is in tile costs: rows of chunk i against keys of chunk j, of all batch items and mask heads.
    """
    chunk = chunk_size(v.nq, WORLD * CHUNKS_A_RANK)
    if v.nq < WORLD or -(-v.nq // chunk) < WORLD:
        return None
    p = plan(v, world_size=WORLD, nodes=NODES, chunk=chunk)
    machine = DEFAULT_MACHINE
    tile = p.tile
    return {
        "world": p.world,
        "nodes": p.nodes,
        "method": p.method,
        "rows": {"bounds": runs(p.rows.bounds), "owner": ranks(p.rows.owner)},
        "keys": {"bounds": runs(p.keys.bounds), "owner": ranks(p.keys.owner)},
        "need": [[j for j in range(p.keys.chunk_count) if bits >> j & 1] for bits in p.parts[0].need],
        "work": [runs(row) for row in pair_work(v, p.rows, p.keys).tolist()],
        "seconds_per_cost": machine.compute_seconds(1, p.costs, tile, max(1, machine.heads // v.heads), machine.head_dim),
        "bytes_per_row": machine.bytes_per_row(machine.heads_kv, machine.head_dim) * v.batch,
        "machine": {
            "tflops": machine.flops / 1e12,
            "intra": machine.intra,
            "inter": machine.inter,
            "latency": machine.latency,
            "heads": machine.heads,
            "heads_kv": machine.heads_kv,
            "head_dim": machine.head_dim,
        },
    }


def pair_work(v: BoundaryVectors, rows: Layout, keys: Layout) -> Ints:
    """Tile costs of each (row chunk, key chunk), int64 [N, M]. Tiles that cross a chunk edge count for both chunks."""
    tile = tile_size(rows), tile_size(keys)
    costs = TileCosts()
    price = np.zeros(len(TileClass), dtype=np.int64)
    price[TileClass.PARTIAL], price[TileClass.UNMASKED] = costs.partial, costs.unmasked
    table = price[classify(v, *tile).cpu().numpy()].sum((0, 1))
    work: Ints = per_chunk(np.add, per_chunk(np.add, table, rows, tile[0]).T, keys, tile[1]).T
    return work
