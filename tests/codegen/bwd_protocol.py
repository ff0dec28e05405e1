"""Who may touch which part of shared memory when, in the main backward kernel: its roles as steps between barriers.

`Kernel` transcribes the roles of templates/bwd (`load`, `clean_rows`, `add_and_store`, `zero_ahead`, `watch_sums`,
`consume`), a warp each, without their arithmetic, for `tests.codegen.cta` to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from maskc.codegen.spec_bwd import BackwardSpec
from tests.codegen.cta import Cta, Named, Part, Ring, Steps


@dataclass(frozen=True)
class Block:
    """A Q block in a walk. rests: the warp group whose keys it is hidden from. dead: it has rows that see nothing.

    unmasked: every row sees every key.
    """

    rests: int | None = None
    dead: bool = False
    unmasked: bool = False


@dataclass(frozen=True)
class Item:
    """A key tile with the blocks that see it. dead: it has keys that no row sees.

    whole: in a gated kernel, it leaves as whole gradients.
    """

    blocks: tuple[Block, ...]
    dead: bool = False
    whole: bool = False


class Kernel(Cta):
    """One CTA that is dealt `items`. staged: gradients leave through shared memory, of a gated kernel those that are whole.

    broken: names of steps that are left out, for tests of this model.
    """

    def __init__(self, spec: BackwardSpec, items: tuple[Item, ...], *, staged: bool = True, broken: str = "") -> None:
        super().__init__(spec.barriers, broken)
        self.spec, self.items, self.staged = spec, items, staged
        self.named = {(b.name, i): Named(b.arrivals) for b in spec.named for i in range(b.slots)}

    def roles(self) -> list[Steps]:
        consumers = (self.consumer(w, warp) for w in range(2) for warp in range(4))
        fourth = [self.zeroer()] if self.spec.zeroes_ahead else [self.watcher()] if self.spec.gated else []
        return [self.loader(), self.cleaner(), self.reducer(), *consumers, *fourth]

    # ---- parts of shared memory

    def keys(self, name: str, slot: int, w: int | None = None) -> list[Part]:
        """K or V, in the parts that the consumer warps stage gradients in. w: the keys that a warp group scores."""
        own = w is not None and not self.spec.wide
        return [(name, slot, part) for part in range(8) if not own or part // 4 == w]

    # ---- what all roles do

    def take(self, n: int) -> Steps:
        yield self.bars["item_full", n & 1].passed(n >> 1 & 1)
        self.memory.read(("items", n & 1), n)

    def release(self, n: int) -> None:
        self.bars["item_empty", n & 1].arrive()

    def walk(self, n: int, ring: Ring) -> Iterator[tuple[Block, int, int, object]]:
        """(block, slot, parity, what lies in the slot) of the n-th item."""
        for m, block in enumerate(self.items[n].blocks):
            yield block, ring.slot, ring.parity, (n, m)
            ring.advance()

    def each_item(self, use: Callable[[int], Steps]) -> Steps:
        n = 0
        while True:
            yield from self.take(n)
            if n == len(self.items):
                return
            if self.items[n].blocks:
                yield from use(n)
            self.memory.read(("items", n & 1), n)
            self.release(n)
            n += 1

    # ---- roles

    def loader(self) -> Steps:
        spec, bars = self.spec, self.bars
        ring, tiles = Ring(spec.slots), 0
        for n in range(len(self.items) + 1):
            if self.does("wait for a place to deal"):
                yield bars["item_empty", n & 1].passed((n >> 1 & 1) ^ 1)
            self.memory.write(("items", n & 1), n)
            bars["item_full", n & 1].arrive()
            if n == len(self.items) or not self.items[n].blocks:
                continue
            k_slot = tiles % spec.k_slots
            if self.does("wait for K to be free"):
                yield bars["k_empty", k_slot].passed((tiles // spec.k_slots & 1) ^ 1)
            if spec.gated:
                yield bars["keys_here", 0].passed(tiles & 1)
            self.copy(bars["k_full", k_slot], self.keys("k", k_slot), n)
            tiles += 1
            last, last_parity = (ring.slot or spec.slots) - 1, ring.parity ^ (ring.slot == 0)
            for m, (block, slot, parity, content) in enumerate(self.walk(n, ring)):
                for name, full, raw, empty in (("q", "q_full", "q_raw", "q_empty"), ("dout", "do_full", "do_raw", "do_empty")):
                    yield bars[empty, slot].passed(parity ^ 1)
                    bar, lands = (raw, ("raw", content)) if block.dead else (full, content)
                    self.copy(bars[bar, slot], [(name, slot)], lands)
                if m == 0:
                    if self.does("wait for V to be free"):
                        yield bars["do_empty", last].passed(last_parity)
                    self.copy(bars["v_ready", 0], self.keys("v", 0), n)

    def cleaner(self) -> Steps:
        ring, raw_parity = Ring(self.spec.slots), [0] * self.spec.slots

        def use(n: int) -> Steps:
            if self.spec.gated:
                self.bars["keys_here", 0].arrive()
            for block, slot, _, content in self.walk(n, ring):
                if not block.dead:
                    continue
                parity = raw_parity[slot]
                raw_parity[slot] ^= 1
                for name, full, raw in (("q", "q_full", "q_raw"), ("dout", "do_full", "do_raw")):
                    yield self.bars[raw, slot].passed(parity)
                    self.memory.read((name, slot), ("raw", content))
                    self.memory.write((name, slot), content)
                    self.bars[full, slot].arrive()

        yield from self.each_item(use)

    def watcher(self) -> Steps:
        def use(n: int) -> Steps:
            self.memory.write(("whole", n & 1), n)
            self.bars["keys_here", 0].arrive()
            yield None

        yield from self.each_item(use)

    def zeroer(self) -> Steps:
        for n in range(len(self.items) + 1):
            yield from self.take(n)
            if n < len(self.items):
                self.release(n)

    def reducer(self) -> Steps:
        spec, named = self.spec, self.named
        ring, tiles = Ring(spec.slots), 0

        def hand_back() -> None:
            if spec.dq_reducer:
                for w in range(2):
                    named["dq_empty", w].arrive(32)

        def use(n: int) -> Steps:
            nonlocal tiles
            for _, _, _, content in self.walk(n, ring):
                if spec.dq_reducer:
                    for w in range(2):
                        yield named["dq_full", w].sync(32)
                        for part in range(4):
                            self.memory.begin_read(("dq", w, part), content)
                    for w in range(2):
                        yield None
                        for part in range(4):
                            self.memory.end_read(("dq", w, part))
                        named["dq_empty", w].arrive(32)
                elif spec.deterministic:
                    named["dq_empty", 0].arrive(32)
                    yield named["dq_full", 0].sync(32)
            yield named["grads_full", 0].sync(32)
            k_slot = tiles % spec.k_slots
            tiles += 1
            if spec.gated:
                self.memory.read(("whole", n & 1), n)
            staged = [*self.keys("k", k_slot), *self.staged_dv()] if self.leaves_staged(n) else []
            for place in staged:
                self.memory.begin_read(place, ("grads", n))
            if not self.does("wait until dK is read"):
                self.bars["k_empty", k_slot].arrive()
            yield None
            for place in staged:
                self.memory.end_read(place)
            if self.does("wait until dK is read"):
                self.bars["k_empty", k_slot].arrive()
            hand_back()

        hand_back()
        yield from self.each_item(use)

    def leaves_staged(self, n: int) -> bool:
        return self.items[n].whole if self.spec.gated else self.staged

    def staged_dv(self) -> list[Part]:
        return self.keys("v", 0) if self.spec.wide else [("dq", w, part) for w in range(2) for part in range(4)]

    def consumer(self, w: int, warp: int) -> Steps:
        spec, bars, named, memory = self.spec, self.bars, self.named, self.memory
        ring, tiles, n = Ring(spec.slots), 0, 0
        mine = w * 4 + warp

        def hand_over(content: object) -> Steps:
            if not spec.dq_reducer:
                return
            wait = named["dq_empty", w].sync(32)
            if self.does("wait for the dQ part to be free"):
                yield wait
            memory.write(("dq", w, warp), content)
            named["dq_full", w].arrive(32)

        def exchange(step: str) -> Steps:
            wait = named["exchange", 0].sync(32)
            if self.does(step):
                yield wait

        yield from self.take(0)  # bounds
        while True:
            yield from self.take(n)
            if n == len(self.items):
                return
            item = self.items[n]
            if not item.blocks:
                if spec.gated:
                    yield from exchange("exchange")
                yield from self.take(n + 1)
                self.release(n)
                n += 1
                continue
            k_slot = tiles % spec.k_slots
            yield bars["k_full", k_slot].passed(tiles // spec.k_slots & 1)
            yield bars["v_ready", 0].passed(tiles & 1)
            tiles += 1
            loaded: object = n
            if item.dead:
                loaded = (n, "cleared")
                memory.write(("k", k_slot, mine), loaded)
                memory.write(("v", 0, mine), loaded)
                yield from exchange("exchange of cleared keys")
            k_all, k_own, v_own = self.keys("k", k_slot), self.keys("k", k_slot, w), self.keys("v", 0, w)
            for block, slot, parity, content in self.walk(n, ring):
                ds_all: list[Part] = [("ds", slot, part) for part in range(8)]
                if block.rests is not None:
                    ds_all = [(name, s, part) for name, s, part in ds_all if int(part) // 4 != block.rests]
                if block.rests == w:
                    bars["do_empty", slot].arrive()
                    bars["q_empty", slot].arrive()
                    yield from exchange("exchange of dS")
                    dq = self.product([*((part, content) for part in ds_all), *((part, loaded) for part in k_all)])
                    yield None
                    dq()
                    yield from hand_over(content)
                    continue
                from_dpsum = spec.dp_from_dpsum and block.unmasked
                if from_dpsum:
                    yield bars["do_full", slot].passed(parity)
                    memory.read(("dout", slot), content)  # dpsum
                yield bars["q_full", slot].passed(parity)
                s = self.product([(("q", slot), content), *((part, loaded) for part in k_own)])
                if not from_dpsum:
                    yield bars["do_full", slot].passed(parity)
                dp = self.product([(("dout", slot), content), *((part, loaded) for part in v_own)])
                yield None
                s()
                dp()
                memory.read(("q", slot), content)  # lse2
                if not from_dpsum:
                    memory.read(("dout", slot), content)  # dpsum
                memory.write(("ds", slot, mine), content)
                ds_read = [(part, content) for part in ds_all]
                if spec.wide:
                    memory.write(("p", slot, mine), content)
                    yield from exchange("exchange of dS")
                p_read: list[tuple[Part, object]] = [(("p", slot, part), content) for part in range(8)] if spec.wide else []
                dv = self.product([(("dout", slot), content), *p_read])
                if not spec.wide:
                    yield from exchange("exchange of dS")
                dq = self.product([*ds_read, *((part, loaded) for part in k_all)])
                yield None
                dv()
                bars["do_empty", slot].arrive()
                if not self.does("hold Q until dK is done"):
                    bars["q_empty", slot].arrive()
                    yield None
                dk = self.product([(("q", slot), content), *(ds_read if spec.wide else [])])
                yield None
                dq()
                yield from hand_over(content)
                if not spec.dq_reducer and spec.deterministic:
                    yield named["dq_empty", 0].sync(32)
                    named["dq_full", 0].arrive(32)
                yield None
                dk()
                if self.does("hold Q until dK is done"):
                    bars["q_empty", slot].arrive()
            yield from self.take(n + 1)  # the next bounds
            if spec.dq_reducer:
                yield named["dq_empty", w].sync(32)
            if spec.gated:
                memory.read(("whole", n & 1), n)
            if self.leaves_staged(n):
                yield from exchange("exchange before gradients")
                memory.write(("k", k_slot, mine), ("grads", n))
                memory.write(("v", 0, mine) if spec.wide else ("dq", w, warp), ("grads", n))
            named["grads_full", 0].arrive(32)
            self.release(n)
            n += 1

    def product(self, operands: list[tuple[Part, object]]) -> Callable[[], None]:
        """A product that reads its operands from now on until the result, waited for, is called."""
        for part, content in operands:
            self.memory.begin_read(part, content)

        def done() -> None:
            for part, _ in operands:
                self.memory.end_read(part)

        return done
