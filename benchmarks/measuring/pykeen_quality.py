"""PyKEEN on files of triples, with its filtered test ranking; runs in its environment: SETTINGS.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train by the settings; write the metrics and the seconds of training."""
    # Inside the function: the benchmark's own environment has no PyKEEN.
    import torch
    from pykeen.pipeline import pipeline

    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["num_threads"])
    files = {name: f"{settings['folder']}/{name}.txt" for name in ("train", "valid", "test")}
    start = time.perf_counter()
    result = pipeline(
        training=files["train"],
        validation=files["valid"],
        testing=files["test"],
        dataset_kwargs={"create_inverse_triples": True},
        model=settings["model"],
        model_kwargs={"embedding_dim": settings["dimension"]},
        loss=settings["loss"],
        training_loop="LCWA",
        optimizer="Adam",
        optimizer_kwargs={"lr": settings["lr"]},
        training_kwargs={
            "num_epochs": settings["num_epochs"],
            "batch_size": settings["batch_size"],
            "use_tqdm": False,
        },
        evaluator_kwargs={"filtered": True},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=settings["seed"],
        device="cpu",
    )
    figures = {
        name: float(result.metric_results.get_metric(f"both.realistic.{key}"))
        for name, key in {
            "mrr": "inverse_harmonic_mean_rank",
            "hits@1": "hits_at_1",
            "hits@3": "hits_at_3",
            "hits@10": "hits_at_10",
        }.items()
    }
    training = float(result.train_seconds)
    whole = time.perf_counter() - start
    Path(settings["result"]).write_text(json.dumps({**figures, "seconds": training, "whole": whole}))


if __name__ == "__main__":
    main()
