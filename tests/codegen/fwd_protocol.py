"""Who may touch which part of shared memory when, in the forward kernel: its roles as steps between barriers.

`Kernel` transcribes the roles of templates/fwd (`generate_queue`, `load_tiles`, `store_output`, and `attend` warp by warp)
without their arithmetic, for `tests.codegen.cta` to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from maskc.codegen.roles import forward_barriers, forward_named
from maskc.codegen.spec import KernelSpec
from tests.codegen.cta import Cta, Fault, Named, Part, Ring, Steps

Item = tuple[int, ...]
"""KV blocks that a work item visits, by queue slot; (0,) for one whose rows see nothing."""
NEAR = 1
"""Tiles before the end of an item, from which on the generator takes the next one; kernels have more."""


class Kernel(Cta):
    """One CTA that is dealt `items`. broken: the name of a step that is left out, for tests of this model.

    With row groups: hidden, the (item, tile, warp group) that a warp group does not see; dense, the (item, tile) that all see
    without a mask.
    """

    def __init__(
        self,
        spec: KernelSpec,
        items: tuple[Item, ...],
        broken: str = "",
        hidden: Collection[tuple[int, int, int]] = (),
        dense: Collection[tuple[int, int]] = (),
    ) -> None:
        super().__init__(forward_barriers(spec), broken)
        self.spec, self.items, self.hidden, self.dense = spec, items, hidden, dense
        self.turns = [Named(b.arrivals) for b in forward_named(spec) if b.name == "turn" for _ in range(b.slots)]
        self.messages = [(n, i) for n, item in enumerate(items) for i in range(len(item))]
        self.stored: list[int] = []
        self.come_to = 0  # tiles, by the loader

    def roles(self) -> list[Steps]:
        consumers = (self.consumer(w) for w in range(self.spec.consumer_warps))
        return [self.generator(), self.loader(), *consumers, *([self.storer()] if self.spec.out_dtype == "input" else [])]

    def check_end(self) -> None:
        super().check_end()
        if self.stored != [n for n, item in enumerate(self.items) if sum(item)] and self.spec.out_dtype == "input":
            raise Fault(f"items {self.stored} were stored")

    def q_parts(self, slot: int) -> list[Part]:
        """A Q tile by the rows of the consumer warps."""
        return [("q", slot, w) for w in range(self.spec.consumer_warps)]

    # ---- roles

    def generator(self) -> Steps:
        ring = Ring(self.spec.queue_slots)
        for m in range(len(self.messages) + 1):
            yield self.bars["queue_empty", ring.slot].passed(ring.parity ^ 1)
            self.memory.write(("queue", ring.slot), m)
            self.bars["queue_full", ring.slot].arrive()
            ring.advance()
            if (self.spec.gated or self.spec.late) and m < len(self.messages) and self.last_part(m):
                tiles = sum(map(sum, self.items[: self.messages[m][0] + 1]))
                yield lambda tiles=tiles: self.come_to + NEAR >= tiles  # type: ignore[misc]

    def last_part(self, message: int) -> bool:
        n, part = self.messages[message]
        return part == len(self.items[n]) - 1

    def each_message(self, ring: Ring) -> Iterator[Callable[[], bool] | int | None]:
        """The number of each message once it can be read; whoever iterates gives the slot back."""
        for m in range(len(self.messages) + 1):
            yield self.bars["queue_full", ring.slot].passed(ring.parity)
            self.memory.read(("queue", ring.slot), m)
            if m < len(self.messages):
                yield m

    def give_back(self, ring: Ring) -> None:
        self.bars["queue_empty", ring.slot].arrive()
        ring.advance()

    def loader(self) -> Steps:
        spec, bars = self.spec, self.bars
        queue, q, k, v = Ring(spec.queue_slots), Ring(spec.q_slots), Ring(spec.k_slots), Ring(spec.v_slots)
        tiles = 0
        for step in self.each_message(queue):
            if not isinstance(step, int):
                yield step
                continue
            n, part = self.messages[step]
            tiles = 0 if part == 0 else tiles
            for _ in range(self.items[n][part]):
                self.come_to += self.does("count tiles")
                yield bars["k_empty", k.slot].passed(k.parity ^ 1)
                self.copy(bars["k_full", k.slot], [("k", k.slot)], (n, tiles))
                k.advance()
                if tiles == 0:
                    if self.does("wait for Q to be free"):
                        yield bars["q_empty", q.slot].passed(q.parity ^ 1)
                    self.copy(bars["q_full", q.slot], self.q_parts(q.slot), n)
                    q.advance()
                yield bars["v_empty", v.slot].passed(v.parity ^ 1)
                self.copy(bars["v_full", v.slot], [("v", v.slot)], (n, tiles))
                v.advance()
                tiles += 1
            self.give_back(queue)

    def storer(self) -> Steps:
        queue, q = Ring(self.spec.queue_slots), Ring(self.spec.q_slots)
        for step in self.each_message(queue):
            if not isinstance(step, int):
                yield step
                continue
            n, part = self.messages[step]
            self.give_back(queue)
            wanted = len(self.items[n]) - 1 if self.does("store after the last queue slot") else 0
            if part != wanted or not self.items[n][0]:
                continue
            yield self.bars["o_ready", q.slot].passed(q.parity)
            for rows in self.q_parts(q.slot):
                self.memory.begin_read(rows, ("o", n))
            yield None
            for rows in self.q_parts(q.slot):
                self.memory.end_read(rows)
            self.stored.append(n)
            self.bars["q_empty", q.slot].arrive()
            q.advance()

    def consumer(self, warp: int) -> Steps:
        spec, bars, memory = self.spec, self.bars, self.memory
        queue, q, k, v = Ring(spec.queue_slots), Ring(spec.q_slots), Ring(spec.k_slots), Ring(spec.v_slots)
        group, groups = warp // 4, spec.warp_groups
        open_item: tuple[int, int, int] | None = None  # (item, its Q slot, its last tile): its last P V is not done yet
        if self.turns and group == 0:
            self.turns[0].arrive(32)

        def in_turn(n: int, tile: int) -> bool:
            if not self.turns:
                return False
            return (n, tile) in self.dense if spec.row_groups > 1 else tile > 0 or spec.chain

        def pass_turn(n: int, tile: int) -> None:
            if in_turn(n, tile) and self.does("give the turn on"):
                self.turns[(group + 1) % groups].arrive(32)

        def output(n: int, tile: int, scored: Callable[[], Steps] | None = None) -> Steps:
            """P V of a tile; scored: gives the turn on and ends the next one's Q K^T, beside which it runs."""
            yield bars["v_full", v.slot].passed(v.parity)
            memory.begin_read(("v", v.slot), (n, tile))
            if scored is not None:
                yield from scored()
            yield None
            memory.end_read(("v", v.slot))
            bars["v_empty", v.slot].arrive()
            v.advance()

        def finish(n: int, slot: int) -> None:
            if spec.out_dtype == "input":
                memory.write(("q", slot, warp), ("o", n))
                bars["o_ready", slot].arrive()
            else:
                bars["q_empty", slot].arrive()

        def close(scored: Callable[[], Steps] | None = None) -> Steps:
            if open_item is not None:
                yield from output(open_item[0], open_item[2], scored)
                finish(*open_item[:2])
            elif scored is not None:
                yield from scored()

        def score(n: int, tile: int) -> Callable[[], Steps]:
            """Q K^T of a tile under way; what gives the turn on and ends it."""
            memory.begin_read(("k", k.slot), (n, tile))
            memory.begin_read(("q", q.slot, warp), n)

            def end() -> Steps:
                pass_turn(n, tile)
                yield None
                memory.end_read(("k", k.slot))
                memory.end_read(("q", q.slot, warp))
                bars["k_empty", k.slot].arrive()
                k.advance()

            return end

        def pass_over() -> Steps:
            """A tile that the group does not see."""
            for full, empty, ring in (("k_full", "k_empty", k), ("v_full", "v_empty", v)):
                yield bars[full, ring.slot].passed(ring.parity)
                bars[empty, ring.slot].arrive()
                ring.advance()

        last: int | None = None  # the tile of the item whose P V is to come
        for step in self.each_message(queue):
            if not isinstance(step, int):
                yield step
                continue
            n, part = self.messages[step]
            if not sum(self.items[n]):
                self.give_back(queue)
                if spec.chain and self.does("finish before an empty item"):
                    yield from close()
                    open_item = None
                continue
            first = sum(self.items[n][:part])
            for tile in range(first, first + self.items[n][part]):
                if tile == 0:
                    yield bars["q_full", q.slot].passed(q.parity)
                if (n, tile, group) in self.hidden:
                    if last is not None and self.does("close before a hidden tile"):
                        yield from output(n, last)
                    last = None
                    yield from pass_over()
                    continue
                yield bars["k_full", k.slot].passed(k.parity)
                if in_turn(n, tile):
                    yield self.turns[group].sync(32)
                scored = score(n, tile)
                yield None
                if last is not None:
                    yield from output(n, last, scored)
                elif spec.chain:
                    yield from close(scored)
                else:
                    yield from scored()
                last = None if spec.chain and tile + 1 == sum(self.items[n]) else tile
            self.give_back(queue)
            if part + 1 < len(self.items[n]):
                continue
            if spec.chain:
                open_item = n, q.slot, sum(self.items[n]) - 1
            else:
                if last is not None:
                    yield from output(n, last)
                    last = None
                finish(n, q.slot)
            q.advance()
        yield from close()
