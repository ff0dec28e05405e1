"""What `maskc plan` prints: who holds what, how even the work is, what travels where, and how long it should take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from maskc.boundary import VECTOR_NAMES, BoundaryVectors
from maskc.diagnostics import MaskcError
from maskc.runtime import chunking, overlap_model
from maskc.runtime.balance import Effort, balance, greedy
from maskc.runtime.chunking import BEST
from maskc.runtime.kernel_tiles import kernel_tiles
from maskc.runtime.layout import Range
from maskc.runtime.localize import localize
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.overlap_model import WIDE
from maskc.runtime.plan import AttentionPlan, assigned, plan
from maskc.runtime.plan_arguments import Spec
from maskc.runtime.plan_specs import vectors_of
from maskc.runtime.schedule import STRATEGIES

PAIRS = 200_000
"""Pairs of ranks and key chunks from which single transfers, of which there may be as many, are not listed."""
CELLS = 1 << 36
"""Cells of a mask from which the tiles of its kernels are not counted."""
STRADDLE = 1.01
"""Tiles over those of one device from which the chunk size is worth a word."""


def report(spec: Spec, p: AttentionPlan) -> str:
    """The plan of one mask as text: chunks, workloads beside those of other orders, bytes per link, what is never sent."""
    machine = DEFAULT_MACHINE
    row_bytes = machine.bytes_per_row(p.heads_kv or machine.heads_kv, p.head_dim or machine.head_dim)
    v = vectors_of(spec, p.rows.length, p.keys.length)
    sections = [_head(p), _ranks(p), _orders(spec, p, row_bytes)]
    few = p.world * p.keys.chunk_count <= PAIRS
    if few and v.nq * v.nk <= CELLS and (tiles := _tiles(v, p)):
        sections.append(tiles)
    if few:
        sections += [_links(p, row_bytes), _never(p), _strategies(p, row_bytes)]
        sections.append(overlap_model.section(p, masks=v.batch * v.heads))
    else:
        sections.append(f"never sent: {_never_share(p):.1%} of a full all-gather")
        sections.append("links, exchanges and predicted times are left out: they take long for so many ranks and chunks")
    return "\n\n".join(sections) + "\n"


def local_vectors(spec: Spec, p: AttentionPlan) -> str:
    """The localized vectors of every rank against all keys, neighbouring keys with equal values joined."""
    v = vectors_of(spec, p.rows.length, p.keys.length)
    out = []
    for rank in range(p.world):
        chunks = p.rows.chunks_of(rank)
        local = localize(v, p.rows, chunks, p.keys, tuple(range(p.keys.chunk_count)))
        held = f"rows {_ranges(p.rows.ranges(chunks))} are local rows {_ranges(((0, local.nq),))}" if local.nq else "no rows"
        out += [f"rank {rank}: {held}", *_vector_lines(local)]
    return "\n".join(out) + "\n"


def _vector_lines(local: BoundaryVectors) -> list[str]:
    out = []
    for b in range(local.batch):
        for h in range(local.heads):
            label = (f", item {b}" if local.batch > 1 else "") + (f", head {h}" if local.heads > 1 else "")
            vectors = zip(VECTOR_NAMES, local.tensors, strict=True)
            runs = _runs({name: t[b, h] for name, t in vectors if t is not None})
            out += [f"  keys {keys}{label}: {values}" for keys, values in runs] or [f"  every key{label}: nothing is masked"]
    if local.blocks is not None:
        table = local.blocks
        out.append(f"  block table {tuple(table.keep.shape)}, blocks of {table.block_q} rows x {table.block_kv} keys")
    return out


def _runs(named: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    columns = list(zip(*(t.tolist() for t in named.values()), strict=True))
    out: list[tuple[str, str]] = []
    start = 0
    for i in range(1, len(columns) + 1):
        if i == len(columns) or columns[i] != columns[start]:
            values = ", ".join(f"{n} {x}" for n, x in zip(named, columns[start], strict=True))
            out.append((_ranges(((start, i),)), values))
            start = i
    return out


# ---------------------------------------------------------------- sections


def _head(p: AttentionPlan) -> str:
    count, size = p.rows.chunk_count, p.rows.chunk
    chunks = f"{count} chunks of {size}" if size else f"{count} uneven chunks"
    nodes = f" in {p.nodes} nodes" if p.nodes > 1 else ""
    keys = "" if p.keys.length == p.rows.length else f", {p.keys.length} keys"
    method = "" if p.method == p.order else f" ({p.method})"
    return "\n".join(
        [
            f"plan of `{p.parts[0].name}`: {p.rows.length} rows{keys}, {p.world} ranks{nodes}",
            f"{chunks}, order {p.order}{method}, tiles of {p.tile[0]} x {p.tile[1]}",
            f"tile costs: partial {p.costs.partial}, unmasked {p.costs.unmasked}; digest {p.digest[:16]}",
        ]
    )


def _ranks(p: AttentionPlan) -> str:
    mean = sum(p.workloads) / p.world
    lines = ["rank    rows    workload  of mean  chunks: positions"]
    idle = []
    for r in range(p.world):
        chunks = p.rows.chunks_of(r)
        if not chunks:
            idle.append(r)
            continue
        share = p.workloads[r] / mean if mean else 1.0
        held = f"{' '.join(map(str, chunks))}: {_ranges(p.rows.ranges(chunks))}"
        lines.append(f"{r:4} {p.rows.local_length(r):7} {p.workloads[r]:11}  {share:7.4f}  {held}")
    if idle:
        lines.append(f"{_named(idle)} without rows")
    slack = p.makespan / p.proven_bound - 1 if p.proven_bound else 0.0
    proof = "optimal: no assignment of these chunks is better" if p.optimal else f"at most {slack:.3%} above the best possible"
    lines.append(
        f"imbalance {p.imbalance:.4f} (largest over mean); lower bound {p.lower_bound}, proven {p.proven_bound}; {proof}"
    )
    return "\n".join(lines)


def _orders(spec: Spec, p: AttentionPlan, row_bytes: int) -> str:
    """Imbalance and traffic of the usual ways, on the same chunks where a way assigns chunks and these are even."""
    chunk = p.rows.chunk or chunking.default_chunk(p.rows.length, p.world)
    made = partial(plan, spec, world_size=p.world, nodes=p.nodes, nq=p.rows.length, nk=p.keys.length, costs=p.costs, chunk=chunk)
    ways: dict[str, AttentionPlan] = {}
    for order in ("contiguous", "zigzag"):
        with suppress(MaskcError):  # M714: with many ranks there may be more pieces than a plan holds
            ways[order] = made(order=order)
    if p.rows.bounds == p.keys.bounds:
        base = p if p.rows.chunk else made()
        loads = base.parts[0].workloads
        ways["heap"] = assigned(base, greedy(loads, p.world), "heap")
        ways["LPT"] = assigned(base, balance(loads, p.world, pairs=False), "LPT")
        ways["HCC-IPO"] = assigned(base, balance(loads, p.world, Effort()), "HCC-IPO")
        if p.nodes == 1 < p.world <= WIDE:
            ways["epsilon=.01"] = made(epsilon=0.01)
    if p.order in ("balanced", "given") and p.method != "HCC-IPO":
        ways["this plan"] = p
    lines = ["order       imbalance  busiest rank receives  all ranks receive"]
    for name, way in ways.items():
        incoming = way.received()
        lines.append(
            f"{name:11} {way.imbalance:9.4f}  {_bytes(max(incoming) * row_bytes):>21}  {_bytes(sum(incoming) * row_bytes):>17}"
        )
    if p.nodes > 1:
        lines.append(
            f"across nodes, worst node: {', '.join(f'{n} {_bytes(across_nodes(w) * row_bytes)}' for n, w in ways.items())}"
        )
    return "\n".join(lines)


def _tiles(v: BoundaryVectors, p: AttentionPlan) -> str:
    """What cutting the sequence costs the kernels, and the chunk size that costs their forward nothing."""
    found = kernel_tiles(v, p, p.head_dim or DEFAULT_MACHINE.head_dim)
    if found is None or p.rows.length < p.world * found.forward_tile[0]:
        return ""  # ranks hold less than a tile
    rows, chunk = found.forward_tile[0], p.rows.chunk
    lines = [
        "tiles that the GPU kernels visit on all ranks, over those on one device",
        f"  forward {found.forward:.3f} ({rows} x {found.forward_tile[1]}), backward {found.backward:.3f} "
        f"({found.backward_tile[0]} x {found.backward_tile[1]}); key tiles, once on each rank that reads them: {found.keys:.2f}",
    ]
    if found.forward > STRADDLE and chunk is not None and chunk % rows:
        size = max(1, round(chunk / BEST)) * BEST
        most, now = chunking.fullest(p.rows.length, p.world, size), max(map(p.rows.local_length, range(p.world)))
        lines.append(
            f"  tiles straddle chunks of {chunk} that lie apart; chunks of {size} hold whole tiles, "
            f"with up to {most} rows a rank where there are {now} now"
        )
    return "\n".join(lines)


def across_nodes(p: AttentionPlan) -> int:
    """Rows that enter the node with the most, each counted once."""
    worst = 0
    for node in range(p.nodes):
        ranks = range(node * p.node_size, (node + 1) * p.node_size)
        wanted = frozenset[int]().union(*(p.needed(r) for r in ranks))
        worst = max(worst, sum(p.keys.size_of(c) for c in wanted if p.keys.owner[c] not in ranks))
    return worst


def _links(p: AttentionPlan, row_bytes: int) -> str:
    table = p.schedule("all-gather").rows_sent(p.keys)
    title = "K and V sent forward, from rank (line) to rank (column); dK and dV take the same ways back"
    outgoing, incoming = [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]
    linked = [r for r in range(p.world) if outgoing[r] or incoming[r]]
    if not linked:
        return f"{title}\n  (nothing)"
    if len(linked) > WIDE:
        lines = ["rank        sends     receives"]
        lines += [f"{r:4} {_bytes(outgoing[r] * row_bytes):>12} {_bytes(incoming[r] * row_bytes):>12}" for r in linked]
        return "\n".join([title, *lines])
    width = max(9, *(len(_bytes(x * row_bytes)) for row in table for x in row))
    lines = ["     " + " ".join(f"{r:>{width}}" for r in linked)]
    for r in linked:
        lines.append(f"{r:4} " + " ".join(f"{_bytes(table[r][c] * row_bytes) if table[r][c] else '-':>{width}}" for c in linked))
    return "\n".join([title, *lines])


def _never(p: AttentionPlan) -> str:
    """Transfers of a full all-gather that no row needs."""
    readers: dict[tuple[int, ...], list[int]] = {}
    for r in range(p.world):
        needed = p.needed(r)
        unseen = tuple(c for c in range(p.keys.chunk_count) if c not in needed and p.keys.owner[c] != r)
        if unseen:
            readers.setdefault(unseen, []).append(r)
    lines = [f"  to {_named(ranks)}: keys {_ranges(p.keys.ranges(unseen))}" for unseen, ranks in readers.items()]
    title = f"never sent: {_never_share(p):.1%} of a full all-gather"
    return "\n".join([title, *(lines or ["  (every rank needs every key)"])])


def _never_share(p: AttentionPlan) -> float:
    everything = (p.world - 1) * p.keys.length
    return 1 - sum(p.received()) / everything if everything else 0.0


def _strategies(p: AttentionPlan, row_bytes: int) -> str:
    lines = ["strategy    exchanges  sent forward"]
    for name in STRATEGIES:
        s = p.schedule(name)
        total = sum(map(sum, s.rows_sent(p.keys)))
        lines.append(f"{name:11} {sum(len(step.phases) for step in s.steps):9}  {_bytes(total * row_bytes)}")
    return "\n".join(lines)


def _named(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 0 4-7"; ranks in order."""
    starts = [r for i, r in enumerate(ranks) if i == 0 or ranks[i - 1] != r - 1]
    ends = [r + 1 for i, r in enumerate(ranks) if i == len(ranks) - 1 or ranks[i + 1] != r + 1]
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(list(zip(starts, ends, strict=True)))}"


def _ranges(ranges: Sequence[Range]) -> str:
    return " ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in ranges)


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
