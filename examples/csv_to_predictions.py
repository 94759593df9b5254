"""From your own CSV to predicted links: train, look at the metrics, ask.

python examples/csv_to_predictions.py examples/countries.csv runs/countries
"""

from __future__ import annotations

import sys

import pandas as pd

import dglkge


def main(csv: str, output: str) -> None:
    """Train a CSV with the columns head, relation, tail, and print predictions."""
    frame = pd.read_csv(csv)
    # For some hundred triples; from some hundred thousand on, the defaults fit.
    settings = {"training.num_epochs": 100, "training.batch_size": 50, "model.dimension": 100}
    run = dglkge.train(frame, "complex", output=output, settings=settings)
    print("test MRR:", run.metrics["test"]["both"]["mrr"])
    print(run.evaluate("test").to_frame(by="relation"))

    head, relation, tail = frame.iloc[0]
    print(f"({head}, {relation}, ?), known answers left out")
    print(run.predict_tails(head, relation, k=5, known="drop"))
    print(f"({head}, ?, {tail})")
    print(run.predict_relations(head, tail))
    print(f"most similar to {head}")
    print(run.similar(head, k=5))


if __name__ == "__main__":
    main(*sys.argv[1:])
