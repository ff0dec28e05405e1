"""Rendering, compiling and disassembling without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from maskc.codegen import disasm, nvrtc, render
from maskc.codegen.nvrtc import Resources, compile_cubin, compile_ptx, parse_log
from maskc.codegen.render import CudaSource
from maskc.diagnostics import MaskcError, MaskcWarning

SOURCE = CudaSource(
    "k.cu",
    '#include "a.cuh"\nextern "C" __global__ void k(int* p) { p[threadIdx.x] = VALUE + OFFSET; }\n',
    (("a.cuh", '#pragma once\n#include "b.cuh"\n'), ("b.cuh", "#pragma once\n#define VALUE 4\n")),
)


# ---------------------------------------------------------------- render


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Templates of a test, in place of the package's."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(render, "_read", texts.get)
    render._environment.cache_clear()
    monkeypatch.setattr(render._environment(), "loader", jinja2.FunctionLoader(texts.get))
    yield texts
    render._environment.cache_clear()


def test_cuda_text_passes_through_and_jinja_chooses(templates: dict[str, str]) -> None:
    templates["k.cu.j2"] = (
        "//# never seen\n"
        "//% for n in sizes\n"
        'asm volatile("{%0, %1}" :: "r"(x), "r"(${n})); float f[2] = {{0.f}, {1.f}}; {#pragma unroll\n'
        "//% endfor\n"
    )
    line = 'asm volatile("{{%0, %1}}" :: "r"(x), "r"({})); float f[2] = {{{{0.f}}, {{1.f}}}}; {{#pragma unroll\n'
    assert render.render("k.cu.j2", sizes=(8, 16)).text == line.format(8) + line.format(16)


def test_headers_are_collected_rendered_and_taken_once(templates: dict[str, str]) -> None:
    templates["k.cu.j2"] = '#include "device/a.cuh"\n#include "b.cuh"\nint main_${n};\n'
    templates["device/a.cuh"] = '#pragma once\n#include "b.cuh"\n${not_rendered}\n'
    templates["b.cuh.j2"] = "#pragma once\nint b_${n};\n"
    source = render.render("k.cu.j2", n=3)
    assert source.name == "k.cu"
    assert [name for name, _ in source.headers] == ["device/a.cuh", "b.cuh"]
    assert dict(source.headers)["b.cuh"] == "#pragma once\nint b_3;\n"
    assert "${not_rendered}" in dict(source.headers)["device/a.cuh"]
    assert source.flat().count("int b_3;") == 1
    assert "#include" not in source.flat()


def test_a_missing_name_or_header_is_an_error(templates: dict[str, str]) -> None:
    templates["k.cu.j2"] = "int x = ${nothing};"
    templates["l.cu.j2"] = '#include "nowhere.cuh"\n'
    with pytest.raises(jinja2.UndefinedError, match="nothing"):
        render.render("k.cu.j2")
    with pytest.raises(jinja2.TemplateNotFound):
        render.render("l.cu.j2")


# ---------------------------------------------------------------- nvrtc


def test_cubin_and_ptx_without_a_gpu() -> None:
    cubin = compile_cubin(SOURCE, defines=("OFFSET=3",))
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.arch == "sm_90a"
    (kernel,) = cubin.kernels
    assert (kernel.name, kernel.spill_stores, kernel.stack) == ("k", 0, 0)
    assert kernel.registers > 0
    assert ".target sm_90a" in compile_ptx(SOURCE, defines=("OFFSET=3",))


def test_flat_source_is_the_same_program() -> None:
    flat = compile_cubin(CudaSource("k.cu", SOURCE.flat()), defines=("OFFSET=3",))
    assert flat.image == compile_cubin(SOURCE, defines=("OFFSET=3",)).image


def test_the_key_is_what_the_compiler_sees(tmp_path: Path) -> None:
    def key(source: CudaSource = SOURCE, **kwargs: object) -> str:
        return compile_cubin(source, **({"defines": ("OFFSET=3",), "cache_dir": tmp_path} | kwargs)).key

    header = SOURCE.headers[0], ("b.cuh", "#pragma once\n#define VALUE 5\n")
    assert key() == key(CudaSource("other.cu", SOURCE.text, SOURCE.headers))
    assert key() == key(options=tuple(reversed(nvrtc.OPTIONS)))
    others = [
        key(CudaSource("k.cu", SOURCE.text + "\n", SOURCE.headers)),
        key(CudaSource("k.cu", SOURCE.text, header)),
        key(defines=("OFFSET=4",)),
        key(arch="sm_100"),
        key(options=(*nvrtc.OPTIONS, "-lineinfo")),
    ]
    assert len({key(), *others}) == 1 + len(others)


def test_a_source_that_does_not_compile_shows_the_log() -> None:
    with pytest.raises(MaskcError) as caught:
        compile_cubin(CudaSource("bad.cu", "int x = ;"))
    assert caught.value.code == "M602"
    assert "bad.cu(1): error: expected an expression" in str(caught.value)


WITHOUT_NVRTC = """
import sys
sys.modules[{module!r}] = None
from maskc.codegen.nvrtc import compile_cubin, missing
from maskc.codegen.render import CudaSource
from maskc.diagnostics import MaskcError, MaskcWarning
assert missing() is not None
try:
    compile_cubin(CudaSource("k.cu", ""))
