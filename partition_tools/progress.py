"""Progress on stderr while files are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm


def shows(progress: bool | None) -> bool:
    """Return whether to show progress: as asked for, else where stderr is a terminal."""
    return sys.stderr.isatty() if progress is None else progress


def say(progress: bool | None, message: str) -> None:
    """Write a line to stderr where progress is shown."""
    if shows(progress):
        sys.stderr.write(message + "\n")


@contextmanager
def reading_progress(
    files: Sequence[Path], progress: bool | None
) -> Iterator[Callable[[Path], Callable[[int], None]]]:
    """Show one bar over the bytes of all files.

    Parameters
    ----------
    files : sequence of Path
        What will be read.
    progress : bool or None
        Whether to show the bar; None: where stderr is a terminal.

    Yields
    ------
    callable
        Gives, for a file, the function to call with the number of its bytes read so far.
    """
    total = sum(path.stat().st_size for path in files if path.is_file())
    done: dict[Path, int] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=not shows(progress)) as bar:

        def watch(path: Path) -> Callable[[int], None]:
            def on_bytes(position: int) -> None:
                done[path] = position
                bar.update(sum(done.values()) - bar.n)

            return on_bytes

        yield watch
