"""Forward kernel on a GPU without the front end: correctness on boundary vectors, then first timings.

    python -m tests.gpu.bringup_fwd OUT_DIR [check] [time]

One worker process per (head dim, dtype), killed and restarted when a case takes longer than 30 s.
"""

from __future__ import annotations

import json
import math
import queue as queues
import statistics
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from zlib import crc32

import torch

from maskc.boundary import BlockTable, BoundaryVectors

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
TIMEOUT = 30.0


@dataclass(frozen=True)
class Case:
    mask: str
    batch: int
    nq: int
    nk: int
    heads: int
    kv_heads: int
    mask_heads: int
    head_dim: int
    dtype: str
    layout: str = "dense"  # dense, strided, expanded
    out: str = "input"
    queue: str = "generator"
    scheduler: str = "lpt"
    special: str = ""  # nan: NaN in keys that no row sees; record: compare the queue with the mirror


def vectors(case: Case, device: str = "cuda") -> BoundaryVectors:
    """Random vectors of a form, canonical as binding makes them."""
    gen = torch.Generator().manual_seed(crc32(f"{case.mask} {case.nq} {case.nk}".encode()))
    b, h, nq, nk = (case.batch if case.mask_heads > 1 else 1), case.mask_heads, case.nq, case.nk
    key = torch.arange(nk).expand(b, h, nk)

    def rand(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), (b, h, nk), generator=gen)

    def docs() -> tuple[torch.Tensor, torch.Tensor]:
        cuts = torch.sort(torch.cat([torch.tensor([0, nk]), torch.randint(0, nk + 1, (5,), generator=gen)])).values
        at = torch.searchsorted(cuts, torch.arange(nk), right=True)
        return cuts[at - 1].expand(b, h, nk), cuts[at].expand(b, h, nk)

    start, end = docs()
    made: dict[str, Any] = {"causal": False}
    match case.mask:
        case "full":
            pass
        case "causal":
            made["causal"] = True
        case "window":
            made |= {"causal": True, "lts": key + max(1, nk // 16)}
        case "causal_doc":
            made |= {"causal": True, "lts": end}
        case "doc":
            made |= {"lts": end, "ute": start}
        case "prefix":
            made |= {"ute": torch.where(key < nk // 2, 0, key)}
        case "qk_sparse":
            made |= {"causal": True, "lts": torch.where(start > 0, key, nq), "lte": torch.where(start > 0, end, nq)}
        case "global":
            w, g = max(1, nk // 16), 16
            made |= {"lts": torch.where(key < g, nq, key + w + 1), "lte": torch.full_like(key, nq)}
            made |= {"uts": torch.where(key <= g + w, 0, g), "ute": torch.where(key <= g + w, 0, key - w)}
        case "eviction":
            made |= {"causal": True, "lts": key + 1 + rand(0, nk)}
        case "random4":
            cut = torch.sort(torch.stack([rand(0, nq + 1) for _ in range(4)]), 0).values
            made |= dict(zip(("lts", "lte", "uts", "ute"), cut, strict=True))
        case "swapped":
            cut = torch.sort(torch.stack([rand(0, nq + 1) for _ in range(4)]), 0).values
            made |= dict(zip(("uts", "ute", "lts", "lte"), cut, strict=True)) | {"causal": True}
        case "diag":
            made |= {"lts": end, "ute": start, "diag": (key * 3) // 4, "uts": start // 2}
        case "unseen":  # every fifth key, and a whole stretch, are hidden from all rows
            hidden = (key % 5 == 0) | ((key > nk // 3) & (key < nk // 2))
            made |= {"lts": torch.where(hidden, 0, end)}
        case "empty_rows":
            made |= {"lts": torch.full_like(key, nq // 3)}
        case "table":
            made |= {"causal": True, "lts": end}
        case _:
            raise ValueError(case.mask)
    for name in ("lts", "lte", "uts", "ute", "diag"):
        if name in made:
            made[name] = made[name].clamp(0, nq).to(torch.int32).contiguous().to(device)
    blocks = None
    if case.mask == "table":
        shape = (b, h, -(-nq // 128), -(-nk // 128))
        blocks = BlockTable((torch.rand(shape, generator=gen) < 0.6).to(device), 128, 128)
    return BoundaryVectors(nq, nk, b, h, blocks=blocks, **made)


def operand(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    b, s, h, d = shape
    if layout == "strided":  # a slice of [B, H, S, 3, D]
        return torch.randn(b, h, s, 3, d, device="cuda").to(dtype)[:, :, :, 1].transpose(1, 2)
    if layout == "expanded":
        return torch.randn(b, s, 1, d, device="cuda").to(dtype).expand(b, s, h, d)
    return torch.randn(shape, device="cuda").to(dtype)


def dense(v: BoundaryVectors, q: Any, k: Any, val: Any, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in `dtype` with dense scores, scale applied to K; one batch item and head at a time."""
    batch, nq, heads, d = q.shape
    masked = v.masked().to("cuda")
    out = torch.empty(batch, nq, heads, d, dtype=dtype, device="cuda")
    lse = torch.empty(batch, heads, nq, dtype=torch.float64, device="cuda")
    for b in range(batch):
        for h in range(heads):
            kh, mh = h // (heads // k.shape[2]), h // (heads // v.heads)
            hide = masked[b if v.batch > 1 else 0, mh]
            kk, vv = k[b, :, kh].to(dtype), val[b, :, kh].to(dtype)
            unseen = hide.all(0)
            kk, vv = kk.masked_fill(unseen[:, None], 0), vv.masked_fill(unseen[:, None], 0)
            s = (q[b, :, h].to(dtype) @ (kk * scale).T).masked_fill(hide, -math.inf)
            p = torch.softmax(s.float() if dtype.itemsize == 2 else s, -1).nan_to_num(0.0).to(dtype)
            out[b, :, h] = p @ vv
            lse[b, h] = torch.logsumexp(s.double(), -1)
    return out, lse


def check(case: Case) -> str:
    from maskc.codegen.forward import forward_spec
    from maskc.runtime import hopper

    torch.manual_seed(1)
    v, dtype = vectors(case), DTYPES[case.dtype]
    q = operand((case.batch, case.nq, case.heads, case.head_dim), dtype, case.layout)
    k = operand((case.batch, case.nk, case.kv_heads, case.head_dim), dtype, case.layout)
    val = operand((case.batch, case.nk, case.kv_heads, case.head_dim), dtype, case.layout)
    scale = case.head_dim**-0.5
    if case.special == "nan":
        unseen = v.masked().to("cuda").all(2).all(1)  # [batch, nk], hidden from every head
        k, val = k.clone(), val.clone()
        k.masked_fill_(unseen[:, :, None, None], math.nan)
        val.masked_fill_(unseen[:, :, None, None], math.nan)
    spec = forward_spec(hopper.mask_form(v), case.head_dim, "bf16" if case.dtype == "bf16" else "f16", case.out)  # type: ignore[arg-type]
    spec = replace(spec, scheduler=case.scheduler, record_queue=case.special == "record")
    if spec.packed:
        spec = replace(spec, queue=case.queue)
    record = None
    if spec.record_queue:
        blocks = -(-case.nk // spec.block_kv)
        record = torch.full(
            (case.batch, case.heads, -(-case.nq // spec.block_q), 1 + blocks), -1, dtype=torch.int32, device="cuda"
        )
    runs = []
    for _ in range(3):
        poison = [
            torch.full((n,), math.nan, device="cuda") for n in (q.numel() // 2, q.numel(), case.batch * case.heads * case.nq)
        ]
        del poison
        runs.append(hopper.forward_with(spec, v, q, k, val, scale, None, record))
    torch.cuda.synchronize()
    out, lse = runs[0]
    problems = (
        []
        if all(torch.equal(out, o) and torch.equal(lse, m) for o, m in runs[1:]) or case.special == "nan"
        else ["not repeatable"]
    )
    ref, ref_lse = dense(v, q, k, val, scale, torch.float64)
    naive, _ = dense(v, q, k, val, scale, dtype)
    if not torch.equal(torch.isnan(out), torch.isnan(ref)):
        return f"NaN at {torch.isnan(out).sum().item()} of {out.numel()}, first {torch.isnan(out).nonzero()[0].tolist()}"
    if not torch.equal(torch.isinf(lse), torch.isinf(ref_lse)):
        bad = (torch.isinf(lse) != torch.isinf(ref_lse)).nonzero()
        return f"inf lse differs at {len(bad)} rows, first {bad[0].tolist()}"
    low = ref.to(dtype)
    rule = 2 * (naive.double() - ref).abs().max() + 2 * ((low + 0.3 - 0.3).double() - low.double()).abs().max()
    error = (out.double() - ref).abs().max()
    finite = ~torch.isinf(ref_lse)
    lse_error = (lse.double() - ref_lse)[finite].abs().max() if finite.any() else torch.zeros(())
    relative = ((out.double() - ref).norm() / ref.norm().clamp(min=1e-30)).item()
    if not error <= rule:
        worst = ((out.double() - ref).abs() == error).nonzero()[0].tolist()
        problems.append(f"error {error:.2e} > {rule:.2e} at {worst}, relative {relative:.2e}")
    if not lse_error <= 1e-3:
        problems.append(f"lse off by {lse_error:.2e}")
    if record is not None:
        problems += compare_queue(case, spec, v, record)
    return "; ".join(problems) or f"ok {relative:.1e} lse {lse_error:.0e}"


def compare_queue(case: Case, spec: Any, v: BoundaryVectors, record: torch.Tensor) -> list[str]:
    from maskc.codegen.mirror import Columns, queue

    rows, wrong = record.cpu(), []
    for b in range(case.batch):
        for h in range(case.heads):
            at = (b if v.batch > 1 else 0, h // (case.heads // v.heads))
            named = {n: getattr(v, n)[at].tolist() for n in spec.form.vectors}
            keep = None
            if v.blocks is not None:
                finer = v.blocks.keep[at].repeat_interleave(128 // spec.block_kv, 1)
                keep = finer.tolist()
            m = Columns(v.nq, v.nk, named, keep)
            for i in range(rows.shape[2]):
                want = queue(spec, m, i)
                line = rows[b, h, i].tolist()
                got = [(x >> 8, x & 255) for x in line[1 : 1 + max(0, line[0])]]
                if got != want and not (line[0] == -1 and not want):
                    wrong.append(f"queue of {(b, h, i)}: {got[:6]} instead of {want[:6]}")
    return wrong[:1]


def cases() -> list[Case]:
    out = []
    masks = ["full", "causal", "window", "causal_doc", "doc", "prefix", "qk_sparse", "global", "eviction", "random4", "swapped"]
    masks += ["diag", "unseen", "empty_rows", "table"]
    for d, dtype in ((128, "bf16"), (64, "bf16"), (128, "f16"), (256, "bf16"), (64, "f16")):
        for m in masks:
            out.append(Case(m, 1, 1000, 1000, 2, 2, 1, d, dtype))
        out.append(Case("full", 1, 128, 128, 1, 1, 1, d, dtype))
        for n in (1, 31, 127, 129, 300, 4097):
            out.append(Case("full", 1, n, n, 2, 1, 1, d, dtype))
            out.append(Case("causal_doc", 2, n, n, 2, 1, 2, d, dtype))
        for nq, nk in ((100, 300), (300, 100), (1, 1025), (799, 113)):
            out.append(Case("causal", 1, nq, nk, 2, 2, 1, d, dtype, special="nan"))
            out.append(Case("random4", 2, nq, nk, 6, 2, 6, d, dtype, queue="schedule"))
        for m in ("unseen", "empty_rows", "table", "random4"):
            out.append(Case(m, 2, 777, 1111, 6, 2, 2, d, dtype, special="nan"))
        for m in ("causal_doc", "random4", "table", "global", "eviction"):
            for source in ("generator", "schedule"):
                out.append(Case(m, 2, 2000, 2000, 4, 2, 2, d, dtype, queue=source, special="record"))
        for s in ("static", "dynamic", "lpt", "giants"):
            out.append(Case("global", 1, 4096, 4096, 14, 1, 1, d, dtype, scheduler=s))
        for layout in ("strided", "expanded"):
            out.append(Case("causal_doc", 2, 515, 515, 4, 2, 1, d, dtype, layout=layout))
        out.append(Case("causal_doc", 2, 515, 515, 4, 2, 1, d, dtype, out="f32"))
        out.append(Case("full", 2, 1025, 700, 4, 2, 1, d, dtype, out="f32"))
    return out


# ---------------------------------------------------------------- workers


def work(bounded: bool) -> None:
    if bounded:
        from maskc.codegen.nvrtc import compile_cubin
        from maskc.runtime import hopper

        hopper.compile_cubin = partial(compile_cubin, defines=("MASKC_BOUNDED_WAITS",))  # type: ignore[assignment]
    for line in sys.stdin:
        case = Case(**json.loads(line))
        try:
            answer = check(case)
        except Exception as e:
            answer = f"{type(e).__name__}: {str(e)[:600]}"
        print("ANSWER " + json.dumps(answer), flush=True)


class Worker:
    def __init__(self, mode: str = "worker") -> None:
        self.mode = mode
        self.process: Popen[str] | None = None

    def ask(self, case: Case) -> str:
        if self.process is None or self.process.poll() is not None:
            self.process = Popen([sys.executable, "-m", "tests.gpu.bringup_fwd", self.mode], stdin=PIPE, stdout=PIPE, text=True)
        process = self.process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(asdict(case)) + "\n")
        process.stdin.flush()
        answers: queues.Queue[str] = queues.Queue()

        def read() -> None:
            assert process.stdout
            for line in process.stdout:
                if line.startswith("ANSWER "):
                    answers.put(json.loads(line[7:]))
                    return
            answers.put("worker died")

        threading.Thread(target=read, daemon=True).start()
        try:
            answer = answers.get(timeout=TIMEOUT)
        except queues.Empty:
            answer = "TIMEOUT"
        if not answer.startswith("ok") and ("CUDA" in answer or "M605" in answer or answer in ("TIMEOUT", "worker died")):
            process.kill()
            process.wait()
            self.process = None
        return answer


def smoke() -> None:
    """A few cases with bounded waits, so that a hang shows as a trap; stops everything when one is wrong."""
    worker = Worker("bounded")
    wrong = 0
    for case in (
        Case("full", 1, 128, 128, 1, 1, 1, 128, "bf16"),
        Case("causal", 1, 1000, 1000, 2, 2, 1, 128, "bf16"),
        Case("causal_doc", 2, 2000, 2000, 4, 2, 2, 128, "bf16"),
    ):
        answer = worker.ask(case)
        wrong += not answer.startswith("ok")
        print(case.mask, case.nq, answer, flush=True)
    if worker.process:
        worker.process.kill()
    if wrong == 3:
        sys.exit("nothing works")


def run_checks(folder: Path) -> None:
    groups: dict[tuple[int, str, int], list[Case]] = {}
    for i, case in enumerate(cases()):
        groups.setdefault((case.head_dim, case.dtype, i % 2), []).append(case)

    def run(group: list[Case]) -> list[tuple[Case, str]]:
        worker, out, hung = Worker(), [], 0
        for case in group:
            answer = worker.ask(case) if hung < 2 else "not run"
            hung += answer in ("TIMEOUT", "worker died")
            out.append((case, answer))
        if worker.process:
            worker.process.kill()
        return out

    with ThreadPoolExecutor(len(groups)) as pool:
        results = [item for group in pool.map(run, groups.values()) for item in group]
    (folder / "check.json").write_text(json.dumps([[asdict(c), a] for c, a in results], indent=0))
    bad = [(c, a) for c, a in results if not a.startswith("ok")]
    for c, a in bad[:40]:
        print(c, "->", a)
    print(f"{len(results) - len(bad)} of {len(results)} right", flush=True)
    if 5 * len(bad) > len(results):
        sys.exit("too much is wrong to time it")


# ---------------------------------------------------------------- timing

LAYOUTS = {8192: (3145, 2203, 2844), 32768: (3482, 4024, 4638, 4022, 2879, 956, 3586, 2682, 3546, 2953)}


def timing_vectors(mask: str, n: int, heads: int) -> BoundaryVectors:
    key = torch.arange(n, device="cuda")
    ends = torch.tensor(LAYOUTS.get(n, (n,)), device="cuda").cumsum(0)
    end = ends[torch.searchsorted(ends, key, right=True)]
    start = torch.cat([ends.new_zeros(1), ends])[torch.searchsorted(ends, key, right=True)]

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t.clamp(0, n).to(torch.int32).view(1, -1, n).contiguous()

    match mask:
        case "full":
            return BoundaryVectors(n, n, 1, 1, False)
        case "causal":
            return BoundaryVectors(n, n, 1, 1, True)
        case "causal_doc":
            return BoundaryVectors(n, n, 1, 1, True, lts=shaped(end))
        case "doc":
            return BoundaryVectors(n, n, 1, 1, False, lts=shaped(end), ute=shaped(start))
        case "window":
            return BoundaryVectors(n, n, 1, 1, True, lts=shaped(key + n // 16))
        case "eviction":
            gen = torch.Generator(device="cuda").manual_seed(0)
            gone = torch.stack(
                [torch.randperm(n - 1, generator=gen, device="cuda")[: n // 2].sort().values for _ in range(heads)]
            )
            lts = torch.full((heads, n), n, device="cuda")
            at = torch.arange(n // 2, n, device="cuda").expand(heads, -1)
            lts.scatter_(1, gone, torch.maximum(at, gone + 1))
            return BoundaryVectors(n, n, 1, heads, True, lts=lts.to(torch.int32).view(1, heads, n).contiguous())
    raise ValueError(mask)


def time_one(mask: str, n: int, batch: int, heads: int, d: int = 128, **spec_changes: Any) -> dict[str, Any]:
    from maskc.codegen.forward import forward_spec
    from maskc.runtime import hopper
    from maskc.tiles import classify

    torch.manual_seed(0)
    v = timing_vectors(mask, n, heads)
    spec = replace(forward_spec(hopper.mask_form(v), d, "bf16"), **spec_changes)
    q, k, val = (torch.randn(batch, n, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tables = hopper.schedule_for(spec, v)
    tiles = (classify(v, spec.block_q, spec.block_kv) > 0).sum(dtype=torch.float64).item() / v.heads
    flop = 4 * tiles * spec.block_q * spec.block_kv * d * batch * heads
    times = []
    for i in range(15):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        hopper.forward_with(spec, v, q, k, val, d**-0.5, tables)
        b.record()
        if i >= 3:
            times.append((a, b))
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in times)
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(10):
        hopper.schedule_for(spec, v)
    b.record()
    torch.cuda.synchronize()
    changes = " ".join(f"{key}={value}" for key, value in spec_changes.items())
    row = {"mask": mask, "n": n, "batch": batch, "heads": heads, "d": d, "changes": changes, "ms": ms}
    row |= {"tflops_visited": flop / ms / 1e9, "schedule_ms": a.elapsed_time(b) / 10}
    figures = f"{ms:8.3f} ms {row['tflops_visited']:6.1f} TFLOP/s visited, schedule {row['schedule_ms']:.3f} ms"
    print(f"{mask:11s} {n:6d} B{batch} H{heads} D{d} {changes:24s} {figures}", flush=True)
    return row


def timings() -> list[tuple[Any, ...]]:
    big = [("full", 8192, 16, 32), ("causal", 8192, 16, 32), ("causal_doc", 8192, 16, 32), ("doc", 8192, 16, 32)]
    big += [("window", 8192, 16, 32), ("eviction", 8192, 16, 32)]
    big += [("full", 32768, 4, 32), ("causal", 32768, 4, 32), ("causal_doc", 32768, 4, 32), ("doc", 32768, 4, 32)]
    return [*big, ("causal", 8192, 1, 16), ("causal", 131072, 1, 32), ("full", 8192, 16, 32, 64), ("full", 8192, 8, 16, 256)]


def run_timings(folder: Path) -> None:
    rows = []
    for item in timings():
        rows.append(time_one(*item))
    for item in (("full", 8192, 16, 32), ("causal", 8192, 16, 32), ("causal_doc", 8192, 16, 32)):
        for changes in (
            {"rescale_log2": 0},
            {"scheduler": "dynamic"},
            {"scheduler": "static"},
            {"ping_pong": False},
            {"queue": "schedule"},
        ):
            if "queue" in changes and item[0] in ("full", "causal"):
                continue
            rows.append(time_one(*item, **changes))
    (folder / "time.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1] in ("worker", "bounded"):
        work(sys.argv[1] == "bounded")
    else:
        out = Path(sys.argv[1])
        if "smoke" in sys.argv:
            smoke()
        if "check" in sys.argv:
            run_checks(out)
        if "time" in sys.argv:
            run_timings(out)
