"""What may keep a job from starting, over all machines: pure, from what their agents say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dglkge.errors import NotReadyError


class PreflightError(NotReadyError):
    """Machines are not ready; each problem has a line. Nothing was started."""


def raise_problems(
    problems: Sequence[tuple[str, str]], num_hosts: int, outcome: str = "nothing was started"
) -> None:
    """Raise all problems in one error, if there are any.

    Parameters
    ----------
    problems : sequence of (address, sentence)
    num_hosts : int
        Machines of the job.
    outcome : str
        What became of it all.

    Raises
    ------
    PreflightError
    """
    if not problems:
        return
    width = max(len(address) for address, _ in problems)
    hosts = len({address for address, _ in problems})
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = [f"  {address:{width}}  {' '.join(text.split())}" for address, text in problems]
    raise PreflightError("\n".join([f"{count} on {hosts} of {num_hosts} hosts; {outcome}", *lines]))


def compare_versions(described: Mapping[str, Mapping[str, Any]], own_version: str) -> list[tuple[str, str]]:
    """Find machines with other versions than the first, or with another dglkge than the launcher's.

    Parameters
    ----------
    described : mapping of str to mapping
        By address, what ``host_tasks.describe_machine`` said.
    own_version : str
        dglkge's, of the launcher.
    """
    problems = []
    addresses = list(described)
    for address in addresses:
        versions = described[address]["versions"]
        reference = {**described[addresses[0]]["versions"], "dglkge": own_version}
        for name, wanted in reference.items():
            whose = "the launcher" if name == "dglkge" else addresses[0]
            if versions.get(name) is None:
                problems.append((address, f"has no {name}"))
            elif wanted is not None and versions[name] != wanted:
                problems.append((address, f"has {name} {versions[name]}, {whose} has {wanted}"))
    return problems


def compare_fingerprints(fingerprints: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Find machines whose partition file is not that of the first machine that has one."""
    known = {address: text for address, text in fingerprints.items() if text is not None}
    first = next(iter(known), "")
    return [
        (address, f"its partition file differs from that of {first}: they are of two partitionings")
        for address, text in known.items()
        if text != known[first]
    ]
