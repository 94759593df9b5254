"""What is said when machines are not ready."""

from __future__ import annotations

import pytest

from dglkge.launch.remote.remote_site import (
    PreflightError,
    compare_fingerprints,
    compare_versions,
    raise_problems,
)


def described(**versions: str | None) -> dict:
    """What an agent says."""
    return {"versions": {"python": "3.11", "dglkge": "1.0", "dgl": "1.1.3", "torch": "2.13.0", **versions}}


def test_every_problem_has_a_line() -> None:
    """All problems of all machines at once, in columns, each on one line."""
    problems = [("10.0.0.2", "port 30050\nis in use"), ("10.0.0.13", "has no dgl"), ("10.0.0.2", "no room")]
    with pytest.raises(PreflightError) as caught:
        raise_problems(problems, 4)
    assert str(caught.value).splitlines() == [
        "3 problems on 2 of 4 hosts; nothing was started",
        "  10.0.0.2   port 30050 is in use",
        "  10.0.0.13  has no dgl",
        "  10.0.0.2   no room",
    ]


def test_no_problem() -> None:
    """Nothing is raised for nothing."""
    raise_problems([], 4)


def test_equal_versions() -> None:
    """Machines that agree with the first and with the launcher are fine."""
    assert compare_versions({"a": described(), "b": described()}, "1.0") == []
    assert compare_versions({}, "1.0") == []


def test_other_versions() -> None:
    """dglkge is compared with the launcher's, all else with the first machine's; what is missing is named."""
    machines = {"a": described(dglkge="0.9"), "b": described(torch="2.2.1", dgl=None), "c": described()}
    assert compare_versions(machines, "1.0") == [
        ("a", "has dglkge 0.9, the launcher has 1.0"),
        ("b", "has no dgl"),
        ("b", "has torch 2.2.1, a has 2.13.0"),
    ]


def test_partition_triples() -> None:
    """A machine with a file of another partitioning is named; one without a file is told of elsewhere."""
    assert compare_fingerprints({"a": "1", "b": "1", "c": None}) == []
    ((address, text),) = compare_fingerprints({"a": None, "b": "1", "c": "2"})
    assert (address, "differs from that of b" in text) == ("c", True)
