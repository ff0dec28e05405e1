"""Barriers and shared memory of the forward kernel under many interleavings, and broken kernels that must be found out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from maskc.codegen.forward import forward_spec
from maskc.codegen.roles import forward_barriers
from maskc.codegen.spec import KernelSpec, MaskForm
from tests.codegen.cta import Fault
from tests.codegen.fwd_protocol import Item, Kernel

DOCUMENT = MaskForm(causal=True, lts=True)
CHAINED = KernelSpec(128, form=DOCUMENT, ping_pong=False, chain=True)
SPECS: dict[str, KernelSpec] = {
    **{f"document-{d}": forward_spec(DOCUMENT, d, "bf16") for d in (64, 128, 256)},
    **{f"document-{d}-f32": forward_spec(DOCUMENT, d, "bf16", "f32") for d in (64, 128, 256)},
    **{f"blocks-{d}": forward_spec(replace(DOCUMENT, blocks=True), d, "bf16") for d in (64, 128)},
    "chained": CHAINED,
    "chained-f32": replace(CHAINED, out_dtype="f32"),
    "chained in turns": replace(CHAINED, ping_pong=True),
    "one slot each": replace(CHAINED, k_slots=1, v_slots=1, queue_slots=1, chain=False),
}


def dealt(rng: random.Random) -> tuple[Item, ...]:
    """Items that see nothing, alone or several in a row; short ones; long ones in several queue slots."""
    kinds: tuple[Item, ...] = ((0,), (0,), (1,), (2,), (3,), (2, 1), (1, 1, 1))
    return tuple(rng.choice(kinds) for _ in range(rng.randrange(7)))


@pytest.mark.parametrize("name", SPECS)
def test_no_interleaving_breaks_the_kernel(name: str) -> None:
    used = set()
    for seed in range(120):
        kernel = Kernel(SPECS[name], dealt(random.Random(seed)))
        kernel.run(seed)
        used |= {bar for (bar, _), b in kernel.bars.items() if b.phase}
    assert used == {b.name for b in forward_barriers(SPECS[name])}


LONG: Item = (1, 1, 1, 1)
PADDED: tuple[Item, ...] = ((1,), (0,), (0,), (1,))


@pytest.mark.parametrize(
    ("name", "items", "broken"),
    [
        ("chained", PADDED, "finish before an empty item"),  # the O Storer waits for an item that is still open
        ("document-128", (LONG, (1,)), "store after the last queue slot"),  # and gives no queue slot back meanwhile
        ("chained", (LONG[1:], (1,)), "store after the last queue slot"),
        ("document-128", ((3,),), "give the turn on"),
    ],
)
def test_roles_that_would_wait_for_each_other(name: str, items: tuple[Item, ...], broken: str) -> None:
    Kernel(SPECS[name], items).run(0)
    with pytest.raises(Fault, match="nobody can go on"):
        Kernel(SPECS[name], items, broken).run(0)


def test_a_q_tile_taken_too_early_is_seen() -> None:
    def run() -> None:
        for seed in range(50):
            Kernel(CHAINED, ((1,),) * 5, broken="wait for Q to be free").run(seed)

    with pytest.raises(Fault, match=r"overwritten|holds"):
        run()
