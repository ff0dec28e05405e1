"""What the driver tells of a GPU while something runs on it, read only: energy, clock, and whether its links sleep."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from threading import Event, Thread
from types import TracebackType

import torch

LINKS = 18
POWER_STATE, POWER_THRESHOLD = 167, 168
"""Field numbers of nvml.h: 1 where a link sleeps, and how long it idles before, in units of 100 us."""
EVERY = 0.02
"""Seconds from sample to sample."""


class Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class Gpu:
    """Raises OSError where there is no driver."""

    def __init__(self, device: torch.device) -> None:
        self.nvml, self.handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self.nvml.nvmlInit_v2()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if self.nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.handle)):
            raise OSError(f"NVML does not know {uuid.decode()}")

    def joules(self) -> float:
        """Since the driver was loaded."""
        found = ctypes.c_ulonglong()
        self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(found))
        return found.value / 1e3

    def mhz(self) -> int:
        """Of the multiprocessors."""
        found = ctypes.c_uint()
        self.nvml.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(found))
        return found.value

    def of_links(self, number: int) -> list[int]:
        """A field of every link that tells it."""
        fields = (Field * LINKS)(*(Field(field=number, scope=link) for link in range(LINKS)))
        self.nvml.nvmlDeviceGetFieldValues(self.handle, LINKS, fields)
        return [f.value & 0xFFFFFFFF for f in fields if f.result == 0]

    def sleeps_after_us(self) -> int | None:
        """Idle time before a link sleeps; None where the driver does not tell."""
        found = self.of_links(POWER_THRESHOLD)
        return 100 * found[0] if found else None


@dataclass
class Watch:
    """Samples clock and links of a GPU, where there is one, as long as it is entered."""

    gpu: Gpu | None
    mhz: list[int] = field(default_factory=list)
    asleep: list[float] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._over, self._thread = Event(), Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while self.gpu is not None and not self._over.wait(EVERY):
            self.mhz.append(self.gpu.mhz())
            if states := self.gpu.of_links(POWER_STATE):
                self.asleep.append(sum(map(bool, states)) / len(states))
