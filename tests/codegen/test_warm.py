"""What the GPU suite compiles ahead is what its cases run, so all of it compiles."""

import pytest

from maskc.codegen.nvrtc import compile_cubin
from tests.gpu.cases import all_cases
from tests.gpu.warm import sources


@pytest.mark.kernels
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_first_case_of_a_kind_compiles(direction: str, dtype: str) -> None:
    case = next(c for c in all_cases() if (c.direction, c.dtype) == (direction, dtype) and list(sources(c)))
    for source in sources(case):
        compile_cubin(source)
