"""Environments of the peers: each has its own, since their requirements exclude ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INSTALLS = {
    # Its setup.py needs the pkg_resources of an older setuptools and imports torch: no build isolation.
    "pbg": [
        ["setuptools<81", "wheel", "numpy", "h5py", "attrs", "tqdm", "torch==2.13.0"],
        ["--no-build-isolation", "torchbiggraph==1.0.0"],
    ],
    "pykeen": [["pykeen"]],
    # Version 0.3.3 imports pyarrow without asking for it, and asks for numpy 1, which newer ones refuse.
    "dicee": [["dicee", "pyarrow<20"]],
}


def peer_python(peer: str, python: Path | None, folder: Path, pip_flags: list[str]) -> Path:
    """Return an interpreter that has the peer: the given one, or that of an environment made in ``folder``.

    An environment that is there already is taken as it is.
    """
    if python is not None:
        return python
    python = folder / "bin" / "python"
    # Written last: an interrupted installation is done again.
    stamp = folder / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for words in INSTALLS[peer]:
            subprocess.run([str(python), "-m", "pip", "install", "-q", *pip_flags, *words], check=True)
        stamp.touch()
    return python
