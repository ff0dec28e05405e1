"""Where a record was made: its first lines."""

from __future__ import annotations

import subprocess
from functools import cache
from typing import Any

import torch


@cache
def machine() -> dict[str, Any]:
    """Device, driver, NCCL and torch; the first GPU stands for all. Without one, no driver and no NCCL."""
    if not torch.cuda.is_available():
        return {"device": "host", "driver": None, "nccl": None, "torch": torch.__version__}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout.strip(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
    }
