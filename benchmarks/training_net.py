"""Digests of what training computes: three batches with configurations drawn from the product of all axes.

    python benchmarks/training_net.py before.json                  # one trainer
    python benchmarks/training_net.py two.json --trainers 2
    python benchmarks/training_net.py after.json --compare before.json

A change that should not change numbers leaves every digest as it is: those of all datasets of the committed
version (rows, optimizer state, dense parameters, global vectors) and the losses, bit for bit. Run it before
the change and after. A configuration is its settings, so files compare although a draw adds some.

With several trainers each loss is that of one trainer's share: compare runs of equal size. Matmuls take one
thread; digests of other processors differ.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import torch

import dglkge
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER
from dglkge.config import Config, load_config
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.training.building.checks import check_config
from dglkge.training.script import JOB

NUM_CONFIGURATIONS, NUM_BATCHES = 40, 3
PLAIN, WEIGHTED = "plain", "weighted"
"""Names of the data sets."""

SCHEDULE = '{"name":"ExponentialLR","gamma":0.9,"every":"batch"}'
PEOPLE = "features.files=[person=FOLDER/vectors.npy]"

BASE = (
    *("model.dimension=12", "model.init_scale=0.3", "training.batch_size=48", "negatives.num_uniform=20"),
    *("negatives.chunk_size=24", "training.matmul_dtype=float32", "training.num_epochs=1", "seed=3"),
    *("training.progress=never", "training.check_memory=false", "optimizer.lr=0.05"),
    *("evaluation.split=none", "checkpoint.every_epochs=0", "checkpoint.background=false"),
)

#: Alternatives of each axis; the first is the usual one, which is drawn more often.
CORE: tuple[tuple[str, ...], ...] = (
    tuple(f"training.objective={name}" for name in ("negative_sampling", "one_vs_all", "k_vs_all")),
    tuple(
        f"model.score_function={name}"
        for name in ("complex", "distmult", "transe_l2", "rotate", "keci", "quate", "conve", "triplere")
    ),
    tuple(f"loss.name={name}" for name in ("softmax", "logistic", "margin_ranking", "self_adversarial")),
    tuple(f"regularizer.name={name} regularizer.weight=0.01" for name in ("n3", "lp", "f2", "dura"))
    + ("regularizer.name=none",),
    tuple(f"optimizer.name={name}" for name in ("sparse_adagrad", "row_adagrad", "sparse_adam")),
    ("training.device=cpu", "training.device=cpu_staged", "tables.storage=device training.device=cpu_staged"),
)
FEATURES: tuple[tuple[str, ...], ...] = (
    ("", "model.entity_dropout=0.2"),
    ("", "model.relation_dropout=0.3"),
    ("", "training.objective.label_smoothing=0.1"),
    ("", "training.relation_prediction=0.5"),
    ("", "training.kernels=reference"),
    ("", "sampling.num_ranges=3", "sampling.num_ranges=2 sampling.buckets=directed"),
    ("", "tables.dtype=bfloat16"),
    ("", PEOPLE, f"{PEOPLE} features.use=alone"),
    ("", "model.global_vectors=true model.reciprocal_relations=false"),
    ("", "model.reciprocal_relations=false"),
    ("", f"optimizer.schedule={SCHEDULE}", "optimizer.warmup_batches=5"),
    ("", "optimizer.relations.lr=0.02", "optimizer.relations.name=row_adagrad"),
    ("", "optimizer.clip_norm=0.5", "optimizer.clip_value=0.01", "optimizer.weight_decay=0.01"),
    ("", "negatives.num_for_heads=11", "negatives.num_for_heads=0", "negatives.name=all_entities"),
    ("", "negatives.own_entity=false"),
    ("", "negatives.mask_known=true"),
    ("", "negatives.in_batch_share=0.5 negatives.global_share=0.5", "negatives.degree_power=0.75"),
    ("", "loss.batch_reduction=sum"),
    ("", 'loss.relation_weights={"knows":2}'),
    ("", f"dataset=FOLDER/{WEIGHTED}", f"dataset=FOLDER/{WEIGHTED} loss.confidences=true"),
    ("", "loss.adversarial_weights=true", "loss.reduction=sum"),
    ("", "training.batch_statistics=true"),
    ("", "training.rows=touched"),
    ("", "model.max_norm=0.8"),
)  # fmt: skip


CODE_PATHS = ("training.kernels=", "training.device=", "tables.storage=")
"""Settings that select code, and not what it computes."""


def settings_of(number: int) -> tuple[str, ...]:
    """Return the settings of a draw; they may not fit each other."""
    random = np.random.default_rng([7, number])
    drawn = [axis[0 if random.random() < 0.3 else random.integers(len(axis))] for axis in CORE]
    # Few at a time: most pairs of them fit, and every pair is drawn in the end.
    drawn += [axis[random.integers(1, len(axis))] if random.random() < 0.15 else axis[0] for axis in FEATURES]
    return tuple(word for choice in drawn for word in choice.split())


def configuration(folder: Path, settings: Sequence[str], output: str) -> Config:
    """Return the configuration of some settings, with the data set of :func:`make_dataset`."""
    drawn = [setting.replace("FOLDER", str(folder)) for setting in settings]
    takes_all = "negatives.name=all_entities" in drawn
    base = [setting for setting in BASE if not (takes_all and "num_uniform" in setting)]
    return load_config(None, [f"dataset={folder / PLAIN}", f"output={folder / output}", *base, *drawn])


def draw(folder: Path, count: int) -> list[tuple[str, ...]]:
    """Return the settings of the first draws that can be trained."""
    drawn: list[tuple[str, ...]] = []
    number = 0
    while len(drawn) < count:
        settings = settings_of(number)
        number += 1
        try:
            check_config(configuration(folder, settings, "none"), World())
        except InputError:
            continue
        if not (WEIGHTED in str(settings) and "k_vs_all" in str(settings)):
            drawn.append(settings)
    return drawn


def make_dataset(folder: Path) -> None:
    """Write people, towns and countries with five relations, the same with weights, and vectors of people."""
    rows = []
    for i in range(40):
        rows += [
            (f"person{i}", "lives_in", f"town{i % 10}"),
            (f"person{i}", "knows", f"person{(i + 7) % 40}"),
        ]
        rows += [(f"person{i}", "near", f"town{(i + 1) % 10}")]
    for j in range(10):
        rows += [(f"town{j}", "lies_in", f"country{j % 3}"), (f"town{j}", "near", f"town{(j + 1) % 10}")]
    frame = pd.DataFrame(rows, columns=["head", "relation", "tail"])
    names = sorted(set(frame["head"]) | set(frame["tail"]))
    types = folder / "types.tsv"
    lines = [f"{name}\t{name.rstrip('0123456789')}\n" for name in names]
    types.write_text("".join(lines), encoding="utf-8")
    options = Options(method="random", entity_types=types, progress=False)
    test = frame.iloc[::11]
    train = frame.drop(test.index).reset_index(drop=True)
    partition_dataframe(train, folder / PLAIN, test, test, options=options)
    weighted = train.assign(weight=np.random.default_rng(3).random(len(train)).round(3))
    columns = "head,relation,tail,weight"
    partition_dataframe(weighted, folder / WEIGHTED, columns=columns, options=options)
    people = [name for name in names if name.startswith("person")]
    vectors = np.random.default_rng(1).standard_normal((len(people), 5)).astype(np.float32)
    np.save(folder / "vectors.npy", vectors)
    (folder / "vectors.names.txt").write_text("".join(f"{name}\n" for name in people), encoding="utf-8")


def train(config: Config, cluster: Cluster) -> list[float]:
    """Train some batches, commit, and leave; returns this trainer's losses."""
    trainer = dglkge.build_trainer(config, cluster)
    losses = []
    for _ in dglkge.remaining_epochs_until(1):
        for batch in trainer.batches():
            losses.append(float(trainer.step(batch)))
            if len(losses) == NUM_BATCHES:
                break
        trainer.commit()
    cluster.leave()
    cluster.end()
    JOB.restore(0)
    del trainer
    gc.collect()  # its tables go before others of the same names come
    cluster.barrier()
    return losses


