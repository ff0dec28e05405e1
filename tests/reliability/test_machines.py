"""Machines that do not fit: another GPU, no driver or an old one, an old NVRTC. One coded message each, before any work."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import maskc
from maskc import doctor
from maskc.boundary import BoundaryVectors
from maskc.codegen import nvrtc
from maskc.codegen.render import CudaSource
from maskc.codes import explain_code
from maskc.diagnostics import MaskcError
from maskc.options import Options
from maskc.runtime import driver_api, hopper

CAUSAL = BoundaryVectors(16, 16, 1, 1, True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """Tensors that say they are on a GPU, which is an A100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return FakeTensorMode()


def test_another_gpu_is_named(gpu: FakeTensorMode) -> None:
    with gpu:
        q = torch.empty(1, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    found = hopper.why_not(CAUSAL, q, q, q)
    assert found is not None
    assert found.code == "M521"
    assert "sm_90a (H100, H200)" in found.message
    assert "NVIDIA A100" in found.message
    assert found.help is not None


def test_doctor_says_what_another_gpu_runs(gpu: FakeTensorMode) -> None:
    lines = dict(line.split(maxsplit=1) for line in doctor.examine(Options.from_env()))
    assert lines["GPU"] == "NVIDIA A100 (sm_80)"
    assert lines["backend"].startswith("flex for CUDA tensors")
    assert "8.0" in lines["backend"]


@pytest.mark.parametrize(
    "broken", ["torch.cuda.is_available", "maskc.runtime.driver_api.driver_version", "maskc.codegen.nvrtc.missing"]
)
def test_doctor_survives_whatever_a_broken_installation_throws(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def throw(*_: object) -> None:
        raise OSError("libnothing.so: wrong ELF class\nand more")

    monkeypatch.setattr(broken, throw)
    lines = list(doctor.examine(Options.from_env()))
    assert any("not usable: libnothing.so: wrong ELF class" in line for line in lines)
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("CUDA_ERROR_NO_DEVICE", "M604", "an NVIDIA driver"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "M604", "an NVIDIA driver"),
        ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "M604", "an NVIDIA driver"),
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", "M606", "maskc doctor"),
        ("CUDA_ERROR_INVALID_IMAGE", "M606", "maskc doctor"),
        ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "M606", "maskc doctor"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "M605", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "M605", "CUDA_LAUNCH_BLOCKING=1"),
    ],
)
def test_answers_of_the_driver(status: str, code: str, says: str) -> None:
    answer = getattr(driver_api._driver().CUresult, status)
    with pytest.raises(MaskcError) as caught:
        driver_api._call(lambda: (answer,))
    assert caught.value.code == code
    assert status in str(caught.value)
    assert says in str(caught.value)
    assert explain_code(code)


def test_an_nvrtc_that_does_not_know_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(MaskcError) as caught:
        nvrtc.compile_cubin(CudaSource("k.cu", ""), arch="sm_999", cache_dir=tmp_path)
    assert caught.value.code == "M602"
    assert f"this is NVRTC {nvrtc.version()}; maskc needs 12.8 or newer" in str(caught.value)
    assert "--gpu-architecture" in str(caught.value)


def test_masks_need_neither_gpu_nor_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof, binding and the CPU path go on where nothing of CUDA can be imported."""
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[3, 2]), nq=5, nk=5)
    q = torch.randn(1, 5, 1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert maskc.run(spec, q, q, q).shape == q.shape


def test_tensors_of_an_unknown_device_are_refused() -> None:
    q = SimpleNamespace(device=SimpleNamespace(type="xpu"))
    found = hopper.why_not(CAUSAL, q, q, q)  # type: ignore[arg-type]
    assert found is not None
    assert found.code == "M520"
