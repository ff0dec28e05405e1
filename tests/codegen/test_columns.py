"""The generated columns: as host C++ they equal the oracle, and their text is what it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from maskc.boundary import BoundaryVectors
from maskc.codegen.columns import ColumnCode, column_code
from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from maskc.ir.evaluate import evaluate_column
from maskc.ir.intervals import VECTORS, IntervalProgram
from maskc.ir.reference import Outside, dense
from maskc.ir.samples import random_env
from maskc.ir.symbolic import prove
from maskc.ir.verdict import Proven
from tests.codegen import programs
from tests.codegen.host import HostColumns, bound_inputs, compile_columns
from tests.codegen.suite import suite


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(1000, 1600), marks=pytest.mark.fuzz)], ids=["", "many"])
def test_random_programs_equal_their_meaning(seeds: range, tmp_path: Path) -> None:
    """Every node, with outside tokens, empty segments, padding of batches and heads; rows of both slots, canonical."""
    made: dict[str, tuple[random.Random, IntervalProgram]] = {}
    codes: dict[str, ColumnCode] = {}
    for seed in seeds:
        rng = random.Random(seed)
        program = programs.program(rng)
        with suppress(MaskcError):  # M609: products of products
            codes[f"p{seed}"] = column_code(programs.FN, program)
            made[f"p{seed}"] = rng, program
    assert len(codes) > 0.8 * len(seeds)
    run = compile_columns(codes, tmp_path)
    compared = 0
    for name, (rng, program) in made.items():
        nq, nk, heads = rng.randint(1, 14), rng.randint(1, 14), rng.randint(1, 2)
        items = programs.batch(rng, nq, nk, 3, heads)
        got = run(name, bound_inputs(programs.FN, items), nq, nk, len(items), heads)
        for b, item in enumerate(items):
            for h, env in enumerate(item):
                for k in range(nk):
                    try:
                        lower, upper = evaluate_column(programs.FN, program, env, k, h)
                    except Outside:
                        continue  # a bound that reads an outside token may be anything
                    compared += 1
                    assert got[:, b, h, k].tolist() == [*_canonical(lower, nq), *_canonical(upper, 0)], (
                        f"{name}, item {b}, head {h}, key {k}: {env}\n{codes[name].text}"
                    )
    assert compared > 10 * len(seeds)


def _canonical(run: tuple[int, int], empty: int) -> tuple[int, int]:
    return run if run[0] < run[1] else (empty, empty)


# ---------------------------------------------------------------- masks of the suite


@pytest.fixture(scope="module")
def suite_columns(tmp_path_factory: pytest.TempPathFactory) -> HostColumns:
    codes = {name: column_code(fn, program) for name, (fn, program) in suite().items()}
    return compile_columns(codes, tmp_path_factory.mktemp("suite"))


def test_suite_masks_equal_the_oracle(suite_columns: HostColumns) -> None:
    """The rows that the columns mask are those that the predicate hides, on random batches that obey the declared facts."""
    for name, (fn, program) in suite().items():
        rng = random.Random(name)
        compared = 0
        for _ in range(100):
            nk = rng.randint(1, 10)
            nq = nk if fn.square or rng.random() < 0.5 else rng.randint(1, 10)
            facts = frozenset(program.hole_free), frozenset(program.tiling)
            envs = [e for _ in range(3) if (e := random_env(fn, rng, nq, nk, *facts, heads=2)) is not None]
            if not envs:
                continue
            got = suite_columns(name, bound_inputs(fn, [[e, e] for e in envs]), nq, nk, len(envs), 2)
            vectors = (got[i] if v in program.vectors else None for i, v in enumerate(VECTORS))
            visible = ~BoundaryVectors(nq, nk, len(envs), 2, program.causal, *vectors).masked()
            for b, env in enumerate(envs):
                for h in range(2):
                    assert visible[b, h].tolist() == dense(fn, env, h), (
                        f"{name}, head {h}: {env}\n{suite_columns.codes[name].text}"
                    )
                    compared += nk
            if compared > 600:
                break
        assert compared > 20, name


def test_arithmetic_beyond_64_bits_is_refused() -> None:
    fn = parse_text("input a : int\ninput b : int\ninput c : int\nmask m = k <= q and q < a * b * c").masks[0]
    verdict = prove(fn)
    assert isinstance(verdict, Proven)
    with pytest.raises(MaskcError) as caught:
        column_code(fn, verdict.program)
    assert caught.value.code == "M609"


def test_inputs_may_be_called_anything(tmp_path: Path) -> None:
    """Names that C++ keeps for itself, and names whose locals would hide a helper."""
    text = """
input set : segments
input find : segments
input class : int per set
input int32 : int
mask m = k <= q and (q in last(find) or q in first(find)) and (same(set) and class[k] < int32 or set[q] >= set[k])
""".replace("int32", "register")
    fn = parse_text(text).masks[0]
    verdict = prove(fn)
    program = verdict.program if isinstance(verdict, Proven) else pytest.fail(str(verdict))
    run = compile_columns({"m": column_code(fn, program)}, tmp_path)
    rng = random.Random(1)
    for _ in range(20):
        env = random_env(fn, rng, 8, 8, frozenset(program.hole_free), frozenset(program.tiling))
        if env is not None:
            got = run("m", bound_inputs(fn, [[env]]), 8, 8)
            for k in range(8):
                lower, upper = evaluate_column(fn, program, env, k)
                assert got[:, 0, 0, k].tolist() == [*_canonical(lower, 8), *_canonical(upper, 0)]


@pytest.mark.parametrize("name", ["doc_prefix", "causal_blockwise", "block_diffusion", "duo_heads", "dflash", "cross_pairs"])
def test_text(golden: Callable[[str, str], None], name: str) -> None:
    golden(f"{name}.column.cu", column_code(*suite()[name]).text)
