"""``dglkge-engine``: installs DGL, also for Pythons that are newer than its wheels."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dglkge.cli.common import Parser, describe, print_text, run_command
from dglkge.distributed.dgl_import import DGL_VERSION, NO_WHEEL_FROM
from dglkge.errors import InputError, JobError

LAST_WITH_WHEEL = "3.12"
MACHINES = ("x86_64", "aarch64")
"""Processors that its wheels are for."""
TRIAL = """
import dglkge
import dgl, dgl.distributed, torch
graph = dgl.graph(([0, 1], [1, 2]))
assert graph.in_degrees().tolist() == [0, 1, 1]
print(f"dgl {dgl.__version__} works with torch {torch.__version__}")
"""
"""What DGL must be able to do in a new process."""
TRIAL_SECONDS = 300


def plan(version: tuple[int, int], flags: Sequence[str], folder: str) -> list[list[str]]:
    """Return the commands that install DGL; ``flags`` are words for pip, the empty folder gets the wheel."""
    pip = [sys.executable, "-m", "pip"]
    if version < NO_WHEEL_FROM:
        return [[*pip, "install", *flags, f"dgl=={DGL_VERSION}"]]
    download = ["--no-deps", "--only-binary=:all:", "--python-version", LAST_WITH_WHEEL, "--dest", folder]
    abi = "cp" + LAST_WITH_WHEEL.replace(".", "")
    tags = ["--remove", "--python-tag=py3", "--abi-tag=none"]
    return [
        [*pip, "download", *flags, *download, "--abi", abi, f"dgl=={DGL_VERSION}"],
        [sys.executable, "-m", "wheel", "tags", *tags, f"{folder}/*.whl"],
        [*pip, "install", *flags, f"{folder}/*.whl"],
    ]


def works() -> str:
    """Import DGL in a new process; returns what works, or an empty text."""
    command = [sys.executable, "-c", TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TRIAL_SECONDS)
    return done.stdout.strip() if done.returncode == 0 else ""


def install(flags: Sequence[str], dry_run: bool) -> int:
    """Install DGL unless it works already."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        known, here = " and ".join(MACHINES), f"{sys.platform} on {platform.machine()}"
        raise InputError(f"dgl {DGL_VERSION} has wheels for linux on {known}; this is {here}")
    if working := works():
        print_text(f"{working}: nothing to do")
        return 0
    with tempfile.TemporaryDirectory(prefix="dglkge-engine.") as folder:
        for command in plan(sys.version_info[:2], flags, folder):
            print_text(shlex.join(command))
            if dry_run:
                continue
            # The name of the downloaded wheel is known only now.
            wheel = next(Path(folder).glob("*.whl"), None)
            words = [str(wheel) if wheel and word.endswith("*.whl") else word for word in command]
            if subprocess.run(words, check=False).returncode:
                raise JobError(f"this command failed: {shlex.join(words)}")
    if not dry_run:
        working = works()
        if not working:
            why = "python -c 'import dglkge, dgl'"
            raise JobError(f"dgl {DGL_VERSION} is installed and cannot be imported; this shows why: {why}")
        print_text(working)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Install dgl 2.1.0, its last release, into this Python's environment, and try it.

    Its wheels are for Python 3.8 to 3.12. For a newer Python pip downloads the one for 3.12, "wheel tags"
    gives it a name that fits every Python 3, and pip installs that: only one extension in it (_cy3) is for
    3.12 alone, and DGL does without it. Nothing else is changed. That DGL loads with any torch is dglkge's
    own work: import dglkge before dgl, or start scripts with dglkge-launch.

    Examples
    --------
      dglkge-engine
      dglkge-engine --dry-run       # shows what it would do
      dglkge-engine --pip-flags="--index-url https://pypi.example.com/simple"
    """
    parser = Parser("dglkge-engine")
    describe(parser, main)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("--pip-flags", default="", metavar="FLAGS", help="more words for pip's commands")
    args = parser.parse_args(argv)
    return run_command("dglkge-engine", lambda: install(shlex.split(args.pip_flags), args.dry_run))


if __name__ == "__main__":
    sys.exit(main())
