"""The Hopper backward alone against dense fp64: regressions and protocol checks for `python -m tests.gpu`.

Rule: max|x - ref| <= 2 max|naive - ref| + 2 max|(ref + 0.3) - 0.3 - ref| with `naive` the same formulas by torch in the
kernel's dtype; what is not finite is reported first. Added to it is what fp32 cannot give: a dP - dpsum that cancels (a
row that sees one key) is off by 2^-22 sum|dO V|, times the other factors, though `naive` may be exact there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import attention
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import Dtype
from maskc.runtime.hopper import mask_form


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
    nan: bool = False  # NaN in keys that no row sees, in rows that see nothing, and in their output
    f32: bool = False  # fp32 output of the forward and fp32 gradients
    layout: str = "bshd"  # bhsd: strided views; expand: dO with stride 0; odd: dO that no bulk copy can address
    repeat: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        plain = {k: v for k, v in asdict(self).items() if v != getattr(Case, k, None) or k in ("nq", "nk", "dim")}
        return "bwd " + " ".join(f"{k}={v}" for k, v in plain.items())


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
        case "window_narrow":
            parts |= {"lts": shaped(key + 60), "ute": shaped(key - 60)}
        case "last_key":
            parts["lts"], parts["ute"] = ints(nq // 2, nq), ints(0, nq // 2)
        case "ends_at_nq":
            parts |= {"lts": shaped(key), "lte": shaped(torch.full((nk,), nq)), "uts": shaped(key * 0), "ute": shaped(key // 2)}
        case "hidden_from_itself":
            causal, parts["lts"] = True, shaped(torch.where(key < nk // 3, key, nq))
        case "bottom_right":
            parts["ute"] = shaped(key + nq - nk)
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
    on = {name: None if t is None else at_the_end(t.to(device)) for name, t in parts.items()}
    return BoundaryVectors(nq, nk, b, h, causal, **on, blocks=blocks)


def at_the_end(t: Tensor) -> Tensor:
    """The same values as the last ones of their allocation."""
    room = t.new_empty(max(t.numel(), 1 << 18))
    return room[room.numel() - t.numel() :].copy_(t.flatten()).view(t.shape)


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
    if case.layout == "odd":
        dout = torch.cat((dout, dout[..., :1]), -1)[..., 1:]
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
        q, dout, out = (t.masked_fill(dead[..., None], torch.nan) for t in (q, dout, out))
    grad = torch.float32 if case.f32 else None

    def once() -> tuple[Tensor, Tensor, Tensor]:
        return backward(v, q, k, val, out, lse, dout, dlse, case.dim**-0.5, case.deterministic, grad_dtype=grad)

    with poisoned():
        results = [once() for _ in range(case.repeat)]
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


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty and Tensor.new_empty give memory full of NaN."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*args: object, **kwargs: object) -> Tensor:
            t = make(*args, **kwargs)
            if t.is_cuda and t.numel():
                t.view(torch.uint8).fill_(255)
            return t

        return fill

    plain = torch.empty, torch.Tensor.new_empty
    torch.empty, torch.Tensor.new_empty = (filled(make) for make in plain)
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = plain


# ---------------------------------------------------------------- what is run

REGRESSIONS: tuple[Case, ...] = (
    Case("blocks", nq=640, nk=20000, hq=1, hk=1),  # a block table over more than 16K keys
    Case("last_key", nq=300, nk=129),  # vectors at the very end of an allocation, one key in the last tile
    Case("ends_at_nq", nq=130, nk=256),  # the last Q block is ragged and the intervals end at nq
    *(Case("window", nq=512, nk=n, hq=1, hk=1) for n in (16383, 16384, 16385, 32769)),
    Case("full", nq=512, nk=16384, hq=1, hk=1),
    Case("causal", nq=32, nk=32, batch=2840, hq=16, hk=4),
    Case("full", nq=1, nk=1000, hq=6, hk=2),
    *(Case("lts_zero", nq=512, nk=1024, hq=h, hk=2, deterministic=d, nan=True) for h in (2, 4) for d in (False, True)),
    Case("empty_rows", nq=512, nk=512, nan=True),
    Case("none", nq=200, nk=300, nan=True),
    Case("two", nq=500, nk=700, hm=2, nan=True),
    Case("two_causal", nq=700, nk=700),
    Case("swapped", nq=1024, nk=1024),
    Case("five", nq=600, nk=900),
    Case("global_window", nq=1024, nk=1024),
    Case("hidden_from_itself", nq=640, nk=640, nan=True),  # LTS[k] = k for a span that starts at 0
    Case("alternate", nq=1100, nk=1100),  # the Q blocks that are left alternate: first, last, middle
    Case("causal", nq=300, nk=200),
    Case("causal", nq=200, nk=300, nan=True),
    Case("bottom_right", nq=500, nk=300, nan=True),
    Case("eviction", nq=512, nk=512, hq=14, hk=1, hm=14),
    Case("eviction", nq=512, nk=512, hq=6, hk=2, hm=6),
    Case("causal_document", nq=512, nk=512, hq=12, hk=2, hm=2),
    Case("causal", nq=2048, nk=2048, hq=28, hk=4, f32=True),
    Case("two", nq=500, nk=500, f32=True, dlse=True),
    Case("document", nq=500, nk=500, layout="bhsd"),
    Case("document", nq=500, nk=500, layout="expand"),
    Case("document", nq=500, nk=500, layout="odd"),
    Case("blocks_causal", nq=640, nk=640, hq=4, hk=2, hm=2, nan=True),
    Case("causal", nq=1000, nk=1000, repeat=20),
    *(
        Case(m, nq=n, nk=n, hq=4, hk=2, deterministic=True, repeat=20)
        for m, n in (("causal", 2048), ("alternate", 1100), ("blocks", 1000))
    ),
    *(Case(m, nq=512, nk=1024, hq=4, hk=2, deterministic=True, repeat=20) for m in ("full", "two")),
)
EVERYWHERE = ("empty_rows", "lts_zero", "alternate", "two", "blocks_causal", "five")  # also at the other head dims, and in f16


FAR = Case("window_narrow", nq=65536, nk=65536, deterministic=True)
SMALL = Case("two", nq=500, nk=700, deterministic=True)


def cases() -> list[Case]:
    elsewhere = ((64, "bf16"), (256, "bf16"), (128, "f16"))
    more = [replace(c, dim=dim, dtype=dtype) for dim, dtype in elsewhere for c in REGRESSIONS if c.mask in EVERYWHERE]
    return list(dict.fromkeys((*REGRESSIONS, *more)))


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [
        *((case.name, partial(run, case)) for case in cases()),
        ("bwd offsets beyond 2^31 elements", far_offsets),
        ("bwd in a CUDA graph", captured),
        ("bwd on two streams at once", two_streams),
    ]


def sources() -> Iterator[CudaSource]:
    for case in (*cases(), FAR, SMALL):
        form = mask_form(vectors(replace(case, nq=64, nk=64), "cpu"))
        dtype: Dtype = "bf16" if case.dtype == "bf16" else "f16"
        yield from attention(form, case.dim, dtype, directions=("bwd",), deterministic=(case.deterministic,))


def far_offsets() -> str:
    """Heads of one large tensor get the same gradients, bit for bit, as alone: 2^31 elements lie before the last ones."""
    from maskc.runtime.hopper_bwd import backward

    n, heads, dim = FAR.nq, 264, FAR.dim
    v = vectors(FAR, "cuda")
    g = torch.Generator("cuda").manual_seed(0)
    q, k, val, dout = (torch.randn(1, n, heads, dim, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    lse = torch.randn(1, heads, n, generator=g, device="cuda") + 6
    whole = backward(v, q, k, val, q, lse, dout, None, dim**-0.5, True)
    for h in (0, heads - 1):
        one = [t[:, :, h : h + 1].contiguous() for t in (q, k, val, dout)]
        alone = backward(v, *one[:3], one[0], lse[:, h : h + 1], one[3], None, dim**-0.5, True)
        for name, a, b in zip(("dq", "dk", "dv"), whole, alone, strict=True):
            if not torch.equal(a[:, :, h : h + 1], b):
                return f"{name} of head {h} differs"
    return ""


def _small() -> tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]:
    from maskc.runtime.hopper_bwd import backward

    v, tensors = vectors(SMALL, "cuda"), inputs(SMALL, "cuda")
    q, k, val, dout = tensors
    lse = torch.full((1, SMALL.hq, SMALL.nq), 6.0, device="cuda")
    return lambda: backward(v, q, k, val, q, lse, dout, None, SMALL.dim**-0.5, True), tensors


def captured() -> str:
    call, tensors = _small()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = call()
    for t in tensors:
        t.copy_(torch.randn_like(t))
    graph.replay()
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(inside, call(), strict=True))
    return "" if same else "a replay differs from a plain call on the same values"


def two_streams() -> str:
    call, _ = _small()
    expected = call()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    wrong_ones = sum(not torch.equal(a, b) for r in results for a, b in zip(r, expected, strict=True))
    return f"{wrong_ones} gradients differ" if wrong_ones else ""
