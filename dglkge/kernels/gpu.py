"""Kernels for a GPU, which Triton compiles.

Sums and shares: see :mod:`dglkge.step.reductions`. Order and negatives: see :mod:`.hashing`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dglkge.kernels.hashing import GOLDEN_GAMMA

LENGTH = tl.constexpr(64)
"""Rows that a program of :func:`sum_runs` walks."""

COLUMNS = tl.constexpr(128)
"""Columns of such a program."""

GAMMA = tl.constexpr(int(GOLDEN_GAMMA))

IGNORED = tl.constexpr(-1e30)
"""Score of a candidate that does not count."""


@triton.jit
def sum_runs(  # type: ignore[no-untyped-def]  # noqa: ANN201
    rows, order, places, sums, parts, num_rows, width, adds: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    """Walk some rows, and write their sums; ``adds``: or add to those that there are.

    Compiled by Triton, which takes no other annotations.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    start = program * LENGTH
    place = tl.load(places + start).to(tl.int64)
    is_part = program * 0 + tl.num_programs(0) > 1  # a tensor, as all masks are
    total = tl.zeros((COLUMNS,), tl.float32)
    for step in range(LENGTH):
        position = start + step
        is_row = position < num_rows
        here = tl.load(places + position, mask=is_row, other=0).to(tl.int64)
        ends = is_row & (here != place)
        is_sum = is_column & ends & (is_part == 0)
        target = sums + place * width + columns
        if adds:
            total += tl.load(target, mask=is_sum, other=0.0)
        tl.store(target, total, mask=is_sum)
        tl.store(parts + program * width + columns, total, mask=is_column & ends & is_part)
        total = tl.where(ends, 0.0, total)
        is_part = is_part & (ends == 0)
        place = tl.where(ends, here, place)
        row = tl.load(order + position, mask=is_row, other=0)
        total += tl.load(rows + row * width + columns, mask=is_column & is_row, other=0.0)
    is_sum = is_column & (is_part == 0)
    target = sums + place * width + columns
    if adds:
        total += tl.load(target, mask=is_sum, other=0.0)
    tl.store(target, total, mask=is_sum)
    tl.store(parts + program * width + columns, total, mask=is_column & is_part)


