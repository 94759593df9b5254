"""Models of the Hugging Face hub: their folder with a model card, which needs no package; their transfer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import string
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dglkge import __version__
from dglkge.checkpoint.manifest import CheckpointMeta, parse
from dglkge.data.dataset_files import load_json
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, import_extra, one_line, os_errors
from dglkge.evaluation.metrics import BOTH, PROTOCOL
from dglkge.inference.exports import files
from dglkge.inference.exports.files import Export, ExportedTable, Output, names_file, text_output
from dglkge.inference.whole_tables import WholeTables
from dglkge.typing import RELATION, Relation

LIBRARY, LIBRARY_FIELD = "dglkge", "library_name"
CONFIG, CARD = "config.json", "README.md"
TENSORS = "model.safetensors"
"""The name that the hub expects of a model's tensors."""

_SAME = ("dataset_name", "dataset_fingerprint", "entity_types", "progress", "seed", "score_function")
_RENAMED = {"config": "training", "dim": "dimension", "reciprocal": "reciprocal_relations"}
HUB_FIELDS = {name: name for name in (*_SAME, "optimizer", "versions", "score_options")} | _RENAMED
"""Attribute of a checkpoint's description to its field in config.json."""

RELATIONS_FIELD = "relations"

DENSE = "dense/"
"""Before the names of dense parameters of the score function's module; no entity type has a '/'."""


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder holds a model that ``dglkge checkpoint export --format huggingface`` wrote."""
    has_files = (folder / TENSORS).is_file() and (folder / CONFIG).is_file()
    return has_files and load_json(folder / CONFIG).get(LIBRARY_FIELD) == LIBRARY


def map_tensors(path: Path, needed: Collection[str]) -> dict[str, np.ndarray]:
    """Map the float32 tensors of a safetensors file by name, copy-on-write; needed ones have to be there."""
    names = ", ".join(map(repr, needed))
    damage = ValueError, KeyError, TypeError, AttributeError, struct.error
    with os_errors(InputError, f"{path} is damaged or has no tensor {names}", *damage):
        with open(path, "rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            # A damaged length must not make read() allocate terabytes.
            if header_bytes > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        tensors: dict[str, np.ndarray] = {}
        for name, tensor in header.items():
            if tensor.get("dtype") == "F32":
                offset = 8 + header_bytes + tensor["data_offsets"][0]
                tensors[name] = np.memmap(path, "<f4", "c", offset, tuple(tensor["shape"]))
        for name in needed:
            if name not in tensors:
                raise ValueError(f"it has no {name!r} in float32")
    return tensors


def open_hub_folder(folder: Path) -> WholeTables:
    """Open a folder for the hub."""
    config = load_json(folder / CONFIG)
    try:
        facts: dict[str, Any] = {name: config[field] for name, field in HUB_FIELDS.items()}
        facts["relations"] = [dataclasses.asdict(Relation(*names)) for names in config[RELATIONS_FIELD]]
        # Modules to import would be code of a stranger: the folder may come from the hub.
        facts["config"].pop("imports", None)
        meta = parse(CheckpointMeta, facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / CONFIG} is damaged: {error!r}") from None
    counts = {**meta.entity_types, RELATION: len(meta.relations)}
    tensors = {name: torch.from_numpy(rows) for name, rows in map_tensors(folder / TENSORS, counts).items()}
    for table, count in counts.items():
        if tensors[table].ndim != 2 or len(tensors[table]) != count:
            shape = tuple(tensors[table].shape)
            raise InputError(f"{folder / TENSORS}: {table!r} has shape {shape}, {CONFIG} says {count} rows")

    def names(entity_type: str) -> Vocabulary:
        path, count = folder / names_file(entity_type), meta.entity_types[entity_type]
        vocabulary = Vocabulary.load(path, "entity")
        if len(vocabulary) != count:
            raise InputError(f"{path} has {len(vocabulary)} names, expected {count}")
        return vocabulary

    dense = {name[len(DENSE) :]: values for name, values in tensors.items() if name.startswith(DENSE)}
    return WholeTables(folder, meta, {table: tensors[table] for table in counts}, names, dense)


LOCAL_FIELDS = ("dataset", "output", "imports")
"""Fields of a configuration that are not published: paths of this machine, and modules that a reader of the
folder would import."""

SHOWN_METRICS = ("mr", "mrr", "hits@1", "hits@3", "hits@10", "num_queries")

NOUNS = ("candidates", "ties", "triples")
"""What values of a result's protocol are of, in the card."""

CARD_TEMPLATE = Path(__file__).with_name("model_card.md")


