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
GROUPED = forward_spec(DOCUMENT, 128, "bf16")
CHAINED = KernelSpec(128, form=DOCUMENT, ping_pong=False, chain=True)
SPECS: dict[str, KernelSpec] = {
    **{f"document-{d}": forward_spec(DOCUMENT, d, "bf16") for d in (64, 128, 256)},
    **{f"document-{d}-f32": forward_spec(DOCUMENT, d, "bf16", "f32") for d in (64, 128, 256)},
    **{f"blocks-{d}": forward_spec(replace(DOCUMENT, blocks=True), d, "bf16") for d in (64, 128)},
    "one tag": replace(GROUPED, row_groups=1),
    "one tag, f32": replace(GROUPED, row_groups=1, out_dtype="f32"),
    "grouped, one slot each": replace(GROUPED, k_slots=1, v_slots=1, queue_slots=1),
    "grouped, in no turn": replace(GROUPED, ping_pong=False),
    "chained": CHAINED,
    "chained-f32": replace(CHAINED, out_dtype="f32"),
    "chained in turns": replace(CHAINED, ping_pong=True),
    "one slot each": replace(CHAINED, k_slots=1, v_slots=1, queue_slots=1, chain=False),
    "gated": replace(GROUPED, gated=True),
}


def dealt(rng: random.Random) -> tuple[Item, ...]:
    """Items that see nothing, alone or several in a row; short ones; long ones in several queue slots, some empty."""
    kinds: tuple[Item, ...] = ((0,), (0,), (1,), (2,), (3,), (2, 1), (2, 0), (1, 1, 1))
    return tuple(rng.choice(kinds) for _ in range(rng.randrange(7)))


def unseen(rng: random.Random, spec: KernelSpec, items: tuple[Item, ...]) -> dict[str, set[tuple[int, ...]]]:
    """What warp groups do not see: single tiles, the ends of an item, whole items; some group sees every tile."""
    if spec.row_groups == 1:
        return {}
    hidden, dense = set(), set()
    for n, item in enumerate(items):
        shares = [rng.choice((0, 0.3, 0.7, 1)) if group != n % spec.row_groups else 0 for group in range(spec.row_groups)]
        for tile in range(sum(item)):
            here = {(n, tile, group) for group, share in enumerate(shares) if rng.random() < share}
            hidden |= here
            if not here and rng.random() < 0.7:
                dense.add((n, tile))
    return {"hidden": hidden, "dense": dense}


@pytest.mark.parametrize("name", SPECS)
def test_no_interleaving_breaks_the_kernel(name: str) -> None:
    used = set()
    for seed in range(120):
        rng = random.Random(seed)
        items = dealt(rng)
        spec = replace(SPECS[name], gated=seed % 3 == 0)
        kernel = Kernel(spec, items, **unseen(rng, spec, items))  # type: ignore[arg-type]
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
        ("one tag", ((3,),), "give the turn on"),
        ("gated", ((2, 1), (1,)), "count tiles"),
        ("document-128", ((2, 1), (1,)), "count tiles"),
    ],
)
def test_roles_that_would_wait_for_each_other(name: str, items: tuple[Item, ...], broken: str) -> None:
    Kernel(SPECS[name], items).run(0)
    with pytest.raises(Fault, match="nobody can go on"):
        Kernel(SPECS[name], items, broken).run(0)


def test_a_hidden_tile_passes_in_order() -> None:
    """The P V of the tile before comes first, or V would be given back before it is read."""
    hidden = {(0, 1, 1), (0, 2, 1)}
    Kernel(GROUPED, ((5,),), hidden=hidden).run(0)
    with pytest.raises(Fault, match="is read for"):
        Kernel(GROUPED, ((5,),), "close before a hidden tile", hidden).run(0)


def test_a_q_tile_taken_too_early_is_seen() -> None:
    def run() -> None:
        for seed in range(50):
            Kernel(CHAINED, ((1,),) * 5, broken="wait for Q to be free").run(seed)

    with pytest.raises(Fault, match=r"overwritten|holds"):
        run()
