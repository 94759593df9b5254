"""``python -m dglkge``: the same as the command ``dglkge``."""

import sys

from dglkge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
