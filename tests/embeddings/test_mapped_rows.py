"""Advice about the pages of a mapped file: which bytes, and what the kernel makes of it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from dglkge.distributed import dgl_memory
from dglkge.embeddings import mapped_rows
from dglkge.embeddings.mapped_rows import MappedFile, MappedRows, find_mapped_files, is_on_disk

NUM_ROWS, DIM = 1 << 14, 256  # 4 ranges of 4 MiB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of rows on a disk, here or in /var/tmp; skips where there is none."""
    folder = next((place for place in (tmp_path, Path("/var/tmp")) if is_on_disk(str(place))), None)
    if folder is None:
        pytest.skip("no folder on a disk: all temporary folders are in memory")
    path = folder / f"dglkge-rows-{os.getpid()}"
    torch.arange(NUM_ROWS * DIM, dtype=torch.float32).numpy().tofile(path)
    yield path
    path.unlink()


def mapped(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=NUM_ROWS * DIM).view(NUM_ROWS, DIM)


def resident(rows: torch.Tensor, first: int, end: int) -> float:
    """Return the share of the pages of some rows that are in the page cache, by mincore(2)."""
    start = rows[first].data_ptr()
    num_bytes = (end - first) * DIM * 4
    assert start % mmap.PAGESIZE == 0
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(start, num_bytes, pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def evict(path: Path) -> None:
    """Drop a file's pages from memory, as long as nobody has mapped them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def two_mappings(file: Path) -> tuple[torch.Tensor, torch.Tensor, MappedRows, MappedRows]:
    """Map a file twice, which is to the kernel as by two processes, the first of which is the leader."""
    rows = mapped(file), mapped(file)
    leader, other = (MappedRows.from_tensor(each, 4, drops=True, is_leader=each is rows[0]) for each in rows)
    return *rows, leader, other


def advise(pages: MappedRows, advice: str, number: int) -> None:
    for address, num_bytes in pages.pieces(number):
        assert getattr(pages, advice)(address, num_bytes)


def test_a_range_is_read_ahead_and_pushed_out_with_its_numbers(file: Path) -> None:
    evict(file)
    rows = mapped(file)
    if resident(rows, 0, NUM_ROWS):
        pytest.skip("this file system does not drop pages")
    quarter, pages = NUM_ROWS // 4, MappedRows.from_tensor(rows, 4, drops=True)
    advise(pages, "read_ahead", 1)
    # The kernel reads asynchronously; touching the rows waits for it.
    assert float(rows[quarter : 2 * quarter].sum()) > 0
    assert resident(rows, quarter, 2 * quarter) == 1
    assert resident(rows, 3 * quarter, NUM_ROWS) == 0
    rows[quarter : 2 * quarter] = 7
    advise(pages, "push_out", 1)
    # A second reader sees what was written.
    assert np.fromfile(file, np.float32, 2, offset=quarter * DIM * 4).tolist() == [7, 7]
    is_kept = resident(rows, quarter, 2 * quarter) > 0.5
    assert (rows[quarter : 2 * quarter] == 7).all() and rows[2 * quarter, 0] == 2 * quarter * DIM
    if is_kept:
        pytest.skip("this kernel keeps the pages")


def test_pages_of_two_processes_leave_memory_when_both_have_unmapped_them(file: Path) -> None:
    first, second, leader, other = two_mappings(file)
    quarter = NUM_ROWS // 4
    first[:quarter] = 3
    second[0, 0] = 4
    assert float(second[:quarter].sum()) > 0
    # It waits for the other, but not for ever.
    advise(leader, "push_out", 0)
    assert resident(first, 0, quarter) == 1
    for advice in ("read_ahead", "start_to_write", "push_out", "drop"):
        advise(other, advice, 0)
    assert resident(first, 0, quarter) == 1  # the other only unmaps, or maps
    advise(leader, "drop", 0)
    if resident(first, 0, quarter) > 0.5:
        pytest.skip("this kernel keeps the pages")
    assert first[0, 0] == second[0, 0] == 4 and (second[1:quarter] == 3).all()
    advise(leader, "start_to_write", 0)
    # The leader waits until another has unmapped a piece.
    second[:quarter] = 5
    later = threading.Timer(0.1, advise, (other, "unmap", 0))
    later.start()
    (piece,) = leader.pieces(0)
    leader.push_out(*piece)
    later.join()
    assert resident(first, 0, quarter) <= 0.5 and (first[:quarter] == 5).all()


def test_others_map_what_the_leader_has_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it, within a limit; a file system that keeps all pages is waited for a few times only."""
    evict(file)
    first, second, leader, other = two_mappings(file)
    if resident(first, 0, NUM_ROWS):
        pytest.skip("this file system does not drop pages")
    (piece,) = leader.pieces(1)
    follower = threading.Thread(target=other.map_ahead, args=piece)
    follower.start()
    time.sleep(0.1)
    assert follower.is_alive()
    leader.read_ahead(*piece)
    follower.join(30)
    assert not follower.is_alive()
    # Nobody reads the others: each is waited for, until it was in vain too often.
    monkeypatch.setattr(mapped_rows, "WAIT_SECONDS", 0.02)
    looks = [mock.Mock(return_value=False) for _ in range(mapped_rows.MOST_VAIN + 2)]
    for look in looks:
        other._wait_until(look)
    num_looks = [look.call_count for look in looks]
    assert min(num_looks[:-2]) > 1 and num_looks[-2:] == [1, 1]


def test_a_range_that_is_mapped_ahead_is_written_without_page_faults(file: Path) -> None:
    evict(file)
    rows = mapped(file)
    half, pages = NUM_ROWS // 2, MappedRows.from_tensor(rows, 2)
    if not pages.map_ahead(*pages.pieces(1)[0]):
        pytest.skip("this kernel does not map ahead")
    advise(pages, "map_ahead", 1)

    def faults_of_writing(first: int, end: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        rows[first:end].add_(0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    num_pages = half * DIM * 4 // mmap.PAGESIZE
    ahead, first = faults_of_writing(half, NUM_ROWS), faults_of_writing(0, half)
    assert ahead < num_pages // 8
    if first < num_pages // 4:
        pytest.skip("this kernel maps many pages at a fault")
    assert float(rows[half, 0]) == half * DIM  # no number has changed


def test_rows_of_an_array_that_is_only_read_leave_memory(file: Path) -> None:
    """As trainers map their triples: whole pages of the rows, and no others."""
    evict(file)  # written: the kernel drops clean pages only
    array = np.memmap(file, np.float32, mode="r", shape=(NUM_ROWS, DIM))
    expected = array[::1000].copy()
    rows = mapped(file)
    pages = MappedRows.from_array(array, drops=True)
    assert array.sum() > 0 and resident(rows, 0, NUM_ROWS) == 1.0
    for address, num_bytes in pages.pieces_between(4096, 8192):
        assert pages.drop(address, num_bytes)
    # The kernel may read some pages around those that stay.
    assert resident(rows, 4096, 8192) < 0.1
    assert resident(rows, 0, 4096) == resident(rows, 8192, NUM_ROWS) == 1.0
    np.testing.assert_array_equal(array[::1000], expected)
    assert MappedRows.from_array(np.zeros((4, 4))) is None


def test_memory_and_private_mappings_are_left_alone(file: Path) -> None:
    rows = torch.from_file(str(file), shared=False, size=NUM_ROWS * DIM).view(NUM_ROWS, DIM)
    rows[0, 0] = 5
    assert not any(file.is_shared for file in find_mapped_files(rows.data_ptr(), rows.nbytes))
    assert MappedRows.from_tensor(rows, 4, drops=True) is None
    for memory in (torch.zeros(100, 8), torch.zeros(0, 8), torch.zeros(8, 100).T):
        assert MappedRows.from_tensor(memory, 2) is None
    path = Path("/dev/shm") / f"dglkge-test-{os.getpid()}"
    path.write_bytes(b"\0" * 4096)
    try:
        rows = torch.from_file(str(path), shared=True, size=1024)
        (mapping,) = find_mapped_files(rows.data_ptr(), rows.nbytes)
        assert mapping.path == str(path) and mapping.offset == 0
        assert not is_on_disk(str(path)) and MappedRows.from_tensor(rows.view(-1, 8), 2) is None
    finally:
        path.unlink()


def test_pieces_cover_a_range_in_whole_pages() -> None:
    """Of one file each: here of one large file, or of many small ones."""
    page = mmap.PAGESIZE
    base = 10 * page
    for row_bytes, num_rows, num_ranges in ((400, 1000, 3), (4, 17, 5), (1 << 20, 40, 2)):
        end_of_rows = base + 64 + row_bytes * num_rows
        for length in (1 << 30, 3 * page):
            starts = range(base, end_of_rows, length)
            files = [MappedFile("x", start, min(start + length, end_of_rows)) for start in starts]
            pages = MappedRows(base + 64, num_rows, row_bytes, num_ranges, files)
            for number in range(num_ranges):
                first, end = (num_rows * turn // num_ranges for turn in (number, number + 1))
                pieces = pages.pieces(number)
                start, stop = base + 64 + first * row_bytes, base + 64 + end * row_bytes
                assert pieces[0][0] == start // page * page and sum(pieces[-1]) == stop
                assert all(address % page == 0 for address, _ in pieces)
                assert all(sum(piece) == following[0] for piece, following in zip(pieces, pieces[1:]))
                assert all(
                    (place - base) // length == (place + size - 1 - base) // length for place, size in pieces
                )
    assert MappedRows(base, 2, 8, 4, [MappedFile("x", base, base + 16)]).pieces(0) == []


def test_rows_in_several_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is read, written and dropped in its own file."""
    monkeypatch.setattr(dgl_memory, "FILE_BYTES", 1 << 20)
    path = file.with_name(f"{file.name}-parts")
    paths = [path, *(path.with_name(f"{number}.{path.name}") for number in range(1, 4))]
    try:
        shape = (4 << 10, DIM)  # 4 MiB
        rows = dgl_memory._mapped_rows(str(path), True, shape, torch.float32)
        assert [part.stat().st_size for part in paths] == [1 << 20] * 4 and not rows.any()
        rows.copy_(torch.arange(rows.numel(), dtype=torch.float32).view(shape))
        other = dgl_memory._mapped_rows(str(path), False, shape, torch.float32)
        assert torch.equal(other, rows)
        pages = MappedRows.from_tensor(rows[100:], 3, drops=True)
        assert pages is not None and [part.path for part in pages._files] == [str(part) for part in paths]
        for number in range(3):
            advise(pages, "push_out", number)
        numbers = np.concatenate([np.fromfile(part, np.float32) for part in paths])
        np.testing.assert_array_equal(numbers, np.arange(rows.numel(), dtype=np.float32))
        assert torch.equal(other, rows)
        del pages, other, rows
        gc.collect()
        assert path.name not in Path("/proc/self/maps").read_text(encoding="utf-8")
    finally:
        for part in paths:
            part.unlink(missing_ok=True)


def test_maps_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "1000-3000 rw-s 00002000 fd:01 77    /data/my table\n"
        "3000-4000 rw-s 00000000 fd:01 78    /data/1.my table\n"
        "4000-5000 rw-p 00000000 00:00 0 \n"
        "5000-6000 rw-s 00000000 00:05 9     /dev/shm/x (deleted)\n"
    )
    second = MappedFile("/data/1.my table", 0x3000, 0x3400)
    expected = [MappedFile("/data/my table", 0x1800, 0x3000, 0x2800), second]
    assert find_mapped_files(0x1800, 0x1C00, maps) == expected
    for address, num_bytes in ((0x4000, 16), (0x5000, 16), (0x9000, 16), (0x1800, 0x3000)):
        assert find_mapped_files(address, num_bytes, maps) == []
    assert find_mapped_files(0x1800, 16, tmp_path / "absent") == find_mapped_files(0, 16) == []
