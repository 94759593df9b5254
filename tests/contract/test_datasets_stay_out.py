"""The data sets of ../shared have licenses of their own: none of their content is in the repository."""

from __future__ import annotations

import gzip
from pathlib import Path

from tests.contract.source_tree import OUTPUTS, ROOT, walk


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, unpacked where it is packed; bytes that are no text are lines of some sort too."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).splitlines()


def copied_lines(root: Path, known: set[bytes]) -> list[str]:
    """Places of a repository whose line is a data set's; indents and quotes around it do not hide it."""
    found = []
    for path in walk(root):
        for number, line in enumerate(lines_of(path), start=1):
            if line.strip(b" \"',") in known:
                found.append(f"{path.relative_to(root)}:{number}")
    return found


def test_no_line_of_a_dataset(shared_datasets):
    files = sorted(shared_datasets.glob("*/*.tsv.gz"))
    known = {line for path in files for line in lines_of(path)}
    assert len(known) > 100_000
    assert copied_lines(ROOT, known) == []


def test_what_is_not_looked_at_is_not_in_git():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/{name}/" for name in OUTPUTS} <= set(ignored)


def test_checker_finds_a_copy(tmp_path):
    known = {b"a\tknows\tb"}
    (tmp_path / "notes.txt").write_bytes(b"x\n  'a\tknows\tb',\n")
    (tmp_path / "toy.tsv.gz").write_bytes(gzip.compress(b"a\tknows\tb\n"))
    (tmp_path / "other.txt").write_bytes(b"a knows b\n")
    assert copied_lines(tmp_path, known) == ["notes.txt:2", "toy.tsv.gz:1"]
