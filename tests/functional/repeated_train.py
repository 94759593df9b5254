"""Trains several times in this one process: ``repeated_train.py [JSON list of settings]...``.

The settings of a training may begin with what happens in the midst of it: ``raise``, ``interrupt`` or
``signal``. What it left is kept, as a notebook keeps what its cells have made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import dglkge

kept: list[Any] = []
BATCHES_BEFORE = 3


def happen(event: str) -> None:
    """End a training in the midst of an epoch."""
    if event == "raise":
        raise ValueError("asked to raise")
    if event == "interrupt":
        raise KeyboardInterrupt
    if event == "signal":
        os.kill(os.getpid(), signal.SIGINT)


def train(settings: list[str], event: str) -> None:
    """Train as examples/train.py does."""
    config, num_batches = dglkge.load_config(None, settings), 0
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        epochs = dglkge.remaining_epochs_until(config.training.num_epochs)
        kept.extend((cluster, trainer, epochs))
        for _ in epochs:
            for batch in trainer.batches():
                trainer.step(batch)
                num_batches += 1
                if num_batches == BATCHES_BEFORE:
                    happen(event)
        print(json.dumps(trainer.evaluate("test").to_dict()["both"]))


for text in sys.argv[1:]:
    words = json.loads(text)
    event = words.pop(0) if words[0] in ("raise", "interrupt", "signal") else ""
    try:
        train(words, event)
    except BaseException as error:
        kept.append(error)
        print(f"{type(error).__name__}: {error}")
    if event == "raise":
        kept.clear()  # closes the loop that was left open, now that nothing of its run is there any more
