"""Training by PyKEEN itself, epoch by epoch with a clock; runs in its environment: SETTINGS.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train by the settings; write seconds and edges of every epoch."""
    import numpy as np
    import torch
    from pykeen.models import model_resolver
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import CoreTriplesFactory

    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["num_threads"])
    torch.manual_seed(settings["seed"])
    everything = np.load(settings["triples"], mmap_mode="r")
    num_entities, num_relations = int(everything[:, [0, 2]].max()) + 1, int(everything[:, 1].max()) + 1
    # A random sample, in ascending order: the file is mapped and read forwards.
    places = np.random.default_rng(0).permutation(len(everything))[: settings["max_triples"]]
    triples = torch.from_numpy(np.ascontiguousarray(everything[np.sort(places)]))
    factory = CoreTriplesFactory(triples, num_entities, num_relations)
    model = model_resolver.make(
        settings["model"],
        triples_factory=factory,
        embedding_dim=settings["dimension"],
        loss="infonce",
        random_seed=settings["seed"],
    )
    loop = SLCWATrainingLoop(
        model=model,
        triples_factory=factory,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=settings["lr"]),
        negative_sampler="basic",
        negative_sampler_kwargs={"num_negs_per_pos": settings["num_negatives"]},
    )
    training, epochs = time.time(), []
    for epoch in range(settings["num_epochs"]):
        start, processor = time.perf_counter(), time.process_time()
        loop.train(
            factory,
            # With continue_training PyKEEN trains up to this epoch, not so many more.
            num_epochs=epoch + 1,
            batch_size=settings["batch_size"],
            continue_training=epoch > 0,
            use_tqdm=False,
        )
        seconds, used = time.perf_counter() - start, time.process_time() - processor
        epochs.append({"edges": len(triples), "seconds": seconds, "processor_seconds": used})
    Path(settings["timings"]).write_text(json.dumps({"training": training, "epochs": epochs}))


if __name__ == "__main__":
    main()
