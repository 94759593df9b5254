"""Files that are read side by side: the same rows with any number of threads, and the first error."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dglkge.data.text_format import Columns, RowRules
from dglkge.data.triples import TripleFile
from dglkge.errors import InputError
from dglkge.partition.ingest import (
    BLOCK_BYTES,
    IdTriples,
    SplitFiles,
    bytes_at_a_time,
    ingest_ids,
    ingest_names,
)

NUM_FILES = 7


def rows_of(number: int) -> list[tuple[str, str, str]]:
    # The names at the start of a block may begin with a byte order mark.
    return [(f"\ufeffe{i % 11}", f"r{i % 3}", f"e{i * number % 17}") for i in range(10, 60 + number)]


def write(folder: Path) -> list[Path]:
    """Files of several kinds; the first begins with a name without a byte order mark."""
    paths = []
    for number in range(NUM_FILES):
        rows = rows_of(number)
        path = folder / f"{number}.tsv"
        text = "".join("\t".join(row) + "\n" for row in rows)
        if number == 0:
            text = "\ufeff" + text
        if number == 3:
            path = folder / "3.tsv.gz"
            path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
        elif number == 5:
            path = folder / "5.parquet"
            pd.DataFrame(rows, columns=["head", "relation", "tail"]).to_parquet(path)
        else:
            path.write_text(
                ("\ufeff" if number else "") + text.replace("\n", "\r\n" if number == 2 else "\n")
            )
        paths.append(path)
    return paths


def read(paths: Sequence[Path], num_workers: int, read_bytes: int, folder: Path | None = None) -> IdTriples:
    seen: dict[Path, list[int]] = {}
    files = {
        "train": [TripleFile(path, read_bytes=read_bytes) for path in paths],
        "test": [TripleFile(paths[1], read_bytes=read_bytes)],
    }
    triples = ingest_names(
        SplitFiles(files, lambda path: seen.setdefault(path, []).append, num_workers), folder
    )
    assert {path: positions[-1] for path, positions in seen.items()} == {
        path: path.stat().st_size for path in paths
    }
    return triples


@pytest.mark.parametrize(
    ("num_workers", "read_bytes", "in_files"),
    [(1, 32, True), (2, 100, False), (5, 64, True), (3, BLOCK_BYTES, False)],
)
def test_rows_stay_in_the_order_of_the_files(
    num_workers: int, read_bytes: int, in_files: bool, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    triples = read(write(tmp_path), num_workers, read_bytes, tmp_path / "here" if in_files else None)
    rows = [row for number in range(NUM_FILES) for row in rows_of(number)]
    assert triples.entities == sorted({name for head, _, tail in rows for name in (head, tail)})
    for split, expected in (("train", rows), ("test", rows_of(1))):
        found = [
            (triples.entities[head], triples.relations[relation], triples.entities[tail])
            for head, relation, tail in triples.splits[split].tolist()
        ]
        assert found == expected
    assert not triples.weights and not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_error_of_the_first_wrong_file_counts(num_workers: int, tmp_path: Path) -> None:
    paths = write(tmp_path)
    paths[4].write_text("a\tb\tc\n" * 40 + "a\tb\n" + "a\tb\tc\n" * 40 + "a\n")
    (tmp_path / "6.tsv").write_text("a\n")
    threads = threading.active_count()
    with pytest.raises(InputError, match=r"4.tsv:41: got 2 columns separated by tabs, expected 3"):
        read(paths, num_workers, 32)
    assert threading.active_count() == threads
    paths[2].unlink()
    with pytest.raises(InputError, match="2.tsv: there is no such file"):
        read(paths, num_workers, 32)


def test_a_bad_line_before_the_damage_of_a_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv.gz"
    content = gzip.compress(b"a\tb\tc\n" * 10 + b"a\t\tc\n" + np.random.default_rng(0).bytes(4000))
    path.write_bytes(content[:-2000])
    with pytest.raises(InputError, match=r"t.tsv.gz:11: the relation is empty"):
        ingest_names(SplitFiles({"train": [TripleFile(path, read_bytes=16)]}, lambda path: print, 2))


def test_an_interrupt_ends_the_threads(tmp_path: Path) -> None:
    (path,) = write(tmp_path)[:1]
    threads = threading.active_count()

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest_names(SplitFiles({"train": [TripleFile(path, read_bytes=32)]}, lambda path: stop, 3))
    assert threading.active_count() == threads


def test_weights_and_integers(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("0\t0\t1\t0.5\n" * 9)
    (tmp_path / "b.tsv").write_text("1\t0\t0\t2\n" * 9)
    columns, rules = (
        Columns(("head", "relation", "tail", "weight")),
        RowRules({"head": 2, "relation": 1, "tail": 2}),
    )
    files = [TripleFile(tmp_path / f"{name}.tsv", columns, rules=rules, read_bytes=24) for name in "ab"]
    triples = ingest_ids(SplitFiles({"train": files}, lambda path: lambda position: None, 2), None, None)
    assert triples.splits["train"].tolist() == [[0, 0, 1]] * 9 + [[1, 0, 0]] * 9
    assert triples.weights["train"].tolist() == [0.5] * 9 + [2] * 9


def test_blocks_are_smaller_where_many_are_in_memory() -> None:
    assert bytes_at_a_time(1 << 40, 8) == BLOCK_BYTES
    assert bytes_at_a_time(512 << 20, 16) == 1 << 20 and bytes_at_a_time(512 << 20, 4) == 4 << 20
    assert bytes_at_a_time(64 * 10**6, 64) == 1 << 20
