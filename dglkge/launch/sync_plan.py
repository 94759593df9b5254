"""Which files a machine needs that shares no disk: script, configuration, its own partition."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from dglkge.config import Config
from dglkge.errors import InputError
from dglkge.launch.file_transfer import Tree, files_below
from dglkge.launch.places import Places

PARTITIONS = "partitions"


def plan_sync(
    command: Sequence[str], config: Config | None, part_config: str | None, places: Places, part_id: int
) -> list[Tree]:
    """List what one machine needs before a job can run there.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments, or ``-m``, a module and its arguments.
    config : Config or None
        The script's configuration, where it has one of ours: names the data set.
    part_config : str or None
        DGL's partition file of other scripts.
    places : Places
    part_id : int
        The machine's own partition.

    Returns
    -------
    list of Tree

    Raises
    ------
    InputError
        If a relative path leads out of the folder.
    """
    files = [*_program(command, places.here), *_named_files(command, places.here)]
    if config is not None:
        folder = places.here / config.dataset
        files += [folder / name for name in dataset_files(folder, part_id)]
    if part_config is not None:
        files += _graph_files(places.here / part_config, part_id)
    return _trees(files, places)


def dataset_files(folder: Path, part_id: int) -> list[str]:
    """Return what a trainer reads of a data set: all but the partitions of other machines."""
    names = []
    for name in files_below(folder):
        parts = Path(name).parts
        is_part = (
            len(parts) > 2 and parts[0] == PARTITIONS and parts[1][:4] == "part" and parts[1][4:].isdigit()
        )
        if not is_part or parts[1] == f"part{part_id}":
            names.append(name)
    return names


def _program(command: Sequence[str], here: Path) -> Iterator[Path]:
    """Yield the script and the modules beside it, or the whole package of a module."""
    if command[0] == "-m":
        package = here / command[1].partition(".")[0]
        yield from sorted(package.rglob("*.py"))
        yield from (path for path in [package.with_suffix(".py")] if path.is_file())
    else:
        yield from sorted((here / command[0]).parent.glob("*.py"))


def _named_files(command: Sequence[str], here: Path) -> Iterator[Path]:
    """Yield the files that arguments name, whole or after ``=``."""
    for word in command:
        for text in (word, word.partition("=")[2]):
            if text and "\0" not in text and (here / text).is_file():
                yield here / text


def _graph_files(part_config: Path, part_id: int) -> Iterator[Path]:
    """Yield DGL's partition file and the files of one partition."""
    yield part_config
    try:
        content = json.loads(part_config.read_bytes())
        yield from (part_config.parent / name for name in content[f"part-{part_id}"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return  # what is wrong with it, the check on the machine says


def _trees(files: Sequence[Path], places: Places) -> list[Tree]:
    """Group files by where they go: those of the folder to the workspace, others to the same path."""
    inside: list[str] = []
    outside: dict[Path, list[str]] = {}
    for path in dict.fromkeys(files):
        if ".." in path.parts:
            raise InputError(f"{path} lies outside of {places.here}, so --sync has no place for it: {path}")
        if path.is_relative_to(places.here):
            inside.append(str(path.relative_to(places.here)))
        else:
            outside.setdefault(path.parent, []).append(path.name)
    trees = [Tree(str(folder), str(folder), tuple(names)) for folder, names in outside.items()]
    if inside:
        trees.append(Tree(str(places.here), str(places.workspace), tuple(inside)))
    return trees