except MaskcError as e:
    print(e)
"""


def test_without_cuda_python_one_error_names_the_extra() -> None:
    code = WITHOUT_NVRTC.format(module="cuda.bindings")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("error[M601]: compiling a kernel needs NVRTC, which is not installed\n")
    assert 'pip install "maskc[cuda]"' in done.stdout


def test_without_the_nvrtc_library_the_error_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: object) -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"\nin many places')

    monkeypatch.setattr(nvrtc._nvrtc(), "nvrtcVersion", not_found)
    with pytest.raises(MaskcError) as caught:
        compile_cubin(SOURCE)
    assert caught.value.code == "M601"
    assert 'found: Failure finding "libnvrtc.so"' in str(caught.value)
    assert 'pip install "maskc[cuda]"' in str(caught.value)


def test_an_installed_cubin_stands_for_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compile_cubin(SOURCE, defines=("OFFSET=9",))
    monkeypatch.setattr(nvrtc, "_installed", {})
    monkeypatch.setattr(nvrtc, "version", lambda: pytest.fail("asked for the compiler"))
    nvrtc.install(cubin)
    assert compile_cubin(SOURCE, defines=("OFFSET=9",)) is cubin


LOG = """ptxas info    : (C7519) Potential Performance Loss: 'warpgroup.arrive' injected in function 'fwd'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fwd' for 'sm_90a'
ptxas info    : Function properties for fwd
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 500.000 ms
ptxas info    : Compiling entry function 'prep' for 'sm_90a'
ptxas info    : Function properties for prep
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""


def test_the_log_of_ptxas() -> None:
    kernels, notes = parse_log(LOG)
    assert kernels == (Resources("fwd", 168, 9, 1024, 16, 12, 20), Resources("prep", 32, 0, 0, 0, 0, 0))
    assert notes == ("(C7519) Potential Performance Loss: 'warpgroup.arrive' injected in function 'fwd'",)


def test_a_spill_is_seen() -> None:
    """A kernel that cannot but spill: the parser of logs agrees with what this NVRTC prints, and with its SASS."""
    body = "".join(f"x[{i}] = x[{i}] * x[{(i * 7 + 1) % 64}] + x[{(i * 5 + 3) % 64}];" for i in range(64))
    text = f"""extern "C" __global__ void __launch_bounds__(1024, 2) k(double* p) {{
  double x[64]; for (int i = 0; i < 64; ++i) x[i] = p[i * 1024 + threadIdx.x];
  for (int n = 0; n < 100; ++n) {{ {body} }}
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = x[i]; }}"""
    cubin = compile_cubin(CudaSource("k.cu", text))
    assert cubin.spills > 0
    counts = disasm.count(cubin.image, ("LDL", "STL", "HGMMA"))
    assert counts is not None
    assert counts["LDL"] > 0
    assert counts["STL"] > 0
    assert counts["HGMMA"] == 0


# ---------------------------------------------------------------- disassembly


def test_sass() -> None:
    sass = disasm.disassemble(compile_cubin(SOURCE, defines=("OFFSET=3",)).image)
    found = disasm.opcodes(sass)
    assert found["STG"] == 1
    assert found["EXIT"] == 1
    assert found["HGMMA"] == 0


def test_predicated_opcodes_count() -> None:
    sass = "        /*0010*/              @!P0 BRA `(.L_x_1);\n        /*0020*/             @UP1 UTMALDG.4D [UR8], [UR4];\n"
    assert disasm.opcodes(sass) == {"BRA": 1, "UTMALDG": 1}


def test_without_nvdisasm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disasm, "find_nvdisasm", lambda: None)
    with pytest.raises(MaskcError) as caught:
        disasm.disassemble(b"\x7fELF")
    assert caught.value.code == "M603"
    assert "pip install nvidia-cuda-nvdisasm" in str(caught.value)
    assert disasm.count(b"\x7fELF", ("LDL",), tmp_path) is None


def test_importing_codegen_loads_neither_torch_nor_the_bindings() -> None:
    code = "import sys, maskc.codegen.kernels; print(sorted({'torch', 'cuda', 'sympy', 'lark', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "[]\n", done.stderr


def test_a_compiler_that_serialises_is_named_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: (b"", note))
    nvrtc._say_slow_once.cache_clear()
    source = CudaSource("slow.cu", "serialised")
    with pytest.warns(MaskcWarning, match="W613") as caught:
        cubins = [compile_cubin(source, cache_dir=tmp_path) for _ in range(2)]
    assert all(c.notes for c in cubins)
    assert len(caught) == 1
    assert f"NVRTC {nvrtc.version()} serialises" in str(caught[0].message)
    nvrtc._say_slow_once.cache_clear()
