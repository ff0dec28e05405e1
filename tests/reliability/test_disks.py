"""Disks that refuse, processes that die, entries that rot: compiled kernels stay right, and messages stay messages.

tests/codegen/test_cache.py has the cache alone; here whole commands meet limits that the system itself enforces.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maskc.codegen import cache
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource

COMPILE = """
import hashlib, sys
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
for i in range(int(sys.argv[1])):
    text = 'extern "C" __global__ void k(int* p) { p[threadIdx.x] = %d; }' % i
    print(hashlib.sha256(compile_cubin(CudaSource("k.cu", text)).image).hexdigest(), flush=True)
"""


def start(folder: Path, *command: str, most_bytes: int | None = None) -> subprocess.Popen[str]:
    """`python COMMAND` with its cache in `folder`; files that it writes may have `most_bytes`, as on a disk that is full."""

    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    environment = {**os.environ, "MASKC_CACHE_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    )


def digests(count: int) -> list[str]:
    """What `COMPILE` prints where all is well."""
    texts = [f'extern "C" __global__ void k(int* p) {{ p[threadIdx.x] = {i}; }}' for i in range(count)]
    return [hashlib.sha256(compile_cubin(CudaSource("k.cu", text)).image).hexdigest() for text in texts]


def test_a_disk_that_fills_up_in_the_middle_of_an_entry(tmp_path: Path) -> None:
    process = start(tmp_path, "-c", COMPILE, "2", most_bytes=1000)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.split() == digests(2)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()], "neither a cut entry nor a temporary file"


def test_a_folder_of_kernels_on_a_full_disk(tmp_path: Path) -> None:
    """`-o` cannot be left out silently: one error, and no manifest that would make the folder look complete."""
    out = tmp_path / "out"
    process = start(tmp_path, "-m", "maskc", "compile", "std:doc_causal", "--kernel", "prep", "-o", str(out), most_bytes=4000)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith(f"error[M541]: cannot write {out}: ")
    assert "Traceback" not in err
    assert not (out / "manifest.json").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_cache_that_nobody_may_write() -> None:
    """/proc refuses even the superuser, whom permissions do not stop."""
    process = start(Path("/proc/maskc"), "-c", COMPILE, "1")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.split()) == (0, digests(1)), err


@pytest.mark.parametrize("flag", ["-o", "--dump-dir"])
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_that_nobody_may_write(tmp_path: Path, flag: str) -> None:
    process = start(tmp_path, "-m", "maskc", "compile", "std:causal", "--kernel", "prep", "--emit", "cuda", flag, "/proc/maskc")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith("error[M541]: cannot write /proc/maskc")


def test_eight_processes_while_entries_rot(tmp_path: Path) -> None:
    """Another process keeps cutting, emptying and overwriting what they share."""
    rng = random.Random(0)
    processes = [start(tmp_path, "-c", COMPILE, "4") for _ in range(8)]
    hurt = 0
    while any(p.poll() is None for p in processes):
        for path in cache.entries(tmp_path):
            try:
                data = path.read_bytes()
                path.write_bytes(rng.choice((b"", data[: len(data) // 2], data[:-1] + b"?", b"\0" * len(data))))
                hurt += 1
            except OSError:
                continue
        time.sleep(0.01)
    wanted = digests(4)
    for p in processes:
        out, err = p.communicate(timeout=120)
        assert (p.returncode, out.split()) == (0, wanted), err
    assert hurt


def test_a_thing_in_the_place_of_an_entry(tmp_path: Path) -> None:
    wanted = digests(1)
    assert start(tmp_path, "-c", COMPILE, "1").communicate(timeout=120)[0].split() == wanted
    (entry,) = cache.entries(tmp_path)
    entry.unlink()
    entry.mkdir()
    assert start(tmp_path, "-c", COMPILE, "1").communicate(timeout=120)[0].split() == wanted


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What a killed process leaves is never taken for an entry."""
    wanted = digests(6)
    for delay in (0.0, 0.02, 0.1):
        process = start(tmp_path, "-c", COMPILE, "6")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    out, err = start(tmp_path, "-c", COMPILE, "6").communicate(timeout=120)
    assert out.split() == wanted, err
    for entry in cache.entries(tmp_path):
        assert cache.load(tmp_path, entry.stem) is not None
