"""Starting a job: a pure plan of its processes, executors that run them, a supervisor that ends them."""

from __future__ import annotations

ALONE = ("--node_rank", "0", "--nodes", "1")
"""Options of ``dglkge-launch`` for a job on this machine, without SSH; it chooses the ports."""
