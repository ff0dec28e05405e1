"""The stages of a compile: `STAGES` is the one table of what there is and in which order.

    file -> ast -> ir -> intervals -> proof; with data -> vectors -> tiles; for kernels -> spec -> cuda -> ptx, cubin -> sass

A stage is a text (a cubin: bytes) made of products that a `Job` holds; a product is made once, when the first stage
asks for it. Nothing below `proof` is imported before a stage needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from maskc import __version__
from maskc.diagnostics import Diagnostic, error
from maskc.files import unwritable
from maskc.inputs import bind_file
from maskc.options import Options
from maskc.targets import compile_fn

if TYPE_CHECKING:
    from maskc.binding.bound import BoundMask
    from maskc.codegen.kernels import Kernel
    from maskc.codegen.nvrtc import Cubin
    from maskc.compiled import CompiledMask
    from maskc.frontend import TypedFile
    from maskc.frontend.ast import Module
    from maskc.ir.intervals import IntervalProgram
    from maskc.ir.nodes import MaskFn

# element types: the name that people use -> the name that templates use
DTYPES = {"bf16": "bf16", "fp16": "f16"}

# what one stage writes: (kernel name or "" for the mask, content)
Output = tuple[str, str | bytes]


@dataclass(frozen=True, slots=True)
class Request:
    """What to make.

    target: `FILE[:MASK]` or `std:NAME`. inputs: a JSON file (see `maskc.inputs`). kernels: names of
    `maskc.codegen.kernels.KERNELS`, None for all. block_q, block_kv: tile size of the stage `tiles`.
    """

    target: str
    options: Options = field(default_factory=Options.from_env)
    inputs: Path | None = None
    head_dim: int = 128
    dtype: str = "bf16"
    kernels: tuple[str, ...] | None = None
    deterministic: bool = False
    block_q: int = 128
    block_kv: int = 128


class Job:
    """The products of one request; each is made once, on first use."""

    def __init__(self, request: Request) -> None:
        self.request = request
        from maskc.frontend import split_target

        self.path, self.mask = split_target(request.target)

    @cached_property
    def module(self) -> Module:
        from maskc.frontend import parse_module

        return parse_module(self.path)

    @cached_property
    def file(self) -> TypedFile:
        from maskc.frontend import parse_file

        return parse_file(self.path)

    @cached_property
    def fn(self) -> MaskFn:
        return self.file.pick(self.mask)

    @cached_property
    def compiled(self) -> CompiledMask:
        return compile_fn(self.fn, self.file.warnings)

    @property
    def program(self) -> IntervalProgram:
        """Raises M544 for a mask that was neither proved nor refuted: it has no program and no kernels of its own."""
        if self.compiled.program is None:
            raise error("M544", f"`{self.fn.name}` is undecided, so it has no intervals to show", self.fn.span)
        return self.compiled.program

    @cached_property
    def bound(self) -> BoundMask:
        if self.request.inputs is None:
            raise error("M544", "the stages vectors and tiles are made from data", None, "give them with --inputs FILE.json")
        return bind_file(self.compiled, self.request.inputs)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        from maskc.codegen.kernels import KERNELS
        from maskc.codegen.kernels import Request as KernelRequest

        r = self.request
        names = tuple(KERNELS) if r.kernels is None else r.kernels
        if unknown := [name for name in names if name not in KERNELS]:
            raise error("M540", f"there is no kernel {unknown[0]!r}", None, f"there are {', '.join(KERNELS)}")
        asked = KernelRequest(self.fn, self.compiled.program, r.head_dim, DTYPES[r.dtype], r.deterministic)
        return tuple(kernel for name in names for kernel in KERNELS[name](asked))

    @cached_property
    def cubins(self) -> tuple[Cubin, ...]:
        from maskc.codegen.kernels import compile_all

        return compile_all(self.kernels)


# ---------------------------------------------------------------- the stages


@dataclass(frozen=True, slots=True)
class Stage:
    """needs: "mask" (the file alone), "data" (--inputs), "kernel" (code generation) or "nvrtc". check: see --check."""

    name: str
    suffix: str
    needs: Literal["mask", "data", "kernel", "nvrtc"]
    summary: str
    outputs: Callable[[Job], Iterator[Output]]
    check: Callable[[Job, int], None] | None = None


def _ast(job: Job) -> Iterator[Output]:
    from maskc.frontend.ast import print_module

    yield "", print_module(job.module)


def _ir(job: Job) -> Iterator[Output]:
    from maskc.ir.printer import print_fn

    yield "", print_fn(job.fn)


def _check_ir(job: Job, level: int) -> None:
    from maskc.verify import verify_fn

    verify_fn(job.fn)


def _intervals(job: Job) -> Iterator[Output]:
    from maskc.ir.printer import print_program

    yield "", print_program(job.program)


def _check_intervals(job: Job, level: int) -> None:
    from maskc.verify import verify_program, verify_with_oracle

    verify_program(job.fn, job.program)
    if level > 1:
        verify_with_oracle(job.fn, job.program)


def _proof(job: Job) -> Iterator[Output]:
    from maskc.ir.printer import print_check, print_verdict
    from maskc.ir.symbolic import prove

    claims = "".join(f"{print_check(c.check)}: {c.status}\n" for c in job.compiled.checks)
    yield "", print_verdict(prove(job.fn, certify=True)) + claims


def _vectors(job: Job) -> Iterator[Output]:
    from maskc.pictures import vectors_text

    yield "", vectors_text(job.bound.vectors())


def _tiles(job: Job) -> Iterator[Output]:
    from maskc.pictures import tiles_text
    from maskc.tiles import classify

    block_q, block_kv = job.request.block_q, job.request.block_kv
    yield "", tiles_text(classify(job.bound.vectors(), block_q, block_kv), block_q, block_kv)


def _spec(job: Job) -> Iterator[Output]:
    for kernel in job.kernels:
        yield kernel.name, kernel.spec.text()


def _cuda(job: Job) -> Iterator[Output]:
    for kernel in job.kernels:
        yield kernel.name, kernel.source.flat()


def _ptx(job: Job) -> Iterator[Output]:
    from maskc.codegen.nvrtc import compile_ptx

    for kernel in job.kernels:
        yield kernel.name, compile_ptx(kernel.source, options=kernel.options)


def _cubin(job: Job) -> Iterator[Output]:
    for kernel, cubin in zip(job.kernels, job.cubins, strict=True):
        yield kernel.name, cubin.image


def _sass(job: Job) -> Iterator[Output]:
    from maskc.codegen.disasm import disassemble

    for kernel, cubin in zip(job.kernels, job.cubins, strict=True):
        yield kernel.name, disassemble(cubin.image)


STAGES: tuple[Stage, ...] = (
    Stage("ast", "ast", "mask", "the file as parsed", _ast),
    Stage("ir", "ir", "mask", "the mask typed, with every let, const and use put in", _ir, _check_ir),
    Stage("intervals", "intervals", "mask", "rows that see a key, as a tree of row intervals", _intervals, _check_intervals),
    Stage("proof", "proof", "mask", "the verdict, its certificates, and the claims", _proof),
    Stage("vectors", "vectors", "data", "boundary vectors of a batch (needs --inputs)", _vectors),
    Stage("tiles", "tiles", "data", "tile classes of a batch (needs --inputs)", _tiles),
    Stage("spec", "spec", "kernel", "every number that a kernel is made of", _spec),
    Stage("cuda", "cu", "kernel", "generated CUDA sources", _cuda),
    Stage("ptx", "ptx", "nvrtc", "PTX (to read; never run)", _ptx),
    Stage("cubin", "cubin", "nvrtc", "machine code for sm_90a", _cubin),
    Stage("sass", "sass", "nvrtc", "disassembled machine code (needs nvdisasm)", _sass),
)


def stage(name: str) -> Stage:
    return next(s for s in STAGES if s.name == name)


# ---------------------------------------------------------------- running them


@dataclass(slots=True)
class Driver:
    """Runs stages of one job: keeps their times, and writes what `--dump-dir` wants."""

    job: Job
    times: list[tuple[str, float]] = field(default_factory=list)

    def outputs(self, wanted: Stage) -> list[Output]:
        """The outputs of one stage. With a dump folder, every stage up to it is written there as NN-name[.kernel].ext.

        Under --check, stages on the way that have a check are made and checked as well.
        """
        dump, level = self.job.request.options.dump_dir, self.job.request.options.check
        outputs: list[Output] = []
        for number, current in enumerate(STAGES):
            useful = dump is not None or (level > 0 and current.check is not None)
            if current is not wanted and not (useful and self._possible(current)):
                continue
            outputs = self._timed(current)
            if dump is not None:
                write_outputs(dump, f"{number:02}-{current.name}", current.suffix, outputs)
            if current is wanted:
                break
        return outputs

    def write(self, wanted: Stage, folder: Path) -> list[Path]:
        """Write the outputs of one stage as `mask[.kernel].suffix`."""
        return write_outputs(folder, self.job.fn.name, wanted.suffix, self.outputs(wanted))

    def warnings(self) -> tuple[Diagnostic, ...]:
        """Warnings of the front end and of the proof, as far as the stages that ran came."""
        return self.job.compiled.warnings if "compiled" in vars(self.job) else ()

    def _possible(self, current: Stage) -> bool:
        if current.name == "intervals":
            return self.job.compiled.program is not None
        return current.needs != "data" or self.job.request.inputs is not None

    def _timed(self, current: Stage) -> list[Output]:
        begin = time.perf_counter()
        outputs = list(current.outputs(self.job))
        self.times.append((current.name, time.perf_counter() - begin))
        if current.check is not None and (level := self.job.request.options.check):
            current.check(self.job, level)
        return outputs

    def times_text(self) -> str:
        """Seconds of each stage without what an earlier one had already made."""
        return "".join(f"{name:<10} {seconds * 1e3:9.1f} ms\n" for name, seconds in self.times)


def write_outputs(folder: Path, stem: str, suffix: str, outputs: list[Output]) -> list[Path]:
    """Write `stem[.kernel].suffix` files; makes the folder. Raises M541."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kernel, content in outputs:
            path = folder / f"{stem}{'.' + kernel if kernel else ''}.{suffix}"
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            written.append(path)
    except OSError as e:
        raise unwritable(folder, e) from None
    return written


def build(run: Driver, folder: Path | None) -> str:
    """Compile every kernel of a job, into a bundle where a folder is named; a line for each kernel."""
    job = run.job
    run.outputs(stage("cubin"))
    built = list(zip(job.kernels, job.cubins, strict=True))
    lines = []
    for kernel, cubin in built:
        r = cubin.kernel(kernel.entry)
        spilled, shared = r.spill_stores + r.spill_loads, r.shared + kernel.dynamic_shared
        lines.append(
            f"{kernel.name:<5} {r.registers} registers, {spilled} bytes spilled, {shared} bytes shared, {cubin.key[:12]}"
        )
    if folder is not None:
        from maskc.codegen.bundle import write_bundle

        try:
            lines.append(str(write_bundle(folder, job.fn, job.compiled.program, built, __version__)))
        except OSError as e:
            raise unwritable(folder, e) from None
    return "\n".join(lines) + "\n"
