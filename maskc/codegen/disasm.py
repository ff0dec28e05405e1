"""Cubin -> SASS text by nvdisasm: from its wheel, else from PATH or a CUDA toolkit. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from maskc.codegen.cache import Entry, content_key, load, store
from maskc.diagnostics import error
from maskc.options import Options

# "/*0010*/   @!P0 HGMMA.64x128x16.F32.BF16 R24, ...": address, optional predicate, opcode with its modifiers
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[\w.]+)?)", re.MULTILINE)


def find_nvdisasm() -> Path | None:
    """The nvdisasm to use, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for found in sorted(Path(root).glob("*/bin/nvdisasm*"), reverse=True):
            return found
    on_path = shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")
    return Path(on_path) if on_path else None


def disassemble(image: bytes) -> str:
    """SASS of a cubin. Raises M603 without nvdisasm."""
    tool = find_nvdisasm()
    if tool is None:
        raise error("M603", "disassembling needs nvdisasm, which is not installed", None, "pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise error("M603", "nvdisasm cannot read the cubin", None, None, ("log", done.stderr.strip()))
    return done.stdout


def opcodes(sass: str) -> Counter[str]:
    """How often each opcode stands in a SASS text, by its first word: HGMMA, UTMALDG, LDL, STL, ..."""
    return Counter(m[1].partition(".")[0] for m in _INSTRUCTION.finditer(sass))


def count(image: bytes, names: Sequence[str], cache_dir: Path | None = None) -> dict[str, int] | None:
    """How often each of the opcodes `names` stands in a cubin, through the cache; None without nvdisasm."""
    folder = cache_dir if cache_dir is not None else Options.from_env().cache_dir
    key = content_key("opcodes", sorted(names), image)
    entry = load(folder, key)
    if entry is None:
        if find_nvdisasm() is None:
            return None
        found = opcodes(disassemble(image))
        entry = Entry({name: found[name] for name in names}, {})
        store(folder, key, entry)
    return {name: cast(int, entry.meta[name]) for name in names}
