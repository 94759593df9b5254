"""Compiled loops that group gradient rows by id, add them up, choose who updates each row, and update it.

Gradient rows stay where they are (autograd's leaf, a receive buffer, another trainer's shared memory): the
loops take the address of each row, so nothing is concatenated or copied before it is added up.

Ids are found in a hash table with linear probing, "(H,) int32" positions in the keys, -1 where free; H is a
power of two and at least twice the number of keys. The rows of an id form a linked list (its chain) in order
of arrival, so sums are added in the same order in every run: ``heads`` and ``tails`` "(K,)" are the first and
last source of each key, ``links`` "(S,)" the source that follows each source, -1 at the end. The loop that
updates rows is generated from the formula of each update rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from dglkge.kernels.hashing import GOLDEN_GAMMA
from dglkge.kernels.jit import carray, compiled, compiled_inline, overload
from dglkge.kernels.rows import LOOKAHEAD, pointer_to, prefetch_bytes, prefetch_row, row_at
from dglkge.kernels.rules import add_decay, average, clip_row, decay_row, is_finite, limit_row


@compiled_inline
def slot_of(key: Any, mask: Any) -> Any:
    """Return the first slot of a key in a hash table of ``mask`` + 1 slots, a power of two.

    Fibonacci hashing: the multiplier is 2**64 divided by the golden ratio (Knuth, TAOCP vol. 3, section 6.4).
    The upper bits of the product are the well mixed ones, so 20 of the lower ones are dropped.
    """
    return ((np.uint64(key) * GOLDEN_GAMMA) >> np.uint64(20)) & mask


@compiled_inline
def find_slot(key: Any, slots: ndarray, keys: ndarray, mask: Any) -> Any:
    """Return the slot of a key, or the free one in which its search ends."""
    slot = slot_of(key, mask)
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@compiled
def index_keys(slots: ndarray, keys: ndarray, num_keys: int) -> None:
    """Enter the first ``num_keys`` distinct keys into an emptied hash table (after it grew)."""
    mask = np.uint64(slots.shape[0] - 1)
    for position in range(num_keys):
        slot = slot_of(keys[position], mask)
        # The keys are distinct: a free slot is enough, no key has to be compared.
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = position


@compiled
def chain_sources(ids: ndarray, first_source: int, table: tuple, chain: tuple, num_keys: int) -> int:
    """Append sources ``first_source + i`` to the chain of the key ``ids[i]``; new ids become new keys.

    ``table`` = (slots, keys), ``chain`` = (heads, tails, links). Returns the number of keys afterwards.
    """
    slots, keys = table
    heads, tails, links = chain
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ids.shape[0]):
        source = first_source + i
        links[source] = -1
        slot = find_slot(ids[i], slots, keys, mask)
        position = slots[slot]
        if position >= 0:
            # Appended at the tail, so that a chain has the order of arrival: float sums depend on it.
            links[tails[position]] = source
            tails[position] = source
        else:
            slots[slot] = num_keys
            keys[num_keys] = ids[i]
            heads[num_keys] = source
            tails[num_keys] = source
            num_keys += 1
    return num_keys


@compiled_inline
def add_chain(head: int, links: ndarray, addresses: ndarray, counts: ndarray, total: ndarray) -> int:
    """Add up the rows of one chain into ``total`` "(D,)"; returns the number of gradients in them."""
    dim = total.shape[0]
    row = carray(pointer_to(addresses[head], total), (dim,))
    for j in range(dim):
        total[j] = row[j]
    count = counts[head]
    source = links[head]
    while source >= 0:
        row = carray(pointer_to(addresses[source], total), (dim,))
        for j in range(dim):
            total[j] += row[j]
        count += counts[source]
        source = links[source]
    return count


@compiled
def merge_chains(selected: ndarray, chain: tuple, merged: ndarray, merged_counts: ndarray) -> None:
    """Write the summed row of each selected key to ``merged`` "(n, D)", its number of gradients to
    ``merged_counts`` "(n,)".
    """
    heads, links, addresses, counts = chain
    for i in range(selected.shape[0]):
        merged_counts[i] = add_chain(heads[selected[i]], links, addresses, counts, merged[i])


@compiled
def match_keys(
    table: tuple, ids: ndarray, place: int, num_places: int, owners: ndarray, shared: ndarray, hits: ndarray
) -> None:
    """Find the rows that another trainer has a gradient for too, and make it their owner if it is nearer.

    Its distance from a row is (place - id) modulo the number of places, so hubs are spread evenly.

    Parameters
    ----------
    table : tuple of ndarray
        Hash table and keys.
    ids : ndarray
        "(n,) int64" rows that the trainer has a gradient for.
    place, num_places : int
        Number of the trainer among those of the machine, and how many these are.
    owners, shared : ndarray
        "(num_keys,) int64" places of the owners so far and "(num_keys,) bool", changed.
    hits : ndarray
        "(n,) int64" position of each id among the keys, -1 where it is absent; written.
    """
    slots, keys = table
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ids.shape[0]):
        key = hits[i] = slots[find_slot(ids[i], slots, keys, mask)]
        if key >= 0:
            shared[key] = True
            if (place - ids[i]) % num_places < (owners[key] - ids[i]) % num_places:
                owners[key] = place


@compiled
def chain_delivered(
    hits: ndarray, owners: ndarray, place: int, delivered: tuple, rows: tuple, chain: tuple, num_sources: int
) -> int:
    """Append the rows that another trainer delivered for the keys of the trainer at ``place``.

    Parameters
    ----------
    hits, owners, place
        As :func:`match_keys` left them for that trainer's ids.
    delivered : tuple of ndarray
        "(n,) int32" number of the row of each of its ids, and "(r,) int32" number of gradients in each row.
    rows : tuple of int
        Address of the first row, and bytes from one to the next.
    chain : tuple of ndarray
        Tails, and links, addresses and counts of the sources; changed.
    num_sources : int
        Number of sources so far; the new number is returned.
    """
    row_of, count_of = delivered
    tails, links, addresses, counts = chain
    for i in range(hits.shape[0]):
        key = hits[i]
        if key >= 0 and owners[key] == place:
            addresses[num_sources] = rows[0] + row_of[i] * rows[1]
            counts[num_sources] = count_of[row_of[i]]
            links[num_sources] = -1
            links[tails[key]] = num_sources
            tails[key] = num_sources
            num_sources += 1
    return num_sources


@compiled_inline
def _row_of(array: ndarray, place: int) -> ndarray:
    """Row of a contiguous array "(N, W)". By its address: numba counts no references to such a view."""
    return row_at(array.ctypes.data + place * array.strides[0], array.shape[1], array)


def _rows_of(arrays: tuple, place: int) -> tuple:
    """Row of each of some arrays."""
    raise NotImplementedError("for compiled loops only")


@overload(_rows_of, jit_options={"forceinline": True})
def _first_and_rest(arrays: Any, place: Any) -> Any:
    # By recursion over types: numba has no other loop that makes a tuple.
    def none(arrays: Any, place: Any) -> Any:
        return ()

    def rows(arrays: Any, place: Any) -> Any:
        return (_row_of(arrays[0], place),) + _rows_of(arrays[1:], place)

    return rows if len(arrays) else none


def _prefetch(arrays: tuple, place: int) -> None:
    """Prefetch the row of each of some arrays."""
    raise NotImplementedError("for compiled loops only")


@overload(_prefetch, jit_options={"forceinline": True})
def _prefetch_each(arrays: Any, place: Any) -> Any:
    def none(arrays: Any, place: Any) -> Any:
        return None

    def prefetch(arrays: Any, place: Any) -> Any:
        prefetch_row(arrays[0], place)
        _prefetch(arrays[1:], place)

    return prefetch if len(arrays) else none


@functools.cache
def update_loop(formula: Callable) -> Callable:
    """Return the compiled loop of an update rule.

    Parameters
    ----------
    formula : callable
        Compiled by :func:`dglkge.kernels.jit.compiled_inline`, with the arguments of those in ``rules``. The
        loop is cached under the formula's name and the digest of its source file.

    Returns
    -------
    callable
        Takes ``rows`` "(N, D)" and ``state``, a tuple of arrays "(N, W)", which change; ``targets`` "(n,)
        int64", the rows to update; ``selected`` "(n,) int64", the position of each target among the chains;
        ``chain`` = (heads, links, addresses, counts) of ``GradientRows``; ``links`` = (mean, max_row_norm,
        weight_decay, kept, max_norm), the numbers of the links, see ``links``; ``numbers`` of the formula.
        Returns the number of rows that were skipped because their gradient was not finite.
    """

    def update(
        rows: ndarray, state: tuple, targets: ndarray, selected: ndarray,
        chain: tuple, links: tuple, numbers: tuple,
    ) -> int:  # fmt: skip
        heads, next_sources, addresses, counts = chain
        mean, max_row_norm, weight_decay, kept, max_norm = links
        gradient = np.empty(rows.shape[1], rows.dtype)
        num_bad = 0
        for i in range(targets.shape[0]):
            ahead = i + LOOKAHEAD
            if ahead < targets.shape[0]:
                prefetch_bytes(addresses[heads[selected[ahead]]], rows.strides[0])
                prefetch_row(rows, targets[ahead])
                _prefetch(state, targets[ahead])
            row = _row_of(rows, targets[i])
            count = add_chain(heads[selected[i]], next_sources, addresses, counts, gradient)
            if not is_finite(gradient):
                # Row and state stay as they are: one such update could not be undone.
                num_bad += 1
                continue
            if mean:
                average(gradient, count)
            clip_row(gradient, max_row_norm)
            # After clipping: the limit is one of the loss's gradient.
            add_decay(gradient, row, weight_decay)
            decay_row(row, kept)
            formula(row, gradient, _rows_of(state, targets[i]), numbers)
            limit_row(row, max_norm)
        return num_bad

    # The name is that of the cache's file, and the one that profilers show.
    update.__name__ = update.__qualname__ = f"update_{formula.__name__}"
    return compiled(update)
