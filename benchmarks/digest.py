"""One digest over all kernels that maskc ships: what a recorded GPU run vouches for.

    python -m benchmarks.digest

sha256 over the name, rendered source, headers and compiler options of every shipped variant, in their fixed order. A
result file that carries another digest was measured with other sources.
"""

from __future__ import annotations

from maskc.codegen.cache import content_key
from maskc.codegen.shipped import shipped


def digest() -> str:
    """64 hex digits."""
    parts: list[list[str]] = []
    for name, source, options in shipped():
        headers = [item for header in source.headers for item in header]
        parts.append([name, source.text, *headers, *options])
    return content_key(*parts)


if __name__ == "__main__":
    print(digest())
