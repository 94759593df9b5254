"""MRR of entities that were not trained: their rows are projections of features, beside random and mean rows.

    python benchmarks/inductive.py --triples datasets/CoDEx-S --features types+facts \
        --config dglkge/config/recipes/codex-s/complex.yaml
    python benchmarks/inductive.py --triples demo/stdlib-triples --features demo/vectors.parquet \
        --config dglkge/config/recipes/stdlib/complex.yaml

A share of the entities is held out with all their triples. The rest is trained, but for a twentieth of the
triples, which are ranked as usual. Of the triples of the held-out entities a share is given and the others
are asked: both sides of each are ranked among all trained and held-out entities, filtered by all known
triples.

--features types: one number for each type of entity_types.tsv (an entity may have several).
--features facts: logarithms of the counts of the relations on each side in the triples that are known of an
entity: the training triples, and for a held-out entity the given ones.
--features FILE: a file of named vectors.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import dglkge
from dglkge.data.dataset_files import SPLITS
from dglkge.data.vector_files import read_new_vectors
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import DglkgeError, InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.run import Run
from dglkge.typing import Side
from measuring.machine import describe_machine

PARTITION = Path(__file__).resolve().parents[1] / "partition_tools" / "partition.py"
ENTITY = "entity"
ROLES = ["head", "relation", "tail"]
VARIANTS: dict[str, dict[str, Any]] = {
    "projected features alone, linear": {"features.use": "alone"},
    "projected features alone, mlp": {"features.use": "alone", "features.mlp": {}},
    "trained row + linear": {"features.use": "added"},
    "trained row + mlp": {"features.use": "added", "features.mlp": {}},
    "mean row of the type": {},
    "random row": {},
}
HEADER = (
    "| row of a new entity | MRR | Hits@10 | MRR, answer trained | MRR, answer new "
    "| MRR of trained entities |\n"
    "|---|--:|--:|--:|--:|--:|"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--triples", required=True, type=Path, help="folder of train, valid and test, and entity_types.tsv")
    add("--features", default="types", metavar="KIND", help="types, facts, types+facts or a file")
    add("--config", required=True, type=Path)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field, in all runs")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="of the entities (default: 0.1)")
    add("--given", type=float, default=0.5, metavar="SHARE", help="of their triples (default: 0.5)")
    add("--typed", action="store_true", help="types of the file are entity types of the data set")
    add("--variants", default=";".join(VARIANTS), metavar="NAME;...")
    add("--seeds", default="0", metavar="N,...")
    add("--trainers", type=int, default=1)
    add("--json", type=Path, help="file for all figures")
    return parser


def read_triples(folder: Path) -> pd.DataFrame:
    """Read the triples of all splits, each once."""
    return pd.concat([read_split(folder, split) for split in SPLITS]).drop_duplicates(ignore_index=True)


def read_split(folder: Path, split: str) -> pd.DataFrame:
    """Read the triples of a split."""
    for path in (folder / f"{split}.tsv", folder / f"{split}.tsv.gz"):
        if path.is_file():
            return pd.read_csv(path, sep="\t", names=ROLES, dtype=str, keep_default_na=False)
    raise InputError(f"{folder} has no {split}.tsv")


def read_types(folder: Path) -> dict[str, list[str]]:
    """Read the types of each entity."""
    types: dict[str, list[str]] = {}
    for path in (folder / "entity_types.tsv", folder / "entity_types.tsv.gz"):
        if path.is_file():
            opened = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8") as file:
                for line in file:
                    entity, type_ = line.rstrip("\n").split("\t")[:2]
                    types.setdefault(entity, []).append(type_)
    return types


class Parts:
    """The triples and entities of a data set, divided.

    Attributes
    ----------
    train, valid, context, queries : DataFrame
    old, new : list of str
        Trained and held-out entities.
    """

    def __init__(self, triples: pd.DataFrame, held_out: float, context_share: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        entities = np.array(sorted(set(triples["head"]) | set(triples["tail"])))
        new = set(random.permutation(entities)[: round(held_out * len(entities))])
        is_new = (triples["head"].isin(new) | triples["tail"].isin(new)).to_numpy()
        rest = triples[~is_new].reset_index(drop=True)
        is_valid = random.random(len(rest)) < 0.05
        self.train = rest[~is_valid].reset_index(drop=True)
        self.old = sorted(set(self.train["head"]) | set(self.train["tail"]))
        self.new = sorted(new)
        self.valid = _among(rest[is_valid], set(self.old), set(self.train["relation"]))
        about = _among(triples[is_new], {*self.old, *new}, set(self.train["relation"]))
        is_given = random.random(len(about)) < context_share
        self.context = about[is_given].reset_index(drop=True)
        self.queries = about[~is_given].reset_index(drop=True)


def _among(frame: pd.DataFrame, entities: set[str], relations: set[str]) -> pd.DataFrame:
    """Return the triples of known names."""
    fits = frame["head"].isin(entities) & frame["tail"].isin(entities) & frame["relation"].isin(relations)
    return frame[fits].reset_index(drop=True)


def make_features(kinds: str, parts: Parts, types: dict[str, list[str]]) -> np.ndarray:
    """Return a vector of length 1 (or 0) for each trained and each held-out entity, in this order."""
    names = [*parts.old, *parts.new]
    place = {name: number for number, name in enumerate(names)}
    blocks = []
    for kind in kinds.split("+"):
        if kind == "types":
            columns: dict[Any, int] = {}
            for name in parts.old:  # a type that no trained entity has tells nothing
                for type_ in types.get(name, []):
                    columns.setdefault(type_, len(columns))
            block = np.zeros((len(names), len(columns)), np.float32)
            for name, row in place.items():
                for type_ in types.get(name, []):
                    if type_ in columns:
                        block[row, columns[type_]] = 1
        elif kind == "facts":
            known = pd.concat([parts.train, parts.context])
            relations = {name: number for number, name in enumerate(sorted(set(known["relation"])))}
            block = np.zeros((len(names), 2 * len(relations)), np.float32)
            for head, relation, tail in known.itertuples(index=False):
                block[place[head], relations[relation]] += 1
                block[place[tail], len(relations) + relations[relation]] += 1
            block = np.log1p(block)
        else:
            raise InputError(f"--features has {kind!r}; allowed: types, facts, types+facts, or a file")
        blocks.append(block / np.maximum(np.linalg.norm(block, axis=1, keepdims=True), 1e-9))
    features = np.concatenate(blocks, axis=1)
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-9)


def read_features(path: Path, parts: Parts) -> np.ndarray:
    """Return the vector of each trained and each held-out entity from a file, 0 where there is none."""
    names, vectors = read_new_vectors(path, Vocabulary([], "entity"))
    place = {name: number for number, name in enumerate(names)}
    features = np.zeros((len(parts.old) + len(parts.new), vectors.shape[1]), np.float32)
    for row, name in enumerate([*parts.old, *parts.new]):
        if name in place:
            features[row] = vectors[place[name]]
    return features


def partition(parts: Parts, types: dict[str, list[str]] | None, folder: Path) -> Path:
    """Write the training triples as a data set."""
    source = folder / "triples"
    source.mkdir(parents=True)
    parts.train.to_csv(source / "train.tsv", sep="\t", header=False, index=False)
    parts.valid.to_csv(source / "valid.tsv", sep="\t", header=False, index=False)
    command = [sys.executable, str(PARTITION), "--input", str(source), "--output", str(folder / "dataset")]
    if types is not None:
        lines = "".join(f"{name}\t{types[name][0]}\n" for name in parts.old)
        (folder / "types.tsv").write_text(lines, encoding="utf-8")
        command += ["--entity-types", str(folder / "types.tsv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"partition.py: {done.stderr.strip().splitlines()[-1]}")
    return folder / "dataset"


def with_new(run: Run, variant: str, groups: dict[str, list[str]], vectors: dict[str, np.ndarray]) -> Run:
    """Return the model with the held-out entities, by their type."""
    if VARIANTS[variant]:
        new_rows = {type_: (names, torch.from_numpy(vectors[type_])) for type_, names in groups.items()}
        return Run(run.checkpoint.with_new_entities(new_rows), run._dataset_path)
    made = {}
    for type_, names in groups.items():
        rows = torch.cat([shard.rows for shard in run.tables.shards(type_)])
        if variant.startswith("mean"):
            new_vectors = rows.mean(0).repeat(len(names), 1)
        else:
            generator = torch.Generator().manual_seed(0)
            new_vectors = torch.randn(len(names), rows.shape[1], generator=generator) * rows.std()
        made[type_] = names, new_vectors
    return Run(run.checkpoint.with_new_rows(made), run._dataset_path)


def resolve(frame: pd.DataFrame, run: Run) -> np.ndarray:
    """Return the ids of triples by name, without those whose entity types the relation does not join."""
    from dglkge.data.named_triples import find_triples

    triples, faults = find_triples(frame.astype("category"), run.tables.relations, run.tables.vocabulary)
    return np.delete(triples, list(faults), axis=0)


def measure(
    args: argparse.Namespace, variant: str, parts: Parts, types: dict[str, list[str]], work: Path, seed: int
) -> dict[str, Any]:
    """Train without the held-out entities, and rank their triples."""
    is_file = Path(args.features).is_file()
    features = (
        read_features(Path(args.features), parts) if is_file else make_features(args.features, parts, types)
    )
    type_of = {name: types[name][0] if args.typed else ENTITY for name in [*parts.old, *parts.new]}
    folder = work / variant.replace(" ", "_")
    data = partition(parts, types if args.typed else None, folder)
    settings = {"seed": seed, "evaluation.split": "none", "training.progress": "never", **VARIANTS[variant]}
    if VARIANTS[variant]:
        path = folder / "features.npy"
        np.save(path, features[: len(parts.old)])
        path.with_suffix(".names.txt").write_text("\n".join(parts.old) + "\n", encoding="utf-8")
        settings["features.files"] = str(path)
    settings.update(
        word.split("=", 1) for word in args.set if VARIANTS[variant] or not word.startswith("dense.")
    )
    run = dglkge.train(
        str(data), output=folder / "run", config=args.config, settings=settings, trainers=args.trainers
    )
    groups: dict[str, list[str]] = {}
    places: dict[str, list[int]] = {}
    for place, name in enumerate(parts.new, start=len(parts.old)):
        if type_of[name] in run.tables.entity_types:
            groups.setdefault(type_of[name], []).append(name)
            places.setdefault(type_of[name], []).append(place)
    more = with_new(run, variant, groups, {type_: features[rows] for type_, rows in places.items()})
    queries, context = resolve(parts.queries, more), resolve(parts.context, more)
    result = more.evaluate(Protocol(split="asked"), queries, also_known=[queries, context])
    relations = more.tables.relations
    is_new = {}
    for side in Side:
        counts = [
            run.tables.meta.entity_types[relations[relation].candidate_type(side)]
            for relation in queries[:, 1]
        ]
        is_new[side] = queries[:, side.column] >= np.array(counts)
    by_answer = {
        name: float(
            np.mean(np.concatenate([1 / result.ranks[side][is_new[side] == has_new] for side in Side]))
        )
        for name, has_new in (("trained", False), ("new", True))
    }
    both = result.to_dict()["both"]
    old = run.evaluate("valid").to_dict()["both"]
    shutil.rmtree(folder)
    return {
        "variant": variant, "seed": seed, "triples": len(queries), "given": len(context),
        "new": len(parts.new), "features": int(features.shape[1]),
        "mrr": both["mrr"], "hits@10": both["hits@10"],
        "mrr_trained": by_answer["trained"], "mrr_new": by_answer["new"], "mrr_old": old["mrr"],
    }  # fmt: skip


def row(variant: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return a line of the table: means over the seeds."""
    names = ("mrr", "hits@10", "mrr_trained", "mrr_new", "mrr_old")
    return (
        f"| {variant} | " + " | ".join(f"{np.mean([run[name] for run in runs]):.3f}" for name in names) + " |"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work, lines, runs = Path(tempfile.mkdtemp(prefix="inductive_")), [], []
    try:
        triples, types = read_triples(args.triples), read_types(args.triples)
        for variant in args.variants.split(";"):
            repeats = []
            for seed in map(int, args.seeds.split(",")):
                parts = Parts(triples, args.held_out, args.given, seed)
                repeats.append(measure(args, variant, parts, types, work, seed))
            runs += repeats
            lines.append(row(variant, repeats))
            print(lines[-1], file=sys.stderr, flush=True)
    except DglkgeError as error:
        print(f"inductive.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    first = runs[0]
    print(f"{first['new']} new entities, {first['triples']} triples asked, {first['given']} given")
    print("\n".join([HEADER, *lines]))
    if args.json:
        figures = {"machine": describe_machine(), "runs": runs}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
