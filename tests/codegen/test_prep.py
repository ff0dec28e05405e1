"""The preparation kernel: run on threads of the CPU, compiled for sm_90a, and its text."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

import maskc
from maskc.codegen.kernels import KERNELS, Request, compile_all
from maskc.codegen.prep import PrepSpec
from maskc.diagnostics import MaskcError
from maskc.ir.evaluate import evaluate_column
from maskc.ir.intervals import VECTORS
from maskc.ir.samples import random_env
from maskc.runtime import prep
from maskc.runtime.driver_api import Arguments
from maskc.runtime.prep import allocate, pack_arguments
from maskc.tiles import block_minmax
from tests.codegen.host import bound_inputs, compile_kernels
from tests.codegen.suite import SUITE, suite
from tests.gpu.inputs import suite_mask
from tests.gpu.special_prep import differences

EMULATED = ("doc_prefix", "duo_heads", "block_diffusion", "causal_blockwise", "bottom_right")


def test_one_launch_makes_vectors_and_tables(tmp_path: Path) -> None:
    """Batches, heads, a ragged last block and blocks larger than a CTA, against the program evaluated in Python."""
    kernels = {name: KERNELS["prep"](Request(*suite()[name]))[0] for name in EMULATED}
    run = compile_kernels({name: kernel.source for name, kernel in kernels.items()}, tmp_path)
    for name, kernel in kernels.items():
        fn, program = suite()[name]
        rng = random.Random(name)
        assert isinstance(kernel.spec, PrepSpec)
        for nk, block_kv in ((38, 16), (150, 144)):
            facts = frozenset(program.hole_free), frozenset(program.tiling)
            nq = nk if fn.square else nk - 7
            tries = (random_env(fn, rng, nq, nk, *facts, heads=2) for _ in range(400))
            envs = list(islice((e for e in tries if e is not None), 2))
            assert len(envs) == 2, name
            out = allocate(program, nq, nk, 2, 2, block_kv, torch.device("cpu"))
            inputs = bound_inputs(fn, [[e, e] for e in envs])  # alive until the kernel has run
            run(name, pack_arguments(kernel.spec, inputs, out), 2 * 2 * -(-nk // block_kv))
            for b, env in enumerate(envs):
                for h in range(2):
                    for k in range(nk):
                        (lts, lte), (uts, ute) = evaluate_column(fn, program, env, k, h)
                        want = (*((lts, lte) if lts < lte else (nq, nq)), *((uts, ute) if uts < ute else (0, 0)))
                        for v, expected in zip(VECTORS, want, strict=True):
                            if v in program.vectors:
                                assert getattr(out.vectors, v)[b, h, k] == expected, (name, v, b, h, k)
            reference = block_minmax(out.vectors, block_kv)
            for v in program.vectors:
                assert torch.equal(getattr(out.extremes, v).low, getattr(reference, v).low), (name, v)
                assert torch.equal(getattr(out.extremes, v).high, getattr(reference, v).high), (name, v)


def test_every_suite_mask_compiles_for_hopper_without_spills() -> None:
    kernels = [KERNELS["prep"](Request(fn, program))[0] for fn, program in suite().values()]
    for kernel, cubin in zip(kernels, compile_all(kernels), strict=True):
        resources = cubin.kernel("prep")
        assert cubin.image.startswith(b"\x7fELF")
        assert (cubin.spills, cubin.stack, cubin.notes) == (0, 0, ()), kernel.spec.text()
        assert resources.registers <= 64, kernel.spec.text()


def test_source_and_spec(golden: Callable[[str, str], None]) -> None:
    (kernel,) = KERNELS["prep"](Request(*suite()["doc_prefix"]))
    golden("doc_prefix.cu", kernel.source.text)
    assert kernel.spec.text().splitlines() == [
        "kernel = prep",
        "mask = doc_prefix",
        "inputs = doc: Segments, prefix: Vector",
        "vectors = lts, ute",
        "causal = false",
        "threads = 128",
    ]
    assert kernel.spec.as_json()["inputs"] == {"doc": "Segments", "prefix": "Vector"}


def test_a_mask_without_vectors_has_an_empty_kernel() -> None:
    (kernel,) = KERNELS["prep"](Request(*suite()["causal"]))
    assert "No vector exists" in kernel.source.text
    assert kernel.compile().kernel("prep").registers <= 16


def test_an_undecided_mask_has_no_kernel() -> None:
    fn, _ = suite()["doc_prefix"]
    with pytest.raises(MaskcError) as caught:
        KERNELS["prep"](Request(fn, None))
    assert caught.value.code == "M610"


def test_a_bound_mask_is_prepared_in_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `prep.vectors` but the driver: arguments, sizes, batch and heads, against what torch makes of the inputs."""
    names = ("04_doc_causal", "09_doc_prefix", "28_duo_heads", "37_cross_pairs", "02_causal", "20_block_diffusion")
    compiled = {name: maskc.compile(str(SUITE / f"{name}.mask")) for name in names}
    kernels = {f"m{name}": KERNELS["prep"](Request(c.fn, c.program))[0] for name, c in compiled.items()}
    run = compile_kernels({name: kernel.source for name, kernel in kernels.items()}, tmp_path)
    launches: list[str] = []

    def ready(mask: maskc.CompiledMask) -> prep._Ready:
        (name,) = (f"m{n}" for n, c in compiled.items() if c is mask)
        spec = kernels[name].spec
        assert isinstance(spec, PrepSpec)
        return prep._Ready(name, spec)  # type: ignore[arg-type]

    def launch(kernel: str, grid: tuple[int, int, int], threads: int, arguments: Arguments, device: torch.device) -> None:
        launches.append(kernel)
        run(kernel, arguments.body, grid[0])

    monkeypatch.setattr(prep, "_load", ready)
    monkeypatch.setattr(prep, "launch", launch)
    for name, mask in compiled.items():
        made = suite_mask(name, 60, 60, random.Random(name))
        assert made is not None
        bound = mask.bind(nq=60, nk=60, **made[1])
        again = mask.bind(nq=60, nk=60, **made[1])
        assert differences(bound.vectors(60, 60, prepare=prep.vectors), again.vectors(60, 60)) == "", name
    assert launches == [f"m{name}" for name in names if name != "02_causal"]
