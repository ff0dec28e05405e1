"""Driver calls, against a libcuda that writes down what it was asked (tests/runtime/stub_driver.cpp)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maskc.diagnostics import MaskcError
from maskc.runtime import driver_api
from tests.stub_libcuda import built

STUB = Path(__file__).with_name("stub_driver.cpp")

PRELUDE = """
import ctypes, torch
from maskc.diagnostics import MaskcError
from maskc.runtime import driver_api as d, driver_streams as s

class Body(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "abcd"]

IMAGE = b"\\x7fELF" + bytes(100)
MAP = d.tensor_map(4096, torch.bfloat16, (128, 100, 4, 1), (1, 512, 128, 7), (64, 128, 1, 1))
device = torch.device("cuda", 1)
"""


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(STUB, tmp_path_factory.mktemp("stub"))


def calls(stub_library: Path, tmp_path: Path, code: str) -> list[str]:
    """What the stub was asked while a process of its own ran `code`, and what that printed."""
    log = tmp_path / "calls"
    log.touch()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub_library), "STUB_DRIVER_LOG": str(log)}
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [*log.read_text().splitlines(), *done.stdout.splitlines()]


def test_a_launch_passes_geometry_arguments_and_context(stub_library: Path, tmp_path: Path) -> None:
    got = calls(
        stub_library,
        tmp_path,
        """
kernel = d.load_kernel(IMAGE, "k")
assert d.load_kernel(bytes(IMAGE), "k") is kernel
arguments = d.Arguments([MAP], Body(1, 2, 3, 4))
for size in (1000, 100_000, 90_000):
    arguments.body.a = size
    d.launch(kernel, (3, 2, 1), 384, arguments, device=device, shared=size, stream=5)
""",
    )
    launch = "launch grid 3 2 1 block 384 1 1 shared {0} stream 5 aligned 1 map 42 body {0} 2 3 4"
    assert [line for line in got if not line.startswith("map")] == [
        "load",
        *("push 101", launch.format(1000), "pop"),
        *("push 101", "allow 100000 on 1", launch.format(100_000), "pop"),
        *("push 101", launch.format(90_000), "pop"),
    ]


def test_launches_of_other_sizes_share_nothing_and_take_no_addresses(stub_library: Path, tmp_path: Path) -> None:
    """Hooks on audit events may cost more than a launch."""
    program = """
import sys
class Other(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "abcdef"]
kernel, events = d.load_kernel(IMAGE, "k"), []
first, other, second = (d.Arguments([MAP], b) for b in (Body(1, 2, 3, 4), Other(5, 6, 7, 8), Body(9, 8, 7, 6)))
for arguments in (first, other):
    d.launch(kernel, (1, 1, 1), 32, arguments, device=device, stream=5)
sys.addaudithook(lambda event, _: events.append(event))
for arguments in (second, other, first):
    d.launch(kernel, (1, 1, 1), 32, arguments, device=device, stream=5)
print([event for event in events if event.startswith("ctypes")])
"""
    got = [line.split("body ")[-1] for line in calls(stub_library, tmp_path, program) if "body" in line or "[" in line]
    assert got == ["1 2 3 4", "5 6 7 8", "9 8 7 6", "5 6 7 8", "1 2 3 4", "[]"]


@pytest.mark.parametrize("count", [0, 1, 8])
def test_pointers_to_every_map_and_the_struct(count: int) -> None:
    class Body(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int64), ("b", ctypes.c_float * 100)]

    maps = [bytes([i + 1]) * 128 for i in range(count)]
    body = Body(7)
    for number in (1.5, 2.5):
        body.b[99] = number
        pointers = (ctypes.c_void_p * (count + 1)).from_address(driver_api.Arguments(maps, body).placed())
        assert [ctypes.string_at(p, 128) for p in pointers[:count]] == maps
        assert all(p % 128 == 0 for p in pointers)
        found = Body.from_address(pointers[count])
        assert (found.a, found.b[99]) == (7, number)


def test_launch_attributes(stub_library: Path, tmp_path: Path) -> None:
    got = calls(
        stub_library,
        tmp_path,
        """
kernel = d.load_kernel(IMAGE, "k")
arguments = d.Arguments([MAP], Body(1, 2, 3, 4))
d.launch(kernel, (4, 1, 1), 128, arguments, device=device, stream=0, cluster=(2, 1, 1), overlap_previous=True)
""",
    )
    assert got[3:-1] == [
        "launch grid 4 1 1 block 128 1 1 shared 0 stream 0 aligned 1 map 42 body 1 2 3 4",
        "attribute 4: 2 1 1",  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        "attribute 6: 1 0 0",  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    ]


def test_what_is_ready_takes_addresses_and_words_alone(stub_library: Path, tmp_path: Path) -> None:
    """Each time from what it was made with: what one start writes the next one does not find."""
    got = calls(
        stub_library,
        tmp_path,
        """
