"""A folder with the compiled kernels of one mask: written by `maskc compile -o DIR`, run by `maskc.load(DIR)`.

`manifest.json` names every other file with its sha256, and is written last, in one step; file names carry a part of
their content's hash, so that a folder which is written again stays whole for whoever reads it meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maskc.codegen import disasm
from maskc.codegen.cache import write_atomic
from maskc.codegen.kernels import Kernel, KernelSpec
from maskc.codegen.nvrtc import Cubin, install, make_cubin
from maskc.diagnostics import MaskcError, error
from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import MaskFn
from maskc.ir.printer import print_fn, print_program
from maskc.ir.reader import read_fn, read_program

MANIFEST = "manifest.json"
FORMAT = 1
COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "LDL", "STL")


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel as a bundle holds it. `spec` is `KernelSpec.as_json()`; the rest as in `Kernel`."""

    name: str
    entry: str
    spec: Mapping[str, object]
    dynamic_shared: int
    cubin: Cubin


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read back and found whole. `program` is None for a mask that only its data decide (W301)."""

    folder: Path
    fn: MaskFn
    program: IntervalProgram | None
    kernels: tuple[BuiltKernel, ...]

    def holds(self, name: str, spec: KernelSpec) -> bool:
        """Whether it has the kernel `name` of exactly this spec."""
        wanted = json.loads(json.dumps(spec.as_json()))
        return any(k.name == name and k.spec == wanted for k in self.kernels)

    def install(self) -> None:
        """From now on, in this process, these cubins stand for their sources; nothing of them is compiled."""
        for kernel in self.kernels:
            install(kernel.cubin)


def write_bundle(
    folder: Path, fn: MaskFn, program: IntervalProgram | None, built: Sequence[tuple[Kernel, Cubin]], maskc_version: str
) -> Path:
    """Write sources, cubins, the mask and `manifest.json`; the path of the manifest. Raises OSError.

    Files of an earlier bundle in the same folder that the new one does not name are deleted; others are left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _listed(folder)
    manifest: dict[str, object] = {
        "format": FORMAT,
        "maskc": maskc_version,
        "mask": fn.name,
        "ir": _put(folder, fn.name, "ir", print_fn(fn).encode()),
        "intervals": None if program is None else _put(folder, fn.name, "intervals", print_program(program).encode()),
        "kernels": [_describe(folder, kernel, cubin) for kernel, cubin in built],
    }
    write_atomic(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    for name in before - _listed(folder):
        (folder / name).unlink(missing_ok=True)
    return folder / MANIFEST


def load_bundle(folder: Path, maskc_version: str) -> Bundle:
    """Read a bundle back; needs neither NVRTC nor a GPU. Raises M608 where it is damaged or of another version."""
    while True:
        text = _manifest(folder)
        try:
            return _read(folder, text, maskc_version)
        except MaskcError:
            if _manifest(folder) == text:
                raise  # else it was written anew while it was read


def _manifest(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError as e:
        raise _refused(folder, f"{MANIFEST}: {(e.strerror or str(e)).lower()}") from e


def _read(folder: Path, text: bytes, maskc_version: str) -> Bundle:
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT or manifest["maskc"] != maskc_version:
            raise _refused(folder, f"made by maskc {manifest['maskc']}, this is {maskc_version}")
        intervals = manifest["intervals"]
        return Bundle(
            folder,
            read_fn(_take(folder, manifest["ir"]).decode()),
            None if intervals is None else read_program(_take(folder, intervals).decode()),
            tuple(_built(folder, k) for k in manifest["kernels"]),
        )
    except OSError as e:
        raise _refused(folder, f"{Path(e.filename or folder).name}: {(e.strerror or str(e)).lower()}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise _refused(folder, f"{MANIFEST} is not what maskc writes ({type(e).__name__}: {e})") from e


def _describe(folder: Path, kernel: Kernel, cubin: Cubin) -> dict[str, object]:
    resources = cubin.kernel(kernel.entry)
    return {
        "name": kernel.name,
        "entry": kernel.entry,
        "spec": kernel.spec.as_json(),
        "source": _put(folder, kernel.name, "cu", kernel.source.flat().encode()),
        "cubin": _put(folder, kernel.name, "cubin", cubin.image),
        "log": _put(folder, kernel.name, "log", cubin.log.encode()),
        "arch": cubin.arch,
        "options": list(kernel.options),
        "nvrtc": cubin.nvrtc,
        "source_key": cubin.source_key,
        "key": cubin.key,
        "registers": resources.registers,
        "stack": resources.stack,
        "spill_stores": resources.spill_stores,
        "spill_loads": resources.spill_loads,
        "barriers": resources.barriers,
        "shared": {"static": resources.shared, "dynamic": kernel.dynamic_shared},
        "functions": [asdict(r) for r in cubin.kernels],  # those above are of `entry`
        "notes": list(cubin.notes),
        "instructions": disasm.count(cubin.image, COUNTED),  # null without nvdisasm
    }


def _built(folder: Path, k: Mapping[str, Any]) -> BuiltKernel:
    image, log = _take(folder, k["cubin"]), _take(folder, k["log"]).decode()
    cubin = make_cubin(k["name"], image, k["source_key"], k["key"], k["arch"], k["nvrtc"], log)
    return BuiltKernel(k["name"], k["entry"], k["spec"], k["shared"]["dynamic"], cubin)


def _put(folder: Path, stem: str, suffix: str, data: bytes) -> dict[str, str]:
    digest = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{digest[:8]}.{suffix}"
    write_atomic(folder / name, data)
    return {"file": name, "sha256": digest}


def _take(folder: Path, item: Mapping[str, str]) -> bytes:
    if Path(item["file"]).name != item["file"]:
        raise _refused(folder, f"{item['file']!r} is not a file of the folder")
    data = (folder / item["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != item["sha256"]:
        raise _refused(folder, f"{item['file']} was changed: its sha256 is not that of the manifest")
    return data


def _listed(folder: Path) -> set[str]:
    """Names of the files that the manifest of a folder lists; none where there is no manifest to be read."""

    def names(value: object) -> set[str]:
        match value:
            case {"file": str(name), "sha256": str()}:
                return {name} if Path(name).name == name else set()
            case dict():
                return set().union(*(names(v) for v in value.values()))
            case list():
                return set().union(*(names(v) for v in value))
            case _:
                return set()

    try:
        return names(json.loads((folder / MANIFEST).read_bytes()))
    except (OSError, ValueError):
        return set()


def _refused(folder: Path, why: str) -> MaskcError:
    return error(
        "M608", f"{folder} holds no kernels that can be run: {why}", None, "compile the mask again: maskc compile FILE -o DIR"
    )
