"""`maskc bench`: the user's own mask, on the user's own machine, against FlexAttention, once both are seen to agree.

FlexAttention gets the mask as a `mask_mod` over the same boundary vectors and builds its own BlockMask from it. Every
figure is a median; the two run in turns, so that clocks and heat meet both alike. FlexAttention has no backward on a CPU:
there only outputs are compared.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.constructors import SetSource
from maskc.compiled import CompiledMask
from maskc.convert.flex import to_mask_mod
from maskc.diagnostics import error
from maskc.inputs import Inputs
from maskc.pictures import tile_counts, visible_pairs
from maskc.runtime.ops import backend_module
from maskc.runtime.run import backend_for, run, vectors_for
from maskc.tiles import classify

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RESULTS = ("out", "dq", "dk", "dv")
_ROUNDS = 3
STEPS = 2 + _ROUNDS
_SECONDS = 0.3  # of repetitions for one figure in one round
_CPU_CELLS = 1 << 28  # scores that FlexAttention may hold at once on a CPU, where it is dense

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes that a mask does not say."""

    heads: int = 32
    kv_heads: int | None = None
    head_dim: int = 128
    dtype: str = "bf16"
    batch: int = 1
    device: str = "cuda"


@dataclass(frozen=True, slots=True)
class Figures:
    """One side. Milliseconds but for `first_step`, seconds of the first forward and backward, compilation included.

    mask: data -> everything that the kernels read, `bind` included; host and device. forward, backward: of the device alone,
    where it is a GPU. backward: None where there is none.
    """

    first_step: float
    mask: float
    forward: float
    backward: float | None

    @property
    def new_mask_step(self) -> float | None:
        """A step whose mask has new data."""
        return None if self.backward is None else self.mask + self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Report:
    """What `maskc bench` prints. distance: relative distance of each result from FlexAttention's; allowed: the bound."""

    mask: str
    setting: Setting
    nq: int
    nk: int
    machine: str
    backend: str
    density: float
    tiles: dict[str, int]
    distance: dict[str, float]
    allowed: float
    maskc: Figures
    flex: Figures

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def render(self) -> str:
        s, work = (
            self.setting,
            4 * self.density * self.nq * self.nk * self.setting.head_dim * self.setting.heads * self.setting.batch,
        )
        tiles = ", ".join(f"{n} {name}" for name, n in self.tiles.items())
        distances = ", ".join(f"{name} {d:.1e}" for name, d in self.distance.items())
        rows: list[tuple[str, str, float | None, float | None, float]] = [
            ("forward", "ms", self.maskc.forward, self.flex.forward, work),
            ("backward", "ms", self.maskc.backward, self.flex.backward, 2.5 * work),
            ("new mask", "ms", self.maskc.mask, self.flex.mask, 0.0),
            ("step with a new mask", "ms", self.maskc.new_mask_step, self.flex.new_mask_step, 0.0),
            ("first step", "s", self.maskc.first_step, self.flex.first_step, 0.0),
        ]
        lines = [
            f"{self.mask}: {self.nq} rows x {self.nk} keys, batch {s.batch}, {s.heads} heads ({s.kv_heads or s.heads} kv), "
            f"head dim {s.head_dim}, {s.dtype}",
            f"on {self.machine}, backend {self.backend}; density {self.density:.4f}; tiles of 128 x 128: {tiles}",
            f"relative distance from FlexAttention: {distances} (allowed {self.allowed:.1e})",
            "",
            f"{'':24}{'maskc':>26}{'FlexAttention':>26}{'ratio':>8}",
        ]
        for name, unit, mine, theirs, flop in rows:
            cells = "".join(f"{_cell(x, flop if s.device == 'cuda' else 0.0):>26}" for x in (mine, theirs))
            ratio = "" if mine is None or theirs is None else f"{theirs / mine:.2f}"
            lines.append(f"{f'{name}, {unit}':24}{cells}{ratio:>8}".rstrip())
        return "\n".join(lines)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def bench(mask: CompiledMask, given: Inputs, setting: Setting, tick: Callable[[str], None] = lambda _: None) -> Report:
    """Time a mask with the data of one batch. Raises M514 where maskc and FlexAttention disagree, M515 for too much on a CPU.

    tick: called at the start of each of `STEPS` steps with what it is, for a progress bar.
    """
    device = torch.device(setting.device)
    inputs = {name: _on_device(value, device) for name, value in given.values.items()}

    def bind() -> BoundMask:
        return mask.bind(nq=given.nq, nk=given.nk, batch=given.batch, **inputs)  # type: ignore[arg-type]

    vectors = bind().vectors()
    nq, nk = vectors.nq, vectors.nk
    setting = replace(setting, batch=given.batch or setting.batch)
    if device.type == "cpu" and nq * nk * setting.heads * setting.batch > _CPU_CELLS:
        fit = _CPU_CELLS // (nq * nk * setting.batch)
        hint = f"take fewer heads (--heads {fit})" if fit else "take a shorter sequence"
        raise error("M515", f"FlexAttention is dense on a CPU, and {nq} x {nk} scores a head are too many", None, hint)
    tensors = _tensors(setting, nq, nk, device)
    mine, theirs = _maskc(bind, tensors), _flex(bind, nq, nk, setting, device)
    sides = mine, theirs
    first_steps, results = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # meant on a CPU
        for side in sides:
            tick(f"first step of {side.name}, which compiles")
            started = time.perf_counter()
            results.append(_step(side, side.make(), tensors))
            wait(device)
            first_steps.append(time.perf_counter() - started)
    allowed = _allowed(setting, nk)
    distance = {name: _distance(a, b) for name, a, b in zip(RESULTS, *results, strict=False)}
    if (worst := max(distance, key=lambda name: distance[name])) and not distance[worst] <= allowed:
        raise error("M514", f"{worst} of maskc and FlexAttention differ by {distance[worst]:.1e}, {allowed:.1e} is allowed")
    times = _times(sides, tensors, device, tick)
    on_cpu = bind().vectors(device="cpu")
    return Report(
        mask.name,
        setting,
        nq,
        nk,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        backend_for(tensors[0], "auto"),
        visible_pairs(on_cpu) / max(1, on_cpu.batch * on_cpu.heads * nq * nk),
        {c.name.lower(): n for c, n in tile_counts(classify(on_cpu, 128, 128)).items()},
        distance,
        allowed,
        Figures(first_steps[0], *times[0]),
        Figures(first_steps[1], *times[1]),
    )


