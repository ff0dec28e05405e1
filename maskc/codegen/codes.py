"""Long texts of the toolchain's codes, for `maskc explain M601`: a title line, then what it means and what to do."""

from __future__ import annotations

CODES: dict[str, str] = {
    "M601": """NVRTC is not installed

Kernels are compiled by NVRTC, NVIDIA's run-time compiler, through cuda-python. Neither a GPU nor a driver is needed for
that, but both packages are:

    pip install "maskc[cuda]"        CUDA 13, what torch 2.11 and later use
    pip install "maskc[cuda12]"      CUDA 12, for torch 2.9 and 2.10

The check of a mask, its proof and the CPU backend need none of this. `maskc doctor` shows what was found.
""",
    "M602": """NVRTC refuses a generated source

The text that maskc generated does not compile. That is a fault of maskc or an NVRTC older than 12.3; the log in the error
names the line. Please report it with the output of `maskc compile FILE --emit cuda` and of `maskc doctor`.
""",
    "M603": """nvdisasm is missing or cannot read a cubin

`--emit sass` shows the machine code of a kernel by NVIDIA's nvdisasm, a small package of its own:

    pip install nvidia-cuda-nvdisasm

One that is older than the NVRTC that built the cubin may not read it.
""",
    "M604": """No CUDA driver

Running a generated kernel needs an NVIDIA driver (libcuda.so.1) and cuda-python. On a machine without a GPU use
`backend="cpu"`, or let maskc choose: `backend="auto"` takes the CPU for CPU tensors.
""",
    "M605": """A call to the CUDA driver failed

The name of the CUDA error follows. Errors of kernels are reported late: an illegal address may come from a kernel that was
launched before, by maskc or by others. CUDA_LAUNCH_BLOCKING=1 makes the guilty launch report it, compute-sanitizer finds
the address.
""",
    "M606": """This GPU or driver cannot run the kernel

maskc builds for sm_90a: H100, H200 and their kin, and nothing else. Within Hopper the usual reason is a driver whose CUDA
major version is older than that of NVRTC: a cubin of CUDA 13 needs a driver of CUDA 13. `maskc doctor` shows both.
""",
    "M607": """A tensor that the copy engine cannot address

A tensor map needs a base address and strides that are multiples of 16 bytes, an innermost stride of one element and a
stride below 2^40 bytes. The error names the rule that is broken and the tensor. `x.contiguous()` makes a copy that fits.
""",
    "M608": """A folder of compiled kernels cannot be used

`maskc.load(DIR)` reads what `maskc compile FILE -o DIR` wrote: manifest.json with a sha256 for every file beside it. The
folder has no manifest, was made by another version of maskc, or one of its files was changed, cut or left out. Compile the
mask again, or copy the whole folder.
""",
    "M609": """Arithmetic beyond 64 bits

Inputs are 32-bit integers, and the vectors are computed exactly in 64 bits. A product of three inputs may need more, so
such a mask is refused before a kernel is written:

    input a : int    input b : int    input c : int
    mask m = a * b * c <= q          # M609; a constant in place of one of them is fine
""",
    "M610": """A mask without a preparation kernel

The preparation kernel evaluates the proved formulas of a mask. A mask that could neither be proved nor refuted (W301) has
none: its vectors are folded from the data when they are bound, by torch operations on their device. `maskc.run` does so by
itself; `maskc compile --kernel fwd,bwd` still builds the attention kernels.
""",
    "M611": """No attention kernel for this head dim or dtype

`maskc compile --head-dim D --dtype T` builds attention kernels for head dims 64, 128 and 256 in bf16 and fp16. The CPU
backend takes any head dim and also fp32 and fp64.
""",
    "M612": """A loaded folder does not hold the kernel of this call

`maskc.load(DIR)` runs the kernels that lie in DIR and compiles nothing. They were built for one mask form, head dim and
dtype, and for gradients that are deterministic or not; a call that needs another is refused before anything runs. So is a
group of ranks, whose parts of the mask need kernels of their own.

    maskc compile FILE -o DIR --head-dim 64 --dtype fp16 --deterministic

`maskc.compile(FILE)` compiles whatever a call needs, once, and keeps it in the cache.
""",
    "W613": """This compiler makes slow kernels

NVRTC 13.3 and newer (seen up to 13.5) find no registers for some kernels of head dim 128 and then run their tensor
instructions one after another. Results are the same, the rate is far lower. 13.0 to 13.2 compile them well, which is what
`pip install "maskc[cuda]"` asks for; the warning comes once a process. `maskc doctor` shows the version in use.
""",
}
