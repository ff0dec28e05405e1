"""The cache: whole entries or none, whatever other processes, signals and disks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskc.codegen import cache, nvrtc
from maskc.codegen.cache import Entry, content_key
from maskc.codegen.render import CudaSource

ENTRY = Entry({"log": "a log", "n": 3}, {"cubin": b"\x7fELF\n\0\n" * 1000, "empty": b""})
KEY = "ab" * 32


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    assert cache.load(tmp_path, KEY) is None
    assert cache.store(tmp_path, KEY, ENTRY)
    assert cache.load(tmp_path, KEY) == ENTRY
    assert cache.entries(tmp_path) == [tmp_path / "ab" / f"{KEY}.bin"]
    assert cache.clear(tmp_path) == 1
    assert cache.load(tmp_path, KEY) is None


@given(data=st.data())
def test_a_damaged_entry_reads_as_absent(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache.store(folder, KEY, ENTRY)
    path = cache.entries(folder)[0]
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:at])
    else:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
    assert cache.load(folder, KEY) is None
    cache.store(folder, KEY, ENTRY)
    assert cache.load(folder, KEY) == ENTRY


def test_keys_frame_their_parts() -> None:
    keys = [
        content_key("ab", "c"),
        content_key("a", "bc"),
        content_key("abc"),
        content_key(["ab", "c"]),
        content_key(["a", "bc"]),
        content_key(["a"], ["bc"]),
        content_key([], ["a", "bc"]),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key(b"ab", "c") == content_key("ab", b"c")


COMPILE = """
import sys, hashlib
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
source = CudaSource("k.cu", 'extern "C" __global__ void k(int* p) { p[threadIdx.x] = %d; }' % int(sys.argv[1]))
for _ in range(3):
    print(hashlib.sha256(compile_cubin(source).image).hexdigest())
"""


def _start(code: str, *args: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "MASKC_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=environment, stdout=subprocess.PIPE, text=True)


def test_eight_processes_share_one_folder(tmp_path: Path) -> None:
    processes = [_start(COMPILE, str(i % 2), folder=tmp_path) for i in range(8)]
    outputs = [p.communicate(timeout=120)[0].split() for p in processes]
    assert [p.returncode for p in processes] == [0] * 8
    assert all(len(o) == 3 for o in outputs)
    for parity in (0, 1):
        assert len({digest for o in outputs[parity::2] for digest in o}) == 1
    assert outputs[0][0] != outputs[1][0]
    assert len(cache.entries(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.tmp"))


WRITE = """
import os, sys
from pathlib import Path
from maskc.codegen import cache

def stopped(source, target):
    print("ready", flush=True)
    sys.stdin.read()

os.replace = stopped
cache.store(Path(sys.argv[1]), "ab" * 32, cache.Entry({}, {"cubin": bytes(100_000)}))
"""


def test_a_writer_killed_half_way_leaves_no_entry(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    assert cache.load(tmp_path, KEY) is None
    assert cache.store(tmp_path, KEY, ENTRY)
    assert cache.load(tmp_path, KEY) == ENTRY
    cache.clear(tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def _refuse(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_a_full_or_read_only_disk_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(step, _refuse)
    source = CudaSource("k.cu", f'extern "C" __global__ void k() {{}}  // {step} {time.time_ns()}')
    cubin = nvrtc.compile_cubin(source, cache_dir=tmp_path)
    assert cubin.image.startswith(b"\x7fELF")
    assert not cache.entries(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_cannot_be_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert not cache.store(tmp_path / "file" / "cache", KEY, ENTRY)
    assert cache.load(tmp_path / "file" / "cache", KEY) is None