@triton.jit
def share_row(scores, logs, width, num_columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Replace a row of scores by shares."""
    query = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, num_columns)
    is_column = columns < width
    values = tl.load(scores + query * width + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    greatest = tl.max(values, 0)
    powers = tl.exp(values - greatest)
    total = tl.sum(powers, 0)
    tl.store(scores + query * width + columns, powers / total, mask=is_column)
    tl.store(logs + query, greatest + tl.log(total))


@triton.jit
def average_candidates(  # type: ignore[no-untyped-def]  # noqa: ANN201
    chunks, averages, logs, sizes,  # noqa: ANN001
    width: tl.constexpr, queries_a_block: tl.constexpr, candidates_a_block: tl.constexpr,
):  # fmt: skip
    """Average the candidates of a block of queries by their shares."""
    queries, candidates, answers, ids = chunks
    num, chunk_size, num_candidates, dim = sizes
    blocks = tl.cdiv(chunk_size, queries_a_block)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    in_chunk = (tl.program_id(0) % blocks) * queries_a_block + tl.arange(0, queries_a_block)
    places = chunk * chunk_size + in_chunk
    is_query = (in_chunk < chunk_size) & (places < num)
    columns = tl.arange(0, width)
    rows = tl.load(queries + places[:, None] * width + columns[None, :], mask=is_query[:, None], other=0.0)
    answer = tl.load(answers + places, mask=is_query, other=-1)
    greatest = tl.full((queries_a_block,), float("-inf"), tl.float32)
    total = tl.zeros((queries_a_block,), tl.float32)
    sums = tl.zeros((queries_a_block, width), tl.float32)
    for start in range(0, num_candidates, candidates_a_block):
        number = start + tl.arange(0, candidates_a_block)
        is_candidate = number < num_candidates
        others = chunk * num_candidates + number
        block = tl.load(
            candidates + others[:, None] * width + columns[None, :], mask=is_candidate[:, None], other=0.0
        )
        other = tl.load(ids + others, mask=is_candidate, other=-2)
        scores = tl.dot(rows, tl.trans(block))
        counts = is_candidate[None, :] & (answer[:, None] != other[None, :])
        scores = tl.where(counts, scores, IGNORED)
        top = tl.maximum(greatest, tl.max(scores, 1))
        powers = tl.exp(scores - top[:, None])
        keeps = tl.exp(greatest - top)
        total = total * keeps + tl.sum(powers, 1)
        sums = tl.dot(powers.to(block.dtype), block, sums * keeps[:, None])
        greatest = top
    target = averages + places[:, None] * dim + columns[None, :]
    tl.store(target, sums / total[:, None], mask=is_query[:, None] & (columns < dim)[None, :])
    tl.store(logs + places, greatest + tl.log(total), mask=is_query)


@triton.jit
def add_candidate_gradients(  # type: ignore[no-untyped-def]  # noqa: ANN201
    chunks, weights, logs, gradients, sizes,  # noqa: ANN001
    width: tl.constexpr, queries_a_block: tl.constexpr, candidates_a_block: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of candidates."""
    queries, candidates, answers, ids = chunks
    num, chunk_size, num_candidates, dim = sizes
    blocks = tl.cdiv(num_candidates, candidates_a_block)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    number = (tl.program_id(0) % blocks) * candidates_a_block + tl.arange(0, candidates_a_block)
    is_candidate = number < num_candidates
    others = chunk * num_candidates + number
    columns = tl.arange(0, width)
    block = tl.load(
        candidates + others[:, None] * width + columns[None, :], mask=is_candidate[:, None], other=0.0
    )
    other = tl.load(ids + others, mask=is_candidate, other=-2)
    sums = tl.zeros((candidates_a_block, width), tl.float32)
    for start in range(0, chunk_size, queries_a_block):
        in_chunk = start + tl.arange(0, queries_a_block)
        places = chunk * chunk_size + in_chunk
        is_query = (in_chunk < chunk_size) & (places < num)
        rows = tl.load(
            queries + places[:, None] * width + columns[None, :], mask=is_query[:, None], other=0.0
        )
        answer = tl.load(answers + places, mask=is_query, other=-1)
        weight = tl.load(weights + places, mask=is_query, other=0.0)
        log = tl.load(logs + places, mask=is_query, other=0.0)
        scores = tl.dot(block, tl.trans(rows))
        counts = is_query[None, :] & (other[:, None] != answer[None, :])
        shares = tl.exp(tl.where(counts, scores - log[None, :], IGNORED)) * weight[None, :]
        sums = tl.dot(shares.to(rows.dtype), rows, sums)
    target = gradients + others[:, None] * dim + columns[None, :]
    is_number = is_candidate[:, None] & (columns < dim)[None, :]
    tl.store(target, tl.load(target, mask=is_number, other=0.0) + sums, mask=is_number)


@triton.jit
def _mixed(words):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit
def _drawn(key, values, limit):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    words = _mixed(values.to(tl.uint64) * GAMMA + key.to(tl.uint64))
    # Not limit.to(): a limit of 1 is a constant of the program.
    return ((words >> 1) % tl.full(words.shape, limit, tl.uint64)).to(tl.int64)


@triton.jit(do_not_specialize=["first", "num_values", "num"])
def walk_back(  # type: ignore[no-untyped-def]  # noqa: ANN201
    rows, keys, first, num_values, num, halves, num_rounds: tl.constexpr, block: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    """Permute consecutive values back by the network of ``walk_all``, whose halves are (a, b)."""
    a, b = halves
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    values = places + first
    is_outside = places < num_values
    while tl.sum(is_outside.to(tl.int32), 0) > 0:
        left, right = values % a, values // a
        for number in tl.static_range(num_rounds - 1, -1, -1):
            key = tl.load(keys + number)
            if number % 2 == 0:
                left = (left + a - _drawn(key, right, a)) % a
            else:
                right = (right + b - _drawn(key, left, b)) % b
        values = tl.where(is_outside, right * a + left, values)
        is_outside = is_outside & (values >= num)
    tl.store(rows + places, values, mask=places < num_values)


@triton.jit(do_not_specialize=["before", "number", "num_drawn", "num_ids"])
def draw_ids(  # type: ignore[no-untyped-def]  # noqa: ANN201
    drawn, node_ids, before, number, num_drawn, num_negatives, num_ids, block: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    """Draw the negatives of all chunks, by the key of each: ``before``, its number and ``number``."""
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_drawn = places < num_drawn
    chunks = (places // num_negatives).to(tl.uint64)
    keys = _mixed(_mixed(before.to(tl.uint64) + GAMMA + chunks) + GAMMA + number.to(tl.uint64))
    words = _mixed((places % num_negatives).to(tl.uint64) * GAMMA + keys)
    limit = tl.zeros((block,), tl.uint64) + num_ids.to(tl.uint64)
    found = tl.load(node_ids + tl.umulhi(words, limit).to(tl.int64), mask=is_drawn, other=0)
    tl.store(drawn + places, found, mask=is_drawn)
