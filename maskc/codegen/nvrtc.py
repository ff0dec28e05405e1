"""CudaSource -> Cubin by NVRTC, through the cache. Needs neither a GPU nor a driver.

The ptxas report (registers, spills, notes) is read from the compile log. What is compiled is a function of the source,
its headers, the options, the architecture and the NVRTC build: exactly the cache key.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from maskc.codegen import cache as store
from maskc.codegen.render import CudaSource
from maskc.diagnostics import Diagnostic, MaskcError, MaskcWarning, error
from maskc.options import Options

ARCH = "sm_90a"
TOO_NEW = (13, 3)
"""From here on ptxas finds no registers for kernels of head dim 128 that 13.0 to 13.2 compile well."""
# -Xptxas -v reports registers and spills; notes about wgmma and setmaxnreg (C75xx) come with or without it.
OPTIONS: tuple[str, ...] = ("--std=c++17", "-default-device", "-Xptxas=-v")


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of one kernel. Sizes in bytes; `shared` is static shared memory."""

    name: str
    registers: int
    barriers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled translation unit.

    image: the ELF file. source_key: sha256 of what was compiled (sources, options, architecture). key: of that and of
    the compiler's build. notes: ptxas remarks such as "(C7510) Potential Performance Loss: wgmma.mma_async ...".
    """

    name: str
    image: bytes
    source_key: str
    key: str
    arch: str
    nvrtc: str
    log: str
    kernels: tuple[Resources, ...]
    notes: tuple[str, ...]

    @property
    def registers(self) -> int:
        """The most registers that one of its kernels uses."""
        return max((k.registers for k in self.kernels), default=0)

    @property
    def spills(self) -> int:
        """Bytes of spill stores and loads of all its kernels."""
        return sum(k.spill_stores + k.spill_loads for k in self.kernels)

    @property
    def shared(self) -> int:
        """The most static shared memory, in bytes, that one of its kernels uses."""
        return max((k.shared for k in self.kernels), default=0)

    @property
    def stack(self) -> int:
        """The largest stack frame of its kernels, in bytes."""
        return max((k.stack for k in self.kernels), default=0)

    def kernel(self, name: str) -> Resources:
        return next(k for k in self.kernels if k.name == name)


def compile_cubin(
    source: CudaSource,
    *,
    arch: str = ARCH,
    options: Sequence[str] = OPTIONS,
    defines: Sequence[str] = (),
    cache_dir: Path | None = None,
) -> Cubin:
    """Compile to a cubin, or take the one that was installed or cached. `defines` are NAME or NAME=VALUE.

    Raises M601 without NVRTC and M602, with the compiler's log, where the source does not compile.
    """
    flags = (*options, *(f"-D{d}" for d in defines))
    source_key = _source_key("cubin", arch, flags, source)
    if source_key in _installed:
        return _installed[source_key]
    entry, key = _cached(source, source_key, arch, flags, "cubin", cache_dir)
    build, log = str(entry.meta["nvrtc"]), str(entry.meta["log"])
    cubin = make_cubin(source.name, entry.blobs["cubin"], source_key, key, arch, build, log)
    if cubin.notes:
        _say_slow_once(build)
    return cubin


@cache
def _say_slow_once(build: str) -> None:
    newer = ".".join(map(str, TOO_NEW))
    diagnostic = Diagnostic(
        "W613",
        f"NVRTC {build} serialises the tensor instructions of a kernel, which runs right but far below its rate",
        help=f'pip install "nvidia-cuda-nvrtc<{newer}"',
    )
    warnings.warn(diagnostic.render(), MaskcWarning, stacklevel=3)


def make_cubin(name: str, image: bytes, source_key: str, key: str, arch: str, nvrtc: str, log: str) -> Cubin:
    """A `Cubin` from its image and its compile log."""
    kernels, notes = parse_log(log)
    return Cubin(name, image, source_key, key, arch, nvrtc, log, kernels, notes)


def install(cubin: Cubin) -> None:
    """Let `compile_cubin` of the same source return this one, in this process, without NVRTC and whatever built it."""
    _installed[cubin.source_key] = cubin


def compile_ptx(
    source: CudaSource,
    *,
    arch: str = "compute_90a",
    options: Sequence[str] = OPTIONS,
    defines: Sequence[str] = (),
    cache_dir: Path | None = None,
) -> str:
    """PTX text, to read: maskc runs cubins only, for a driver older than NVRTC refuses its PTX. Errors as above."""
    flags = tuple(o for o in (*options, *(f"-D{d}" for d in defines)) if not o.startswith("-Xptxas"))
    entry, _ = _cached(source, _source_key("ptx", arch, flags, source), arch, flags, "ptx", cache_dir)
    return entry.blobs["ptx"].rstrip(b"\0").decode()


def version() -> str:
    """The NVRTC build, such as "13.0.88": the wheel's where it is the library in use, else major.minor. Raises M601."""
    nvrtc = _nvrtc()
    _, major, minor = _call(nvrtc.nvrtcVersion)
    release = f"{major}.{minor}"
    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            build = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        if build == release or build.startswith(release + "."):
            return build
    return release


