"""Barriers and shared memory of the backward kernel under many interleavings, and broken kernels that must be found out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from tests.codegen.bwd_protocol import Block, Item, Kernel
from tests.codegen.cta import Fault

FULL, DOCUMENT = MaskForm(), MaskForm(causal=True, lts=True)
SPECS: dict[str, BackwardSpec] = {
    "full-128": select_backward(FULL, 128, "bf16"),
    "document-128": select_backward(DOCUMENT, 128, "bf16"),
    "document-128-det": select_backward(DOCUMENT, 128, "bf16", deterministic=True),
    "document-128-gated": replace(select_backward(DOCUMENT, 128, "bf16"), gated=True),
    "document-64": select_backward(DOCUMENT, 64, "bf16"),
    "one-k": replace(select_backward(FULL, 128, "bf16"), k_slots=1),
    "three-slots": replace(select_backward(FULL, 64, "bf16"), block_q=64, slots=3),
    "document-256": select_backward(DOCUMENT, 256, "bf16"),
    "document-256-det": select_backward(DOCUMENT, 256, "bf16", deterministic=True),
    "document-256-gated": replace(select_backward(DOCUMENT, 256, "bf16"), gated=True),
}


def dealt(spec: BackwardSpec, rng: random.Random) -> tuple[Item, ...]:
    """What a CTA may be dealt: tiles that few, many or no blocks see, blocks in which a group rests, padding."""

    def block() -> Block:
        rests = rng.choice((None, None, 0, 1)) if spec.halves else None
        return Block(rests, rng.random() < 0.3, rests is None and rng.random() < 0.5)

    def item() -> Item:
        blocks = tuple(block() for _ in range(rng.choice((0, 1, 1, 2, 3, 5))))
        return Item(blocks, rng.random() < 0.3, spec.gated and rng.random() < 0.5)

    return tuple(item() for _ in range(rng.randrange(5)))


def run(spec: BackwardSpec, seed: int, broken: str = "") -> set[str]:
    """The barriers that came into play."""
    rng = random.Random(seed)
    kernel = Kernel(spec, dealt(spec, rng), staged=rng.random() < 0.7, broken=broken)
    kernel.run(seed)
    used = {name for (name, _), bar in kernel.bars.items() if bar.phase}
    return used | {name for (name, _), bar in kernel.named.items() if bar.generation}


@pytest.mark.parametrize("name", SPECS)
def test_no_interleaving_breaks_the_kernel(name: str) -> None:
    spec = SPECS[name]
    used = set().union(*(run(spec, seed) for seed in range(200)))
    assert used == {b.name for b in (*spec.barriers, *spec.named)}


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("document-128", "wait for a place to deal"),
        ("one-k", "wait for K to be free"),
        ("document-128", "wait for V to be free"),
        ("document-128", "wait for the dQ part to be free"),
        ("document-128", "hold Q until dK is done"),
        ("document-128", "exchange of dS"),
        ("document-256", "exchange of dS"),
        ("document-128", "exchange of cleared keys"),
        ("document-128", "exchange before gradients"),
        ("document-256", "exchange before gradients"),
        ("document-128-gated", "exchange before gradients"),
        ("one-k", "wait until dK is read"),
    ],
)
def test_a_missing_wait_is_found_out(name: str, broken: str) -> None:
    def all_seeds() -> None:
        for seed in range(300):
            run(SPECS[name], seed, broken)

    with pytest.raises(Fault):
        all_seeds()


def test_why_a_shared_tile_has_one_k() -> None:
    """dV of a tile that the warp groups share leaves through V, and only the return of K says that it is gone."""
    wide = select_backward(FULL, 256, "bf16")
    with pytest.raises(ValueError, match="one slot of K"):
        replace(wide, k_slots=2)
