"""Which files hold which split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dglkge.data.dataset_files import SPLITS
from dglkge.data.text_format import EXTENSIONS, extension
from dglkge.errors import InputError

_WORDS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
_WORDS |= {"dev": "valid", "test": "test", "testing": "test"}


def find_sources(inputs: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each split.

    Parameters
    ----------
    inputs : sequence of Path
        A folder with files called train, valid and test, or up to three files. Files whose names say nothing
        are taken as train, valid and test in their order.

    Returns
    -------
    dict of str to Path
        At least ``"train"``, in the order train, valid, test.

    Raises
    ------
    InputError
        If something is missing, or two files claim the same split.
    """
    for path in inputs:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
    if len(inputs) == 1 and inputs[0].is_dir():
        return _in_folder(inputs[0])
    folders = [str(path) for path in inputs if path.is_dir()]
    if folders:
        raise InputError(
            f"--input takes one folder or up to three files; got the folder {folders[0]} among others"
        )
    if len(inputs) > len(SPLITS):
        raise InputError(f"--input takes up to three files (train, valid, test), got {len(inputs)}")
    if len(inputs) == 1:
        return {"train": inputs[0]}
    words = [split_of(path) for path in inputs]
    if not any(words):
        return dict(zip(SPLITS, inputs))
    if not all(words):
        unclear = inputs[words.index(None)]
        raise InputError(f"{unclear}: its name does not say which of train, valid and test it is, others' do")
    return _one_each(list(inputs), "the files given")


def split_of(path: Path) -> str | None:
    """Return which split a file's name stands for: ``train.tsv``, ``dev.txt.gz``, ``wiki-test.txt``, ..."""
    stem = path.name[: -len(".gz")] if path.name.lower().endswith(".gz") else path.name
    return _WORDS.get(re.split(r"[-_.]", Path(stem).stem.lower())[-1])


def _in_folder(folder: Path) -> dict[str, Path]:
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and extension(path) in EXTENSIONS]
    sources = _one_each([path for path in files if split_of(path)], str(folder))
    if "train" not in sources:
        raise InputError(
            f"{folder} has no file called train with one of the extensions {', '.join(EXTENSIONS)} "
            "(the text ones also with .gz)"
        )
    return sources


def _one_each(files: list[Path], place: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in files:
        split = split_of(path)
        if split in found:
            raise InputError(
                f"{place}: the {split} split is ambiguous: {found[split].name} and {path.name}; give files"
            )
        if split:
            found[split] = path
    return {split: found[split] for split in SPLITS if split in found}
