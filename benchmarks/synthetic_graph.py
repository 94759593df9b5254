"""Write a synthetic knowledge graph whose degrees are as skewed as real ones, of any size.

    python benchmarks/synthetic_graph.py --entities 500000 --relations 100 --edges 1000000 \\
        --output data/synthetic-triples
    python partition_tools/partition.py --input data/synthetic-triples --output data/synthetic

Entities and relations are drawn with probabilities that fall with a power of their rank (Zipf's law); every
entity occurs as far as there are edges, and which entities are frequent has nothing to do with their
numbers. Rows are made and written in blocks, so memory does not grow with the graph; the same seed gives the
same files. The output is train, valid and test files of names e0, e1, ... and r0, r1, ...
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

Ids = npt.NDArray[np.int64]
BLOCK_ROWS = 1 << 20
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Shape:
    """Size and skew of a graph.

    Attributes
    ----------
    num_entities, num_relations, num_edges, seed : int
    entity_exponent, relation_exponent : float
        The probability of rank k is proportional to ``(k + 1) ** -exponent``.
    """

    num_entities: int
    num_relations: int
    num_edges: int
    seed: int = 0
    entity_exponent: float = 0.75
    relation_exponent: float = 1.0


def zipf_ranks(uniform: npt.NDArray[np.float64], num: int, exponent: float) -> Ids:
    """Turn uniform numbers in [0, 1) into ranks in [0, num), by the inverse of the integrated density.

    Parameters
    ----------
    uniform : (n,) float64
    num : int
    exponent : float
        Not negative; 0 gives uniform ranks.
    """
    if exponent == 1:
        # The integral of 1/x is the logarithm; other exponents have a power.
        places = (num + 1.0) ** uniform
    else:
        rest = 1 - exponent
        places = (((num + 1.0) ** rest - 1) * uniform + 1) ** (1 / rest)
    return np.minimum(places.astype(np.int64) - 1, num - 1)


def scatter(values: Ids, num: int, offset: int) -> Ids:
    """Map [0, num) one to one onto itself, so that neighbours come far apart."""
    factor = max(1, int(num * GOLDEN))
    # Coprime to num, so that multiplication modulo num is one to one.
    while math.gcd(factor, num) != 1:
        factor += 1
    return (values * factor + offset) % num


def edges(shape: Shape, start: int, end: int) -> tuple[Ids, Ids, Ids]:
    """Return heads, relations and tails of some rows; the start must be a multiple of the block.

    Row i, by a bijection, has a turn k; the first turns have entity k for an end, even ones as head and odd
    ones as tail, so that every entity occurs.
    """
    # A generator for each block: a block does not depend on the ones before.
    random = np.random.default_rng([shape.seed, start // BLOCK_ROWS])
    heads, tails = (
        scatter(
            zipf_ranks(random.random(end - start), shape.num_entities, shape.entity_exponent),
            shape.num_entities,
            shape.seed,
        )
        for _ in range(2)
    )
    relations = zipf_ranks(random.random(end - start), shape.num_relations, shape.relation_exponent)
    turns = scatter(np.arange(start, end), shape.num_edges, shape.seed)
    for column, parity in ((heads, 0), (tails, 1)):
        mask = (turns < shape.num_entities) & (turns % 2 == parity)
        column[mask] = turns[mask]
    return heads, relations, tails


def blocks(shape: Shape) -> Iterator[pa.Table]:
    """Yield the rows as tables of names."""
    for start in range(0, shape.num_edges, BLOCK_ROWS):
        heads, relations, tails = edges(shape, start, min(start + BLOCK_ROWS, shape.num_edges))
        columns = {"head": _names("e", heads), "relation": _names("r", relations), "tail": _names("e", tails)}
        yield pa.table(columns)


def write(shape: Shape, folder: Path, kind: str, num_held_out: int) -> None:
    """Write train, valid and test; the first rows are held out for the last two.

    Parameters
    ----------
    shape : Shape
    folder : Path
    kind : str
        ``tsv`` or ``parquet``.
    num_held_out : int
        Triples of valid, and of test.
    """
    folder.mkdir(parents=True)
    writer = None
    for block in blocks(shape):
        if writer is None:
            # From the first block, so that nothing has to be kept. Rows are in random order.
            for split in ("valid", "test"):
                block, held_out = block.slice(num_held_out), block.slice(0, num_held_out)
                with _writer(folder, split, kind, block.schema) as file:
                    file.write_table(held_out)
            writer = _writer(folder, "train", kind, block.schema)
        writer.write_table(block)
    if writer is not None:
        writer.close()


def _names(letter: str, ids: Ids) -> pa.Array:
    return pc.binary_join_element_wise(letter, pc.cast(pa.array(ids), pa.string()), "")


def _writer(
    folder: Path, split: str, kind: str, schema: pa.Schema
) -> pyarrow.csv.CSVWriter | pyarrow.parquet.ParquetWriter:
    path = folder / f"{split}.{kind}"
    if kind == "parquet":
        return pyarrow.parquet.ParquetWriter(path, schema)
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    return pyarrow.csv.CSVWriter(path, schema, write_options=options)


def main() -> int:
    """Write the graph of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entities", type=int, default=500_000)
    parser.add_argument("--relations", type=int, default=100)
    parser.add_argument("--edges", type=int, default=1_000_000, help="those held out included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--entity-exponent", type=float, default=0.75)
    parser.add_argument("--relation-exponent", type=float, default=1.0)
    parser.add_argument("--held-out", type=int, default=1000, help="triples of valid, and of test")
    parser.add_argument("--format", choices=("tsv", "parquet"), default="tsv")
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    args = parser.parse_args()
    if min(args.entities, args.relations, args.edges) < 1 or args.held_out * 2 >= min(args.edges, BLOCK_ROWS):
        parser.error("there must be entities, relations and more edges than are held out")
    if args.output.exists():
        parser.error(f"{args.output} exists")
    shape = Shape(
        args.entities,
        args.relations,
        args.edges,
        args.seed,
        args.entity_exponent,
        args.relation_exponent,
    )
    write(shape, args.output, args.format, args.held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
