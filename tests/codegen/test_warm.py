"""What the GPU suite compiles ahead is what its cases run, so all of it compiles."""

from dataclasses import replace

import pytest

from maskc.codegen.forward import forward_source, forward_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import MaskForm
from tests.gpu.cases import all_cases
from tests.gpu.suite import Suite, special_modules
from tests.gpu.warm import sources


@pytest.mark.kernels
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_first_case_of_a_kind_compiles(direction: str, dtype: str) -> None:
    case = next(c for c in all_cases() if (c.direction, c.dtype) == (direction, dtype) and list(sources(c)))
    for source in sources(case):
        compile_cubin(source)


def test_special_cases_name_their_kernels() -> None:
    """All but those of FlexAttention, which runs none; each module adds some that the cover does not have."""
    for name, module in special_modules().items():
        assert (name == "flex") == (not hasattr(module, "sources")), name
        if name != "flex":
            assert all(isinstance(source, CudaSource) for source in module.sources())
    suite = Suite()
    cover = {source for case in suite.cover for source in sources(case)}
    everything = suite.sources()
    assert len(everything) == len(set(everything)) > len(cover)
    assert cover <= set(everything)


def test_variants_that_differ_in_a_header_are_all_compiled() -> None:
    plain = forward_spec(MaskForm(causal=True), 128, "bf16")
    sources = [forward_source(spec) for spec in (plain, replace(plain, record_queue=True))]
    assert sources[0].text == sources[1].text
    assert set(sources) <= set(Suite().sources())