def contents(output: Path) -> Iterator[tuple[str, Any]]:
    """Yield every dataset of the newest version of a run, by file and path."""
    for path in sorted((output / CHECKPOINT_FOLDER).rglob("*.h5")):
        with h5py.File(path, "r") as file:
            names: list[str] = []
            file.visit(names.append)
            for name in sorted(names):
                if isinstance(file[name], h5py.Dataset):
                    yield f"{path.name.split('.v')[0]}:{name}", file[name][()]


def digests(output: Path) -> dict[str, str]:
    """Return a digest of every dataset of numbers of the newest version."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
        for name, values in contents(output)
        if np.asarray(values).dtype.kind in "fiub"
    }


def variants(folder: Path, settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the settings of the same configuration computed by other code, where it can be trained."""
    kept = tuple(setting for setting in settings if not setting.startswith(CODE_PATHS))
    by_name = {"auto": kept}
    for name in ("training.kernels=reference", "training.device=cpu_staged"):
        with contextlib.suppress(InputError):
            check_config(configuration(folder, (*kept, name), "none"), World())
            by_name[name] = (*kept, name)
    return by_name


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each configuration of both files whose results differ."""
    lines = []
    for settings, result in after.items():
        expected = before.get(settings)
        if expected is None or expected == result:
            continue
        parts = [part for part in ("losses", "tables") if expected[part] != result[part]]
        all_tables = {**expected["tables"], **result["tables"]}
        names = [name for name in all_tables if expected["tables"].get(name) != result["tables"].get(name)]
        lines.append(f"{' and '.join(parts)} differ ({', '.join(names)}): {settings}")
    return lines


def work(folder: Path, count: int) -> None:
    """Train all configurations as one trainer of a job, and write the results of this rank."""
    drawn = draw(folder, count)
    configs = {
        " ".join(settings): configuration(folder, settings, f"run{number}")
        for number, settings in enumerate(drawn)
    }
    results: dict[str, Any] = {}
    for data in (PLAIN, WEIGHTED):
        some = {name: config for name, config in configs.items() if config.dataset == str(folder / data)}
        with dglkge.join_cluster(next(iter(some.values()))) as cluster:
            rank = cluster.world.rank
            for name, config in some.items():
                losses = [value.hex() for value in train(config, cluster)]
                tables = digests(Path(config.output)) if rank == 0 else {}
                results[name] = {"losses": losses, "tables": tables}
            if cluster.world.launched:
                break  # a launched process joins once
    (folder / f"rank{rank}.json").write_text(json.dumps(results), encoding="utf-8")


def run(folder: Path, trainers: int, count: int) -> dict[str, Any]:
    """Make the data set, train on it, and return the results: losses of all ranks, digests of tables."""
    make_dataset(folder)
    machines = folder / "ip_config.txt"
    machines.write_text("127.0.0.1\n", encoding="utf-8")
    command = [__file__, "--work", str(folder), "--count", str(count)]
    if trainers > 1:
        options = ["--ip_config", str(machines), "--num_trainers", str(trainers), "--num_omp_threads", "1"]
        command = ["-m", "dglkge.cli.launch", *options, "--log_dir", str(folder / "logs"), *command]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"the trainers ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(trainers)]
    return {
        settings: {"losses": [rank[settings]["losses"] for rank in ranks], "tables": result["tables"]}
        for settings, result in ranks[0].items()
    }


def main() -> int:
    """Train all configurations; write digests, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, nargs="?", help="file for digests and losses")
    parser.add_argument("--compare", type=Path, help="file of a run before; status 1 where digests differ")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--count", type=int, default=NUM_CONFIGURATIONS, help="configurations")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.work:
        work(arguments.work, arguments.count)
        return 0
    with tempfile.TemporaryDirectory(prefix="training-net-") as folder:
        results = run(Path(folder), arguments.trainers, arguments.count)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    lines = []
    if arguments.compare:
        before = json.loads(arguments.compare.read_text(encoding="utf-8"))
        lines = differences(before, results)
        print(
            f"{len(results)} configurations, {len(set(before) & set(results))} in both, {len(lines)} differ"
        )
    print("\n".join(lines) or f"{len(results)} configurations trained")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
