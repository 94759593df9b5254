"""The command: further triples and entities to a data set, with every old id as it was. See --help."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

if __name__ == "__main__":
    # Not the folder of this script, whose modules could hide others, but its parent, which has the packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dglkge.cli.datasets import run_script

main = functools.partial(run_script, "extend.py")

if __name__ == "__main__":
    sys.exit(main())
