"""Compiled loops of a step: find equal ids, add up their rows, apply an update rule.

Gradient rows stay where they are (the autograd leaf, a receive buffer, a neighbour's shared memory); a loop
is handed the address of each row, so nothing is concatenated or copied before it is added up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dglkge.kernels.jit import carray, compiled, intrinsic, ir, types

#: Multiplier of Fibonacci hashing: 2**64 divided by the golden ratio (Knuth, TAOCP vol. 3, section 6.4).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
CACHE_LINE_BYTES = 64
#: Rows between the one that is worked on and the one that is asked for from memory.
LOOKAHEAD = 4


@intrinsic
def pointer_to(typing_context: Any, address: Any, like: Any) -> Any:
    """Return an integer address as a pointer to the element type of the array ``like``."""
    pointer_type = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer_type))

    return pointer_type(address, like), generate


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask the processor to bring the cache line at an integer address near, for writing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        builder.call(
            function, [builder.inttoptr(arguments[0], byte_pointer), number(1), number(3), number(1)]
        )
        return context.get_dummy_value()

    return types.void(types.intp), generate


@compiled
def prefetch_bytes(address: int, num_bytes: int) -> None:
    """Bring some memory near. The rows of a step lie anywhere, and waiting for each would take half of its
    time."""
    for offset in range(0, num_bytes, CACHE_LINE_BYTES):
        _prefetch(address + offset)


@compiled
def prefetch_row(array: np.ndarray, row: int) -> None:
    """Bring a row of a contiguous "(N, D)" array near."""
    prefetch_bytes(array.ctypes.data + row * array.strides[0], array.strides[0])


@compiled
def index_keys(slots: np.ndarray, keys: np.ndarray, num_keys: int) -> None:
    """Enter the first ``num_keys`` distinct keys into an emptied hash table (after it grew)."""
    mask = np.uint64(slots.shape[0] - 1)
    for position in range(num_keys):
        slot = ((np.uint64(keys[position]) * GOLDEN) >> np.uint64(20)) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = position


@compiled
def find_keys(slots: np.ndarray, keys: np.ndarray, wanted: np.ndarray, found: np.ndarray) -> None:
    """Position of each wanted key among the keys of a hash table, -1 where it is absent.

    Parameters
    ----------
    slots, keys : np.ndarray
        Hash table, "(H,) int32" positions into "(K,) int64" keys, H a power of two.
    wanted, found : np.ndarray
        "(n,) int64" keys asked for, and the answer.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(wanted.shape[0]):
        slot = ((np.uint64(wanted[i]) * GOLDEN) >> np.uint64(20)) & mask
        while slots[slot] >= 0 and keys[slots[slot]] != wanted[i]:
            slot = (slot + np.uint64(1)) & mask
        found[i] = slots[slot]


@compiled
def chain_sources(
    ids: np.ndarray,
    first_source: int,
    slots: np.ndarray,
    keys: np.ndarray,
    heads: np.ndarray,
    tails: np.ndarray,
    links: np.ndarray,
    num_keys: int,
) -> int:
    """Append sources ``first_source + i`` to the chain of the key ``ids[i]``; new ids become new keys.

    Parameters
    ----------
    ids : np.ndarray
        "(n,) int64" row ids, not negative.
    first_source : int
        Number of the first of these sources.
    slots : np.ndarray
        "(H,) int32" hash table of positions in ``keys``, -1 where free; H is a power of two and at least
        twice the number of keys.
    keys, heads, tails : np.ndarray
        "(K,) int64" distinct ids in order of first appearance; first and last source of each.
    links : np.ndarray
        "(S,) int64" the source that follows each source in its chain, -1 at the end.
    num_keys : int
        Number of keys so far.

    Returns
    -------
    int
        Number of keys afterwards.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for i in range(ids.shape[0]):
        source = first_source + i
        links[source] = -1
        slot = ((np.uint64(ids[i]) * GOLDEN) >> np.uint64(20)) & mask
        while slots[slot] >= 0 and keys[slots[slot]] != ids[i]:
            slot = (slot + np.uint64(1)) & mask
        position = slots[slot]
        if position >= 0:
            links[tails[position]] = source
            tails[position] = source
        else:
            slots[slot] = num_keys
            keys[num_keys] = ids[i]
            heads[num_keys] = source
            tails[num_keys] = source
            num_keys += 1
    return num_keys


@compiled
def add_chain(
    head: int, links: np.ndarray, addresses: np.ndarray, counts: np.ndarray, total: np.ndarray
) -> int:
    """Add up the rows of one chain into ``total`` "(D,)" and return how many gradients they stand for."""
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
def merge_chains(
    selected: np.ndarray,
    heads: np.ndarray,
    links: np.ndarray,
    addresses: np.ndarray,
    counts: np.ndarray,
    merged: np.ndarray,
    merged_counts: np.ndarray,
) -> None:
    """Write the summed row of each selected key to ``merged`` "(n, D)" and its number of gradients beside
    it."""
    for i in range(selected.shape[0]):
        merged_counts[i] = add_chain(heads[selected[i]], links, addresses, counts, merged[i])


@compiled
def prepare_gradient(
    head: int,
    links: np.ndarray,
    addresses: np.ndarray,
    counts: np.ndarray,
    mean: bool,
    max_norm: float,
    weight_decay: float,
    row: np.ndarray,
    gradient: np.ndarray,
) -> bool:
    """Gradient of one row: sum (or mean) of its chain, clipped, with weight decay added.

    Parameters
    ----------
    head, links, addresses, counts
        The chain, as in :func:`add_chain`.
    mean : bool
        Divide the sum by the number of gradients.
    max_norm, weight_decay : float
        Scalars of the rows' dtype; ``max_norm`` may be infinite.
    row, gradient : np.ndarray
        "(D,)" the parameters, and where the gradient is written.

    Returns
    -------
    bool
        False when the gradient has a NaN or an infinity: the row must then be left alone.
    """
    count = add_chain(head, links, addresses, counts, gradient)
    dim = gradient.shape[0]
    zero = gradient.dtype.type(0)
    poison = zero
    for j in range(dim):
        poison += gradient[j] * zero
    if poison != zero:
        return False
    if mean and count > 1:
        share = gradient.dtype.type(1) / gradient.dtype.type(count)
        for j in range(dim):
            gradient[j] *= share
    if max_norm < np.inf:
        squares = zero
        for j in range(dim):
            squares += gradient[j] * gradient[j]
        norm = np.sqrt(squares)
        if norm > max_norm:
            shrink = max_norm / norm
            for j in range(dim):
                gradient[j] *= shrink
    if weight_decay != zero:
        for j in range(dim):
            gradient[j] += weight_decay * row[j]
    return True


@compiled
def choose_owners(
    positions: np.ndarray, ids: np.ndarray, place: int, num_places: int, owners: np.ndarray
) -> None:
    """Make the holder at ``place`` the owner of each key that it holds and stands nearer to than the owner so
    far.

    A holder's distance from a row is (place - id) modulo the number of places, so hubs are dealt out evenly.

    Parameters
    ----------
    positions : np.ndarray
        "(n,) int64" keys that the holder has too, -1 to be passed over.
    ids : np.ndarray
        "(n,) int64" their row ids.
    place, num_places : int
        The holder's place among so many.
    owners : np.ndarray
        "(num_keys,) int64" places of the owners so far, changed.
    """
    for i in range(positions.shape[0]):
        key = positions[i]
        if key >= 0 and (place - ids[i]) % num_places < (owners[key] - ids[i]) % num_places:
            owners[key] = place
