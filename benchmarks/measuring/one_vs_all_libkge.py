"""LibKGE's 1vsAll training of ComplEx in plain torch, with a clock: SETTINGS.json.

The formulas are those of LibKGE (Broscheit et al. 2020): ``ComplExScorer`` scores by one matmul of rows of
twice the width, ``TrainingJob1vsAll`` takes cross entropy of each side and a backward pass after each, and
torch's own Adagrad updates dense parameters. With reciprocal relations, as ours.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def scores_of_tails(heads: torch.Tensor, relations: torch.Tensor, entities: torch.Tensor) -> torch.Tensor:
    """Score (h, r, ?) against all entities: (B, D), (B, D), (N, D) -> (B, N)."""
    # Contiguous copies, as in LibKGE.
    real, imaginary = (part.contiguous() for part in relations.chunk(2, dim=1))
    entity_real, entity_imaginary = (part.contiguous() for part in entities.chunk(2, dim=1))
    left = torch.cat((heads, heads), dim=1)  # re, im, re, im
    middle = torch.cat((real, relations, -imaginary), dim=1)  # re, re, im, -im
    right = torch.cat((entities, entity_imaginary, entity_real), dim=1)  # re, im, im, re
    return (left * middle).mm(right.transpose(0, 1))


def main() -> None:
    """Train some batches by the settings; write the seconds of each."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["num_threads"])
    torch.manual_seed(settings["seed"])
    everything = np.load(settings["triples"])
    num_entities, num_relations = int(everything[:, [0, 2]].max()) + 1, int(everything[:, 1].max()) + 1
    dim, size = settings["dimension"], settings["batch_size"]
    entities = torch.nn.Embedding(num_entities, dim)
    relations = torch.nn.Embedding(2 * num_relations, dim)
    for table in (entities, relations):
        torch.nn.init.normal_(table.weight, std=settings["init_scale"])
    parameters = [entities.weight, relations.weight]
    optimizer = torch.optim.Adagrad(parameters, lr=settings["lr"])
    order = np.random.default_rng(settings["seed"]).permutation(len(everything))
    seconds = []
    for number in range(settings["max_batches"]):
        batch = torch.from_numpy(everything[order[number * size : (number + 1) * size]].astype(np.int64))
        start = time.perf_counter()
        optimizer.zero_grad()
        # Reciprocal relations: heads are predicted with the relation's second row.
        for anchor, relation, answer in (
            (batch[:, 0], batch[:, 1], batch[:, 2]),
            (batch[:, 2], batch[:, 1] + num_relations, batch[:, 0]),
        ):
            scores = scores_of_tails(entities(anchor), relations(relation), entities.weight)
            # A backward pass for each side: the scores of only one side are in memory.
            (torch.nn.functional.cross_entropy(scores, answer, reduction="sum") / len(batch)).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    Path(settings["timings"]).write_text(json.dumps({"seconds": seconds, "edges": size}))


if __name__ == "__main__":
    main()
