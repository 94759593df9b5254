"""New triples for a trained run: extend the data set, start from the old rows, train the new triples only.

    python examples/csv_to_predictions.py examples/countries.csv runs/countries
    python examples/warm_start.py runs/countries new.csv runs/countries-new

The old ids stay. Only rows of entities and relations in the new triples change (training.rows: touched).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import dglkge
from dglkge.partition.extend import extend_dataset


def main(old: str, new_csv: str, output: str) -> None:
    """Extend the data set of a run by the triples of a CSV, and train them."""
    dataset = Path(output + "-dataset")
    if not dataset.exists():
        extend_dataset(Path(old) / "dataset", [Path(new_csv)], dataset, name="new")
    settings = {
        "checkpoint.init_path": old,
        "training.edge_sets": ["new"],  # the old triples are the set "train"
        "training.rows": "touched",
        "training.num_epochs": 20,
        "training.batch_size": 50,
        "model.dimension": 100,  # as the old run's
    }
    run = dglkge.train(dataset, "complex", output=output, settings=settings)
    head, relation, tail = pd.read_csv(new_csv).iloc[0]
    print(f"({head}, {relation}, ?); the new triples say {tail}")
    print(run.predict_tails(head, relation, k=5))


if __name__ == "__main__":
    main(*sys.argv[1:])
