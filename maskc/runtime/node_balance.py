"""Balancing over nodes: which node owns which chunks, so that little crosses between nodes and every rank stays busy.

A chunk enters a node once, however many of its ranks need it; the metric is the largest such inflow of a node, then the
sum. Two ways are tried and the better one kept by a cost model: stage 1 over all ranks followed by one-for-one swaps that
lower the metric while loads stay inside a band (stage 2), or contiguous blocks per node that are swapped until the node
loads agree. Stage 3 then balances the ranks inside each node, which leaves the traffic between nodes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maskc.runtime.balance import Assignment, Effort, balance, with_owner
from maskc.runtime.layout import usual_owners

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NODE_LOAD_PPM = 10_000
"""Node-first swaps stop when the heaviest node is within this many millionths of the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What the masks need: `sizes` int64 [N] rows per key chunk, and (weight, need bool [N, N]) per mask."""

    sizes: Ints
    needs: tuple[tuple[int, Bools], ...]

    def inflow(self, owner: Ints, node: int) -> int:
        """Weighted rows that enter a node: key chunks some of its row chunks need and that it does not own."""
        inside = owner == node
        return sum(w * int(self.sizes[need[inside].any(0) & ~inside].sum()) for w, need in self.needs)

    def inflows(self, owner: Ints, nodes: int) -> Ints:
        return np.array([self.inflow(owner, n) for n in range(nodes)], dtype=np.int64)

    def after_swap(self, owner: Ints, node: int, leaving: NDArray[np.intp], coming: NDArray[np.intp]) -> Ints:
        """Inflow of `node` for every (leaving, coming) pair of chunks exchanged, int64 [leaving, coming]."""
        inside = owner == node
        out = np.zeros((len(leaving), len(coming)), dtype=np.float64)
        for weight, need in self.needs:
            users = need[inside].sum(0)
            alive = users[None, :] - need[leaving] > 0  # [leaving, N]: still needed once `leaving` is gone
            outside = np.where(inside, 0, self.sizes).astype(np.float64)
            fresh = (~alive * outside) @ need[coming].T.astype(np.float64)  # exact: integers below 2^53
            total = (alive @ outside)[:, None] + fresh
            now_inside = (alive[:, coming] | need[coming, coming][None, :]) * self.sizes[coming][None, :]
            row = np.arange(len(leaving))
            now_outside = (alive[row, leaving][:, None] | need[coming][:, leaving].T) * self.sizes[leaving][:, None]
            out += weight * (total - now_inside + now_outside)
        return out.astype(np.int64)


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """An assignment to ranks with its inflow per node (weighted rows) and the name of the way it was found."""

    assignment: Assignment
    inflows: tuple[int, ...]
    method: str


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Chunk workloads int64 [N], what they need, and the ranks: `nodes` times `ranks_per_node`. epsilon_ppm: the load band."""

    weights: Ints
    traffic: Traffic
    nodes: int
    ranks_per_node: int
    epsilon_ppm: int
    effort: Effort

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def capacity(self) -> int:
        """Chunks a node may own."""
        return -(-len(self.weights) // self.world) * self.ranks_per_node

    @property
    def mean(self) -> int:
        return int(self.weights.sum()) // self.world

    @property
    def band(self) -> tuple[int, int]:
        """Workloads that a rank may have after a swap, if it was not above them before."""
        margin = self.mean * self.epsilon_ppm // 1_000_000
        return self.mean - margin, self.mean + margin


def balance_nodes(problem: Problem, cost: Callable[[int, int], float]) -> NodeAssignment:
    """The best way by `cost(makespan, worst inflow)`, then by inflow, among those whose makespan stays in the band.

    Plain contiguous and zigzag assignments compete too: for regular masks nothing sends less.
    """
    weights = problem.weights.tolist()
    first = balance(weights, problem.world, problem.effort)
    ways = [by_swaps(problem, first), by_blocks(problem, first)]
    for name, owner in usual_owners(len(weights), problem.world).items():
        ways.append(_judged(problem, with_owner(first, weights, owner), name))
    limit = max(first.makespan, problem.band[1])
    inside = [way for way in ways if way.assignment.makespan <= limit] or [min(ways, key=lambda w: w.assignment.makespan)]
    return min(inside, key=lambda w: (cost(w.assignment.makespan, max(w.inflows)), max(w.inflows), sum(w.inflows), w.method))


def by_swaps(problem: Problem, first: Assignment) -> NodeAssignment:
    """Stage 2 on the assignment of stage 1, then stage 3 where it lowers the makespan."""
    owner = swap_traffic(problem, np.array(first.owner, dtype=np.int64))
    swapped = _assignment(problem, owner, first)
    inner = _inside_nodes(problem, owner // problem.ranks_per_node, first)
    best = inner if inner.makespan < swapped.makespan and problem.ranks_per_node > 1 else swapped
    return _judged(problem, best, "global, then swaps")


def by_blocks(problem: Problem, first: Assignment) -> NodeAssignment:
    """Contiguous blocks per node, evened out, then stage 3. Bounds are those of `first`: any assignment obeys them."""
    return _judged(problem, _inside_nodes(problem, node_blocks(problem), first), "node first")


def _judged(problem: Problem, a: Assignment, method: str) -> NodeAssignment:
    node_of = np.array(a.owner, dtype=np.int64) // problem.ranks_per_node
    return NodeAssignment(a, tuple(problem.traffic.inflows(node_of, problem.nodes).tolist()), method)


def swap_traffic(problem: Problem, owner: Ints) -> Ints:
    """Stage 2: exchange one chunk of the node with the worst inflow for one elsewhere while (worst, sum) falls.

    Both ranks must stay in the band, or below the current peak. Returns the new owner of every chunk.
    """
    owner, w, traffic, nodes, ranks_per_node = (
        owner.copy(),
        problem.weights,
        problem.traffic,
        problem.nodes,
        problem.ranks_per_node,
    )
    loads = np.bincount(owner, weights=w, minlength=problem.world).astype(np.int64)
    low, high = problem.band[0], max(int(loads.max()), problem.band[1])
    node_of = owner // ranks_per_node
    inflows = traffic.inflows(node_of, nodes)
    for _ in range(4 * len(w)):
        worst = int(inflows.argmax())
        best: tuple[int, int, int, int] | None = None
        for other in range(nodes):
            if other == worst:
                continue
            a, b = np.flatnonzero(node_of == worst), np.flatnonzero(node_of == other)
            if len(a) == 0 or len(b) == 0:
                continue
            moved = w[b][None, :] - w[a][:, None]
            new_a, new_b = loads[owner[a]][:, None] + moved, loads[owner[b]][None, :] - moved
            allowed = (np.minimum(new_a, new_b) >= low) & (np.maximum(new_a, new_b) <= high)
            if not allowed.any():
                continue
            in_worst = traffic.after_swap(node_of, worst, a, b)
            in_other = traffic.after_swap(node_of, other, b, a).T
            rest = np.delete(inflows, [worst, other])
            peak = np.maximum(np.maximum(in_worst, in_other), int(rest.max(initial=0)))
            total = in_worst + in_other + int(rest.sum())
            peak[~allowed] = np.iinfo(np.int64).max
            i, j = np.unravel_index(np.lexsort((total.ravel(), peak.ravel()))[0], peak.shape)
            candidate = (int(peak[i, j]), int(total[i, j]), int(a[i]), int(b[j]))
            best = candidate if best is None else min(best, candidate)
        if best is None or best[:2] >= (int(inflows.max()), int(inflows.sum())):
            return owner
        _, _, x, y = best
        loads[owner[x]] += w[y] - w[x]
        loads[owner[y]] += w[x] - w[y]
        owner[x], owner[y] = owner[y], owner[x]
        node_of = owner // ranks_per_node
        inflows = traffic.inflows(node_of, nodes)
    return owner


def node_blocks(problem: Problem) -> Ints:
    """Contiguous blocks, then swaps between the heaviest and another node until loads agree.

    Each swap moves work for the least growth of inflow per unit moved. Returns the node of every chunk.
    """
    w, traffic, nodes = problem.weights, problem.traffic, problem.nodes
    n = len(w)
    node_of = np.minimum(np.arange(n, dtype=np.int64) * nodes // max(n, 1), nodes - 1)
    assert np.bincount(node_of, minlength=nodes).max(initial=0) <= problem.capacity
    loads = np.bincount(node_of, weights=w, minlength=nodes).astype(np.int64)
    mean = int(w.sum()) // nodes
    inflows = traffic.inflows(node_of, nodes)
    for _ in range(4 * n):
        heavy = int(loads.argmax())
        if loads[heavy] <= mean + mean * NODE_LOAD_PPM // 1_000_000:
            break
        best: tuple[int, int, int] | None = None
        for light in np.flatnonzero(loads < mean).tolist():
            a, b = np.flatnonzero(node_of == heavy), np.flatnonzero(node_of == light)
            moved = w[a][:, None] - w[b][None, :]
            allowed = (moved > 0) & (moved < loads[heavy] - loads[light])
            if not allowed.any():
                continue
            growth = traffic.after_swap(node_of, heavy, a, b) + traffic.after_swap(node_of, light, b, a).T
            growth -= inflows[heavy] + inflows[light]
            price = np.where(allowed, (growth << 16) // np.maximum(moved, 1), np.iinfo(np.int64).max)
            i, j = np.unravel_index(np.lexsort((-moved.ravel(), price.ravel()))[0], price.shape)
            candidate = (int(price[i, j]), int(a[i]), int(b[j]))
            best = candidate if best is None else min(best, candidate)
        if best is None:
            break
        _, x, y = best
        loads[node_of[x]] += w[y] - w[x]
        loads[node_of[y]] += w[x] - w[y]
        node_of[x], node_of[y] = node_of[y], node_of[x]
        inflows = traffic.inflows(node_of, nodes)
    return node_of


def _inside_nodes(problem: Problem, node_of: Ints, first: Assignment) -> Assignment:
    """Stage 3: stage 1 on the chunks of each node."""
    owner = np.empty(len(problem.weights), np.int64)
    for node in range(problem.nodes):
        mine = np.flatnonzero(node_of == node)
        inner = balance(problem.weights[mine].tolist(), problem.ranks_per_node, problem.effort)
        owner[mine] = node * problem.ranks_per_node + np.array(inner.owner, dtype=np.int64)
    return _assignment(problem, owner, first)


def _assignment(problem: Problem, owner: Ints, bounds_from: Assignment) -> Assignment:
    loads = np.bincount(owner, weights=problem.weights, minlength=problem.world).astype(np.int64)
    return replace(bounds_from, owner=tuple(owner.tolist()), workloads=tuple(loads.tolist()))
