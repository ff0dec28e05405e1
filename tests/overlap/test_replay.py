"""Which calls are made again, and what of one is put into the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.runtime.overlap_replay import MOST, Places, Replay, Replays, Space, backward_kernels, key_of, numbers_of, plain
from maskc.runtime.protocol import Turn

Tensors = tuple[torch.Tensor, ...]


def mask(keep: torch.Tensor | None = None) -> BoundaryVectors:
    return BoundaryVectors(64, 64, 1, 1, True, blocks=None if keep is None else BlockTable(keep, 64, 64))


def operands() -> Tensors:
    return tuple(torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))


def kept(number: int = 0) -> Replay:
    made: Any = SimpleNamespace(number=number)
    return made  # type: ignore[no-any-return]


def test_a_call_is_made_again_where_nothing_but_addresses_is_other() -> None:
    made, v, x = Replays(), mask(), operands()
    key = key_of(7, "forward", 0.5, tensors=x)
    one = kept()
    made.keep(v, key, one)
    assert made.find(v, key_of(7, "forward", 0.5, tensors=operands()), operands()) is one
    others = (
        key_of(8, "forward", 0.5, tensors=x),
        key_of(7, "backward", 0.5, tensors=x),
        key_of(7, "forward", 0.25, tensors=x),
        key_of(7, "forward", 0.5, tensors=[t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]),
    )
    assert [made.find(v, other, x) for other in others] == [None] * 4
    assert made.find(mask(), key, x) is None, "of another mask"


def test_what_lies_askew_is_copied_and_so_made_anew() -> None:
    """A copy has another address each time."""
    made, v = Replays(), mask()
    x = operands()
    key = key_of(7, tensors=x)
    made.keep(v, key, kept())
    room = torch.zeros(64 * 2 * 64 + 1, dtype=torch.bfloat16)
    askew = room[1:].view(1, 64, 2, 64)
    assert key_of(7, tensors=(*x[:2], askew)) == key
    assert made.find(v, key, (*x[:2], askew)) is None


def test_the_last_layouts_of_a_mask_are_kept_as_long_as_it_lives() -> None:
    made, v, x = Replays(), mask(), operands()
    for i in range(MOST + 1):
        made.keep(v, (i,), kept(i))
    assert made.find(v, (0,), x) is None
    assert all(made.find(v, (i,), x) is not None for i in range(1, MOST + 1))
    del v
    assert not made._of


@pytest.mark.parametrize("which", range(3))
def test_tensors_that_kernels_read_copies_of_are_not_plain(which: int) -> None:
    """As the gradient of a sum is, one number everywhere."""
    x = list(operands())
    assert plain(mask(), x)
    x[which] = torch.zeros(1, dtype=torch.bfloat16).expand(1, 64, 2, 64)
    assert not plain(mask(), x)


def test_a_table_of_blocks_is_read_where_it_is_if_dense() -> None:
    keep = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    assert plain(mask(keep), operands())
    assert not plain(mask(keep.transpose(2, 3)), operands())


def test_epochs_are_words() -> None:
    assert numbers_of(Turn((1 << 32) + 5, ((3, (1 << 32) + 2), (1, 7)))) == (5, 2, 7)


@pytest.mark.parametrize("falling", [False, True])
def test_a_backward_takes_its_tiles_as_they_lie_or_by_an_order(falling: bool) -> None:
    seen: list[tuple[Any, ...]] = []
    ready: Any = [SimpleNamespace(start=lambda *given: seen.append(given)) for _ in range(3)]
    space = Space(tuple(range(1000, 1009)), falling)
    now: Any = SimpleNamespace(given=range(8), own=(50, 60), parts=(70, 80), numbers=(9,))
    backward_kernels(ready, 5, Places((20, 30), (1, 2), 4), (100, 200), space)(now)
    pre, main, post = seen
    assert main[1] == (0, 3, 20, 30, 5 + 100, 6 + 200, 50 + 1, 60 + 2)
    assert main[2][-1] == (7 + 1008) * falling
    assert main[4] == (4 | 9 << 32,)
    assert {call[0] for call in (pre, main, post)} == {5}