from maskc.runtime.ready import Ready
kernel = d.load_kernel(IMAGE, "k")
ready = Ready(kernel, (4, 1, 1), 128, d.Arguments([MAP], Body(1, 2, 3, 4)), (("c", 1),), shared=900, overlap_previous=True)
plain = Ready(kernel, (5, 1, 1), 32, d.Arguments([MAP], Body(1, 2, 3, 4)), (("a", 2),))
ready.start(5, (32,), (7 << 32 | 6,))
ready.start(6, (64,), (8,))
plain.start(5, (64,), (0, 1))
try:
    ready.start(5, (8,), (0,))
except MaskcError as e:
    print(e.code, "cuTensorMapReplaceAddress failed: CUDA error 1" in str(e))
""",
    )
    shown = "launch grid {} 1 1 block {} 1 1 shared {} stream {} aligned 1 map 43 body {}"
    assert got[2:] == [
        "map 42 lies at 32 now",
        shown.format(4, 128, 900, 5, "1 2 6 7"),
        "attribute 6: 1 0 0",
        "map 42 lies at 64 now",
        shown.format(4, 128, 900, 6, "1 2 8 0"),
        "attribute 6: 1 0 0",
        "map 42 lies at 64 now",
        shown.format(5, 32, 0, 5, "0 0 1 0"),
        "map 42 lies at 8 now",
        "M605 True",
    ]


def test_a_tensor_map_counts_in_bytes_and_ignores_strides_of_size_one(stub_library: Path, tmp_path: Path) -> None:
    got = calls(stub_library, tmp_path, "")
    assert got == ["map aligned 1 type 9 at 4096 swizzle 3 | 128 0 64 1 | 100 1024 128 1 | 4 256 1 1 | 1 16 1 1"]


def test_a_context_is_current_where_one_is_asked_for(stub_library: Path, tmp_path: Path) -> None:
    """A thread that has not called CUDA yet has none."""
    got = calls(stub_library, tmp_path, "with d.context_of(1): s.write_value(64, 7, 5)")
    assert got[1:] == ["push 101", "write 7 at 64", "pop"]


def test_stream_values(stub_library: Path, tmp_path: Path) -> None:
    got = calls(stub_library, tmp_path, "s.write_value(64, 7, 5); s.wait_value(64, 7, 5); print(d.driver_version())")
    assert got[1:] == ["write 7 at 64", "wait 7 at 64 flags 0", "(13, 0)"]


def test_stream_words_go_in_one_operation(stub_library: Path, tmp_path: Path) -> None:
    words = "[s.StreamWord(False, 64, 7), s.StreamWord(True, 1 << 40, 0xFFFFFFFF)]"
    got = calls(stub_library, tmp_path, f"s.stream_words({words}, 5); s.stream_words({words}[1:], 5)")
    assert got[1:] == [
        "2 words on stream 5 flags 0",
        "operation 2 of 7 at 64 flags 0 rest 0",  # CU_STREAM_MEM_OP_WRITE_VALUE_32
        "operation 1 of 4294967295 at 1099511627776 flags 0 rest 0",  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_WAIT_VALUE_GEQ
        "wait 4294967295 at 1099511627776 flags 0",
    ]


def test_words_of_other_numbers_go_again(stub_library: Path, tmp_path: Path) -> None:
    program = """
words = s.StreamWords([s.StreamWord(True, 64, 1), s.StreamWord(False, 1 << 40, 0), s.StreamWord(False, 72, 1)])
one = s.StreamWords([s.StreamWord(True, 64, 1)])
for numbers in ((7, 0xFFFFFFFF), (8, 2)):
    words.enqueue(5, numbers)
    one.enqueue(5, numbers)
