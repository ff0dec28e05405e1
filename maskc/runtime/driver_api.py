"""The CUDA driver, as little of it as maskc uses: load a cubin, launch a kernel, encode a tensor map, write a flag.

The only user of `cuda.bindings.driver` and of libcuda. Importing it needs neither a driver nor a GPU; the first call
does. Nothing here allocates device memory or synchronises; a launch goes to torch's current stream unless told
otherwise and may be captured into a CUDA graph once the kernel has run on that device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from maskc.binding.streams import current_handle
from maskc.diagnostics import MaskcError, error

TENSOR_MAP_BYTES = 128
SHARED_WITHOUT_ASKING = 48 * 1024  # dynamic shared memory that needs no attribute
Dim3 = tuple[int, int, int]

# ---------------------------------------------------------------- kernels


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """One kernel of a loaded cubin. The handle belongs to no context: it serves every device and every thread."""

    name: str
    handle: Any = field(repr=False)  # CUkernel
    address: int = field(repr=False)  # the same handle, as the launch takes it
    _shared: dict[int, int] = field(repr=False)  # device -> dynamic shared memory allowed so far

    def allow_shared(self, device: int, size: int) -> None:
        """Let launches on `device` use up to `size` bytes of dynamic shared memory."""
        if size <= self._shared.get(device, SHARED_WITHOUT_ASKING):
            return
        driver = _driver()
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuKernelSetAttribute, limit, size, self.handle, device)
        self._shared[device] = size


_kernels: dict[tuple[bytes, str], Kernel] = {}
_libraries: dict[bytes, Any] = {}
_loading = threading.Lock()


def load_kernel(image: bytes, name: str) -> Kernel:
    """The kernel `name` of a cubin; each image is loaded once per process. Raises M604, M605 or M606."""
    kernel = _kernels.get((image, name))
    if kernel is not None:
        return kernel
    with _loading:
        if image not in _libraries:
            _initialise()
            _libraries[image] = _call(_driver().cuLibraryLoadData, image, [], [], 0, [], [], 0)
        handle = _call(_driver().cuLibraryGetKernel, _libraries[image], name.encode())
        return _kernels.setdefault((image, name), Kernel(name, handle, int(handle), {}))


# ---------------------------------------------------------------- launching


class Arguments:
    """The arguments of a kernel that takes tensor maps, then one struct, all `const __grid_constant__`.

    maps: encoded tensor maps, passed in 128-byte aligned slots. body: the struct, which may be rewritten between
    launches (the driver copies all arguments at the launch), but by one thread at a time.
    """

    def __init__(self, maps: Sequence[bytes], body: ctypes.Structure) -> None:
        self.maps, self.body = maps, body

    def placed(self) -> int:
        """Address of the pointers to all arguments, for a launch by this thread at once."""
        everything = b"".join((*self.maps, self.body))
        room = room_of(len(self.maps), len(everything))
        room.contents[:] = everything
        return room.pointers


class Room:
    """Memory for arguments of such sizes, used by one launch of a thread after another.

    contents: the maps, then the struct. slots: where the maps and the struct lie; pointers: where those addresses do.

    Taking addresses is what costs here: each time is an audit event of Python, and hooks on those can be slow.
    """

    def __init__(self, maps: int, size: int) -> None:
        """For so many maps and, with the struct, so many bytes."""
        memory = (ctypes.c_char * (TENSOR_MAP_BYTES + size))()
        at = -ctypes.addressof(memory) % TENSOR_MAP_BYTES
        self.start = ctypes.addressof(memory) + at
        self.contents = memoryview(memory).cast("B")[at : at + size]
        self.slots = tuple(self.start + i * TENSOR_MAP_BYTES for i in range(maps + 1))
        self._pointers = (ctypes.c_void_p * (maps + 1))(*self.slots)
        self.pointers = ctypes.addressof(self._pointers)


class _Rooms(threading.local):
    """Of each thread, by sizes."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Room] = {}
        self.encoded = Room(1, TENSOR_MAP_BYTES)
        self.context = ctypes.c_void_p()
        self.at_context = ctypes.addressof(self.context)


_rooms = _Rooms()


def room_of(maps: int, size: int) -> Room:
    """This thread's for so many maps and, with the struct, so many bytes."""
    room = _rooms.known.get((maps, size))
    if room is None:
        room = _rooms.known[maps, size] = Room(maps, size)
    return room


