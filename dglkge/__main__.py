"""``python -m dglkge``: the same as the command ``dglkge``."""

from __future__ import annotations

import sys

from dglkge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
