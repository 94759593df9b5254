"""Runs a script of the repository in a process of its own."""

from __future__ import annotations

import subprocess

from tests import warm
from tests.functional.job import environment
from tests.toy_kg import REPOSITORY


def run_script(path, *words, status=0, python=None, **options):
    """Run a script, given from the repository, with a Python that has imported much, to an exit status."""
    command = [*(python or warm.python()), str(REPOSITORY / path), *map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": 280, "env": environment(), **options}
    done = subprocess.run(command, **options)
    assert done.returncode == status, done.stdout + done.stderr
    return done
