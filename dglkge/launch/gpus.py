"""GPUs of a machine, and the variables that show a process its own; nothing of CUDA or torch is loaded."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dglkge.typing import CUDA_DEVICE

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
"""Where the driver has a folder for each GPU; counted where ``nvidia-smi`` is missing."""
LIST_SECONDS = 10.0
"""Limit for ``nvidia-smi -L``, which initializes the driver."""


def usable_gpus() -> tuple[str, ...]:
    """Return the GPUs that trainers on this machine may use, each as ``CUDA_VISIBLE_DEVICES`` names it."""
    return find_gpus(os.environ) if torch_has_cuda() else ()


def find_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine that an environment allows."""
    count = _count_gpus(environment)
    allowed = environment.get(VISIBLE_VARIABLE)
    if allowed is None:
        return tuple(map(str, range(count)))
    if not count:
        return ()
    names = []
    for word in (word.strip() for word in allowed.split(",")):
        # As CUDA reads the list: it ends at the first number of no GPU, such as -1.
        if not word or re.fullmatch(r"-?\d+", word) and not 0 <= int(word) < count:
            break
        names.append(word)
    return tuple(names)


def _count_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs on this machine."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    try:
        if program is None:
            return len(os.listdir(DRIVER_FOLDER))
        done = subprocess.run(
            [program, "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_SECONDS,
            env=dict(environment)
        )  # fmt: skip
        return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
    except (OSError, subprocess.TimeoutExpired):  # a driver that does not answer: no GPU to train on
        return 0


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA, from its version file; loading it takes 1 s."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None


def gpu_variables(device: str, gpus: Sequence[str], local_rank: int | None) -> dict[str, str]:
    """Return the variables that show a process its GPU; a server, of `local_rank` None, uses none."""
    if not device:
        return {}
    is_shown = device == CUDA_DEVICE and local_rank is not None
    return {VISIBLE_VARIABLE: gpus[local_rank or 0] if is_shown else ""}
