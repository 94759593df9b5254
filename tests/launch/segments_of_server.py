"""Run as a program: makes DGL's server of one part, without starting it, and says what it put in /dev/shm.

``python segments_of_server.py IP_CONFIG PARTITION_JSON PART`` prints {new segment: bytes of its pages}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ["DGL_ROLE"] = "server"

import dglkge  # noqa: F401, I001  before dgl
import dgl

SHARED_MEMORY = Path("/dev/shm")


def sizes() -> dict[str, int]:
    return {path.name: path.stat().st_blocks * 512 for path in SHARED_MEMORY.iterdir() if path.is_file()}


def main(ip_config: str, part_config: str, part: str) -> None:
    before = sizes()
    with contextlib.redirect_stdout(sys.stderr):
        server = dgl.distributed.DistGraphServer(int(part), ip_config, 1, 1, part_config, graph_format="csc")
    added = {name: size for name, size in sizes().items() if name not in before}
    print(json.dumps(added))
    del server


if __name__ == "__main__":
    main(*sys.argv[1:])
