"""The mapped index of known answers: against sets of triples, damaged, stale, shared and without a place."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from dglkge.data import known_triples
from dglkge.data.dataset_files import partial_path
from dglkge.data.known_triples import KnownTriples, open_known_index
from dglkge.errors import JobError
from dglkge.typing import Side

FILE = "known_train.index"


def random_triples(num: int, largest: int, num_relations: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    triples = rng.integers(0, largest + 1, (num, 3))
    triples[:, 1] %= num_relations
    return np.concatenate([triples, triples[: num // 5]])  # with duplicates


def mapped(folder: Path, triples: np.ndarray, num_relations: int, source: str = "abc") -> KnownTriples:
    index = open_known_index(folder, "train", source, triples, num_relations)
    return KnownTriples([], num_relations, [lambda: index])


def check(known: KnownTriples, triples: np.ndarray, queries: np.ndarray) -> None:
    """Hold that queries (Q, 2) of entity and relation have the answers that a dict of sets gives."""
    entities, relations = queries.T
    for side in Side:
        oracle: dict[tuple[int, int], set[int]] = {}
        for triple in triples.tolist():
            oracle.setdefault((triple[side.anchor_column], triple[1]), set()).add(triple[side.column])
        expected = [sorted(oracle.get((e, r), set())) for e, r in queries.tolist()]
        places, answers = known.answers(side, entities, relations)
        assert [answers[places == i].tolist() for i in range(len(queries))] == expected
        first, count, answer_ids = known.runs(side, entities, relations)
        assert [answer_ids[a : a + n].tolist() for a, n in zip(first, count)] == expected
        # One answer that is there, if any, and one that may be.
        first_answers = np.array([answers[0] if answers else 0 for answers in expected], np.int64)
        for candidates in (first_answers, first_answers + 1):
            is_known = [candidate in answers for candidate, answers in zip(candidates.tolist(), expected)]
            assert known.contain(side, entities, relations, candidates).tolist() == is_known


@pytest.mark.parametrize(
    ("largest", "num_relations", "chunk"),
    [(5, 1, 16), (40, 7, 1 << 20), (1, 300, 16), (2**31 - 1, 3, 1 << 20)],
)
def test_answers_are_those_of_a_dict(largest, num_relations, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(known_triples, "_CHUNK_ROWS", chunk)
    triples = random_triples(300, largest, num_relations)
    triples[0, 0] = triples[1, 2] = largest
    others = random_triples(50, largest, num_relations)
    queries = np.concatenate([triples[:, :2], triples[:, [2, 1]], others[:, :2]])
    known = mapped(tmp_path, triples, num_relations)
    check(known, triples, queries)
    (direction,) = known.directions(Side.TAIL)
    first = direction.first_answers()
    entities = direction.given(first)
    relations = np.searchsorted(direction.starts, first, side="right") - 1
    assert list(zip(relations, entities)) == sorted({(r, h) for h, r, _ in triples.tolist()})
    check(KnownTriples([triples[:100], triples[50:]], num_relations), triples, queries)
    in_memory = known_triples.index_in_memory([triples[20:]], num_relations, list(Side))
    check(KnownTriples([triples[:30]], num_relations, [lambda: in_memory]), triples, queries)
    for few in (triples[:0], triples[:1]):
        for few_queries in (queries, queries[:0]):
            check(mapped(tmp_path, few, num_relations, str(len(few))), few, few_queries)


def inode(folder: Path) -> int:
    return (folder / FILE).stat().st_ino


def test_a_file_is_built_once_and_again_for_other_triples(tmp_path: Path) -> None:
    triples = random_triples(100, 9, 2)
    mapped(tmp_path, triples, 2)
    before = inode(tmp_path)
    check(mapped(tmp_path, triples, 2), triples, triples[:, :2])
    assert inode(tmp_path) == before and os.listdir(tmp_path) == [FILE]
    (direction,) = mapped(tmp_path, triples, 2).directions(Side.HEAD)
    assert not direction.keys.flags.owndata and not direction.answers.flags.writeable
    # NumPy's header, a checksum, 16 bytes a triple, and for each direction where a relation begins.
    assert (tmp_path / FILE).stat().st_size == 128 + 8 + 16 * len(triples) + 2 * 8 * 3
    for source, num_relations, num_rows in (("other", 2, 120), ("other", 3, 120), ("other", 3, 90)):
        before, others = inode(tmp_path), random_triples(100, 9, 2, seed=8)[:num_rows]
        check(mapped(tmp_path, others, num_relations, source), others, others[:, :2])
        assert inode(tmp_path) != before


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def test_a_damaged_file_is_built_again(tmp_path, caplog):
    triples = random_triples(20_000, 900, 5)
    mapped(tmp_path, triples, 5)
    whole = (tmp_path / FILE).read_bytes()
    caplog.set_level(logging.INFO)
    damaged = [flipped(whole, place) for place in (3, 70, 128, 132, 136, 3000, len(whole) - 1)]
    for content in (whole[:60], whole[:-5], *damaged):
        (tmp_path / FILE).write_bytes(content)
        caplog.clear()
        check(mapped(tmp_path, triples, 5), triples, triples[:50, :2])
        (record,) = caplog.records
        assert "the index of known answers is built again: " in record.getMessage()
        assert (tmp_path / FILE).read_bytes() == whole


def test_another_process_that_holds_the_lock_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(known_triples, "LOCK_SECONDS", 0.2)
    triples = random_triples(10, 9, 2)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(JobError, match="another process has been building .*known_train.index for 0 s"):
            open_known_index(tmp_path, "train", "abc", triples, 2)
    finally:
        os.close(handle)
    check(mapped(tmp_path, triples, 2), triples, triples[:, :2])


@pytest.mark.parametrize("number", [None, errno.ENOLCK, 0])
def test_processes_at_the_same_time_share_one_file(number, tmp_path, monkeypatch):
    """Where hosts do not see each other's locks, none maps what another is still writing.

    A disk of a network has no locks (ENOLCK), or locks for each host (0).
    """

    def flock(file: object, operation: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    if number is not None:
        monkeypatch.setattr(fcntl, "flock", flock)
    triples = random_triples(50_000, 900, 3)
    context = multiprocessing.get_context("fork")
    inodes = context.SimpleQueue()

    def open_in_process() -> None:
        check(mapped(tmp_path, triples, 3), triples, triples[:20, :2])
        inodes.put(inode(tmp_path))

    processes = [context.Process(target=open_in_process) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    different = {inodes.get() for _ in processes}
    assert os.listdir(tmp_path) == [FILE] and (number is not None or len(different) == 1)


def test_files_of_killed_processes_go(tmp_path: Path) -> None:
    """Those of this host; another host's may be in use."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    host = socket.gethostname()
    remnant = tmp_path / f".{FILE}.{host}.{process.pid}.partial"
    running = [tmp_path / f".{FILE}.other.1.partial", tmp_path / f".{FILE}.{host}.{os.getppid()}.partial"]
    for path in (remnant, *running):
        path.touch()
    mapped(tmp_path, random_triples(10, 9, 2), 2)
    assert sorted(tmp_path.iterdir()) == sorted([*running, tmp_path / FILE])


def test_without_a_place_for_the_file_it_is_built_in_memory(tmp_path, monkeypatch, caplog):
    """And a build that fails leaves nothing."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    triples = random_triples(100, 9, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        check(mapped(tmp_path, triples, 2), triples, triples[:, :2])
    assert os.listdir(tmp_path) == []
    partial_path(tmp_path / FILE).mkdir()
    check(mapped(tmp_path, triples, 2), triples, triples[:, :2])
    first, second = [record.getMessage() for record in caplog.records]
    assert "each process builds its own index of known answers" in first and "No space left" in first
    assert "known_train.index: Is a directory" in second
