"""Three models on one data set, compared on the valid split; the best one on the test split.

python examples/compare_models.py examples/countries.csv runs/compared
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

import dglkge

MODELS: dict[str, dict[str, Any]] = {
    "complex": {},
    "distmult": {"regularizer.weight": 0.003},
    "rotate": {"loss.name": "self_adversarial", "model.init_scale": 0.1},
}
COMMON: dict[str, Any] = {
    "training.num_epochs": 100,
    "training.batch_size": 50,
    "model.dimension": 100,
    "evaluation.split": "none",  # the test split is ranked once, at the end
}


def main(csv: str, folder: str) -> None:
    """Train each model, and print a table."""
    frame = pd.read_csv(csv)
    runs, rows = {}, []
    for name, settings in MODELS.items():
        runs[name] = dglkge.train(frame, name, output=Path(folder) / name, settings={**COMMON, **settings})
        valid = runs[name].evaluate("valid").both
        rows.append({"model": name, "MRR": valid.mrr, "Hits@10": valid.hits[10]})
    table = pd.DataFrame(rows).set_index("model").sort_values("MRR", ascending=False)
    print(table)
    best = str(table.index[0])
    print(f"{best}: test MRR {runs[best].evaluate('test').both.mrr:.3f}")
    print(f"side by side: dglkge report {' '.join(str(Path(folder) / name) for name in MODELS)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
