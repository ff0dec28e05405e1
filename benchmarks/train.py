"""Whole training steps on packed documents: maskc, FlexAttention, and SDPA with a dense mask where that fits.

    python -m benchmarks.train [--model dense moe] [--attention maskc flex sdpa] [--seqlen 8192 ...] [--out FILE]
    python -m benchmarks.train --ablate [--world 8]
    python -m benchmarks.train --gpus 2 [--ablate] [--seqlen 32768]
    python -m benchmarks.train [...] --resume

A step is: bind the documents of a new batch, forward, loss, backward, AdamW. Documents change at every step. The attentions
take turns step by step, on the same batches and from the same weights, so that clocks and heat meet all alike. Of `--steps`
steps the `--drop` fastest and slowest are left out; what remains gives mean and standard deviation. "attention" is the forward
and backward of all layers' attention alone, on random tensors of the same shapes and the last batch's mask.

`--ablate` is the paper's ablation on simulated ranks, see `benchmarks.train_ablation`. `--gpus N` splits the sequence over N
GPUs, see `benchmarks.train_gpus`; with `--ablate` in every way between dual chunk and all of maskc, else in these two. Files are
written after every row. The first two share one, and keep what the other wrote there, if it is of the same sources and machine.
`--resume` goes on where an earlier call was ended: rows that are there with as many steps are kept.

Without a GPU everything runs small and in fp32 or fp64, to be tested; such times say nothing and are not written by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).parents[1])

import maskc
from benchmarks import train_ablation, train_gpus
from benchmarks.digest import digest, digests
from benchmarks.machine import machine
from benchmarks.train_model import Attend, Shape
from benchmarks.train_steps import Batch, Setting, batches, learn, new_model, seconds, trimmed

RESULTS = Path(__file__).parent / "results"
IDENTITY = ("model", "shape", "attention", "row", "seqlen", "batch", "sparsity", "ranks", "link", "gpus")
"""What a row is, beside what was measured."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
WARM = 2
"""Steps before any is timed."""
DENSE_MASK_BYTES = 256 << 20
"""SDPA's mask may take this much; it makes a 16-bit copy of it, and reads it for every head."""


Row: TypeAlias = dict[str, Any]


class CannotRun(Exception):
    """Why an attention is left out."""


# ---------------------------------------------------------------- attention


def with_maskc(s: Setting) -> Callable[[Batch], Attend]:
    mask = maskc.compile("std:doc_causal")

    def of(batch: Batch) -> Attend:
        spec = mask.bind(doc=maskc.segments(lengths=batch.lengths), nq=s.seqlen, nk=s.seqlen)
        return lambda q, k, v: maskc.run(spec, q, k, v)

    return of


def with_flex(s: Setting) -> Callable[[Batch], Attend]:
    if s.device.type == "cpu":
        raise CannotRun("FlexAttention has no backward on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, make = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)

    def of(batch: Batch) -> Attend:
        ids = ids_of(batch.lengths, s.device)
        mod = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)  # noqa: E731  # as its users write it
        blocks = make(mod, None, None, s.seqlen, s.seqlen, device=str(s.device), BLOCK_SIZE=128)
        return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return of


def with_sdpa(s: Setting) -> Callable[[Batch], Attend]:
    """Keys are repeated for their query heads: no fused kernel of SDPA takes both a mask and fewer key heads."""
    if s.seqlen**2 > DENSE_MASK_BYTES:
        raise CannotRun(f"a dense mask of {s.seqlen} x {s.seqlen} is over {DENSE_MASK_BYTES >> 20} MiB")

    def of(batch: Batch) -> Attend:
        ids = ids_of(batch.lengths, s.device)
        dense = (ids[:, None] == ids[None, :]).tril()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense).transpose(1, 2)

        return attend

    return of


def ids_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


