"""The schedule kernels as host C++, launched by `hopper.schedule` on CPU tensors, against the mirror in Python."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.forward import schedule_source
from maskc.codegen.spec import VECTORS, KernelSpec, MaskForm
from maskc.runtime import mask_tables, ready
from tests.codegen.mirror import KvIndex

KERNELS = ("kv_bounds", "row_runs", "row_order")
FORMS = (
    MaskForm(causal=True, lts=True),
    MaskForm(ute=True),
    MaskForm(lts=True, lte=True, uts=True, ute=True, diag=True, causal=True, blocks=True),
)
_CALL = """
extern "C" void call_{name}(const Params* params, int grid_x, int grid_y, int threads) {{
  run_grid({name}, *params, grid_x, grid_y, threads);
}}
"""


def spec_of(form: MaskForm, groups: int = 1) -> KernelSpec:
    sizes = {"block_q": 64 * groups, "block_kv": 16, "warp_groups": groups, "row_groups": groups}
    return KernelSpec(64, form=form, queue="schedule", queue_runs=33, **sizes)


@pytest.fixture(scope="module", params=[(FORMS[0], 3), (FORMS[1], 1), (FORMS[2], 1), (FORMS[2], 2)], ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelSpec, ctypes.CDLL]:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    spec = spec_of(*request.param)
    source = schedule_source(spec)
    text = (
        Path(__file__).with_name("warps_on_host.h").read_text() + source.flat() + "".join(_CALL.format(name=n) for n in KERNELS)
    )
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "schedule.cpp", "-o", "schedule.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return spec, ctypes.CDLL(str(folder / "schedule.so"))


def random_mask(spec: KernelSpec, rng: random.Random, rows: int, cols: int, heads: int) -> BoundaryVectors:
    def steps(low: list[int] | None = None) -> list[int]:
        out: list[int] = []
        while len(out) < cols:
            out += [rng.randint(0, rows)] * rng.randint(1, 30)
        return out[:cols] if low is None else [max(a, b) for a, b in zip(low, out, strict=False)]

    lines: dict[str, list[list[int]]] = {name: [] for name in spec.form.vectors}
    for _ in range(heads):
        starts: dict[str, list[int]] = {}
        for name in spec.form.vectors:
            starts[name] = steps(starts.get({"lte": "lts", "ute": "uts"}.get(name, "")))
            lines[name].append(starts[name])
    blocks = None
    if spec.form.blocks:
        shape = (1, heads, -(-rows // (2 * spec.block_q)), -(-cols // spec.block_kv))
        keep = torch.tensor([rng.random() < 0.7 for _ in range(shape[1] * shape[2] * shape[3])]).view(shape)
        blocks = BlockTable(keep, 2 * spec.block_q, spec.block_kv)
    tensors = {name: torch.tensor(value, dtype=torch.int32)[None] for name, value in lines.items()}
    elsewhere = None
    if blocks is None and rng.random() < 0.5:
        elsewhere = torch.tensor([rng.random() < 0.7 for _ in range(heads * cols)]).view(1, heads, cols)
    return BoundaryVectors(rows, cols, 1, heads, spec.form.causal, blocks=blocks, elsewhere=elsewhere, **tensors)


def index_of(spec: KernelSpec, v: BoundaryVectors, head: int) -> KvIndex:
    named = {n: getattr(v, n)[0, head].tolist() for n in spec.form.vectors}
    keep = None if v.blocks is None else v.blocks.keep[0, head].repeat_interleave(2, 0).tolist()
    elsewhere = None if v.elsewhere is None else v.elsewhere[0, head].tolist()
    return KvIndex(spec, v.nq, v.nk, named, keep, elsewhere)


def as_runs(queue: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Maximal runs of falling neighbours with one tag: (first block, count, tag)."""
    keyed = groupby(enumerate(queue), key=lambda item: (item[1][0] + item[0], item[1][1]))
    groups = [[entry for _, entry in members] for _, members in keyed]
    return [(g[0][0], len(g), g[0][1]) for g in groups]


def joined(spec: KernelSpec, runs: list[list[int]]) -> list[tuple[int, int, int]]:
    """Runs in a table, (first block, run word), where those that only the bits of a count have cut are one again."""
    most = 2 ** (32 - spec.tag_bits) - 1
    out: list[tuple[int, int, int]] = []
    last = 0
    for first, word in runs:
        count, tag = (word & 0xFFFFFFFF) >> spec.tag_bits, word & (1 << spec.tag_bits) - 1
        assert count <= most
        if last > most - 32 and out[-1][2] == tag and out[-1][0] - out[-1][1] == first:
            out[-1] = out[-1][0], out[-1][1] + count, tag
        else:
            out.append((first, count, tag))
        last = count
    return out


