"""PyKEEN's LCWA training of ComplEx, epoch by epoch with a clock; runs in its environment: SETTINGS.json.

With inverse triples, so that both sides are predicted; a batch is of (entity, relation) pairs with all their
answers, as in our k_vs_all.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train by the settings; write the seconds of every epoch."""
    # Inside the function: the benchmark's own environment has no PyKEEN.
    import numpy as np
    import torch
    from pykeen.models import model_resolver
    from pykeen.training import LCWATrainingLoop
    from pykeen.triples import CoreTriplesFactory

    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["num_threads"])
    torch.manual_seed(settings["seed"])
    triples = torch.from_numpy(np.load(settings["triples"]).astype(np.int64))
    num_entities, num_relations = int(triples[:, [0, 2]].max()) + 1, int(triples[:, 1].max()) + 1
    if settings["max_triples"]:
        triples = triples[torch.randperm(len(triples))[: settings["max_triples"]]]
    factory = CoreTriplesFactory(triples, num_entities, num_relations, create_inverse_triples=True)
    model = model_resolver.make(
        "ComplEx",
        triples_factory=factory,
        # PyKEEN counts complex numbers, ours counts real ones.
        embedding_dim=settings["dimension"] // 2,
        loss="crossentropy",
        random_seed=settings["seed"],
    )
    loop = LCWATrainingLoop(
        model=model,
        triples_factory=factory,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=settings["lr"]),
    )
    seconds = []
    for epoch in range(settings["num_epochs"]):
        start = time.perf_counter()
        loop.train(
            factory,
            # With continue_training PyKEEN trains up to this epoch, not so many more.
            num_epochs=epoch + 1,
            batch_size=settings["pykeen_batch_size"],
            continue_training=epoch > 0,
            use_tqdm=False,
            use_tqdm_batch=False,
        )
        seconds.append(time.perf_counter() - start)
    # Its batches are of distinct (entity, relation) pairs of both directions.
    pairs = torch.cat([triples[:, :2], torch.stack([triples[:, 2], triples[:, 1] + num_relations], 1)])
    queries = len(torch.unique(pairs, dim=0))
    Path(settings["timings"]).write_text(json.dumps({"seconds": seconds, "queries": queries}))


if __name__ == "__main__":
    main()