ATTENTION: dict[str, Callable[[Setting], Callable[[Batch], Attend]]] = {
    "maskc": with_maskc,
    "flex": with_flex,
    "sdpa": with_sdpa,
}


def attention_seconds(attend: Attend, s: Setting, shape: Shape, repeats: int = 7) -> tuple[float, float]:
    """(forward, backward) of one layer's attention, medians of as many calls."""
    generator = torch.Generator(s.device).manual_seed(0)

    def made(heads: int) -> Tensor:
        size = (s.batch, s.seqlen, heads, shape.head_dim)
        return torch.randn(size, dtype=s.dtype, device=s.device, generator=generator)

    qkv = [made(h).requires_grad_() for h in (shape.heads, shape.kv_heads, shape.kv_heads)]
    dout = made(shape.heads)
    forward, backward = [], []
    outs: list[Tensor] = []
    for _ in range(1 + repeats):
        forward.append(seconds(lambda: outs.append(attend(*qkv)), s.device))
        backward.append(seconds(lambda: torch.autograd.grad(outs.pop(), qkv, dout), s.device))
    return statistics.median(forward[1:]), statistics.median(backward[1:])


# ---------------------------------------------------------------- steps


class Trainee:
    """A model that learns under one attention."""

    def __init__(self, attends: Callable[[Batch], Attend], shape: Shape, s: Setting) -> None:
        self.attends, self.shape, self.setting = attends, shape, s
        self.model, self.optimizer = new_model(shape, s)
        self.times: list[float] = []
        self.losses: list[float] = []
        self.attend: Attend | None = None

    def step(self, batch: Batch) -> None:
        losses: list[Tensor] = []

        def run() -> None:
            self.attend = self.attends(batch)
            losses.append(learn(self.model, self.optimizer, batch, self.attend))

        self.times.append(seconds(run, self.setting.device))
        self.losses.append(losses[0].item())

    def row(self) -> dict[str, Any]:
        s = self.setting
        assert self.attend is not None
        mean, deviation = trimmed(self.times[WARM:], s.drop)
        forward, backward = (self.shape.layers * t for t in attention_seconds(self.attend, s, self.shape))
        return {
            "steps": s.steps,
            "first_step_s": self.times[0],
            "step_ms": 1e3 * mean,
            "step_std_ms": 1e3 * deviation,
            "tokens_per_s": s.batch * s.seqlen / mean,
            "attention_forward_ms": 1e3 * forward,
            "attention_backward_ms": 1e3 * backward,
            "attention_share": (forward + backward) / mean,
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
        }


def compare(names: Sequence[str], shape: Shape, s: Setting, sparsity: float) -> Iterator[dict[str, Any]]:
    """One row for each attention."""
    trainees: dict[str, Trainee] = {}
    problems: dict[str, str] = {}
    data = batches(s, shape.vocabulary, sparsity, seed=1)
    for name in names:
        try:
            trainees[name] = Trainee(ATTENTION[name](s), shape, s)
        except CannotRun as e:
            problems[name] = str(e)
    for _ in range(WARM + s.steps):
        batch = next(data)
        for name, trainee in list(trainees.items()):
            try:
                trainee.step(batch)
            except torch.OutOfMemoryError:
                problems[name] = "out of memory"
                del trainees[name]
            except Exception as e:
                if name == "maskc":
                    raise
                first_line = str(e).partition("\n")[0]
                problems[name] = f"{type(e).__name__}: {first_line[:200]}"  # a peer that fails costs its row only
                del trainees[name]
            else:
                if len(trainee.times) == 1:
                    print(f"{name}: first step {trainee.times[0]:.1f} s", flush=True)
    for name in names:
        row = trainees[name].row() if name in trainees else {"problem": problems[name]}
        yield {"attention": name, "seqlen": s.seqlen, "batch": s.batch, "sparsity": sparsity, **row}


# ---------------------------------------------------------------- command line


