"""What DGL and torch write whenever they start and stop; it tells a person nothing, and the logs keep it."""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"\[[\d:]+\] .*/rpc/rpc\.cc:\d+: (Sender|Receiver) with NetType~\w+ is created\.$"
    r"|\[W.* socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved\."
    r"|load \w+$"
    r"|Start to create specified graph formats which may take non-trivial time\.$"
    r"|Finished creating specified graph formats\.$"
    r"|start graph service on server \d+ for part \d+$"
    r"|Client \[\d+\] waits on [\d.:]+$"
    r"|Machine \(\d+\) group \(\d+\) client \(\d+\) connect to server successfuly!$"
    r"|Warning! Interface: \w+ ?$"
    r"|IP address not available for interface\.$"
    r"|Server is waiting for connections (non-blockingly )?on \[.*\]\.\.\.$"
    r"|Client ?\[\d+\] in group ?\[\d+\] is exiting\.\.\.$"
    r"|Server ?\(\d+\) shutdown\.$"
    r"|Server is exiting\.\.\.$"
    r"|Initialize the distributed services with graphbolt: (True|False)$"
)


def is_noise(line: str) -> bool:
    """Tell whether a line is one that every job of DGL writes.

    Examples
    --------
    >>> is_noise("Server (0) shutdown."), is_noise("epoch 1: loss 3.2")
    (True, False)
    """
    return _NOISE.match(line) is not None
