"""Warp roles and barriers as data: the comments of a kernel and its mbarrier_init lines come from the same rows."""

from __future__ import annotations

from dataclasses import dataclass

from maskc.codegen.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Role:
    """What some warps of the CTA do."""

    warps: str
    name: str
    duty: str


@dataclass(frozen=True, slots=True)
class Barrier:
    """An array of mbarriers, one per ring slot, or (count in threads) a named barrier.

    name: the event that a completed phase proves. arrivals: arrivals of a phase. arrives, waits: roles. guards: what may
    be touched after the wait. index: of its first mbarrier, or the id of the first named barrier.
    """

    name: str
    index: int
    slots: int
    arrivals: int
    arrives: str
    waits: str
    guards: str


LOADER, GENERATOR, STORER, CONSUMER = "KV Loader", "KV Index Generator", "O Storer", "MMA Consumer"


def forward_roles(spec: KernelSpec) -> tuple[Role, ...]:
    first, last = 4, 3 + spec.consumer_warps
    waits = ", once their chunk has arrived" if spec.gated else ""
    return (
        Role("0", LOADER, "one lane issues every TMA load, only for queued KV blocks" + waits),
        Role("1", GENERATOR, "takes the next work item, queues its UNMASKED and PARTIAL KV blocks right to left"),
        *(
            (Role("2", STORER, "one lane stores O tiles by TMA"), Role("3", "idle", "only gives up its registers"))
            if spec.out_dtype == "input"
            else (Role("2-3", "idle", "only give up their registers"),)
        ),
        Role(f"{first}-{last}", CONSUMER, "own 16 query rows each, from S = Q K^T to O and lse"),
    )


def forward_barriers(spec: KernelSpec) -> tuple[Barrier, ...]:
    """The mbarriers of the forward kernel, in the order in which they lie in shared memory."""
    warps, stores = spec.consumer_warps, spec.out_dtype == "input"
    release = "each consumer warp"
    also = f", {STORER}" if stores else ""
    readers = warps + 1 + stores  # of a queue slot
    rows = (
        ("queue_full", spec.queue_slots, 1, GENERATOR, f"{LOADER}, {CONSUMER}{also}", "a queue slot: header and runs"),
        ("queue_empty", spec.queue_slots, readers, f"{release}, {LOADER}{also}", GENERATOR, "the slot may be rewritten"),
        ("q_full", spec.q_slots, 1, f"{LOADER} + bytes", CONSUMER, "a Q tile"),
        *((("o_ready", spec.q_slots, warps, release, STORER, "an O tile in the Q slot"),) if stores else ()),
        ("q_empty", spec.q_slots, 1 if stores else warps, STORER if stores else release, LOADER, "the Q slot may be overwritten"),
        ("k_full", spec.k_slots, 1, f"{LOADER} + bytes", CONSUMER, "a K tile and, where the tag asks, its pack"),
        ("k_empty", spec.k_slots, warps, f"{release} after S and the mask", LOADER, "the K slot may be overwritten"),
        ("v_full", spec.v_slots, 1, f"{LOADER} + bytes", CONSUMER, "a V tile"),
        ("v_empty", spec.v_slots, warps, f"{release} after its P V", LOADER, "the V slot may be overwritten"),
    )
    out, index = [], 0
    for name, slots, arrivals, arrives, waits, guards in rows:
        out.append(Barrier(name, index, slots, arrivals, arrives, waits, guards))
        index += slots
    return tuple(out)


def forward_named(spec: KernelSpec) -> tuple[Barrier, ...]:
    """Named barriers of the forward kernel; arrivals are threads. Id 0 is __syncthreads()."""
    groups = spec.warp_groups
    turn = Barrier("turn", 1, groups, 256, "the group before", "the group", "the tensor cores: ping-pong between groups")
    group = Barrier("group", 1 + groups, groups, 128, "the group", "the group", "its own rows of a tile in shared memory")
    return ((turn,) if spec.ping_pong and groups > 1 else ()) + (group,)


def check_barriers(barriers: tuple[Barrier, ...], named: tuple[Barrier, ...], room: int) -> list[str]:
    """What is inconsistent in a barrier table; empty when all is well. `room`: mbarriers that fit the reserved bytes."""
    wrong = []
    seen: set[str] = set()
    next_free = 0
    for b in barriers:
        if b.name in seen:
            wrong.append(f"{b.name} appears twice")
        seen.add(b.name)
        if b.index != next_free:
            wrong.append(f"{b.name} starts at {b.index}, expected {next_free}")
        next_free = b.index + b.slots
        if b.slots < 1 or not 1 <= b.arrivals < 1 << 20:
            wrong.append(f"{b.name}: {b.slots} slots, {b.arrivals} arrivals")
    for full in (b for b in barriers if b.name.endswith("_full")):
        empty = next((b for b in barriers if b.name == full.name.removesuffix("full") + "empty"), None)
        if empty is None or empty.slots != full.slots:
            wrong.append(f"{full.name} has no matching empty barrier")
    if next_free != room:
        wrong.append(f"{next_free} mbarriers, room for {room}")
    ids = [i for b in named for i in range(b.index, b.index + b.slots)]
    if len(set(ids)) != len(ids) or any(not 1 <= i <= 15 for i in ids):
        wrong.append(f"named barrier ids {ids}")
    if any(b.arrivals % 32 for b in named):
        wrong.append("named barriers count whole warps")
    return wrong
