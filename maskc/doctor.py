"""`maskc doctor`: what this machine has, and what would run on it. Nothing here raises: what is missing is said."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator

from maskc import __version__
from maskc.options import VARIABLES, Options, default_cache_dir

HOPPER = (9, 0)


def examine(options: Options) -> Iterator[str]:
    """Lines `name  what was found`."""
    probes: tuple[tuple[str, Callable[[], str]], ...] = (
        ("maskc", lambda: f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("torch", _torch),
        ("bindings", lambda: f"cuda.bindings {importlib.metadata.version('cuda-bindings')}"),
        ("NVRTC", _nvrtc),
        ("nvdisasm", _nvdisasm),
        ("driver", _driver),
        ("GPU", _gpus),
        ("cache", lambda: _cache(options)),
        ("settings", lambda: _settings(options)),
        ("backend", _backend),
        ("next", _next),
    )
    for name, probe in probes:
        yield f"{name:<9} {_said(probe)}"


def _said(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except importlib.metadata.PackageNotFoundError as e:
        return f"{e.name} is not installed"
    except Exception as e:  # whatever a broken installation throws is the finding
        return f"not usable: {str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__}"


def _torch() -> str:
    import torch

    cuda = torch.version.cuda
    return f"{torch.__version__}, {'built for CUDA ' + cuda if cuda else 'built without CUDA'}"


def _nvrtc() -> str:
    from maskc.codegen import nvrtc

    if (why := nvrtc.missing()) is not None:
        first = why.diagnostics[0]
        return f"{first.message} ({first.help})"
    version = nvrtc.version()
    if tuple(map(int, version.split(".")[:2])) < nvrtc.TOO_NEW:
        return f"{version}, compiles for {nvrtc.ARCH} here"
    wanted = ".".join(map(str, nvrtc.TOO_NEW))
    return f'{version}, TOO NEW: some kernels come out slow (W613): pip install "nvidia-cuda-nvrtc<{wanted}"'


def _nvdisasm() -> str:
    from maskc.codegen.disasm import find_nvdisasm

    found = find_nvdisasm()
    return str(found) if found is not None else "not installed (only `--emit sass` needs it: pip install nvidia-cuda-nvdisasm)"


def _driver() -> str:
    from maskc.runtime.driver_api import driver_version

    version = driver_version()
    return f"CUDA {version[0]}.{version[1]}" if version is not None else "none (libcuda is not there): nothing can be launched"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    count = torch.cuda.device_count()
    names = [
        f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})" for i in range(count)
    ]
    return ", ".join(names)


def _cache(options: Options) -> str:
    from maskc.codegen.cache import entries

    folder = options.cache_dir
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    found = entries(folder)
    size = sum(path.stat().st_size for path in found) / 1e6
    fault = "NOT a folder" if not existing.is_dir() else "NOT writable" if not os.access(existing, os.W_OK) else None
    writable = f", {fault}: kernels are compiled again in every process (set MASKC_CACHE_DIR)" if fault else ""
    return f"{folder}: {len(found)} entries, {size:.1f} MB{writable}"


def _settings(options: Options) -> str:
    changed = [f"MASKC_CACHE_DIR={options.cache_dir}"] if options.cache_dir != default_cache_dir() else []
    changed += [f"MASKC_CHECK={options.check}"] if options.check else []
    changed += [f"MASKC_DUMP_DIR={options.dump_dir}"] if options.dump_dir is not None else []
    changed += ["MASKC_TRACE=1"] if options.trace else []
    return ", ".join(changed) or f"all defaults ({', '.join(name for name, _ in VARIABLES)} are unset or as by default)"


def _backend() -> str:
    import torch

    from maskc.codegen import nvrtc

    if not torch.cuda.is_available():
        compiles = "compiled here, not run" if nvrtc.missing() is None else "neither compiled (no NVRTC) nor run here"
        return f"cpu, for torch sees no GPU; kernels can be {compiles}"
    if torch.cuda.get_device_capability() != HOPPER:
        have = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"flex for CUDA tensors (the kernels need compute capability 9.0, this GPU has {have}), cpu for CPU tensors"
    if nvrtc.missing() is not None:
        return "cpu for CPU tensors; CUDA tensors need NVRTC or a folder for `maskc.load`"
    return "hopper for CUDA tensors, cpu for CPU tensors"


def _next() -> str:
    """The one thing to do now."""
    if importlib.util.find_spec("torch") is None:
        return "pip install torch: without it masks can be checked, but neither bound nor run"
    import torch

    from maskc.codegen import nvrtc
    from maskc.runtime.driver_api import driver_version

    bindings = nvrtc.missing() is None
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() == HOPPER and not bindings:
            return 'pip install "maskc[cuda]" (beside torch 2.9 and 2.10: "maskc[cuda12]")'
        return "`maskc fuzz std:doc_prefix` compares what runs here with dense attention; `maskc bench` times a mask of yours"
    if driver_version() is not None:
        if torch.version.cuda is None:
            return "there is a driver, but this torch is built without CUDA: install one that is built for it (pytorch.org)"
        return "there is a driver, but torch cannot use it: `python -c 'import torch; torch.cuda.init()'` says why"
    made = "`maskc compile FILE -o DIR` makes kernels here that `maskc.load(DIR)` runs on an H100 or H200"
    return f"nothing is missing for a CPU: `maskc fuzz std:doc_prefix` tries it{'; ' + made if bindings else ''}"