# ---------------------------------------------------------------- the two sides


@dataclass(frozen=True, slots=True)
class _Side:
    """`make` turns the data into an attention function; everything that a new mask costs is in it."""

    name: str
    make: Callable[[], Attend]
    differentiable: bool = True


def _maskc(bind: Callable[[], BoundMask], tensors: tuple[Tensor, ...]) -> _Side:
    q, k = tensors[:2]
    backend = backend_module(backend_for(q, "auto"))

    def make() -> Attend:
        spec = bind()
        spec.schedule(vectors_for(spec, q, k), q.shape[3], backend.schedule)
        return lambda q, k, v: _only(run(spec, q, k, v))

    return _Side("maskc", make)


def _flex(bind: Callable[[], BoundMask], nq: int, nk: int, setting: Setting, device: torch.device) -> _Side:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = device.type == "cuda"
    attend: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    blocks_of: Any = torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask
    gqa = setting.kv_heads not in (None, setting.heads)
    vectors = bind().vectors(nq, nk, device)
    mod = to_mask_mod(vectors, query_heads=setting.heads)
    axes = vectors.batch if vectors.batch > 1 else None, setting.heads if vectors.heads > 1 else None

    def make() -> Attend:
        blocks = blocks_of(mod, *axes, nq, nk, device=str(device), BLOCK_SIZE=128)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = ((x if compiled else x.detach()).transpose(1, 2) for x in (q, k, v))
            out: Tensor = attend(*heads_first, block_mask=blocks, enable_gqa=gqa)
            return out.transpose(1, 2)

        return forward

    return _Side("FlexAttention", make, compiled)


