"""The order of work items (device/deal.cuh) as host C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.resources import files
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text

Deal = Callable[[int, int, int, int], list[tuple[int, int]]]
_CALL = """
extern "C" void deal_all(int* out, int ranks, int giants, int heads, int group_heads) {
  for (int item = 0; item < ranks * heads; ++item) {
    const Dealt d = deal(item, ranks, giants, heads, group_heads);
    *out++ = d.rank, *out++ = d.head;
  }
}
"""


@pytest.fixture(scope="module")
def deal(tmp_path_factory: pytest.TempPathFactory) -> Deal:
    """(ranks, giants, heads, heads of a group) -> (rank, head) of every item."""
    header = in_one_text((files("maskc") / "templates" / "device" / "deal.cuh").read_text())
    library = compile_on_host(ONE_THREAD + header + _CALL, tmp_path_factory.mktemp("deal"))

    def call(ranks: int, giants: int, heads: int, group_heads: int) -> list[tuple[int, int]]:
        out = (ctypes.c_int * (2 * ranks * heads))()
        library.deal_all(out, ranks, giants, heads, group_heads)
        return list(zip(out[::2], out[1::2], strict=True))

    return call


sizes = st.integers(1, 9)


@given(sizes, st.integers(0, 9), sizes, sizes)
def test_every_item_once_and_in_order(deal: Deal, ranks: int, giants: int, heads: int, group_heads: int) -> None:
    giants, group_heads = min(giants, ranks), min(group_heads, heads)
    wanted = [
        (rank, head)
        for part in (range(giants), range(giants, ranks))
        for first in range(0, heads, group_heads)
        for rank in part
        for head in range(first, min(first + group_heads, heads))
    ]
    assert deal(ranks, giants, heads, group_heads) == wanted


def test_giants_of_a_head_stay_together(deal: Deal) -> None:
    """24 giants in each of 128 heads: what 132 multiprocessors work on at one time is of few heads, not one of each."""
    items = deal(256, 24, 128, 2)
    assert [rank for rank, _ in items[: 24 * 128]].count(0) == 128
    assert max(len({head for _, head in items[i : i + 132]}) for i in range(0, len(items), 132)) <= 8
    assert [len(list(same)) for _, same in groupby(items, key=lambda item: item[1] // 2)][:64] == [48] * 64
