"""The command: triples to a data set with DGL partitions. ``dglkge data build`` does the same; see --help."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

if __name__ == "__main__":
    # Not the folder of this script, whose modules could hide others, but its parent, which has the packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dglkge.cli.datasets import run_script

main = functools.partial(run_script, "partition.py")

if __name__ == "__main__":
    sys.exit(main())
