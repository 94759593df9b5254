"""``dglkge-launch`` that takes this machine for another one, so that it goes by ssh; run as a program."""

from __future__ import annotations

import sys

from dglkge.cli import launch
from dglkge.launch.remote import remote_site

remote_site.is_own_address = lambda address: False

if __name__ == "__main__":
    sys.exit(launch.main())
