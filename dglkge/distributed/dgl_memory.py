"""Names and places of DGL's shared memory: the one door between a job and what its processes share.

DGL names its segments after graph and table only, so two jobs on one machine would take
over each other's. :func:`install` puts a job's own prefix in front of every name. All of DGL's shared memory
comes through these places:

=================================================== =====================================================
``empty_shared_mem`` in four modules                tables, partition book, node and edge data
``exist_shared_mem_array`` in two modules           tests for the last two
``dist_graph._copy_graph_to_shared_mem``            the graph's structure, which servers write
``dist_graph._get_graph_from_shared_mem``           the graph's structure, which clients read
``dist_tensor._default_init_data``                  first rows of a table, zeros
``rpc.copy_data_to_shared_memory``                  copies first rows to where they stay
``rpc.read_ip_config``                              addresses and ports of the servers
=================================================== =====================================================

With a folder, all of it but the graph's structure is in files there, mapped by servers and trainers alike:
the page cache is their memory. Names, rows and updates stay as they are, so results do too. Zeros are not
written: DGL would make the whole table in its own memory and copy it, and new memory and new files are zero.

The structure goes through C++, which gets the graph's name with the prefix. DGL imports the functions by
name, so they are replaced in the modules that use them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import itertools
import math
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

MOST_NAME_BYTES = 255
"""NAME_MAX: the longest name of a segment."""
MOST_GRAPH_BYTES = 100
"""Longest graph name with prefix: C++ writes it twice into a name, with up to 40 bytes more."""

FILE_BYTES, MOST_FILES = 16 << 20, 4096
"""Bytes of a file of a table, or a multiple of them; and files of a table at most."""
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value

_MODULES = ("kvstore", "dist_graph", "graph_partition_book", "shared_mem_utils")
_installed: list[str] = []


def install(prefix: str, folder: str = "", ip_config: str = "") -> None:
    """Give the shared memory that DGL makes in this process names of the job; call it before DGL starts.

    Parameters
    ----------
    prefix : str
        Beginning of all names. An empty one changes nothing.
    folder : str
        An existing folder of this job alone, for tables in files; empty: in shared memory.
    ip_config : str
        The launcher's own file, which DGL reads whatever file a script names: it has the ports that were
        found.

    Raises
    ------
    RuntimeError
        If another prefix or folder was installed before.
    """
    if not prefix or _installed == [prefix, folder]:
        return
    if _installed:
        raise RuntimeError(f"shared memory is named {_installed} already, not {[prefix, folder]}")
    _installed.extend([prefix, folder])
    modules: dict[str, Any] = {name: importlib.import_module(f"dgl.distributed.{name}") for name in _MODULES}
    in_files: dict[str, Any] = {
        "empty_shared_mem": functools.partial(file_array, folder),
        "exist_shared_mem_array": functools.partial(has_file, folder),
    }
    for module in modules.values():
        for name, in_file in in_files.items():
            if hasattr(module, name):
                function = in_file if folder else getattr(module, name)
                setattr(module, name, _name_first(function, prefix, MOST_NAME_BYTES))
    graph = modules["dist_graph"]
    graph._get_graph_from_shared_mem = _name_first(graph._get_graph_from_shared_mem, prefix, MOST_GRAPH_BYTES)
    copy_graph = graph._copy_graph_to_shared_mem

    def copy_named(structure: Any, name: str, *rest: Any) -> Any:
        return copy_graph(structure, named(prefix, name, MOST_GRAPH_BYTES), *rest)

    graph._copy_graph_to_shared_mem = copy_named
    _skip_zeros()
    if ip_config:
        rpc: Any = importlib.import_module("dgl.distributed.rpc")
        read = rpc.read_ip_config
        rpc.read_ip_config = lambda _script_config, *rest: read(ip_config, *rest)


def _skip_zeros() -> None:
    """Let new tables of zeros be made in place: neither in the server's own memory nor copied."""
    dist_tensor: Any = importlib.import_module("dgl.distributed.dist_tensor")
    rpc: Any = importlib.import_module("dgl.distributed.rpc")
    copy = rpc.copy_data_to_shared_memory

    # wraps: clients pickle the function by its name in DGL, under which servers find this one.
    @functools.wraps(dist_tensor._default_init_data)
    def one_zero(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((), dtype=dtype).expand(tuple(shape))

    @functools.wraps(copy)
    def copy_unless_zero(to: torch.Tensor, rows: torch.Tensor) -> None:
        if rows.numel() > 1 and not any(rows.stride()):  # one number that stands for all
            if bool(rows[(0,) * rows.ndim]):
                to.copy_(rows)
        else:
            copy(to, rows)

    dist_tensor._default_init_data = one_zero
    rpc.copy_data_to_shared_memory = copy_unless_zero


def file_array(folder: str, name: str, is_create: bool, shape: Sequence[int], dtype: str = "float32") -> Any:
    """Return an array of DGL's over a mapped file, as ``empty_shared_mem`` does over shared memory.

    `is_create` makes it, of zeros; else it exists. Raises OSError if the file cannot be made, or the disk has
    no room for it.
    """
    backend: Any = importlib.import_module("dgl.backend")
    # DGL's own arrays hold bool as bytes too.
    kind = torch.uint8 if dtype == "bool" else backend.data_type_dict[dtype]
    path = os.path.join(folder, name.lstrip("/"))
    return backend.zerocopy_to_dgl_ndarray(_mapped_rows(path, is_create, shape, kind))


def _mapped_rows(path: str, is_create: bool, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
    """Return rows over mapped files of equal sizes, one behind the other in memory.

    The first has the name; a number stands before the names of the others, which no table's name begins with.

    Linux looks for files with pages that have been dirty for 30 seconds. A file that is written to all the
    time, and is too large to be written back in one go, is never done with: it is written back anew every few
    seconds, and each page then enters the kernel at its next write. Small ones are written every 30 seconds.
    """
    num_bytes = math.prod(shape) * torch.empty(0, dtype=kind).element_size()
    if not num_bytes:
        if is_create:
            os.close(_create(path))
        return torch.empty(tuple(shape), dtype=kind)  # mmap refuses an empty file
    # As many mappings as a process may have are 65,530.
    file_bytes = FILE_BYTES * -(-num_bytes // (FILE_BYTES * MOST_FILES))
    folder, name = os.path.split(path)
    # Before the first file: many would be made until the disk is full, beside other programs.
    if is_create and num_bytes > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def map_at(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
        start = libc.mmap(address, size, protection, flags, descriptor, 0)
        if start == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return int(start)

    first = map_at(None, num_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    memory = (ctypes.c_char * num_bytes).from_address(first)
    # Not at the exit of the process: other threads may still read the rows then.
    weakref.finalize(memory, libc.munmap, first, num_bytes).atexit = False
    for number, start in enumerate(range(0, num_bytes, file_bytes)):
        part = os.path.join(folder, f"{number}.{name}") if number else path
        size = min(file_bytes, num_bytes - start)
        descriptor = _create(part) if is_create else os.open(part, os.O_RDWR)
        try:
            if is_create:
                # Takes the room now: on a full disk a write to a mapped page would end the process by SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            rights = mmap.PROT_READ | mmap.PROT_WRITE
            map_at(first + start, size, rights, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)
    return torch.frombuffer(memory, dtype=kind).view(tuple(shape))


def _create(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


@contextlib.contextmanager
def standalone_tables(folder: str) -> Iterator[None]:
    """Let tables that a process alone makes inside the block be files in an existing folder of its own.

    Without servers DGL's client (``standalone_kvstore.KVClient``) keeps each table as a tensor
    of its own memory.
    """
    client: Any = importlib.import_module("dgl.distributed.standalone_kvstore").KVClient
    dist_tensor: Any = importlib.import_module("dgl.distributed.dist_tensor")
    init_data, numbers = client.init_data, itertools.count()

    def init_file(self: Any, name: str, shape: Any, dtype: Any, policy: Any, make: Any, *rest: Any) -> None:
        def make_file(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            rows = _mapped_rows(os.path.join(folder, str(next(numbers))), True, shape, dtype)
            return rows if make is dist_tensor._default_init_data else rows.copy_(make(shape, dtype))

        init_data(self, name, shape, dtype, policy, make_file, *rest)

    client.init_data = init_file
    try:
        yield
    finally:
        client.init_data = init_data


def has_file(folder: str, name: str) -> bool:
    """Whether an array of DGL's exists as a file."""
    return os.path.exists(os.path.join(folder, name.lstrip("/")))


def named(prefix: str, name: str, most_bytes: int = MOST_NAME_BYTES) -> str:
    """Return a segment's name with the prefix, once; one that gets too long ends with its hash instead."""
    slash, plain = ("/", name[1:]) if name.startswith("/") else ("", name)
    if plain.startswith(prefix):
        return name
    if len((prefix + plain).encode()) > most_bytes:
        plain = hashlib.sha256(plain.encode()).hexdigest()[:32]
    return f"{slash}{prefix}{plain}"


def _name_first(function: Callable[..., Any], prefix: str, most_bytes: int) -> Any:
    """Wrap a function whose first argument is a name."""

    def call(name: str, *rest: Any, **options: Any) -> Any:
        return function(named(prefix, name, most_bytes), *rest, **options)

    return call
