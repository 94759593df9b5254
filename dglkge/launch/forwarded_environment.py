"""Which of the launcher's environment variables processes on other machines get."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping

FORWARDED_VARIABLES = (
    "CONDA_*", "CUDA_*", "DGL*", "GLOO_*", "GOMP_*", "HDF5_*", "KMP_*", "LANG", "LANGUAGE", "LC_*",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "MKL_*", "NCCL_*", "NUMBA_*", "OMP_*", "OPENBLAS_*", "PATH",
    "PYTHON*", "TORCH_*", "TP_*", "TZ", "VIRTUAL_ENV",
)  # fmt: skip
"""Patterns of names; --extra_envs brings any other."""

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that go to other machines.

    Parameters
    ----------
    environment : mapping of str to str
        That of the launcher.

    Returns
    -------
    dict of str to str
        Relative folders of search paths are made absolute: processes elsewhere start in other folders.
    """
    picked = {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in FORWARDED_VARIABLES)
    }
    for name in SEARCH_PATHS:
        if name in picked:
            folders = picked[name].split(os.pathsep)
            picked[name] = os.pathsep.join(
                os.path.abspath(folder) if folder else folder for folder in folders
            )
    return picked