@pytest.mark.parametrize("seed", range(6))
def test_tables_equal_the_mirror(built: tuple[KernelSpec, ctypes.CDLL], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, library = built
    rng = random.Random(seed)
    rows, cols, heads = rng.randint(1, 700), rng.choice([1, 15, 16, 17, rng.randint(1, 900), 1100, 9000]), rng.randint(1, 2)
    v = random_mask(spec, rng, rows, cols, heads)

    def on_host(kernel: str, grid: tuple[int, int, int], threads: int, arguments: Any, **_: Any) -> None:
        getattr(library, f"call_{kernel}")(ctypes.byref(arguments.body), grid[0], grid[1], threads)

    for module in (mask_tables, ready):
        monkeypatch.setattr(module, "launch", on_host)
    monkeypatch.setattr(mask_tables, "_known", {})
    monkeypatch.setattr(mask_tables, "_schedule_kernel", lambda spec, name: name)
    (storage,) = mask_tables.schedule_for(spec, v)
    tables = mask_tables.tables_of(spec, rows, cols, 1, heads)
    masks, q_blocks, kv_blocks = (tables.sizes[name] for name in ("masks", "q_blocks", "kv_blocks"))
    offsets = tables.offsets

    def table(name: str, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return storage[offsets[name] : offsets[name] + count * dtype.itemsize].view(dtype)

    minmax = table("minmax", 2 * len(spec.form.vectors) * masks * kv_blocks).view(-1, masks, kv_blocks, 2)
    unseen = table("unseen", masks * kv_blocks, torch.uint8).view(masks, kv_blocks)
    runs = table("runs", masks * q_blocks * spec.queue_runs * 2).view(masks, q_blocks, -1, 2)
    counts = table("run_counts", masks * q_blocks).view(masks, q_blocks)
    work = table("work", masks * q_blocks).view(masks, q_blocks)
    order = table("order", masks * q_blocks).view(masks, q_blocks)
    packs = table("packs", masks * kv_blocks * spec.pack_bytes // 4).view(masks, kv_blocks, -1)
    giants = 0
    for m in range(masks):
        index = index_of(spec, v, m)
        for j, name in enumerate(spec.form.vectors):
            wanted = [one[VECTORS.index(name)] for one in index.extremes]
            assert minmax[j, m].tolist() == [list(pair) for pair in wanted], name
            for block in range(kv_blocks):
                part = getattr(v, name)[0, m, block * 16 : block * 16 + 16].tolist()
                assert packs[m, block, 16 * j : 16 * j + len(part)].tolist() == part
        assert unseen[m].bool().tolist() == index.unseen
        for block in range(kv_blocks):
            bits = int(packs[m, block, 16 * len(spec.form.vectors)])
            assert [bool(bits >> i & 1) for i in range(min(16, cols - 16 * block))] == [
                not index._is_seen(key) for key in range(16 * block, min(cols, 16 * block + 16))
            ]
        tallies = []
        for i in range(q_blocks):
            queue = index.queue(i)
            wanted_runs = as_runs(queue)
            tallies.append(16 + sum(18 if tag else 16 for _, tag in queue))
            kept = min(int(counts[m, i]), spec.queue_runs)
            got = joined(spec, runs[m, i, :kept].tolist())
            assert got == wanted_runs[: len(got)]
            assert len(got) == len(wanted_runs) or int(counts[m, i]) > spec.queue_runs
        assert work[m].tolist() == tallies
        falling = sorted(range(q_blocks), key=lambda i: (-tallies[i], i))
        assert order[m].tolist() == falling
        giants = max([giants, *(rank + 1 for rank, i in enumerate(falling) if tallies[i] * q_blocks > 4 * sum(tallies))])
    assert int(table("giants", 1)) == giants


def test_runs_of_a_queue() -> None:
    assert as_runs([(9, 0), (8, 0), (7, 2), (5, 2), (4, 2)]) == [(9, 2, 0), (7, 1, 2), (5, 2, 2)]
    grouped = spec_of(FORMS[0], 3)
    cut = [[400, 224 << 24 | 2], [176, 100 << 24 | 2], [76, 3 << 24], [73, 1 << 24]]
    assert joined(grouped, cut) == [(400, 324, 2), (76, 3, 0), (73, 1, 0)], "a run that was cut for no reason stays cut"
    assert replace(spec_of(FORMS[0]), queue="generator").queue == "generator"