def shapes(a: argparse.Namespace) -> dict[str, Shape]:
    dense = Shape(a.layers, a.width, a.heads, a.kv_heads, a.head_dim, a.hidden, a.vocabulary)
    return {"dense": dense, "moe": replace(dense, hidden=a.expert_hidden, experts=a.experts, active=a.active)}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.train", description=(__doc__ or "").splitlines()[0])
    p.add_argument(
        "--model", nargs="+", choices=("dense", "moe"), default=None, help="default: both; with --ablate or --gpus, dense"
    )
    p.add_argument("--attention", nargs="+", choices=tuple(ATTENTION), default=list(ATTENTION))
    p.add_argument(
        "--seqlen", type=int, nargs="+", default=None, help="default 8192; with --gpus 32768; with --ablate 8192 a rank"
    )
    p.add_argument("--batch", type=int, default=1)
    p.add_argument(
        "--sparsity", type=float, nargs="+", default=None, help="shares of cells that documents hide: 0.86; with --ablate three"
    )
    p.add_argument("--steps", type=int, default=None, help="default 20; with --ablate on one device 70")
    p.add_argument(
        "--drop", type=int, default=None, help="of the fastest and of the slowest; default 3; with --ablate on one device 10"
    )
    p.add_argument("--layers", type=int, default=None, help="default 4; with --ablate on one device 2")
    for name, value in {"width": 2048, "heads": 64, "kv-heads": 8, "head-dim": 128, "hidden": 4096}.items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--vocabulary", type=int, default=32_000)
    p.add_argument("--experts", type=int, default=16)
    p.add_argument("--expert-hidden", type=int, default=2048, help="two active ones do the work of the dense MLP")
    p.add_argument("--active", type=int, default=2, help="experts a token goes to")
    p.add_argument("--dtype", choices=tuple(DTYPES), default=None, help="bf16 on a GPU, fp32 on a CPU")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument(
        "--ablate", action="store_true", help="the paper's ablation, ranks simulated on one device, or with --gpus on as many"
    )
    p.add_argument("--world", type=int, default=8, help="simulated ranks of --ablate")
    p.add_argument(
        "--link", choices=("host", "peer"), default="host", help="--ablate: other ranks in host memory, or on a second GPU"
    )
    p.add_argument("--seconds", type=float, default=inf, help="--ablate: begin no row after so many")
    p.add_argument("--resume", action="store_true", help="keep the rows of the file that have as many steps")
    p.add_argument("--out", type=Path, default=None, help="default on a GPU: train.json, or train_gpus.json; on a CPU none")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    a = p.parse_args(arguments)
    several = a.gpus > 1
    simulated = a.ablate and not several
    steps, drop = a.steps or (70 if simulated else 20), a.drop if a.drop is not None else (10 if simulated else 3)
    if a.device == "cuda" and a.gpus > torch.cuda.device_count():
        p.error(f"--gpus {a.gpus}: there are {torch.cuda.device_count()}")
    if simulated and a.batch != 1:
        p.error("--batch: the ablation packs everything into one sequence")
    if steps <= 2 * drop:
        p.error(f"--drop {drop} leaves nothing of --steps {steps}")
    if len(a.sparsity or ()) > 1 and not simulated:
        p.error("--sparsity: more than one is for --ablate on one device")
    a.layers = a.layers or (2 if simulated else 4)
    a.sparsity = tuple(a.sparsity or (train_ablation.SPARSITIES if simulated else (0.86,)))
    device = torch.device("cuda", torch.cuda.current_device()) if a.device == "cuda" else torch.device(a.device)
    dtype = DTYPES[a.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: times say nothing about GPUs"
    print(f"{name}; torch {torch.__version__}; {dtype}")
    out = a.out or (RESULTS / ("train_gpus.json" if several else "train.json") if device.type == "cuda" else None)
    file = File(out, "ablation" if simulated else "rows", a.resume, a.gpus)
    for model in a.model or (["dense"] if a.ablate or several else ["dense", "moe"]):
        for seqlen in a.seqlen or [8192 * a.world if simulated else 32_768 if several else 8192]:
            s = Setting(device, dtype, seqlen, a.batch, steps, drop)
            shape = shapes(a)[model]
            of = {"model": model, "shape": asdict(shape)}
            for row in run(shape, s, a, partial(file.there, steps, of)):
                file.put({**of, **row})
                print(line({**of, **row}), flush=True)
    return 0


def run(shape: Shape, s: Setting, a: argparse.Namespace, there: Callable[[Row], bool]) -> Iterator[Row]:
    """The rows that are not `there` already."""
    if a.ablate and a.gpus == 1:
        yield from train_ablation.rows(shape, s, a.sparsity, a.world, a.link, a.seconds, there)
        return
    (sparsity,) = a.sparsity
    same: Row = {"seqlen": s.seqlen, "sparsity": sparsity}
    if a.gpus > 1:
        ways = train_gpus.WAYS if a.ablate else (train_gpus.WAYS[0], train_gpus.WAYS[-1])
        wanted = [w for w in ways if not there({**same, "gpus": a.gpus, "row": w.name})]
        yield from train_gpus.rows(shape, s, a.gpus, sparsity, wanted)
    elif not all(there({**same, "batch": s.batch, "attention": name}) for name in a.attention):  # they take turns
        yield from compare(a.attention, shape, s, sparsity)


class File:
    """The rows under one key of the file, beside those of other keys where machine and sources are the same.

    path: None for no file. resume: begin with the rows that are there. gpus: over how many a sequence is split.
    """

    def __init__(self, path: Path | None, key: str, resume: bool, gpus: int) -> None:
        self.path, self.key = path, key
        sources: Row = {} if path is None else {"gpus": gpus, **digests()} if gpus > 1 else {"digest": digest()}
        self.head = {**machine(), **sources}
        before = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        self.kept = before if all(before.get(n) == v for n, v in self.head.items()) else {}
        self.rows: list[Row] = list(self.kept.get(key, ())) if resume else []

    def there(self, steps: int, of: Row, what: Row) -> bool:
        """Whether there is a row of so many steps that is this."""
        return any(r.get("steps", 0) >= steps for r in self.rows if all(r.get(n) == v for n, v in {**of, **what}.items()))

    def put(self, row: Row) -> None:
        """In the place of a row that is the same but for what was measured."""
        names = [n for n in row if n in IDENTITY]
        at = next((i for i, r in enumerate(self.rows) if all(r.get(n) == row[n] for n in names)), len(self.rows))
        self.rows[at : at + 1] = [row]
        if self.path is not None:
            data = {**self.kept, **self.head, self.key: self.rows}
            self.path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def line(r: dict[str, Any]) -> str:
    what = f"{r['model']:6}" + (
        f"{r['sparsity']:.0%} hidden  {r['row']:44}" if "row" in r else f"{r['seqlen']:6} {r['attention']:6}"
    )
    if "problem" in r:
        return f"{what} {r['problem']}"
    text = f"{what} {r['step_ms']:9.2f} ± {r['step_std_ms']:.2f} ms a step  {r['tokens_per_s']:10.0f} tokens/s"
    if "attention_share" in r:
        times = f"{r['attention_forward_ms']:.2f} + {r['attention_backward_ms']:.2f} ms, {r['attention_share']:.0%}"
        return f"{text}  attention {times}  loss {r['first_loss']:.4f} to {r['last_loss']:.4f}"
    loss = f"  loss {r['first_loss']:.4f} to {r['last_loss']:.4f}" if "first_loss" in r else ""
    host = f", enqueued after {r['enqueue_ms']:.1f} ms" if "enqueue_ms" in r else ""
    return f"{text}  imbalance {r['imbalance']:.3f}{host}{loss}"


if __name__ == "__main__":
    raise SystemExit(main())
