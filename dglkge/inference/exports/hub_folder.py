"""Export of a model as a folder for the Hugging Face hub: tensors, names, configuration and a model card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from dglkge import __version__
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.errors import InputError
from dglkge.evaluation.metrics import BOTH, PROTOCOL
from dglkge.inference.exports.files import (
    Export,
    ExportedTable,
    Output,
    file_output,
    names_output,
    text_output,
    write_safetensors,
)
from dglkge.inference.exports.hub import (
    CARD,
    CONFIG,
    HUB_FIELDS,
    LIBRARY,
    LIBRARY_FIELD,
    RELATIONS_FIELD,
    TENSORS,
    dense_tensor,
    names_file,
)
from dglkge.typing import RELATION

LOCAL_FIELDS = ("dataset", "output", "imports")
"""Fields of a configuration that are not published: paths of this machine, and modules that a reader of the
folder would import."""

SHOWN_METRICS = ("mr", "mrr", "hits@1", "hits@3", "hits@10", "num_queries")

PROTOCOL_WORDS = {
    "split": "{}",
    "filtering": "{}",
    "candidates": "{} candidates",
    "ties": "{} ties",
    "num_triples": "{} triples",
}
"""Fields of a result's protocol and their words in the card; files of older versions lack some."""

EXAMPLE_ANSWERS = 5


def plan_huggingface(export: Export) -> list[Output]:
    """Plan the folder."""
    meta = export.source.meta
    tables = {table.name: table for table in export.tables}
    missing = [name for name in (*meta.entity_types, RELATION) if name not in tables]
    if missing:
        raise InputError(f"the format huggingface holds whole models: the table {missing[0]!r} is left out")
    shared_settings = {name: value for name, value in meta.config.items() if name not in LOCAL_FIELDS}
    config = {
        LIBRARY_FIELD: LIBRARY,
        "dglkge_version": __version__,
        **{field: getattr(meta, name) for name, field in HUB_FIELDS.items()},
        HUB_FIELDS["config"]: shared_settings,
        RELATIONS_FIELD: [[relation.name, relation.lhs, relation.rhs] for relation in meta.relations],
    }
    dense = {dense_tensor(name): values.numpy() for name, values in export.source.dense_parameters().items()}
    content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    # The hub's viewers ask for this field; "pt" says that a tensor's layout is torch's.
    write = partial(write_safetensors, tables=tables, metadata={"format": "pt"}, arrays=dense)
    return [
        file_output(TENSORS, write),
        *map(names_output, tables.values()),
        text_output(CONFIG, content),
        text_output(CARD, model_card(meta, tables, export.metrics)),
    ]


def model_card(meta: CheckpointMeta, tables: Mapping[str, ExportedTable], metrics: Mapping[str, Any]) -> str:
    """Return the model card: its YAML head with metrics, and a text with examples that can be run."""
    title = f"{meta.score_function} on {meta.dataset_name}"
    results = list(_results(metrics))
    head: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "graph-ml",
        "tags": ["knowledge-graph-embeddings", "link-prediction", meta.score_function],
    }
    if results:
        dataset = {"name": meta.dataset_name, "type": meta.dataset_name}
        head["model-index"] = [
            {"name": title, "results": [_index_entry(dataset, *result) for result in results]}
        ]
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    rows = [
        ("score function", meta.score_function),
        *meta.score_options.items(),
        ("dimension", meta.dim),
        ("reciprocal relations", meta.reciprocal),
        *((f"rows of `{name}`", f"{table.shape[0]} x {table.shape[1]}") for name, table in tables.items()),
    ]
    figures = [[words, *(_figure(metrics.get(name)) for name in SHOWN_METRICS)] for words, metrics in results]
    parts = [
        f"---\n{front}---\n\n# {title}\n",
        f"Knowledge-graph embeddings, trained by dglkge {meta.versions.get('dglkge', '')}".rstrip() + ".\n",
        _markdown(["model", ""], rows),
        "## Metrics\n",
        _markdown(["protocol", *SHOWN_METRICS], figures)
        if figures
        else "Not measured. `dglkge evaluate` ranks the test triples.\n",
        "## Use\n",
        _examples(meta, tables),
        "## Training\n",
        f"Data set `{meta.dataset_name}`, fingerprint `{meta.dataset_fingerprint}`. Progress: "
        f"{_listed(meta.progress)}. Optimizer: {_listed(meta.optimizer)}. Versions: "
        f"{_listed(meta.versions)}. The whole configuration is in `{CONFIG}`.\n",
    ]
    return "\n".join(parts)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "not recorded"


def _results(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the protocol in words and the metrics of both sides of each result; equal protocols once."""
    seen = set()
    for result in metrics.values():
        # Not the whole result: its field "ties" has results under all rules.
        known = {**result[PROTOCOL], "num_triples": result.get("num_triples")}
        words = ", ".join(
            text.format(known[name]) for name, text in PROTOCOL_WORDS.items() if known.get(name)
        )
        if words not in seen:
            seen.add(words)
            yield words, result[BOTH]


def _index_entry(dataset: Mapping[str, str], words: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as the hub's index has it."""
    values = [{"type": name, "value": metrics[name]} for name in SHOWN_METRICS if name in metrics]
    return {
        "task": {"type": "link-prediction", "name": "Link prediction"},
        "dataset": {**dataset, "split": words.partition(",")[0]},
        "metrics": [{**value, "name": f"{value['type']} ({words})"} for value in values],
    }


def _figure(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def _markdown(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _examples(meta: CheckpointMeta, tables: Mapping[str, ExportedTable]) -> str:
    """Return two examples: with dglkge, and with safetensors and numpy alone."""
    relation = meta.relations[0]
    entity, label = tables[relation.lhs].names[0], tables[RELATION].names[0]
    return f"""With [dglkge](https://pypi.org/project/dglkge/), which predicts missing parts of triples:

```python
import dglkge

folder = "."  # or huggingface_hub.snapshot_download("USER/MODEL")
run = dglkge.open_run(folder)
print(run.predict_tails({entity!r}, {label!r}, k={EXAMPLE_ANSWERS}))
```

Rows alone, with `pip install safetensors numpy`; row i has the name in line i of the file of names:

```python
import numpy as np
from safetensors import safe_open

folder = "."
with open(f"{{folder}}/{names_file(relation.lhs)}", encoding="utf-8", newline="\\n") as file:
    names = file.read().split("\\n")[:-1]
with safe_open(f"{{folder}}/{TENSORS}", framework="numpy") as file:
    rows = file.get_tensor({relation.lhs!r})
row = rows[names.index({entity!r})]
cosines = rows @ row / np.linalg.norm(rows, axis=1) / np.linalg.norm(row)
for place in np.argsort(-cosines)[:{EXAMPLE_ANSWERS}]:
    print(names[place], cosines[place])
```
"""
