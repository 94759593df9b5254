"""Description of the machine on which figures were taken."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch


def describe_machine() -> dict[str, object]:
    """Return processor, cores, memory and versions."""
    # platform.processor() is empty on many Linux systems.
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "processor": model,
        # Cores that this process may use, which a container may limit.
        "cores": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
