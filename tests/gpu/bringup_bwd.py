"""The Hopper backward alone against dense fp64: `python -m tests.gpu.bringup_bwd [--time] [GROUP ...]`.

One worker process per group, with a timeout. Outputs and workspaces are poisoned with NaN before every call. Rule:
max|x - ref| <= 2 max|naive - ref| + 2 max|(ref + 0.3) - 0.3 - ref| with `naive` the same formulas by torch in the
kernel's dtype; NaN and inf positions are compared first. Added to it is what fp32 cannot give: a dP - dpsum that cancels
(a row that sees one key) is off by 2^-22 sum |dO V|, times the other factors, though `naive` may be exact there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from maskc.boundary import BlockTable, BoundaryVectors

TIMEOUT = 75.0


@dataclass(frozen=True)
class Case:
    mask: str
    nq: int = 256
    nk: int = 256
    batch: int = 1
    hq: int = 2
    hk: int = 2
    hm: int = 1
    dim: int = 128
    dtype: str = "bf16"
    deterministic: bool = False
    dlse: bool = False
    nan: bool = False  # NaN in keys that no row sees and in rows that see nothing
    f32: bool = False  # fp32 output of the forward and fp32 gradients
    layout: str = "bshd"  # bhsd: strided views; expand: dO with stride 0
    repeat: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        plain = {k: v for k, v in asdict(self).items() if v != getattr(Case, k, None) or k in ("nq", "nk", "dim")}
        return " ".join(f"{k}={v}" for k, v in plain.items())


# ---------------------------------------------------------------- masks


def vectors(case: Case, device: str) -> BoundaryVectors:
    g = torch.Generator().manual_seed(case.seed + 1)
    nq, nk, b, h = case.nq, case.nk, case.batch, case.hm
    key = torch.arange(nk)

    def ints(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (b, h, nk), generator=g, dtype=torch.int32)

    def shaped(x: Tensor) -> Tensor:
        return x.clamp(0, nq).int().expand(b, h, nk).contiguous()

    def pair(empty: float = 0.2) -> tuple[Tensor, Tensor]:
        x, y = ints(0, nq), ints(0, nq)
        low, high = torch.minimum(x, y), torch.maximum(x, y)
        gone = torch.rand(b, h, nk, generator=g) < empty
        return low, torch.where(gone, low, high)

    def documents() -> tuple[Tensor, Tensor]:
        cuts = torch.randint(1, max(2, nk), (5,), generator=g).sort().values
        start = torch.zeros(nk, dtype=torch.long)
        end = torch.full((nk,), nk)
        for c in cuts.tolist():
            start[c:] = torch.maximum(start[c:], torch.tensor(c))
        for c in reversed(cuts.tolist()):
            end[:c] = torch.minimum(end[:c], torch.tensor(c))
        return start, end

    parts: dict[str, Tensor | None] = dict.fromkeys(("lts", "lte", "uts", "ute", "diag"))
    causal = False
    blocks = None
    match case.mask:
        case "full":
            pass
        case "causal":
            causal = True
        case "document":
            start, end = documents()
            parts |= {"lts": shaped(end), "ute": shaped(start)}
        case "causal_document":
            causal, parts["lts"] = True, shaped(documents()[1])
        case "eviction":
            causal, parts["lts"] = True, torch.maximum(ints(0, nq), key.int() + 1).clamp(max=nq)
        case "sliding":
            causal, parts["lts"] = True, shaped(key + max(1, nq // 16))
        case "lts_zero":  # whole key tiles that no row sees, and none at the end
            lts = torch.full((nk,), nq)
            lts[nk // 4 : nk // 2 + 7] = 0
            parts["lts"] = shaped(lts)
        case "interval":  # visible rows before lts and from lte on
            parts["lts"], parts["lte"] = pair()
        case "ute":
            parts["ute"] = ints(0, nq)
        case "window":
            parts |= {"lts": shaped(key + nq // 4), "ute": shaped(key - nq // 8)}
        case "global_window":
            w = max(1, nq // 16)
            lts = torch.where(key < 16, nq, (key + w + 1).clamp(max=nq))
            uts = torch.where(key <= 16 + w, 0, 16)
            ute = torch.where(key <= 16 + w, 0, (key - w).clamp(min=0))
            parts |= {"lts": shaped(lts), "lte": shaped(torch.full((nk,), nq)), "uts": shaped(uts), "ute": shaped(ute)}
        case "two" | "two_causal":  # two intervals in any order, touching, overlapping, empty
            parts["lts"], parts["lte"] = pair()
            parts["uts"], parts["ute"] = pair()
            touch = torch.rand(b, h, nk, generator=g) < 0.2
            parts["uts"] = torch.where(touch, parts["lte"], parts["uts"])
            parts["ute"] = torch.maximum(parts["ute"], parts["uts"])
            causal = case.mask == "two_causal"
        case "swapped":  # the lower slot lies above the upper one, in long runs
            parts |= {
                "lts": shaped(key // 4),
                "lte": shaped(key // 2),
                "uts": shaped(key // 2 + nq // 4),
                "ute": shaped(key // 2 + nq // 2),
            }
        case "diag":
            parts["diag"] = ints(0, nq // 2)
        case "five":
            parts["lts"], parts["lte"] = pair()
            parts["uts"], parts["ute"] = pair()
            parts["diag"] = ints(0, nq // 2)
        case "alternate":  # the surviving Q blocks of a tile alternate by tile: first only, last only, middle
            which = key // 128 % 3
            lts = torch.where(which == 0, 60, torch.where(which == 1, 0, nq // 3))
            lte = torch.where(which == 0, nq, torch.where(which == 1, nq - 40, nq // 3 + 64))
            parts |= {"lts": shaped(lts), "lte": shaped(lte)}
        case "none":
            parts["lts"] = shaped(torch.zeros(nk))
        case "empty_rows":  # rows below nq / 3 and some keys see nothing
            lts = torch.where(key % 5 == 0, 0, nq)
            parts |= {"lts": shaped(lts), "ute": shaped(torch.full((nk,), nq // 3))}
        case "blocks" | "blocks_causal":
            size = (128, 128)
            keep = torch.rand(b, h, -(-nq // 128), -(-nk // 128), generator=g) < 0.5
            blocks = BlockTable(keep.to(device), *size)
            causal = case.mask == "blocks_causal"
        case _:
            raise ValueError(case.mask)
    on = {name: None if t is None else t.to(device) for name, t in parts.items()}
    return BoundaryVectors(nq, nk, b, h, causal, **on, blocks=blocks)


# ---------------------------------------------------------------- reference


def dense(
    case: Case, masked: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """(out, lse, dq, dk, dv) by dense formulas in `dtype`. masked: [batch, hq, nq, nk]."""
    q, k, v, dout = (t.to(dtype).transpose(1, 2) for t in (q, k, v, dout))
    g = case.hq // case.hk
    kx, vx = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    scale = case.dim**-0.5
    s = (q @ (kx * scale).mT).masked_fill(masked, -torch.inf)
    lse = torch.logsumexp(s.double(), -1)
    p = torch.exp(s.double() - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).to(dtype)
    out = p @ vx
    delta = (dout * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    ds = p * (dout @ vx.mT - delta[..., None])
    dq = (ds @ kx) * scale
    fold = lambda x: x.unflatten(1, (case.hk, g)).sum(2)  # noqa: E731
    dk, dv = fold(ds.mT @ q) * scale, fold(p.mT @ dout)
    return [out.transpose(1, 2), lse, *(t.transpose(1, 2) for t in (dq, dk, dv))]


def wrong(name: str, got: Tensor, ref: Tensor, naive: Tensor, floor: float = 0.0) -> str:
    """Why `got` breaks the rule, or ""."""
    got, naive = got.double(), naive.double()
    if not got.isfinite().all():
        at = (~got.isfinite()).nonzero()
        return f"{name}: {len(at)} of {got.numel()} not finite, first at {at[0].tolist()}"
    error = (got - ref).abs()
    allowed = floor + 2 * (naive - ref).abs().max() + 2 * ((ref.float() + 0.3) - 0.3 - ref.float()).abs().max()
    if error.max() <= allowed:
        return ""
    at = [int(x) for x in torch.unravel_index(error.argmax(), error.shape)]
    return f"{name}: error {error.max():.3e} > {allowed:.3e} at {at}, got {got[tuple(at)]:.4f}, ref {ref[tuple(at)]:.4f}"


# ---------------------------------------------------------------- one case


def inputs(case: Case, device: str) -> list[Tensor]:
    g = torch.Generator(device).manual_seed(case.seed)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[case.dtype]

    def make(n: int, h: int) -> Tensor:
        if case.layout == "bhsd":
            return torch.randn(case.batch, h, n, case.dim, generator=g, device=device).to(dtype).transpose(1, 2)
        return torch.randn(case.batch, n, h, case.dim, generator=g, device=device).to(dtype)

    q, k, v = make(case.nq, case.hq), make(case.nk, case.hk), make(case.nk, case.hk)
    dout = make(case.nq, case.hq)
    if case.layout == "expand":
        dout = dout[:, :1, :1].expand_as(q)
    return [q, k, v, dout]


def run(case: Case, device: str = "cuda") -> str:
    """ "" where the case is right, else what is wrong."""
    from maskc.runtime.hopper_bwd import backward

    v = vectors(case, device)
    masked = v.masked().to(device).expand(case.batch, -1, -1, -1).repeat_interleave(case.hq // case.hm, 1)
    q, k, val, dout = inputs(case, device)
    dlse = torch.randn(case.batch, case.hq, case.nq, device=device) if case.dlse else None
    ref = dense(case, masked, q, k, val, dout, dlse, torch.float64)
    naive = dense(case, masked, q, k, val, dout, dlse, q.dtype)
    out, lse = ref[0].to(torch.float32 if case.f32 else q.dtype).contiguous(), ref[1].float()
    if case.nan:
        by_kv = masked.unflatten(1, (case.hk, -1)).all(2)
        unseen = by_kv.all(2).transpose(1, 2)  # [batch, nk, hk]
        dead = masked.all(3).transpose(1, 2)  # [batch, nq, hq]
        k, val = (t.masked_fill(unseen[..., None], torch.nan) for t in (k, val))
        q, dout = (t.masked_fill(dead[..., None], torch.nan) for t in (q, dout))
    grad = torch.float32 if case.f32 else None
    results = [
        backward(v, q, k, val, out, lse, dout, dlse, case.dim**-0.5, case.deterministic, grad_dtype=grad)
        for _ in range(case.repeat)
    ]
    torch.cuda.synchronize()
    worst = [float(t.nan_to_num().abs().max()) for t in (q, k, val, dout)]
    cancel = 2**-22 * case.dim * worst[2] * worst[3] * max(worst[0], worst[1]) * case.dim**-0.5
    for name, got, r, n in zip(("dq", "dk", "dv"), results[0], ref[2:], naive[2:], strict=True):
        if reason := wrong(name, got, r, n, 0.0 if name == "dv" else cancel):
            return reason
    same = ("dq", "dk", "dv") if case.deterministic else ("dk", "dv")
    for again in results[1:]:
        for name, a, b in zip(("dq", "dk", "dv"), results[0], again, strict=True):
            if name in same and not torch.equal(a, b):
                return f"{name} differs between runs by {(a.double() - b.double()).abs().max():.3e}"
    return ""


def poison() -> None:
    """From now on torch.empty and Tensor.new_empty give memory full of NaN."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: object, **kwargs: object) -> Tensor:
            t = make(*args, **kwargs)
            if t.is_cuda and t.numel():
                t.view(torch.uint8).fill_(255)
            return t

        return poisoned

    torch.empty = filled(torch.empty)
    torch.Tensor.new_empty = filled(torch.Tensor.new_empty)


