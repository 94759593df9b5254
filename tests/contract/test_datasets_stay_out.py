"""The data sets of ../shared have licenses of their own: none of their content is in the repository."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from tests.contract.source_tree import ROOT


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, unpacked where it is packed; bytes that are no text are lines of some sort too."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).splitlines()


def copied_lines(paths: list[Path], known: set[bytes]) -> list[str]:
    """Places whose line is a data set's; indents and quotes around it do not hide it."""
    return [
        f"{path.name}:{number}"
        for path in paths
        for number, line in enumerate(lines_of(path), start=1)
        if line.strip(b" \"',") in known
    ]


def test_no_line_of_a_dataset(shared_datasets):
    files = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(files, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"git does not list the repository's files: {done.stderr}")
    paths = [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    known = {line for path in shared_datasets.glob("*/*.tsv.gz") for line in lines_of(path)}
    assert len(known) > 100_000 and len(paths) > 500
    assert copied_lines(paths, known) == []


def test_checker_finds_a_copy(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"x\n  'a\tknows\tb',\n")
    (tmp_path / "toy.tsv.gz").write_bytes(gzip.compress(b"a\tknows\tb\n"))
    (tmp_path / "other.txt").write_bytes(b"a knows b\n")
    assert copied_lines(sorted(tmp_path.iterdir()), {b"a\tknows\tb"}) == ["notes.txt:2", "toy.tsv.gz:1"]