def missing() -> MaskcError | None:
    """Why nothing can be compiled here (M601), or None."""
    try:
        version()
    except MaskcError as e:
        return e
    return None


_installed: dict[str, Cubin] = {}
_memo: dict[tuple[str, str], store.Entry] = {}


def _source_key(kind: str, arch: str, flags: tuple[str, ...], source: CudaSource) -> str:
    headers = [item for header in source.headers for item in header]
    return store.content_key(kind, arch, sorted(flags), source.text, headers)


def _cached(
    source: CudaSource, source_key: str, arch: str, flags: tuple[str, ...], kind: str, cache_dir: Path | None
) -> tuple[store.Entry, str]:
    build = version()
    key = store.content_key(source_key, build)
    folder = cache_dir if cache_dir is not None else Options.from_env().cache_dir
    entry = _memo.get((str(folder), key)) or store.load(folder, key)
    if entry is None:
        image, log = _compile(source, (f"--gpu-architecture={arch}", *flags), kind)
        entry = store.Entry({"name": source.name, "log": log, "nvrtc": build, "arch": arch}, {kind: image})
        store.store(folder, key, entry)
    _memo[str(folder), key] = entry
    return entry, key


def _compile(source: CudaSource, flags: tuple[str, ...], kind: str) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    _, program = _call(nvrtc.nvrtcCreateProgram, source.text.encode(), source.name.encode(), len(names), texts, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        log = _TIME.sub("", _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode())
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            old = status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION
            hint = f"this is NVRTC {version()}; maskc needs 12.8 or newer" if old else None
            raise error("M602", f"NVRTC refuses {source.name}: {status.name}", None, hint, ("log", log.strip()))
        if kind == "ptx":
            return _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), log
        return _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(size: Any, fill: Any, program: Any) -> bytes:
    _, n = _call(size, program)
    data = bytearray(n)
    _call(fill, program, data)
    return bytes(data)


def _call(function: Any, *args: object) -> tuple[Any, ...]:
    """Call NVRTC. The bindings load the library on the first call, so that is where a missing wheel shows."""
    try:
        result: tuple[Any, ...] = function(*args)
    except RuntimeError as e:  # what the bindings raise where they find no library, itself or a subclass
        raise _no_nvrtc(str(e)) from e
    if int(result[0]) != 0:
        raise error("M602", f"{function.__name__} failed: {result[0].name}")
    return result


@cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise _no_nvrtc(str(e)) from e
    return nvrtc  # type: ignore[no-any-return]


def _no_nvrtc(reason: str) -> MaskcError:
    first_line = reason.strip().split("\n")[0]
    return error(
        "M601", "compiling a kernel needs NVRTC, which is not installed", None, 'pip install "maskc[cuda]"', ("found", first_line)
    )


# ---------------------------------------------------------------- the compile log

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?")
_SHARED = re.compile(r"(\d+) bytes smem")
_TIME = re.compile(r".*Compile time = .*\n")  # equal sources give equal logs
_NOTE = re.compile(r"\(C\d{4}\).*")


def parse_log(log: str) -> tuple[tuple[Resources, ...], tuple[str, ...]]:
    """(resources of each kernel in the order of the log, performance notes) of an NVRTC log with `-Xptxas -v`."""
    kernels: list[dict[str, Any]] = []
    notes: list[str] = []
    for line in log.splitlines():
        if m := _ENTRY.search(line):
            kernels.append(asdict(Resources(m[1], 0, 0, 0, 0, 0, 0)))
        if m := _NOTE.search(line):
            notes.append(m[0].strip())
        if not kernels:
            continue
        if m := _FRAME.search(line):
            kernels[-1].update(stack=int(m[1]), spill_stores=int(m[2]), spill_loads=int(m[3]))
        if m := _USED.search(line):
            shared = _SHARED.search(line)
            kernels[-1].update(registers=int(m[1]), barriers=int(m[2] or 0), shared=int(shared[1]) if shared else 0)
    return tuple(Resources(**k) for k in kernels), tuple(notes)