# ---------------------------------------------------------------- groups


def groups() -> dict[str, list[Case]]:
    base = [
        Case("full", nq=64, nk=128, hq=1, hk=1),
        Case("full", nq=128, nk=128, hq=1, hk=1),
        Case("full"),
        Case("causal"),
        Case("full", nq=300, nk=300),
        Case("causal", nq=1000, nk=1000, repeat=20),
        Case("causal_document", nq=1025, nk=1025, batch=2, dlse=True),
        Case("document", nq=640, nk=640, hq=4, hk=2),
        Case("interval", nq=384, nk=384, hm=2),
        Case("two", nq=500, nk=700, hm=2),
        Case("two_causal", nq=700, nk=700),
        Case("swapped", nq=1024, nk=1024),
        Case("five", nq=600, nk=900),
        Case("global_window", nq=1024, nk=1024),
        Case("alternate", nq=1100, nk=1100),
        Case("none", nq=200, nk=300),
        Case("lts_zero", nq=512, nk=1024, hq=4, hk=1, nan=True),
        Case("empty_rows", nq=512, nk=512, nan=True),
    ]
    more = [
        Case("full", nq=1, nk=1),
        Case("causal", nq=1, nk=1),
        Case("full", nq=1, nk=300),
        Case("causal", nq=31, nk=31),
        Case("causal", nq=127, nk=127),
        Case("causal", nq=129, nk=129),
        Case("window", nq=130, nk=130),
        Case("diag", nq=300, nk=200),
        Case("ute", nq=257, nk=513, hq=6, hk=2, hm=1),
        Case("eviction", nq=1024, nk=1024, hq=4, hk=4, hm=4),
        Case("eviction", nq=512, nk=512, hq=14, hk=1, hm=14),
        Case("causal_document", nq=512, nk=512, hq=12, hk=2, hm=2),
        Case("causal", nq=4097, nk=4097, hq=1, hk=1),
        Case("causal", nq=32, nk=32, batch=284, hq=16, hk=4),
        Case("causal", nq=300, nk=200),
        Case("causal", nq=200, nk=300),
        Case("document", nq=500, nk=500, layout="bhsd"),
        Case("document", nq=500, nk=500, layout="expand"),
        Case("two", nq=500, nk=500, f32=True, dlse=True),
        Case("causal", nq=2048, nk=2048, hq=28, hk=4, f32=True),
        Case("blocks", nq=1000, nk=1000),
        Case("blocks_causal", nq=640, nk=640, hq=4, hk=2, hm=2, nan=True),
        Case("two", nq=500, nk=700, hm=2, nan=True),
    ]
    det = [
        Case("full", nq=512, nk=1024, deterministic=True, repeat=20),
        Case("causal", nq=2048, nk=2048, hq=4, hk=2, deterministic=True, repeat=20),
        Case("two", nq=1000, nk=3000, hm=2, deterministic=True, repeat=20),
        Case("alternate", nq=1100, nk=1100, deterministic=True, repeat=20),
        Case("lts_zero", nq=512, nk=1024, hq=4, hk=1, deterministic=True, repeat=20),
        Case("blocks", nq=1000, nk=1000, deterministic=True, repeat=20),
        Case("causal_document", nq=16384, nk=16384, hq=1, hk=1, deterministic=True),
    ]
    out = {}
    for dim, dtype in ((128, "bf16"), (64, "bf16"), (256, "bf16"), (128, "f16")):
        cases = [replace(c, dim=dim, dtype=dtype) for c in base]
        out[f"d{dim}-{dtype}"] = cases
        out[f"d{dim}-{dtype}-more"] = [replace(c, dim=dim, dtype=dtype) for c in more]
        out[f"d{dim}-{dtype}-det"] = [replace(c, dim=dim, dtype=dtype) for c in det]
    return out


