"""The measurements as one page: benchmarks/results/*.json -> HTML that stands alone.

    python -m benchmarks.report [--results DIR] [--out FILE]

Every figure names the file that it comes from; one without data says so and how to get them. Gains are times of the peer
over times of maskc, forward and backward together, in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures
from benchmarks.figures import Data, NoData

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """A section of the page: `draw` makes its body of the contents of `file` in the folder of results."""

    id: str
    short: str
    title: str
    lead: str
    file: str
    command: str
    draw: Callable[[Data], str]


@dataclass(frozen=True)
class Section:
    id: str
    short: str
    title: str
    lead: str
    body: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS / "report.html")
    a = parser.parse_args()
    text = page(a.results)
    a.out.write_text(text, encoding="utf-8")
    print(f"{a.out}: {len(text) / 1e6:.2f} MB")
    return 0


def page(folder: Path) -> str:
    from maskc.report.page import render

    sections = [section(f, folder) for f in FIGURES]
    return render(
        "plain.html.j2",
        title="maskc, measured",
        lead="What the benchmarks wrote, drawn. Hover a mark for its value. Times of different runs are never put side by side.",
        sections=sections,
        footer="Made by python -m benchmarks.report. Densities and floating-point operations count visible cells exactly.",
    )


def section(figure: Figure, folder: Path) -> Section:
    path = folder / figure.file
    try:
        if not path.exists():
            raise NoData(f"{figure.file} is not there")
        data = _read(path)
        body = figure.draw(data) + f'<p class="quiet">{_origin(data, figure.file)}</p>'
    except NoData as e:
        body = f'<p class="empty">No data: {e}. To make them: <code>{figure.command}</code></p>'
    return Section(figure.id, figure.short, figure.title, figure.lead, body)


def _read(path: Path) -> Data:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise SystemExit(f"{path}: not JSON ({e})") from None
    if not isinstance(data, dict):
        raise SystemExit(f"{path}: expected an object")
    return data


def _origin(data: Data, file: str) -> str:
    known = [
        f"{name.replace('_', ' ')} {str(data[name])[:16] if name.endswith('digest') else data[name]}"
        for name in ("device", "torch", "nvrtc", "digest", "gated_digest")
        if name in data
    ]
    return "; ".join([file, *known])


ATTENTION = "python -m benchmarks.attention"
FIGURES: tuple[Figure, ...] = (
    Figure(
        "gains",
        "gains",
        "Gain over peers",
        "Time of the peer over time of maskc, forward and backward: geometric mean, least and greatest over masks and lengths.",
        "attention.json",
        ATTENTION,
        figures.gain_whiskers,
    ),
    Figure(
        "lengths",
        "by length",
        "Gain by length",
        "Geometric mean over the masks.",
        "attention.json",
        ATTENTION,
        figures.gain_by_length,
    ),
    Figure(
        "rates",
        "rates",
        "TFLOP/s of every mask",
        "Forward / backward, counting visible cells only.",
        "attention.json",
        ATTENTION,
        figures.rates,
    ),
    Figure(
        "new-mask",
        "new mask",
        "A new mask in every step",
        "What making the mask costs beside attention; least and greatest over the masks.",
        "new_mask.json",
        "python -m benchmarks.new_mask",
        figures.new_mask,
    ),
    Figure(
        "peers",
        "peers",
        "Peers by themselves",
        "TFLOP/s of other kernels on the same masks, in runs of their own: a yardstick, not a comparison.",
        "peers.json",
        "see docs/performance.md",
        figures.reference,
    ),
    Figure(
        "waiting",
        "waiting",
        "Where the forward kernel's roles spend their time",
        "From a trace of every role and tile; the loader waits for the queue, consumers for tiles.",
        "trace.json",
        "python -m benchmarks.trace",
        figures.waiting,
    ),
    Figure(
        "schedulers",
        "schedulers",
        "Schedulers",
        "Rate over that of the best scheduler in each cell: geometric mean over the masks, whiskers from least to greatest.",
        "scheduler.json",
        "python -m benchmarks.scheduler",
        figures.schedulers,
    ),
    Figure(
        "degree",
        "CP degree",
        "TFLOP/s by context-parallel degree",
        "8K rows a rank; the slowest rank and its exchange decide. Links are a model.",
        "scaling.json",
        "python -m benchmarks.scaling",
        figures.by_degree,
    ),
    Figure(
        "overlap",
        "overlap",
        "Overlap efficiency E",
        "1 − exposed / copies; one GPU, the keys of others in pinned host memory; mean, least and greatest. 1 hides everything.",
        "overlap.json",
        "python -m benchmarks.overlap",
        figures.efficiency,
    ),
    Figure(
        "gpus",
        "GPUs",
        "Between GPUs",
        "Forward and backward of the slowest GPU, by the way keys travel; E where it was taken.",
        "overlap_gpus.json",
        "python -m benchmarks.overlap --gpus 2",
        figures.between_gpus,
    ),
    Figure(
        "peaks",
        "peak / average",
        "Peak over average workload",
        "Real document layouts at 128K: mean over the layouts, whisker to the worst.",
        "balance_masks.json",
        "python -m benchmarks.balance",
        figures.peaks,
    ),
    Figure(
        "pruned",
        "pruned",
        "What is never sent",
        "Share of a full gather that no row of the receiver sees.",
        "balance_masks.json",
        "python -m benchmarks.balance",
        figures.pruned,
    ),
    Figure(
        "balancer",
        "balancer",
        "Balancer on random workloads",
        "LPT, then exact pairs (P2), then exact covers (P3); gaps are over the lower bound.",
        "balance.json",
        "python -m benchmarks.balance",
        figures.balancer,
    ),
    Figure(
        "training",
        "training",
        "Training steps",
        "Whole steps of a small decoder and a small mixture of experts, optimizer included; whiskers are one standard deviation.",
        "train.json",
        "python -m benchmarks.train",
        figures.training,
    ),
    Figure(
        "training-gpus",
        "training, GPUs",
        "Training steps over several GPUs",
        "One sequence split over the GPUs of a host; whiskers are one standard deviation.",
        "train_gpus.json",
        "python -m benchmarks.train --gpus 2 --ablate",
        figures.training_gpus,
    ),
    Figure(
        "ablation",
        "ablation",
        "The paper’s ablation, simulated",
        "One GPU plays the slowest rank; the keys of the others come out of pinned host memory. Not a cluster’s tokens/s.",
        "train.json",
        "python -m benchmarks.train --ablate",
        figures.ablation,
    ),
    Figure(
        "tests",
        "GPU tests",
        "Conformance on the GPU",
        "Every case against dense fp64.",
        "gpu_tests.json",
        "python -m tests.gpu",
        figures.tests,
    ),
)
"""In the order of the page."""

if __name__ == "__main__":
    raise SystemExit(main())
