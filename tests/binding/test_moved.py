"""Inputs from and to a GPU in few transfers; a tensor that says it lies on one stands for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import maskc
from maskc.binding import data
from maskc.binding.bound import BoundInputs, SegmentTable
from maskc.binding.constructors import SetSource
from maskc.boundary import BlockTable

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
DTYPES = (torch.int32, torch.int64, torch.bool)


class There(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


class Transfers:
    """What stands for a copy between devices, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(data, "move", self.move)

    def move(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        if t.device == device:
            return t
        self.count += 1
        plain = t.as_subclass(torch.Tensor).clone()  # type: ignore[attr-defined]
        return plain if device == HOST else plain.as_subclass(There)


def random_tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1000, shape, generator=generator).to(dtype)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(wanted=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES, st.booleans()), max_size=6))
def test_moved_tensors_are_the_same_and_take_a_transfer_a_dtype(
    wanted: list[tuple[torch.dtype, tuple[int, ...], bool]],
) -> None:
    made = [random_tensor(i, dtype, shape) for i, (dtype, shape, _) in enumerate(wanted)]
    tensors = [t.as_subclass(There) if already else t for t, (_, _, already) in zip(made, wanted, strict=True)]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        transfers = Transfers(patch)
        got = data.moved(tensors, GPU)
    assert transfers.count == len({t.dtype for t in tensors if t.device == HOST})
    for there, t in zip(got, made, strict=True):
        assert there.device == GPU
        assert there.is_contiguous()
        assert there.dtype == t.dtype
        assert torch.equal(there.as_subclass(torch.Tensor), t)


def test_large_tensors_are_moved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = Transfers(monkeypatch)
    large = [random_tensor(i, torch.int32, (data.FEW_NUMBERS + 1,)) for i in range(2)]
    small = [random_tensor(i, torch.int32, (3,)) for i in range(3)]
    got = data.moved([large[0], *small, large[1]], GPU)
    assert transfers.count == 3
    assert all(torch.equal(a.as_subclass(torch.Tensor), b) for a, b in zip(got, [large[0], *small, large[1]], strict=True))


@pytest.mark.parametrize(("dtypes", "count"), [((torch.int32,) * 3, 1), (DTYPES, 1), ((torch.int64,), 1)])
def test_few_numbers_come_to_the_host_in_one_transfer(
    dtypes: tuple[torch.dtype, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = Transfers(monkeypatch)
    host = [random_tensor(i, dtype, (i + 1, 2)) for i, dtype in enumerate(dtypes)]
    there = [t.as_subclass(There) for t in host]  # type: ignore[attr-defined]
    given = {
        "doc": [maskc.segments(ids=there[0]), maskc.segments(lengths=[3, 4])],
        "key": there[-1],
        "n": 5,
        "again": [1, there[0], [there[-1]]],
        "own": host[0],
    }
    got = data.on_host(given)
    assert transfers.count == count
    doc, again = got["doc"], got["again"]
    assert isinstance(doc, list)
    assert isinstance(again, list)
    assert isinstance(doc[0], SetSource)
    for moved, t in ((doc[0].data, host[0]), (got["key"], host[-1]), (again[1], host[0]), (again[2][0], host[-1])):
        assert type(moved) is torch.Tensor
        assert moved.dtype == t.dtype
        assert torch.equal(moved, t)
    assert (doc[1].data, got["n"], again[0], got["own"] is host[0]) == ([3, 4], 5, 1, True)


def test_bound_inputs_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = Transfers(monkeypatch)
    numbers = [random_tensor(i, torch.int32, (2, 1, 4) if i < 2 else (1, 4)) for i in range(6)]
    inputs = BoundInputs(
        HOST,
        {"a": SegmentTable(numbers[0], numbers[2][0]), "b": SegmentTable(numbers[1], None, (0, 3))},
        {"v": numbers[3][None], "flags": numbers[4][None] > 500},
        {"s": 7, "each": numbers[5]},
        {"table": BlockTable(random_tensor(9, torch.bool, (1, 1, 2, 3)), 64, 64)},
    )
    got = inputs.to(GPU)
    assert transfers.count == 2, "integers and truth values"
    assert (list(got.sets), list(got.vectors), got.scalars["s"]) == (["a", "b"], ["v", "flags"], 7)
    assert [t.block_q for t in got.blocks.values()] == [64]
    assert (got.sets["a"].edges, got.sets["b"].given, got.sets["b"].edges) == (None, None, (0, 3))
    for there, here in zip(got.tensors, inputs.tensors, strict=True):
        assert there.shape == here.shape
        assert torch.equal(there.as_subclass(torch.Tensor), here)


@given(dtype=st.sampled_from(DTYPES), shape=SHAPES, seed=st.integers(0, 99), strided=st.booleans())
def test_what_is_baked_into_a_graph_is_the_same(dtype: torch.dtype, shape: tuple[int, ...], seed: int, strided: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    t = torch.randint(-(2**31), 2**31, shape, generator=generator).to(dtype)
    t = t.transpose(0, 1) if strided and t.ndim > 1 else t
    got = data._baked(t, HOST)
    assert (got.dtype, got.shape) == (t.dtype, t.shape)
    assert got.is_contiguous()
    assert torch.equal(got, t)


def test_only_a_capture_takes_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    baked: list[torch.Tensor] = []
    monkeypatch.setattr(data, "_baked", lambda t, device: baked.append(t) or t)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    host, there = torch.zeros(3), torch.zeros(3).as_subclass(There)  # type: ignore[attr-defined]
    assert data.move(host, HOST) is host
    assert data.move(there, GPU) is there
    assert baked == []
    data.move(host, GPU)
    assert baked == [host]


def test_too_much_for_a_graph_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    most = data.MOST_BAKED // 4
    assert data._baked(torch.zeros(most, dtype=torch.int32), HOST).shape == (most,)
    with pytest.raises(maskc.MaskcError, match=r"65537 numbers .* CUDA graph.*256 KiB") as caught:
        data.move(torch.zeros(most + 1, dtype=torch.int32), GPU)
    assert caught.value.code == "M420"
