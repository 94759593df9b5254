"""The rows of a run in a faiss index, and predictions by one search of it.

    pip install 'dglkge[faiss]'
    python examples/faiss_search.py runs/countries index/ Switzerland borders

For score functions that are inner products (complex, distmult, rescal, simple and others) the index returns
candidates in the order of the model's scores, known answers included.
"""

from __future__ import annotations

import sys
from pathlib import Path

import faiss

import dglkge
from dglkge.typing import Side


def main(path: str, folder: str, head: str, relation: str) -> None:
    """Write the index, and print the best tails of (head, relation, ?)."""
    run = dglkge.open_run(path)
    run.export("faiss", Path(folder), tables=["entity"], overwrite=True)
    index = faiss.read_index(str(Path(folder) / "entity.faiss"))
    names = (Path(folder) / "entity.names.txt").read_text(encoding="utf-8").split("\n")

    rows = run.tables["entity"][head], run.tables["relation"][relation]
    query = run.model.query(rows[0][None], rows[1][None], Side.TAIL).numpy()
    scores, places = index.search(query, 5)
    for score, place in zip(scores[0], places[0]):
        print(f"{score:10.4f}  {names[place]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
