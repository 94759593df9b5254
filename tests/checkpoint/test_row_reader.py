"""Rows read block by block: what comes, the checksum, and files that are not as they should be."""

from __future__ import annotations

import random
import threading
import time

import h5py
import numpy as np
import pytest

from dglkge.checkpoint import durable, hdf5_format
from dglkge.checkpoint import restore as row_reader
from dglkge.checkpoint.restore import RowReader, Span, plan_pieces


@pytest.fixture
def small_blocks(monkeypatch):
    """Cut rows into blocks of 100 bytes, and read what lies between in pieces as small."""
    monkeypatch.setattr(hdf5_format.row_blocks, "__defaults__", (100,))
    monkeypatch.setattr(hdf5_format, "BLOCK_BYTES", 100)


def gathered(reader, datasets):
    """All rows that a reader yields, put together; each must come once."""
    found = {name: np.zeros(rows.shape, rows.dtype) for name, rows in datasets.items()}
    seen = {name: np.zeros(len(rows), int) for name, rows in datasets.items()}
    for name, start, block in reader:
        found[name][start : start + len(block)] = block
        seen[name][start : start + len(block)] += 1
    assert all((times == 1).all() for times in seen.values())
    return found


@pytest.mark.parametrize("slow", ["disk", "reader"])
def test_contiguous_compressed_and_empty_rows(tmp_path, small_blocks, monkeypatch, slow):
    """No block may be overwritten before it was used, and none used before it was read."""
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.random((57, 6), np.float32),
        "ids": np.arange(57),
        "packed": rng.random((31, 3)),
        "wide": rng.random((3, 90), np.float32),
        "none": np.empty((0, 4), np.float32),
        "narrow": np.empty((5, 0), np.float32),
    }
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, compression="gzip" if name == "packed" else None)
    if slow == "disk":
        real = row_reader.os.preadv
        monkeypatch.setattr(row_reader.os, "preadv", lambda *words: (time.sleep(0.001), real(*words))[1])
    with h5py.File(path) as file:
        datasets = {**{name: file[name] for name in arrays}, "in memory": arrays["ids"]}
        reader = RowReader(path, datasets)
        found = gathered(((time.sleep(0.001), each)[1] for each in reader), datasets)
    for name, values in {**arrays, "in memory": arrays["ids"]}.items():
        assert found[name].tobytes() == values.tobytes(), name
    assert reader.crc32 == durable.file_crc32(path)


def test_pieces_cover_the_file_once(small_blocks):
    """Random layouts: pieces are in order without a gap, and every dataset's rows come whole and once."""
    rng = random.Random(0)
    for _ in range(200):
        place, spans = rng.randrange(300), []
        for number in range(rng.randrange(4)):
            spans.append(Span(str(number), place, rng.randrange(40), rng.randrange(1, 150)))
            place = spans[-1].stop + rng.choice([0, 1, 250])
        num_bytes = place + rng.randrange(300)
        pieces = plan_pieces(num_bytes, rng.sample(spans, len(spans)))
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
        assert not pieces or pieces[-1].stop == num_bytes
        for span in spans:
            mine = [piece for piece in pieces if piece.name == span.name]
            assert sum(piece.stop - piece.start for piece in mine) == span.stop - span.offset
            assert all(piece.start == span.offset + piece.first_row * span.row_bytes for piece in mine)
            assert all((piece.stop - piece.start) % span.row_bytes == 0 for piece in mine)


def test_datasets_out_of_place_are_no_pieces(small_blocks):
    """One inside another, and one behind the end of the file."""
    spans = [Span("good", 10, 5, 10), Span("inside", 20, 1, 10), Span("behind", 70, 5, 10)]
    assert {piece.name for piece in plan_pieces(100, spans)} == {"good", None}


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path, small_blocks):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["rows"] = np.arange(1000)
    with h5py.File(path) as file:
        reader = RowReader(path, {"rows": file["rows"]})
        with open(path, "r+b") as raw:
            raw.truncate(5000)
        with pytest.raises(OSError, match="x.h5 ends at byte 5000, expected 50"):
            for _ in reader:
                pass


def test_a_reader_that_is_left_leaves_no_thread(tmp_path, small_blocks):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["rows"] = np.arange(1000)
    before = set(row_reader_threads())
    with h5py.File(path) as file:
        blocks = iter(RowReader(path, {"rows": file["rows"]}))
        next(blocks)
        blocks.close()
    assert set(row_reader_threads()) == before


def row_reader_threads():
    """Living threads of readers."""

    return [thread for thread in threading.enumerate() if "checkpoint-reader" in thread.name]
