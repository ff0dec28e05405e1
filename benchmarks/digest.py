"""Digests over all kernels that maskc ships: what a recorded GPU run vouches for.

    python -m benchmarks.digest          the kernels of attention on one GPU
    python -m benchmarks.digest --gated  those of attention beside copies of its keys

sha256 over the name, rendered source, headers and compiler options of every shipped variant, in their fixed order; the first
also of the preparation kernel of every standard mask. A result file that carries another digest was measured with other sources.
A run of attention on one GPU launches none of the gated kernels, so its record stands when only these change.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain

from maskc.codegen.cache import content_key
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.render import CudaSource
from maskc.codegen.shipped import shipped, shipped_gated
from maskc.frontend import parse_file, std_names
from maskc.targets import compile_fn

Named = tuple[str, CudaSource, tuple[str, ...]]


@cache
def digest() -> str:
    """64 hex digits. The first call takes seconds."""
    return _digest(chain(shipped(), _preparation()))


@cache
def gated_digest() -> str:
    """64 hex digits. The first call takes seconds."""
    return _digest(shipped_gated())


def digests() -> dict[str, str]:
    """Both, as the records of runs beside copies and of whole conformance carry them."""
    return {"digest": digest(), "gated_digest": gated_digest()}


def _digest(kernels: Iterable[Named]) -> str:
    parts: list[list[str]] = []
    for name, source, options in kernels:
        headers = [item for header in source.headers for item in header]
        parts.append([name, source.text, *headers, *options])
    return content_key(*parts)


def _preparation() -> Iterator[Named]:
    for name in sorted(std_names()):
        for fn in parse_file(f"std:{name}").masks:
            for kernel in KERNELS["prep"](Request(fn, compile_fn(fn).program)):
                yield f"{kernel.name}-{fn.name}", kernel.source, kernel.options


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gated", action="store_true", help="of the gated kernels")
    print(gated_digest() if parser.parse_args().gated else digest())
