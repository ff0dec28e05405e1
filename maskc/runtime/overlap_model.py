"""How long a step takes on every rank by a model of rates: keys arrive in order, work on a chunk starts when it is there.

A rank is a server that works through its slots in the order of visit. Slot i arrives at A(i) and takes W(i), so attention
beside its copies ends at the largest of A(i) + W(i) + W(i + 1) + ...; one after the other they take A(last) + W. Backward,
keys arrive once more, and the gradients of a slot leave when it is done, one after another over the same link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from maskc.runtime.machine import BACKWARD_FACTOR, DEFAULT_MACHINE, Machine
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan
from maskc.runtime.plan import AttentionPlan

CHUNK_SECONDS = 5e-6
"""Per chunk on top of its bytes: two copies and a flag."""
WIDE = 16
"""Of more ranks than this, reports show sums, the mean or the worst."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one direction on one rank: attention alone, transfers alone, one after the other, beside each other."""

    attention: float
    transfer: float
    apart: float
    beside: float

    def __add__(self, other: Times) -> Times:
        pairs = ((getattr(self, n), getattr(other, n)) for n in Times.__slots__)
        return Times(*(a + b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Flow:
    """What reaches a rank: when each slot is there, seconds of its transfer, and of forward attention to it."""

    arrivals: tuple[float, ...]
    transfers: tuple[float, ...]
    work: tuple[float, ...]


def forward_times(flow: Flow) -> Times:
    attention, last = sum(flow.work), max(flow.arrivals, default=0.0)
    return Times(attention, sum(flow.transfers), last + attention, _finish(flow.arrivals, flow.work)[-1])


def backward_times(flow: Flow) -> Times:
    """Gradients are fp32, so those of a 16-bit chunk take twice the time of the chunk."""
    work = [BACKWARD_FACTOR * w for w in flow.work]
    back = [2 * t for t in flow.transfers]
    ends = _finish(flow.arrivals, work)[1:]
    sent = 0.0
    for end, seconds in zip(ends, back, strict=True):
        sent = max(sent, end) + seconds if seconds else sent
    attention = sum(work)
    apart = max(flow.arrivals, default=0.0) + attention + sum(back)
    return Times(attention, sum(flow.transfers) + sum(back), apart, max(sent, ends[-1] if ends else 0.0))


def _finish(arrivals: Sequence[float], work: Sequence[float]) -> list[float]:
    """When the server is done with nothing, and then with each slot."""
    return list(accumulate(zip(arrivals, work, strict=True), lambda t, slot: max(t, slot[0]) + slot[1], initial=0.0))


def predict(
    p: AttentionPlan, part: int = 0, machine: Machine = DEFAULT_MACHINE, masks: int = 1
) -> tuple[tuple[Times, Times], ...]:
    """(forward, backward) of every rank for one layer and one batch item.

    masks: batch items times mask heads that the plan's workloads are summed over.
    """
    return tuple((forward_times(f), backward_times(f)) for f in flows(p, part, machine, masks))


def flows(p: AttentionPlan, part: int, machine: Machine, masks: int = 1) -> tuple[Flow, ...]:
    """Arrivals by link: `intra` into each rank, its share of `inter` for what it brings in from other nodes."""
    plans = [overlap_plan(p, r, part) for r in range(p.world)]
    entered = [_entries(p, o, machine) for o in plans]
    return tuple(_flow(p, o, entered, part, machine, masks) for o in plans)


def _seconds(p: AttentionPlan, chunk: int, rate: float, machine: Machine) -> float:
    row = machine.bytes_per_row(p.heads_kv or machine.heads_kv, p.head_dim or machine.head_dim)
    return p.keys.size_of(chunk) * row / rate + CHUNK_SECONDS


def _entries(p: AttentionPlan, o: OverlapPlan, machine: Machine) -> dict[int, float]:
    """When each chunk that this rank brings into its node is there."""
    chunks = [*(s.chunk for s in o.pulls if s.across), *o.carried]
    rate = machine.inter / p.node_size
    ends = accumulate(_seconds(p, c, rate, machine) for c in chunks)
    return {c: machine.latency + end for c, end in zip(chunks, ends, strict=True)}


def _flow(p: AttentionPlan, o: OverlapPlan, entered: Sequence[dict[int, float]], part: int, machine: Machine, masks: int) -> Flow:
    arrivals, transfers = [], []
    link = machine.latency
    for slot in o.slots:
        if slot.source == o.rank:
            arrivals.append(0.0)
            transfers.append(0.0)
        elif slot.across:
            arrivals.append(entered[o.rank][slot.chunk])
            transfers.append(_seconds(p, slot.chunk, machine.inter / p.node_size, machine))
        else:
            seconds = _seconds(p, slot.chunk, machine.intra, machine)
            link = max(link, entered[slot.source].get(slot.chunk, 0.0)) + seconds
            arrivals.append(link)
            transfers.append(seconds)
    return Flow(tuple(arrivals), tuple(transfers), tuple(_work(p, o, part, machine, masks)))


def _work(p: AttentionPlan, o: OverlapPlan, part: int, machine: Machine, masks: int) -> list[float]:
    """Forward seconds per slot: the work of a row chunk is spread over the key chunks it needs, by their rows."""
    mask = p.parts[part]
    heads, dim = p.heads or machine.heads, p.head_dim or machine.head_dim
    out = dict.fromkeys((s.chunk for s in o.slots), 0.0)
    for chunk in p.rows.chunks_of(o.rank):
        needed = [c for c in out if mask.need[chunk] >> c & 1]
        rows = sum(p.keys.size_of(c) for c in needed)
        seconds = machine.compute_seconds(mask.workloads[chunk], p.costs, p.tile, heads, dim) / masks
        for c in needed:
            out[c] += seconds * p.keys.size_of(c) / rows
    return [out[s.chunk] for s in o.slots]


# ---------------------------------------------------------------- as text


def section(p: AttentionPlan, part: int = 0, machine: Machine = DEFAULT_MACHINE, masks: int = 1) -> str:
    """Predicted milliseconds of one layer's training step, with everything that the figures rest on."""
    heads, heads_kv, dim = p.heads or machine.heads, p.heads_kv or machine.heads_kv, p.head_dim or machine.head_dim
    tflops, intra, inter = machine.flops / 1e12, machine.intra / 1e9, machine.inter / 1e9
    across = f", {inter:.0f} GB/s into a node shared by its ranks" if p.nodes > 1 else ""
    lines = [
        "predicted step of one layer and batch item, forward and backward, in ms (a model, not a measurement)",
        f"  {heads} query heads, {heads_kv} key heads, head dim {dim}, 16 bits; UNMASKED tiles at {tflops:.0f} TFLOP/s,",
        f"  backward {BACKWARD_FACTOR} x forward; {intra:.0f} GB/s into a rank{across}, {CHUNK_SECONDS * 1e6:.0f} us a chunk;",
        "  no rank waits for another but for its keys; copies take no multiprocessors and slow no kernel",
        "rank   attention  transfers  one after the other  beside each other",
    ]
    totals = [a + b for a, b in predict(p, part, machine, masks)]
    busy = [r for r in range(p.world) if p.rows.chunks_of(r)]
    if len(busy) <= WIDE:
        lines += [_line(f"{r:4}", totals[r]) for r in busy]
    mean = Times(*(sum(getattr(t, n) for t in totals) / p.world for n in Times.__slots__))
    slowest = Times(*(max(getattr(t, n) for t in totals) for n in Times.__slots__))
    return "\n".join([*lines, _line("mean", mean), _line("most", slowest)])


def _line(label: str, t: Times) -> str:
    a, b, c, d = (f"{1e3 * x:.3f}" for x in (t.attention, t.transfer, t.apart, t.beside))
    return f"{label}  {a:>10}  {b:>9}  {c:>19}  {d:>17}"
