"""One CTA of a kernel without its arithmetic: roles that go from barrier to barrier and use parts of shared memory.

Steps of different warps, copies and products that run on their own interleave as a seed says. Every use of a part names what
has to lie there, so whatever is overwritten too early, read too early or read for the wrong block is a `Fault`, as are a
named barrier that too many threads come to, a state in which nobody can go on, and a part still in use at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from maskc.codegen.roles import Barrier

Steps = Iterator[Callable[[], bool] | None]  # what the role waits for; None: it may go on at once
Part = tuple[str | int, ...]


class Fault(Exception):
    """Something that must not happen in any order of steps."""


@dataclass
class Memory:
    """What lies in each part of shared memory, who reads it and whether somebody writes it."""

    holds: dict[Part, object] = field(default_factory=dict)
    readers: dict[Part, int] = field(default_factory=dict)
    writing: set[Part] = field(default_factory=set)

    def begin_write(self, part: Part) -> None:
        if self.readers.get(part) or part in self.writing:
            raise Fault(f"{part} is overwritten while it is in use")
        self.writing.add(part)

    def end_write(self, part: Part, content: object) -> None:
        self.writing.discard(part)
        self.holds[part] = content

    def write(self, part: Part, content: object) -> None:
        self.begin_write(part)
        self.end_write(part, content)

    def begin_read(self, part: Part, content: object) -> None:
        if part in self.writing or self.holds.get(part) != content:
            raise Fault(f"{part} is read for {content}, but holds {self.holds.get(part)}")
        self.readers[part] = self.readers.get(part, 0) + 1

    def end_read(self, part: Part) -> None:
        self.readers[part] -= 1

    def read(self, part: Part, content: object) -> None:
        self.begin_read(part, content)
        self.end_read(part)


@dataclass
class Mbarrier:
    arrivals: int
    left: int = 0
    phase: int = 0

    def arrive(self) -> None:
        self.left = (self.left or self.arrivals) - 1
        self.phase += self.left == 0

    def passed(self, parity: int) -> Callable[[], bool]:
        """`mbarrier_wait`: the phase of that parity is complete."""
        return lambda: self.phase & 1 != parity


@dataclass
class Named:
    threads: int
    here: int = 0
    generation: int = 0

    def arrive(self, threads: int) -> None:
        self.here += threads
        if self.here > self.threads:
            raise Fault(f"{self.here} threads at a named barrier of {self.threads}")
        if self.here == self.threads:
            self.here, self.generation = 0, self.generation + 1

    def sync(self, threads: int) -> Callable[[], bool]:
        before = self.generation
        self.arrive(threads)
        return lambda: self.generation != before


@dataclass
class Ring:
    slots: int
    slot: int = 0
    parity: int = 0

    def advance(self) -> None:
        self.slot = (self.slot + 1) % self.slots
        self.parity ^= self.slot == 0


class Cta:
    """What runs the roles of a kernel. broken: the name of a step that is left out, for tests of the model."""

    def __init__(self, barriers: Iterable[Barrier], broken: str) -> None:
        self.broken = broken
        self.memory = Memory()
        self.bars = {(b.name, i): Mbarrier(b.arrivals) for b in barriers for i in range(b.slots)}
        self.copies: list[Steps] = []  # TMA and bulk copies under way

    def roles(self) -> list[Steps]:
        raise NotImplementedError

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        waiting: list[tuple[Steps, Callable[[], bool] | None]] = [(role, None) for role in self.roles()]
        pace = [rng.choice((1, 1, 4)) for _ in waiting]  # some warps are slow
        while waiting:
            waiting += [(copy, None) for copy in self.copies]
            pace += [rng.choice((1, 4)) for _ in self.copies]
            self.copies.clear()
            ready = [i for i, (_, until) in enumerate(waiting) if until is None or until()]
            if not ready:
                raise Fault("nobody can go on")
            i = rng.choices(ready, [pace[i] for i in ready])[0]
            try:
                waiting[i] = waiting[i][0], next(waiting[i][0])
            except StopIteration:
                del waiting[i], pace[i]
        self.check_end()

    def check_end(self) -> None:
        """What holds once every role has ended."""
        left = [part for part, readers in self.memory.readers.items() if readers]
        if left or self.memory.writing:
            raise Fault(f"still in use: {left}, {self.memory.writing}")

    def does(self, step: str) -> bool:
        return step != self.broken

    def copy(self, bar: Mbarrier, parts: list[Part], content: object) -> None:
        """A load under way, which arrives by itself."""
        for part in parts:
            self.memory.begin_write(part)

        def land() -> Steps:
            yield None
            for part in parts:
                self.memory.end_write(part, content)
            bar.arrive()

        self.copies.append(land())