def launch(
    kernel: Kernel,
    grid: Dim3,
    threads: int,
    arguments: Arguments,
    *,
    device: torch.device,
    shared: int = 0,
    stream: int | None = None,
    cluster: Dim3 | None = None,
    overlap_previous: bool = False,
) -> None:
    """Launch `grid` blocks of `threads` threads on `stream` (a handle; torch's current stream of `device` if None).

    shared: bytes of dynamic shared memory. cluster: blocks per cluster; it divides `grid`. overlap_previous:
    programmatic stream serialisation; the kernel must wait (griddepcontrol.wait) before it reads what the kernel
    before it wrote. Raises M605.
    """
    device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    handle = current_handle(device) if stream is None else stream
    with context_of(device.index):
        if shared > SHARED_WITHOUT_ASKING:
            kernel.allow_shared(device.index, shared)
        configured = configuration(grid, threads, shared, handle, cluster, overlap_previous)
        launch_configured(kernel, configured, arguments.placed())


class Configured(NamedTuple):
    """How a kernel is launched: where the driver finds it, and what keeps it there."""

    address: int
    made: Any


def launch_configured(kernel: Kernel, configured: Configured, pointers: int) -> None:
    """`launch` with what `configuration` made, in the current context, with the arguments at these `pointers`."""
    if status := _launch()(configured.address, kernel.address, pointers, None):
        raise _failure("cuLaunchKernelEx", _name_of(status))


@cache
def _launch() -> Callable[[int, int, int, None], int]:
    """Not by cuda-python, whose objects take the host twice as long as the rest."""
    call = libcuda().cuLaunchKernelEx
    call.argtypes = (ctypes.c_void_p,) * 4
    return call


@lru_cache(maxsize=256)
def configuration(grid: Dim3, threads: int, shared: int, stream: int, cluster: Dim3 | None, overlap_previous: bool) -> Configured:
    """How a kernel is launched, which the driver only reads: any thread may use it again."""
    config = _driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = _driver().CUstream(stream)
    attributes = _attributes(cluster, overlap_previous)
    config.attrs = list(attributes)
    config.numAttrs = len(attributes)
    return Configured(config.getPtr(), config)


