"""`maskc.load`: a mask with its kernels, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import maskc
from maskc.boundary import BoundaryVectors
from maskc.codegen import nvrtc
from maskc.codegen.attention import backward_kernels, forward_kernels
from maskc.codegen.bundle import BuiltKernel, Bundle, write_bundle
from maskc.codegen.forward import schedule_source, schedule_spec
from maskc.codegen.kernels import Kernel, Request
from maskc.codegen.nvrtc import Cubin
from maskc.diagnostics import MaskcError
from maskc.ir.verdict import Proven, Unknown
from maskc.runtime.hopper import DTYPES, mask_form
from maskc.runtime.loaded import check_kernels, refuse_group
from tests.codegen.suite import suite
from tests.codegen.test_bundle import write


def unbuilt(kernels: tuple[Kernel, ...]) -> Bundle:
    """What a folder with these kernels would be read back as, but for their cubins."""
    fn, program = suite()["doc_prefix"]
    cubin = Cubin("k", b"", "", "", "sm_90a", "13.0", "", (), ())
    return Bundle(Path("out"), fn, program, tuple(BuiltKernel(k.name, k.entry, k.spec.as_json(), 0, cubin) for k in kernels))


@pytest.fixture(scope="module")
def vectors() -> BoundaryVectors:
    return maskc.compile("std:doc_prefix").bind(doc=maskc.segments(lengths=[3, 5]), prefix=[1, 2]).vectors()


def q(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, 8, 1, head_dim, dtype=dtype)


def test_a_loaded_mask_binds_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_installed", {})
    write(tmp_path, version=maskc.__version__)
    mask, original = maskc.load(tmp_path), maskc.compile("std:doc_prefix")
    assert isinstance(mask.verdict, Proven)
    inputs = {"doc": maskc.segments(lengths=[3, 5]), "prefix": [1, 2]}
    x = torch.randn(1, 8, 2, 16, dtype=torch.float64)
    assert torch.equal(maskc.run(mask.bind(**inputs), x, x, x), maskc.run(original.bind(**inputs), x, x, x))


def test_an_undecided_mask_stays_undecided(tmp_path: Path) -> None:
    write_bundle(tmp_path, suite()["doc_prefix"][0], None, [], maskc.__version__)
    mask = maskc.load(tmp_path)
    assert isinstance(mask.verdict, Unknown)
    assert mask.bind(doc=maskc.segments(lengths=[3, 5]), prefix=[1, 2]).vectors().lts is not None


def test_a_call_finds_its_kernels_or_is_refused(vectors: BoundaryVectors) -> None:
    request = Request(*suite()["doc_prefix"], head_dim=128, dtype="bf16")
    bundle = unbuilt((*forward_kernels(request), *backward_kernels(request)))
    call = {"gradients": True, "deterministic": False}
    check_kernels(bundle, vectors, q(128, torch.bfloat16), **call)
    check_kernels(unbuilt(forward_kernels(request)), vectors, q(128, torch.bfloat16), **(call | {"gradients": False}))
    refused = [
        (bundle, q(64, torch.bfloat16), call),
        (bundle, q(128, torch.float16), call),
        (bundle, q(128, torch.bfloat16), call | {"deterministic": True}),
        (unbuilt(forward_kernels(request)), q(128, torch.bfloat16), call),
        (unbuilt(forward_kernels(request)[1:]), q(128, torch.bfloat16), call | {"gradients": False}),
    ]
    for held, tensor, how in refused:
        with pytest.raises(MaskcError) as caught:
            check_kernels(held, vectors, tensor, **how)
        assert caught.value.code == "M612"
    with pytest.raises(MaskcError, match="M612"):
        refuse_group(bundle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp16_and_bf16_share_a_schedule(vectors: BoundaryVectors, dtype: torch.dtype) -> None:
    """`hopper.schedule` does not know the dtype of the call, so the folder holds the one that it takes."""
    kernels = forward_kernels(Request(*suite()["doc_prefix"], head_dim=64, dtype=DTYPES[dtype]))
    assert kernels[0].source == schedule_source(schedule_spec(mask_form(vectors), 64))
    check_kernels(unbuilt(kernels), vectors, q(64, dtype), gradients=False, deterministic=False)