def _only(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


# ---------------------------------------------------------------- running and timing


def _tensors(s: Setting, nq: int, nk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator(device).manual_seed(0)

    def make(n: int, heads: int) -> Tensor:
        return torch.randn(s.batch, n, heads, s.head_dim, generator=generator, device=device).to(DTYPES[s.dtype])

    kv_heads = s.kv_heads or s.heads
    q, k, v = make(nq, s.heads), make(nk, kv_heads), make(nk, kv_heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), make(nq, s.heads)


def _step(side: _Side, attend: Attend, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv), or (out,)."""
    *leaves, dout = tensors
    with torch.set_grad_enabled(side.differentiable):
        out = attend(leaves[0], leaves[1], leaves[2])
    return out.detach(), *(torch.autograd.grad(out, leaves, dout) if side.differentiable else ())


def _distance(a: Tensor, b: Tensor) -> float:
    """Relative, by the Frobenius norm; rows that see nothing count as zero, whatever FlexAttention leaves there."""
    a, b = a.double(), b.double().nan_to_num()
    return float((a - b).norm()) / max(float(b.norm()), torch.finfo(torch.float64).tiny)


def _allowed(s: Setting, nk: int) -> float:
    """Two results of one precision: rounding of operands, weights and results on both sides, and fp32 sums over nk terms."""
    rounding, summing = torch.finfo(DTYPES[s.dtype]).eps, math.sqrt(nk) * torch.finfo(torch.float32).eps
    return 4 * (rounding + summing)


def _times(
    sides: tuple[_Side, _Side], tensors: tuple[Tensor, ...], device: torch.device, tick: Callable[[str], None]
) -> list[tuple[float, float, float | None]]:
    """(mask, forward, backward) of each side. Forward as in training: FlexAttention compiles anew for any other."""
    *leaves, dout = tensors
    q, k, v = leaves
    attends = [side.make() for side in sides]
    found: list[tuple[list[float], list[float], list[float]]] = [([], [], []) for _ in sides]
    for number in range(_ROUNDS):
        tick(f"round {number + 1} of {_ROUNDS}")
        for side, attend, (mask, forward, backward) in zip(sides, attends, found, strict=True):
            call = partial(attend, q, k, v)
            mask += _repeat(partial(_wall_ms, side.make, device))
            with torch.set_grad_enabled(side.differentiable):
                forward += _repeat(partial(_gpu_ms, call, device))
            if side.differentiable:
                backward += _repeat(partial(_backward_ms, call, leaves, dout, device))
    return [(median(mask), median(forward), median(backward) if backward else None) for mask, forward, backward in found]


def _repeat(milliseconds: Callable[[], float]) -> list[float]:
    """A warm call, then as many as fit into the time, 3 to 20."""
    times: list[float] = []
    while len(times) < 4 or (sum(times[1:]) < 1e3 * _SECONDS and len(times) < 21):
        times.append(milliseconds())
    return times[1:]


def _wall_ms(call: Callable[[], object], device: torch.device) -> float:
    """Of host and device, until everything is done."""
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return 1e3 * (time.perf_counter() - started)


def _gpu_ms(call: Callable[[], object], device: torch.device) -> float:
    """Of a GPU alone: enqueued while it multiplies matrices, as in training, where the host is ahead."""
    if device.type != "cuda":
        return _wall_ms(call, device)
    ahead = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        ahead @ ahead
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    wait(device)
    return float(start.elapsed_time(end))


def _backward_ms(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, device: torch.device) -> float:
    """After a forward of its own: what FlexAttention saves serves one backward only."""
    return _gpu_ms(partial(torch.autograd.grad, forward(), leaves, dout), device)


def wait(device: torch.device) -> None:
    """Until everything that was enqueued there is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_device(value: object, device: torch.device) -> object:
    """Lists of numbers as tensors on the device, as a training loop holds them; what is ragged stays."""
    if isinstance(value, SetSource):
        return SetSource(value.kind, value.form, _on_device(value.data, device), value.pad)
    if not isinstance(value, list) or any(isinstance(x, SetSource) for x in value):
        return [_on_device(x, device) for x in value] if isinstance(value, list) else value
    try:
        return torch.tensor(value, device=device) if value else value
    except (TypeError, ValueError):
        return value


def _cell(value: float | None, flop: float) -> str:
    if value is None:
        return "-"
    rate = f" ({flop / value / 1e9:.3g} TFLOP/s)" if flop else ""
    return f"{value:.3g}{rate}"
