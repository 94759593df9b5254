"""Bounded memory: the same data set at any limit, and limits that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dglkge.data.text_format import Columns
from dglkge.data.triples import BLOCK_BYTES
from dglkge.errors import InputError
from dglkge.partition import rows
from dglkge.partition.ingest import bytes_at_a_time
from dglkge.partition.make_dataset import METIS_TRIPLE_BYTES, metis_memory, partition_triples
from dglkge.partition.options import Options
from dglkge.partition.readers import files
from dglkge.partition.rows import CollectedRows, distinct_below, pieces


def test_metis_is_refused_where_it_does_not_fit() -> None:
    assert metis_memory(1000, 10**9) == 1000 * METIS_TRIPLE_BYTES
    with pytest.raises(
        InputError, match=r"METIS needs about .* GB for 100,000,000 triples, --max-memory is 1.0 GB: "
    ):
        metis_memory(10**8, 10**9)
    with pytest.raises(InputError, match="the machine's free memory is .* GB: give --method ldg or random"):
        metis_memory(10**12, None)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a data set but DGL's own, which have times in them, and the log."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".dgl", ".log")
    }
    description = json.loads(files["dataset.json"])
    checksums = description["checksums"]
    assert any(name.endswith(".dgl") for name in checksums)
    description["checksums"] = {name: crc for name, crc in checksums.items() if not name.endswith(".dgl")}
    return {**files, "dataset.json": json.dumps(description).encode()}


@pytest.mark.parametrize("typed, method", [(False, "random"), (True, "ldg")])
def test_any_limit_and_number_of_workers_give_the_same_data_set(
    typed: bool, method: str, tmp_path: Path, build_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    names = [f"{kind}{i}" for kind in "ab" for i in range(40)]
    frame = pd.DataFrame({"head": rng.choice(names, 900), "relation": rng.integers(0, 6, 900)})
    frame = frame.assign(tail=rng.choice(names, 900), weight=rng.random(900).astype(np.float32))
    frame = pd.concat([frame, frame[:50]])
    frame.to_csv(tmp_path / "all.tsv", sep="\t", header=False, index=False)
    (tmp_path / "types.tsv").write_text("".join(f"{name}\t{name[0]}\n" for name in names))
    contents = []
    for number, limit in enumerate((None, 64 * 10**6)):
        options = Options(
            num_parts=2,
            method=method,
            columns=Columns(order=("head", "relation", "tail", "weight")),
            entity_types=tmp_path / "types.tsv" if typed else None,
            split=(0.8, 0.1, 0.1),
            name="same",
            max_memory=limit,
            num_workers=1 if limit is None else 3,
        )
        if limit is not None:
            # As few rows at a time, and as many buckets, as a large graph would have.
            monkeypatch.setattr(rows, "ROWS_AT_A_TIME", 64)
            monkeypatch.setattr(files, "bytes_at_a_time", lambda *_: 512)
            monkeypatch.setattr("dglkge.partition.build_graph.PIECE_ROWS", 50)
            monkeypatch.setattr("dglkge.data.quality.INDEXED_BYTES", 64 * 10**6 // 100)
        partition_triples([tmp_path / "all.tsv"], tmp_path / str(number), options)
        contents.append(content(tmp_path / str(number)))
    assert sorted(contents[0]) == sorted(contents[1])
    assert [name for name, expected in contents[0].items() if contents[1][name] != expected] == []
    report = json.loads(contents[0]["partitions/report.json"])
    assert report["method"] == method and report["quality"]["duplicates"]["train"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "all.tsv", "types.tsv"]


def test_blocks_are_smaller_where_many_are_in_memory() -> None:
    assert bytes_at_a_time(1 << 40, 8) == BLOCK_BYTES
    assert bytes_at_a_time(512 << 20, 16) == 1 << 20 and bytes_at_a_time(512 << 20, 4) == 4 << 20
    assert bytes_at_a_time(64 * 10**6, 64) == 1 << 20


@pytest.mark.parametrize("in_file", [False, True])
def test_rows_are_collected(in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_AT_A_TIME", 4)
    collected = CollectedRows(tmp_path if in_file else None, (3,), np.int32)
    blocks = [np.arange(3 * n).reshape(n, 3).astype(np.int32) for n in (5, 0, 2, 9)]
    for block in blocks:
        collected.append(block)
    array = collected.array()
    for _, (piece,) in pieces(array):
        piece += 1
    assert np.array_equal(array, np.concatenate(blocks) + 1)
    assert distinct_below([array], 1).tolist() == np.unique(array[:, 1]).tolist()
    assert not list(tmp_path.iterdir())
    # Few large numbers take no large array.
    assert distinct_below([np.array([[2**31 - 1], [5], [5]], np.int32)], 0).tolist() == [5, 2**31 - 1]
    assert CollectedRows(tmp_path if in_file else None, (3,), np.int32).array().shape == (0, 3)
