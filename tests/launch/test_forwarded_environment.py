"""Which variables reach other machines."""

from __future__ import annotations

import os

import pytest

from dglkge.launch.ssh import forwarded_environment


@pytest.mark.parametrize(
    "name", ["PATH", "PYTHONHASHSEED", "LD_PRELOAD", "OMP_NUM_THREADS", "DGLBACKEND", "GLOO_SOCKET_IFNAME"]
)
def test_forwarded(name: str) -> None:
    """What changes how Python, DGL and torch compute, with its value as it is."""
    assert forwarded_environment({name: "/x'y $z"}) == {name: "/x'y $z"}


@pytest.mark.parametrize(
    "name", ["HOME", "USER", "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "RANK", "DISPLAY"]
)
def test_not_forwarded(name: str) -> None:
    """What belongs to this machine or session, and secrets, stay here."""
    assert forwarded_environment({name: "x"}) == {}


def test_relative_folders_become_absolute() -> None:
    """Processes elsewhere start in other folders; an empty entry stays what it was."""
    found = forwarded_environment({"PYTHONPATH": f".{os.pathsep}{os.pathsep}/a", "PYTHONWARNINGS": "."})
    assert found == {"PYTHONPATH": f"{os.getcwd()}{os.pathsep}{os.pathsep}/a", "PYTHONWARNINGS": "."}
