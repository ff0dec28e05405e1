"""One digest over all kernels that maskc ships: what a recorded GPU run vouches for.

    python -m benchmarks.digest

sha256 over the name, rendered source, headers and compiler options of every shipped variant, in their fixed order, and
of the preparation kernel of every standard mask. A result file that carries another digest was measured with other sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from maskc.codegen.cache import content_key
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.render import CudaSource
from maskc.codegen.shipped import shipped
from maskc.frontend import parse_file, std_names
from maskc.targets import compile_fn


@cache
def digest() -> str:
    """64 hex digits. The first call takes seconds."""
    parts: list[list[str]] = []
    for name, source, options in (*shipped(), *_preparation()):
        headers = [item for header in source.headers for item in header]
        parts.append([name, source.text, *headers, *options])
    return content_key(*parts)


def _preparation() -> Iterator[tuple[str, CudaSource, tuple[str, ...]]]:
    for name in sorted(std_names()):
        for fn in parse_file(f"std:{name}").masks:
            for kernel in KERNELS["prep"](Request(fn, compile_fn(fn).program)):
                yield f"{kernel.name}-{fn.name}", kernel.source, kernel.options


if __name__ == "__main__":
    print(digest())
