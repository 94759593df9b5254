"""Where files lie: on the launcher's machine and on those of the job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """Two folders that mean the same, here and on the machines.

    Attributes
    ----------
    here : Path
        Where the launcher seeks relative paths.
    workspace : Path
        Where the processes run, so that a relative path means the same to the script.
    """

    here: Path
    workspace: Path

    def on_machines(self, path: Path) -> Path:
        """Return where a path of here lies on the machines: inside the folder, or the same absolute path."""
        path = self.here / path
        return self.workspace / path.relative_to(self.here) if path.is_relative_to(self.here) else path