def plan_huggingface(export: Export) -> list[Output]:
    """Plan the folder."""
    meta = export.source.meta
    tables = {table.name: table for table in export.tables}
    for name in (*meta.entity_types, RELATION):
        if name not in tables:
            raise InputError(f"the format huggingface holds whole models: the table {name!r} is left out")
    config = {
        LIBRARY_FIELD: LIBRARY,
        "dglkge_version": __version__,
        **{field: getattr(meta, name) for name, field in HUB_FIELDS.items()},
        HUB_FIELDS["config"]: {name: meta.config[name] for name in meta.config if name not in LOCAL_FIELDS},
        RELATIONS_FIELD: list(map(dataclasses.astuple, meta.relations)),
    }
    dense = {DENSE + name: values.numpy() for name, values in export.source.dense_parameters().items()}
    content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    write = partial(files.write_safetensors, tensors={**tables, **dense})
    return [
        files.file_output(TENSORS, write),
        *map(files.names_output, tables.values()),
        text_output(CONFIG, content),
        text_output(CARD, model_card(meta, tables, export.metrics)),
    ]


def model_card(meta: CheckpointMeta, tables: Mapping[str, ExportedTable], metrics: Mapping[str, Any]) -> str:
    """Return the model card: its YAML head with metrics, and a text with examples that can be run."""
    title = f"{meta.score_function} on {meta.dataset_name}"
    results = _results(metrics)
    head: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "graph-ml",
        "tags": ["knowledge-graph-embeddings", "link-prediction", meta.score_function],
    }
    if results:
        entries = [_index_entry(meta.dataset_name, *result) for result in results.items()]
        head["model-index"] = [{"name": title, "results": entries}]
    rows = [
        ("score function", meta.score_function),
        *meta.score_options.items(),
        ("dimension", meta.dim),
        ("reciprocal relations", meta.reciprocal),
        *((f"rows of `{name}`", f"{table.shape[0]} x {table.shape[1]}") for name, table in tables.items()),
    ]
    figures = [[words, *map(_figure, map(both.get, SHOWN_METRICS))] for words, both in results.items()]
    not_measured = "Not measured. `dglkge evaluate` ranks the test triples.\n"
    relation = meta.relations[0]
    return string.Template(CARD_TEMPLATE.read_text(encoding="utf-8")).substitute(
        front=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        title=title,
        trainer=f"dglkge {meta.versions.get('dglkge', '')}".rstrip(),
        model=_markdown(["model", ""], rows),
        metrics=_markdown(["protocol", *SHOWN_METRICS], figures) if figures else not_measured,
        entity=repr(tables[relation.lhs].names[0]),
        relation=repr(tables[RELATION].names[0]),
        names=names_file(relation.lhs),
        tensors=TENSORS,
        entity_type=repr(relation.lhs),
        dataset=meta.dataset_name,
        fingerprint=meta.dataset_fingerprint,
        **{name: _listed(getattr(meta, name)) for name in ("progress", "optimizer", "versions")},
        config=CONFIG,
    )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "not recorded"


def _results(metrics: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metrics of both sides of each result by its protocol in words; the first of equal ones."""
    results: dict[str, Mapping[str, Any]] = {}
    for result in metrics.values():
        # Not the whole result: its field "ties" has results under all rules.
        known = {**result[PROTOCOL], "triples": result.get("num_triples")}
        words = [f"{known[noun]} {noun}" for noun in NOUNS if known.get(noun)]
        results.setdefault(", ".join([known["split"], known["filtering"], *words]), result[BOTH])
    return results


def _index_entry(dataset: str, words: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as the hub's index has it."""
    shown = [name for name in SHOWN_METRICS if name in metrics]
    return {
        "task": {"type": "link-prediction", "name": "Link prediction"},
        "dataset": {"name": dataset, "type": dataset, "split": words.partition(",")[0]},
        "metrics": [{"type": name, "value": metrics[name], "name": f"{name} ({words})"} for name in shown],
    }


def _figure(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def _markdown(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


HUB_URL = re.compile(r"hf://([^/@]+/[^/@]+)(?:@(.+))?")
"""``hf://USER/MODEL``, with a revision after ``@``."""


@contextlib.contextmanager
def _hub(user: str) -> Iterator[Any]:
    """Provide ``huggingface_hub``; what the hub or the network refuses is an :class:`InputError`."""
    module = import_extra(user, "huggingface_hub", "huggingface")
    try:
        yield module
    except Exception as error:
        # Refusals of the hub and failures of the network are errors of whichever HTTP library it uses.
        is_http = any(base.__name__ == "HTTPError" for base in type(error).__mro__)
        if not is_http and not isinstance(error, (ValueError, OSError)):
            raise
        raise InputError(f"{user}: {one_line(error)}") from None


def push(write: Callable[[Path], object], name: str, private: bool) -> str:
    """Upload the folder that a function writes; see :meth:`dglkge.inference.run.Run.push_to_hub`."""
    with _hub(f"push_to_hub {name}") as hub, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write(folder)
        hub.create_repo(name, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder).commit_url)


def download(path: str) -> str:
    """Return the folder of a model of the hub in the user's cache; other paths as they are."""
    match = HUB_URL.fullmatch(path)
    if match is None:
        return path
    with _hub(path) as hub:
        return str(hub.snapshot_download(match[1], revision=match[2]))