# ---------------------------------------------------------------- timing


def timings() -> Iterator[dict[str, object]]:
    """Milliseconds of the three kernels and of the whole call, TFLOP/s of the main kernel and of the call."""
    from maskc.codegen.spec_bwd import select_backward
    from maskc.runtime import hopper_bwd

    def bench(
        mask: str, n: int, batch: int, heads: int, hk: int, dim: int, density: float, deterministic: bool = False, **tune: int
    ) -> dict[str, object]:
        hopper_bwd.GROUP = tune.pop("group", 1)
        hopper_bwd.select_backward = lambda *a, **k: replace(select_backward(*a, **k), **tune)
        case = Case(mask, nq=n, nk=n, batch=batch, hq=heads, hk=hk, dim=dim, deterministic=deterministic)
        v = vectors(replace(case, batch=1), "cuda")
        q, k, val, dout = inputs(case, "cuda")
        lse = torch.full((batch, heads, n), 9.5, device="cuda")
        marks: list[torch.cuda.Event] = []
        real = hopper_bwd.launch

        def timed(*args: object, **kwargs: object) -> None:
            real(*args, **kwargs)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        rows = []
        hopper_bwd.launch = timed
        for i in range(13):
            marks.clear()
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            hopper_bwd.backward(v, q, k, val, q, lse, dout, None, dim**-0.5, deterministic)
            if i >= 3:
                rows.append((start, *marks))
        torch.cuda.synchronize()
        hopper_bwd.launch = real
        spans = [[a.elapsed_time(b) for a, b in zip(r, r[1:], strict=False)] for r in rows]
        pre, main, post = (sorted(s[i] for s in spans)[len(spans) // 2] for i in range(3))
        order = round(sum(s[1] for s in spans) / len(spans), 4) if len(spans[0]) == 4 else 0.0
        if order:
            spans = [[x[0], x[2], x[3]] for x in spans]
            pre, main, post = (sorted(s[i] for s in spans)[len(spans) // 2] for i in range(3))
        flop = 10 * batch * heads * n * n * dim * density
        return {
            "case": f"{mask} S={n} B={batch} H={heads}/{hk} D={dim}{' det' if deterministic else ''} g={hopper_bwd.GROUP} {tune}",
            "pre": round(pre, 3),
            "main": round(main, 3),
            "post": round(post, 3),
            "order": order,
            "tflops_main": round(flop / main / 1e9, 1),
            "tflops_all": round(flop / (pre + main + post) / 1e9, 1),
        }

    torch.manual_seed(0)
    orders = [{"ahead": a, "dq_bulk": b} for a in (0, 1) for b in (1, 0)]
    for _ in range(2):
        for tune in (
            *orders,
            {"ahead": 0, "slots": 3},
            {"ahead": 0, "dq_bulk": 0, "slots": 3},
            {"ahead": 1, "dq_bulk": 0, "slots": 3},
        ):
            yield bench("full", 8192, 4, 32, 32, 128, 1.0, **tune)
            yield bench("causal", 8192, 4, 32, 32, 128, 0.5, **tune)
        for tune in orders:
            yield bench("full", 8192, 4, 32, 32, 64, 1.0, **tune)
            yield bench("causal", 8192, 4, 32, 32, 64, 0.5, **tune)
            yield bench("sliding", 8192, 4, 32, 32, 128, 0.0606, **tune)
        for ahead in (0, 1):
            yield bench("full", 8192, 4, 16, 16, 256, 1.0, ahead=ahead)
    for group in (1, 8):
        for many in (0, 16):
            hopper_bwd._MANY = many
            yield bench("document", 8192, 1, 16, 16, 128, 1.0, group=group)


def worker(name: str) -> None:
    if name == "time":
        for row in timings():
            print(json.dumps(row), flush=True)
        return
    from maskc.runtime import hopper_bwd

    hopper_bwd.compile_cubin = partial(hopper_bwd.compile_cubin, defines=("MASKC_BOUNDED_WAITS",))  # a hang becomes a trap
    poison()
    name, _, options = name.partition("@")
    if options:
        tune = {k: int(x) for k, x in (o.split("=") for o in options.split(","))}
        select = hopper_bwd.select_backward
        hopper_bwd.select_backward = lambda *a, **k: replace(select(*a, **k), **tune)
    for case in groups()[name]:
        begin = time.time()
        try:
            reason = run(case)
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"[:600]
        print(
            json.dumps({"group": name, "case": case.name, "wrong": reason, "seconds": round(time.time() - begin, 2)}), flush=True
        )
        if "CUDA error" in reason or "failed: CUDA" in reason:
            break  # the context is lost


def spawn(name: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "tests.gpu.bringup_bwd", "--worker", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        out, tail = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as e:
        out, tail = (e.stdout or b"").decode(), "timeout"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if tail:
        rows.append({"group": name, "case": f"after {len(rows)} cases", "wrong": tail})
    return rows


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--worker"]:
        worker(arguments[1])
        return 0
    names = [a for a in arguments if not a.startswith("-")] or list(groups())
    with ThreadPoolExecutor(8) as pool:
        rows = [row for part in pool.map(spawn, names) for row in part]
    if "--time" in arguments:
        rows += spawn("time")
    Path("bringup_bwd.json").write_text(json.dumps(rows, indent=1))
    bad = [r for r in rows if r.get("wrong")]
    for r in rows:
        if "wrong" not in r:
            print(r)
    for r in bad:
        print("WRONG", r["group"], "|", r["case"], "|", r["wrong"])
    print(f"{len([r for r in rows if r.get('wrong') == ''])} right, {len(bad)} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
