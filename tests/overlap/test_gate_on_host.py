"""The gate's own text, compiled for the host beside a clock and flags that a test sets: what it waits for, and when it stops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskc.codegen.forward import forward_source, forward_spec
from maskc.codegen.spec import MaskForm
from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text

_AROUND = """
{tables}
struct MaskTables {{ int kv_blocks; }};
// One CTA's shared memory, the GPU's clock, and what a look at a flag costs.
static u32 shared_words[2048];
static u64 now;
static u32 looks, stops, fences;
static const u64* times;         // [slot]: when its flag is written
static u64 stopped_at;           // when the host says stop
static const GateTables* tables;
inline u32 load_shared(u32 a) {{ return shared_words[a / 4]; }}
inline void store_shared(u32 a, u32 v) {{ shared_words[a / 4] = v; }}
inline void store_shared_v2(u32 a, u32 v, u32 w) {{ store_shared(a, v); store_shared(a + 4, w); }}
inline u64 global_timer() {{ return now; }}
inline void nanosleep(u32 ns) {{ now += ns; }}
inline u32 load_acquire_system(const u32* p) {{
  ++looks;
  now += 700;
  const long slot = p - tables->flags;
  return now >= times[slot] ? tables->epoch + (slot & 1) : tables->epoch - 1;  // later epochs are as good
}}
inline u32 load_relaxed_system(const u32* p) {{
  ++stops;
  return now >= stopped_at ? 0xffffffffu : *p;
}}
inline void store_relaxed_system(u32* p, u32 v) {{ *p = v; }}
inline void fence_proxy_async_global() {{ ++fences; }}
{gate}
// Passes every block in turn; `out` gets the time after each; returns the looks at flags.
extern "C" u32 run(const GateTables* t, const u64* slot_times, u64 stop, const int* order, int count, u64* out, u32* fenced) {{
  now = 1u << 20, looks = stops = fences = 0, times = slot_times, stopped_at = stop, tables = t;
  for (u32& word : shared_words) word = 0xdeadbeef;  // as shared memory is found
  Gate gate(*t, 64);
  for (int i = 0; i < count; ++i) {{
    gate.take_head(order[i] >> 16);
    gate.pass(order[i] & 0xffff);
    out[i] = now;
  }}
  *fenced = fences;
  return looks;
}}
"""
START, NEVER = 1 << 20, (1 << 64) - 1


class Tables(ctypes.Structure):
    _fields_ = [
        ("items", ctypes.c_void_p),
        ("blocks", ctypes.POINTER(ctypes.c_uint32)),
        ("flags", ctypes.POINTER(ctypes.c_uint32)),
        ("failed", ctypes.POINTER(ctypes.c_uint32)),
        ("timeout", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("own", "slots", "group_heads")),
    ]


@dataclass(frozen=True)
class Outcome:
    times: list[int]
    looks: int
    fences: int
    failed: int


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The rendered gate as a function of slot ranges by block, own slots, arrival times, and the order of blocks."""
    spec = replace(forward_spec(MaskForm(lts=True), 128, "bf16"), gated=True)
    headers = dict(forward_source(spec).headers)
    shared = headers["fwd/shared.cuh"]
    tables = shared[shared.index("struct GateTables") :]
    tables = tables[: tables.index("\n};") + 4]
    text = in_one_text(*(headers[name] for name in ("device/arrival.cuh", "fwd/gate.cuh")))
    library = compile_on_host(ONE_THREAD + _AROUND.format(tables=tables, gate=text), tmp_path_factory.mktemp("gate"))
    library.run.restype = ctypes.c_uint32
    library.run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
    ]

    def run(
        ranges: list[tuple[int, int]],
        own: int,
        arrivals: list[int],
        order: list[int],
        timeout: int = 1 << 20,
        stop: int = NEVER,
        epoch: int = 5,
        slots: int = 0,
    ) -> Outcome:
        blocks = (ctypes.c_uint32 * len(ranges))(*(a | b << 16 for a, b in ranges))
        flags, failed = (ctypes.c_uint32 * len(arrivals))(), (ctypes.c_uint32 * 1)()
        given = Tables(None, blocks, flags, failed, timeout, epoch, own, slots or len(arrivals), 2)
        times, out = (ctypes.c_uint64 * len(arrivals))(*arrivals), (ctypes.c_uint64 * len(order))()
        fences = ctypes.c_uint32()
        looks = library.run(
            ctypes.byref(given), times, stop, (ctypes.c_int * len(order))(*order), len(order), out, ctypes.byref(fences)
        )
        return Outcome(list(out), looks, fences.value, failed[0])

    return run


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, list[int], list[int]]:
    slots = draw(st.integers(1, 200))
    blocks = draw(st.lists(st.tuples(st.integers(0, slots - 1), st.integers(0, 3)), min_size=1, max_size=30))
    ranges = [(a, min(a + n, slots - 1)) for a, n in blocks]
    arrivals = draw(st.lists(st.integers(START, START + 100_000), min_size=slots, max_size=slots))
    order = draw(st.lists(st.integers(0, len(ranges) - 1), min_size=1, max_size=60))
    return ranges, draw(st.integers(0, slots)), arrivals, order