@cache
def _attributes(cluster: Dim3 | None, overlap_previous: bool) -> tuple[Any, ...]:
    driver = _driver()
    ids = driver.CUlaunchAttributeID
    out = []
    if cluster is not None:
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
        out.append(_attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if overlap_previous:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        out.append(_attribute(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
    return tuple(out)


def _attribute(which: Any, value: Any) -> Any:
    attribute = _driver().CUlaunchAttribute()
    attribute.id = which
    attribute.value = value
    return attribute


def failed(name: str, status: int) -> MaskcError:
    return error("M605", f"{name} failed: {_named(status)}", None, _EARLIER)


def _named(status: int) -> str:
    name, number = _name_of(status), f"CUDA error {status}"
    return name if name == number else f"{number} ({name})"


def _name_of(status: int) -> str:
    try:
        return str(_driver().CUresult(status).name)
    except ValueError:  # of a newer driver
        return f"CUDA error {status}"


# ---------------------------------------------------------------- tensor maps

_MAP_TYPES: dict[torch.dtype, tuple[int, int]] = {  # CUtensorMapDataType, bytes
    torch.int32: (3, 4),
    torch.float16: (6, 2),
    torch.float32: (7, 4),
    torch.bfloat16: (9, 2),
}
Swizzle = Literal[0, 32, 64, 128]
_SWIZZLES: dict[Swizzle, int] = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3


def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: Swizzle = 128,
) -> bytes:
    """An encoded CUtensorMap of a strided tensor, innermost dimension first; reads outside it give zeros.

    sizes, strides: in elements, 1 to 5 of them; strides[0] must be 1, and the stride of a dimension of size 1 does not
    matter. box: the tile that one copy moves. swizzle: bytes of the shared-memory swizzle pattern (0: none). Raises M607
    for what the hardware cannot address. Some context must be current (`context_of`).
    """
    code, width = _MAP_TYPES[dtype]
    steps = _byte_strides(sizes, strides, width)
    for rule, holds in (
        ("the innermost stride is 1", strides[0] == 1),
        ("the address is a multiple of 16 bytes", pointer % 16 == 0),
        ("strides are positive multiples of 16 bytes below 2^40", all(s % 16 == 0 and 0 < s < 1 << 40 for s in steps)),
        ("sizes are between 1 and 2^32", all(1 <= n <= 1 << 32 for n in sizes)),
        ("a box has between 1 and 256 elements a side", all(1 <= n <= 256 for n in box)),
        ("a row of the box is a multiple of 16 bytes", box[0] * width % 16 == 0),
        ("a row of the box fits the swizzle", not swizzle or box[0] * width <= swizzle),
    ):
        if not holds:
            shown = f"address {pointer:#x}, sizes {sizes}, strides {strides}, box {box}, {dtype}"
            raise error("M607", f"no tensor map: {rule}", None, None, ("tensor", shown))
    rank = len(sizes)
    slot = _rooms.encoded
    status = libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(slot.start),
        code,
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * max(1, rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleave
        _SWIZZLES[swizzle],
        _L2_PROMOTION_256B,
        0,  # zeros outside
    )
    if status != 0:
        raise error("M605", f"cuTensorMapEncodeTiled failed: {_named(status)}")
    return bytes(slot.contents)


def replace_address(slot: int, address: int) -> None:
    """Let the tensor of the encoded map at `slot` lie at `address`, a multiple of 16 bytes."""
    if status := _replace_address()(slot, address):
        raise failed("cuTensorMapReplaceAddress", status)


@cache
def _replace_address() -> Callable[[int, int], int]:
    call = ctypes.PyDLL("libcuda.so.1").cuTensorMapReplaceAddress  # too short to let other threads have Python's lock
    call.argtypes = ctypes.c_void_p, ctypes.c_void_p
    return call


def _byte_strides(sizes: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Byte strides of the dimensions after the first; a legal one for dimensions of size 1, whatever torch says."""
    return tuple(16 if n == 1 else s * width for n, s in zip(sizes[1:], strides[1:], strict=True))


# ---------------------------------------------------------------- contexts, errors


def driver_version() -> tuple[int, int] | None:
    """CUDA version of the installed driver, such as (13, 0), or None without one."""
    try:
        number = int(_call(_driver().cuDriverGetVersion))
    except MaskcError:
        return None
    return number // 1000, number % 1000 // 10


def _enter(device: int) -> bool:
    """Make the primary context of `device`, which torch uses, current in this thread; whether one is to be popped for it."""
    wanted, number = _primary_context(device)
    if status := _current_context()(_rooms.at_context):
        raise _failure("cuCtxGetCurrent", _name_of(status))
    if _rooms.context.value == number:
        return False
    _call(_driver().cuCtxPushCurrent, wanted)
    return True


@cache
def _current_context() -> Callable[[int], int]:
    call = ctypes.PyDLL("libcuda.so.1").cuCtxGetCurrent  # too short to let other threads have Python's lock
    call.argtypes = (ctypes.c_void_p,)
    return call


class context_of:
    """Inside, a CUDA device's context is current, as it need not be in a thread or for a device that was not used before."""

    __slots__ = ("_device", "_entered")

    def __init__(self, device: int) -> None:
        self._device, self._entered = device, False

    def __enter__(self) -> None:
        self._entered = _enter(self._device)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            _call(_driver().cuCtxPopCurrent)


@cache
def _primary_context(device: int) -> tuple[Any, int]:
    """(context, its address)."""
    _initialise()
    driver = _driver()
    context = _call(driver.cuDevicePrimaryCtxRetain, _call(driver.cuDeviceGet, device))
    return context, int(context)


@cache
def _initialise() -> None:
    _call(_driver().cuInit, 0)


@cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise _no_driver(str(e)) from e
    return driver  # type: ignore[no-any-return]


@cache
def libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise _no_driver(str(e)) from e


_WRONG_IMAGE = ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")


_NO_DEVICE = (
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_DEVICE_NOT_LICENSED",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
)


def _call(function: Any, *args: object) -> Any:
    """Call the driver and return its one result, if it has one."""
    try:
        status, *result = function(*args)
    except RuntimeError as e:  # what the bindings raise where they find no driver, itself or a subclass
        raise _no_driver(str(e)) from e
    if status == 0:
        return result[0] if result else None
    raise _failure(function.__name__, status.name)


def _failure(call: str, status: str) -> MaskcError:
    """What a status says, by name."""
    if status in _NO_DEVICE:
        return _no_driver(status)
    if status in _WRONG_IMAGE:
        why = f"this GPU or driver cannot run the kernel: {status}"
        return error("M606", why, None, "kernels are built for sm_90a (H100, H200); `maskc doctor` shows the versions in use")
    return error("M605", f"{call} failed: {status}", None, _EARLIER)


_EARLIER = "the error may come from a kernel launched before; CUDA_LAUNCH_BLOCKING=1 shows which"


def _no_driver(reason: str) -> MaskcError:
    found = reason.strip().split("\n")[0]
    hint = 'pip install "maskc[cuda]", and an NVIDIA driver on the machine'
    return error("M604", "running a kernel needs the CUDA driver and cuda-python", None, hint, ("found", found))
