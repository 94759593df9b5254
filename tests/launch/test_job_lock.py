"""One job per machine, and the holder's name for the second."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dglkge.errors import InputError
from dglkge.launch.local_site import lock_machine

HOLDER = """
import sys
from dglkge.launch.local_site import lock_machine
with lock_machine(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_is_refused_and_told_who_holds(tmp_path: Path) -> None:
    """The lock excludes, names its holder, leaves no file, and ends with a holder that is killed."""
    root = Path(__file__).resolve().parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(
            InputError, match=re.escape(f"another job runs on this machine (pid {holder.pid}: ")
        ):
            with lock_machine(str(tmp_path)):
                raise AssertionError("held twice")
    finally:
        holder.kill()
        holder.communicate()
    with lock_machine(str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_released_after_failure(tmp_path: Path) -> None:
    """A job that fails lets go, in the same process too."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock_machine(str(tmp_path)):
            raise ZeroDivisionError


def test_no_shared_memory(tmp_path: Path) -> None:
    """A machine without the folder is told so."""
    with pytest.raises(InputError, match="absent, where DGL's tables lie: No such file or directory"):
        with lock_machine(str(tmp_path / "absent")):
            pass


def test_holder_out_of_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that the kernel's list does not show here (another container's) is still a holder."""
    locks = tmp_path / "locks"
    locks.write_text("1: FLOCK  ADVISORY  WRITE 0 00:00:1 0 EOF\n")
    real_open = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *a, **k: real_open(locks if path == "/proc/locks" else path, *a, **k)
    )
    with lock_machine(str(tmp_path)):
        with pytest.raises(InputError, match="its process cannot be seen from here"):
            with lock_machine(str(tmp_path)):
                pass
