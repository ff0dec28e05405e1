"""Data that somebody broke, for every mask of the suite: refused with a code that is explained, or run exactly.

Files given to `--inputs` are broken in tests/cli/test_mutated_inputs.py; here the mutations meet `bind` and `run` in Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import maskc
from maskc.codes import explain_code
from maskc.ir.reference import Env
from tests.binding.test_vectors import SUITE, WANTED, environments, inputs_of
from tests.runtime.dense import attend

HUGE = (2**31, -(2**31) - 1, 2**63, -(2**70))


def refusal(call: Callable[[], object]) -> str | None:
    """The code with which a call is refused, None if it is not. Any other exception fails the test."""
    try:
        call()
    except maskc.MaskcError as e:
        return e.code
    return None


def broken_value(value: Any, rng: random.Random) -> Any:
    """A value like the given one, and yet not."""
    numbers = list(value) if isinstance(value, list) else None
    match rng.randint(0, 9):
        case 0:
            return None
        case 1:
            return rng.choice((1.5, float("nan"), float("inf"), "3", b"3", object(), {}, {1, 2}, lambda: 3))
        case 2:
            return rng.choice((*HUGE, -1, 0, 2**31 - 1, True))
        case 3 if numbers:
            numbers[rng.randrange(len(numbers))] = rng.choice((*HUGE, -1, 99, None, 0.5, float("nan"), "x", [1]))
            return numbers
        case 4 if numbers:
            return numbers[: rng.randrange(len(numbers))]
        case 5 if numbers:
            return [numbers, numbers[:-1]]
        case 6 if numbers:
            return torch.tensor([0.0 for _ in numbers], dtype=torch.float16)
        case 7 if numbers:
            return np.array(numbers)[None, None, None]
        case 8 if numbers:
            return torch.tensor(numbers, device="meta")
        case 9 if numbers:
            return torch.tensor(numbers)[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(rng.randrange(9)))]
        case _:
            return rng.choice(([], [[]], torch.zeros(0), np.zeros((0, 2), np.int32), torch.zeros(2, 2, dtype=torch.uint8)))


def broken_set(ranges: list[tuple[int, int]], rng: random.Random) -> Any:
    """Segments or spans from ranges that overlap, fall, run backwards, or are no ranges."""
    form = rng.choice((maskc.segments, maskc.spans))
    pairs = [list(r) for r in ranges] or [[0, 1]]
    match rng.randint(0, 6):
        case 0:
            pairs[rng.randrange(len(pairs))][rng.randint(0, 1)] = rng.choice((*HUGE, -1, 99, 2**31 - 1))
        case 1:
            rng.shuffle(pairs)
        case 2:
            pairs = [p[::-1] for p in pairs]
        case 3:
            return broken_value([a for a, _ in pairs], rng)
        case 4:
            keyword = rng.choice(("lengths", "cu_seqlens", "ids", "positions", "eos"))
            return form(**{keyword: broken_value([b - a for a, b in pairs], rng)})
        case 5:
            return [form(ranges=pairs)] * rng.randint(0, 3)
        case _:
            pairs = [[*p, 1] for p in pairs]
    return form(ranges=pairs)


@pytest.mark.parametrize("part", range(4))
def test_mutated_inputs_of_every_mask(part: int) -> None:
    """60 mutations: each is an error with an explained code, or a mask that then runs as its vectors say."""
    rng = random.Random(part)
    codes = []
    for i in range(60):
        mask = maskc.compile(SUITE / f"{WANTED[(60 * part + i) % len(WANTED)]}.mask")
        env = next(environments(mask, rng, 1))
        given: dict[str, Any] = {**inputs_of(mask, env), "nq": env.nq, "nk": env.nk}
        codes.append(refusal(lambda: _runs_exactly(mask.bind(**broken(given, env, rng)), env.nq, env.nk)))  # noqa: B023
    refused = [code for code in codes if code is not None]
    assert "M599" not in refused
    assert all(explain_code(code) for code in refused)
    assert 20 < len(refused) < 60


def broken(given: dict[str, Any], env: Env, rng: random.Random) -> dict[str, Any]:
    """The keywords of `bind` with one or two faults."""
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(list(given))
        match rng.randint(0, 5):
            case 0 if len(given) > 1:
                del given[name]
            case 1:
                given["surplus"] = given[name]
            case _ if name in env.sets:
                given[name] = broken_set(list(env.sets[name]), rng)
            case _:
                given[name] = broken_value(given[name], rng)
    return given


def _runs_exactly(spec: maskc.BoundMask, nq: int, nk: int) -> None:
    v = spec.vectors(nq, nk)
    if v.heads > 2 or v.batch > 3:
        return
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(v.batch, n, 2, 8, generator=generator, dtype=torch.float64) for n in (v.nq, v.nk))
    out = maskc.run(spec, q, k, k, scale=0.3)
    torch.testing.assert_close(out, attend(v.masked(), q, k, k, 0.3)[0])


BAD_TENSORS: tuple[Any, ...] = (
    None, 3, "q", [1.0], np.zeros((1, 6, 2, 8)), torch.zeros(6), torch.zeros(1, 6, 2, 8, dtype=torch.int32),
    torch.zeros(1, 6, 2, 8, dtype=torch.complex64), torch.zeros(1, 5, 2, 8), torch.zeros(2, 6, 2, 8), torch.zeros(1, 6, 3, 8),
    torch.zeros(1, 6, 2, 7), torch.zeros(1, 6, 0, 8), torch.zeros(1, 6, 2, 0), torch.zeros(0, 6, 2, 8),
    torch.zeros(1, 6, 2, 8, 1), torch.zeros(1, 6, 2, 8, device="meta"),
    torch.zeros(1, 6, 2, 8, dtype=torch.float64), torch.zeros(1, 6, 2, 8).to_sparse(),
    torch.zeros(1, 6, 2, 8).half(), torch.nn.Parameter(torch.zeros(1, 6, 2, 9)),
)  # fmt: skip
BAD_OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale": (0, -1.0, float("nan"), float("inf"), "1", None, 1j, torch.tensor(1.0)),
    "backend": ("hopper", "cuda", "", None, 3, "flex", "auto"),
    "strategy": ("ring", "nonsense", 3, None),
    "plan": (3, "plan", object()),
    "group": (3, "world", object()),
    "deterministic": (None, 1, "yes", True),
    "return_lse": (None, 1, "yes"),
    "sink": (torch.zeros(2),),
    "dropout_p": (0.0,),
    "is_causal": (True,),
}


def test_two_hundred_mutated_calls() -> None:
    """`run` with one or two arguments that are wrong: an error with a code, or a result of the right shape."""
    rng = random.Random(0)
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[4, 2]), nq=6, nk=6)
    codes = []
    for _ in range(200):
        tensors = [torch.zeros(1, 6, 2, 8) for _ in "qkv"]
        options: dict[str, Any] = {}
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.6:
                tensors[rng.randrange(3)] = rng.choice(BAD_TENSORS)
            else:
                name = rng.choice(list(BAD_OPTIONS))
                options[name] = rng.choice(BAD_OPTIONS[name])
        codes.append(refusal(lambda: _has_the_shape(maskc.run(spec, *tensors, **options), *tensors)))  # noqa: B023
    refused = [code for code in codes if code is not None]
    assert "M599" not in refused
    assert all(explain_code(code) for code in refused)
    assert 120 < len(refused) < 200


def _has_the_shape(result: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == (*q.shape[:3], v.shape[3])


@pytest.mark.parametrize("nothing", [[], [[]], torch.zeros(0), torch.zeros(2, 0)])
def test_no_head_at_all(nothing: Any) -> None:
    mask = maskc.compile("std:duo_heads")
    given = {"doc": maskc.segments(lengths=[4]), "window": 2, "sinks": 1, "nq": 4, "nk": 4}
    assert refusal(lambda: mask.bind(streaming=nothing, **given)) == "M413"


def test_tensors_without_numbers_to_read() -> None:
    mask = maskc.compile("std:random_eviction")
    for evict in (torch.ones(4, device="meta"), torch.ones(4, dtype=torch.int32).to_sparse()):
        assert refusal(lambda: mask.bind(evict=evict)) == "M412"  # noqa: B023