@given(call=calls())
def test_no_block_passes_before_its_chunks_are_there(
    gate: Run, call: tuple[list[tuple[int, int]], int, list[int], list[int]]
) -> None:
    ranges, own, arrivals, order = call
    got = gate(ranges, own, arrivals, order)
    assert got.failed == 0
    waited: set[int] = set()
    for block, time in zip(order, got.times, strict=True):
        needed = {s for s in range(ranges[block][0], ranges[block][1] + 1) if s >= own}
        assert all(time >= arrivals[s] for s in needed)
        waited |= needed
    assert got.fences == len(waited), "each chunk is waited for once, and fenced once"


@given(call=calls())
def test_chunks_that_are_there_are_looked_at_once(
    gate: Run, call: tuple[list[tuple[int, int]], int, list[int], list[int]]
) -> None:
    ranges, own, arrivals, order = call
    got = gate(ranges, own, [0] * len(arrivals), order * 3)
    needed = {s for b in order for s in range(ranges[b][0], ranges[b][1] + 1) if s >= own}
    assert got.looks == got.fences == len(needed)


def test_epochs_are_compared_in_cyclic_order(gate: Run) -> None:
    for epoch in (1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
        late = START + 50_000
        assert gate([(1, 1)], 0, [NEVER, late], [0], epoch=epoch).times[0] >= late
        assert gate([(0, 0)], 0, [0], [0], epoch=epoch).looks == 1


def test_the_last_of_4096_chunks_is_told_from_the_first(gate: Run) -> None:
    arrivals = [0] * 4096
    arrivals[4095] = START + 30_000
    got = gate([(0, 0), (4095, 4095), (31, 33)], 0, arrivals, [0, 2, 1, 0])
    assert got.times[1] < START + 30_000 <= got.times[2]
    assert got.looks >= 5


def test_heads_of_a_group_wait_for_its_pieces(gate: Run) -> None:
    """Two slots, two groups of two heads: flag 2 belongs to slot 0 of heads 2 and 3."""
    arrivals = [0, 0, START + 30_000, START + 60_000]
    order = [head << 16 | block for head in (0, 1, 3, 2) for block in (1, 0)]
    got = gate([(0, 0), (1, 1)], 0, arrivals, order, slots=2)
    assert all(t < START + 30_000 for t in got.times[:4])
    assert got.times[4] >= START + 60_000
    assert got.fences == 4
    assert gate([(0, 0), (1, 1)], 1, [NEVER, 0, NEVER, 0], order, slots=2).fences == 2, "slot 0 is the rank's own in every group"


def test_a_chunk_that_never_comes_is_named_and_nothing_is_waited_for_after_it(gate: Run) -> None:
    timeout = 200  # of 1024 ns
    got = gate([(0, 0), (1, 2), (3, 3)], 1, [0, 0, NEVER, NEVER], [0, 1, 2, 1], timeout=timeout)
    assert got.failed == 2 + 1
    first, gave_up, *rest = got.times
    assert first == START
    assert timeout * 1024 <= gave_up - START <= (timeout + 5) * 1024
    assert rest == [gave_up, gave_up]
    assert got.fences == 1, "of the chunk that did come"


def test_the_host_ends_a_wait(gate: Run) -> None:
    got = gate([(0, 0), (1, 1)], 0, [NEVER, NEVER], [0, 1], timeout=1 << 30, stop=START + 300_000)
    assert got.failed == 0, "the host's word is its own"
    assert START + 300_000 <= got.times[0] <= START + 300_000 + 4096 * 850, "the stop word is far away: looked at now and then"
    assert got.times[1] == got.times[0]
