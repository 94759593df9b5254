"""Test MRR of a run's rows in PyKEEN's ComplEx, put in rightly and with two mistakes that are easily made.

    pip install pykeen
    python benchmarks/pykeen_rows.py

The data set is Nations, which PyKEEN brings along. Rows are ranked by ``dglkge evaluate``, and by PyKEEN's
own evaluator. Prints the table of docs/from-pykeen.md; with --json, writes it as JSON too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dglkge

SETTINGS = {"model.dimension": 64, "training.num_epochs": 100, "training.batch_size": 200}
SIDES = ("both", "head", "tail")


def pairs(rows: torch.Tensor) -> torch.Tensor:
    """Return all real parts and then all imaginary parts as pairs (n, D / 2, 2), as PyKEEN has them."""
    return torch.stack(rows.chunk(2, dim=-1), dim=-1)


def as_they_are(rows: torch.Tensor) -> torch.Tensor:
    """Take neighbours for pairs, which is wrong."""
    return rows.contiguous().view(len(rows), -1, 2)


def with_inverses(rows: torch.Tensor) -> torch.Tensor:
    """Return each relation's half for (h, r, ?), and after it that for (?, r, t)."""
    return torch.stack(rows.chunk(2, dim=-1), dim=1).flatten(0, 1)


def in_pykeen(run: Any, has_inverses: bool, arrange: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Return the MRR of each side by PyKEEN; ``arrange`` returns rows as its complex numbers."""
    from pykeen.datasets import Nations
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.models import ComplEx
    from pykeen.nn.init import PretrainedInitializer
    from pykeen.triples import TriplesFactory

    nations = Nations()
    training, testing = (
        TriplesFactory(
            part.mapped_triples, nations.entity_to_id, nations.relation_to_id, create_inverse_triples=inverse
        )
        for part, inverse in ((nations.training, has_inverses), (nations.testing, False))
    )
    names = [sorted(ids, key=ids.get) for ids in (training.entity_to_id, training.relation_to_id)]
    entities = torch.tensor(run.embeddings(names[0]).to_numpy())
    relations = torch.stack([run.tables["relation"][name] for name in names[1]])
    relations = with_inverses(relations) if has_inverses else relations.chunk(2, dim=-1)[0]
    model = ComplEx(
        triples_factory=training,
        embedding_dim=run.tables.meta.dim // 2,
        entity_initializer=PretrainedInitializer(arrange(entities)),
        relation_initializer=PretrainedInitializer(arrange(relations)),
    )
    known = [training.mapped_triples, nations.validation.mapped_triples]
    result = RankBasedEvaluator().evaluate(
        model, testing.mapped_triples, additional_filter_triples=known, use_tqdm=False
    )
    return [result.get_metric(f"{side}.realistic.inverse_harmonic_mean_rank") for side in SIDES]


def main() -> None:
    """Train, rank, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    options = parser.parse_args()
    from pykeen.datasets import Nations  # here: --help does without

    with tempfile.TemporaryDirectory(prefix="dglkge-pykeen-") as folder:
        run = dglkge.train(Nations(), "complex", output=Path(folder) / "run", settings=SETTINGS)
        evaluation = run.evaluate("test")
        rows = {
            "dglkge evaluate": [evaluation.metrics(side).mrr for side in SIDES],
            "as above": in_pykeen(run, has_inverses=True, arrange=pairs),
            "without inverse triples": in_pykeen(run, has_inverses=False, arrange=pairs),
            "rows as they are": in_pykeen(run, has_inverses=True, arrange=as_they_are),
            "both mistakes": in_pykeen(run, has_inverses=False, arrange=as_they_are),
        }
    print("| | both | heads | tails |\n|---|--:|--:|--:|")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