s.StreamWords([s.StreamWord(False, 64, 0)] * 256).enqueue(6, (3,))
s.StreamWords([]).enqueue(6, ())
"""
    got = calls(stub_library, tmp_path, program)
    for at, (now, other) in ((1, (7, 0xFFFFFFFF)), (6, (8, 2))):
        assert got[at : at + 5] == [
            "3 words on stream 5 flags 0",
            f"operation 1 of {other} at 64 flags 0 rest 0",
            f"operation 2 of {now} at {1 << 40} flags 0 rest 0",
            f"operation 2 of {other} at 72 flags 0 rest 0",
            f"wait {other} at 64 flags 0",
        ]
    assert [line for line in got[11:] if "words" in line] == ["255 words on stream 6 flags 0", "1 words on stream 6 flags 0"]


def test_streams_follow_each_other_and_tell_of_graphs(stub_library: Path, tmp_path: Path) -> None:
    program = "s.follow(5, 7, 9)\nprint(s.is_capturing(5), s.is_capturing(6))\ntry: s.follow(5, 7, 0)\n"
    got = calls(stub_library, tmp_path, program + "except MaskcError as e: print(e.code)")
    assert got[1:] == ["record 9 on 7", "stream 5 waits for 9 flags 0", "record 0 on 7", "False True", "M605"]


def test_more_stream_words_than_the_driver_takes_at_once(stub_library: Path, tmp_path: Path) -> None:
    got = calls(stub_library, tmp_path, "s.stream_words([s.StreamWord(False, 64, 7)] * 600, 5)")
    assert [line.split()[0] for line in got[1:] if " words on " in line] == ["255", "255", "90"]


def test_copies_name_both_ends(stub_library: Path, tmp_path: Path) -> None:
    program = """
s.copy(64, 128, 32, 5)
s.copy_pieces(into=4096, source=8192, width=256, pieces=3, pitches=(512, 1024), stream=5)
try:
    s.copy(64, 128, 32, 0)
except MaskcError as e:
    print(e.code, "cuMemcpyAsync failed: CUDA error 1" in str(e))
"""
    assert calls(stub_library, tmp_path, program)[1:] == [
        "copy 32 from 128 to 64 stream 5",
        "copy 3 x 256 from 8192 by 1024 to 4096 by 512 kinds 4 4 stream 5 rest 0",
        "copy 32 from 128 to 64 stream 0",
        "M605 True",
    ]


def test_driver_errors_have_codes(stub_library: Path, tmp_path: Path) -> None:
    got = calls(
        stub_library,
        tmp_path,
        """
for attempt in (
    lambda: d.load_kernel(b"not a cubin", "k"),
    lambda: d.launch(d.load_kernel(IMAGE, "k"), (0, 1, 1), 1, d.Arguments([MAP], Body()), device=device, stream=0),
):
    try:
        attempt()
    except MaskcError as e:
        print(e.code, e)
""",
    )
    assert any(line.startswith("M606") and "CUDA_ERROR_INVALID_IMAGE" in line for line in got)
    assert any(line.startswith("M605") and "cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE" in line for line in got)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"pointer": 4104}, "the address is a multiple of 16 bytes"),
        ({"strides": (2, 512)}, "the innermost stride is 1"),
        ({"strides": (1, 100)}, "strides are positive multiples of 16 bytes"),
        ({"strides": (1, 1 << 40)}, "below 2^40"),
        ({"sizes": (128, 0)}, "sizes are between 1 and 2^32"),
        ({"box": (64, 257)}, "between 1 and 256 elements"),
        ({"box": (128, 64)}, "fits the swizzle"),
    ],
)
def test_what_the_copy_engine_cannot_address_is_refused(change: dict[str, object], rule: str) -> None:
    wanted = {"pointer": 4096, "dtype": torch.bfloat16, "sizes": (128, 100), "strides": (1, 512), "box": (64, 128)}
    with pytest.raises(MaskcError) as caught:
        driver_api.tensor_map(**(wanted | change))
    assert caught.value.code == "M607"
    assert rule in str(caught.value)


@pytest.mark.skipif(driver_api.driver_version() is not None, reason="this machine has a driver")
def test_without_a_driver_one_error_says_what_to_install() -> None:
    with pytest.raises(MaskcError) as caught:
        driver_api.load_kernel(b"\x7fELF", "k")
    assert caught.value.code == "M604"
    assert 'pip install "maskc[cuda]"' in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (1, "M605", "cuX failed: CUDA_ERROR_INVALID_VALUE"),
        (209, "M606", "cannot run the kernel: CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (100, "M604", "CUDA_ERROR_NO_DEVICE"),
        (99_999, "M605", "cuX failed: CUDA error 99999"),
    ],
)
def test_what_a_status_says(status: int, code: str, says: str) -> None:
    found = driver_api._failure("cuX", driver_api._name_of(status))
    assert (found.code, says in str(found)) == (code, True)


def test_a_context_that_is_current_already_is_left_alone(stub_library: Path, tmp_path: Path) -> None:
    program = """
import threading
def inside():
    with d.context_of(1):
        with d.context_of(1):
            print("inside")
d._primary_context(1)
d._current_context = lambda: lambda at: ctypes.c_void_p.from_address(at).__setattr__("value", 101) or 0
inside()
thread = threading.Thread(target=inside); thread.start(); thread.join()
"""
    assert calls(stub_library, tmp_path, program)[1:] == ["inside"] * 2
