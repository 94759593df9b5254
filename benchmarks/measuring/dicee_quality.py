"""dicee's training and filtered test ranking on files of triples; runs in its environment: SETTINGS.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Train by the settings; write the metrics and the seconds of training."""
    # Inside the function: the benchmark's own environment has no dicee.
    import tiktoken
    import torch

    # dicee 0.3.3 fetches GPT-2's encoding from the net for every graph, and uses it for byte pairs only.
    tiktoken.get_encoding = lambda name: SimpleNamespace(n_vocab=0, encode=lambda text: [0])

    from dicee.config import Namespace
    from dicee.executer import Execute

    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["num_threads"])
    options = Namespace()
    options.dataset_dir = settings["folder"]
    options.path_to_store_single_run = settings["run"]
    options.model = settings["model"]
    options.p, options.q = 0, 1
    options.embedding_dim = settings["dimension"]
    options.optim = "Adam"
    options.lr = settings["lr"]
    options.num_epochs = settings["num_epochs"]
    options.batch_size = settings["batch_size"]
    options.scoring_technique = settings["scoring"]
    options.trainer = "torchCPUTrainer"
    options.eval_model = "test"
    options.random_seed = settings["seed"]
    report = Execute(options).start()
    test = report["Test"]
    figures = {"mrr": test["MRR"], "hits@1": test["H@1"], "hits@3": test["H@3"], "hits@10": test["H@10"]}
    # It reports the whole run as text, such as "12.3 seconds".
    seconds = float(report["Runtime"])
    Path(settings["result"]).write_text(json.dumps({**figures, "seconds": seconds}))


if __name__ == "__main__":
    main()
