"""Pages that are made from the code and from notebooks: the configuration reference, the API, the tutorials.

MkDocs calls :func:`on_files` and :func:`on_page_content`; neither DGL nor torch is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dglkge.cli.main import build_parser
from dglkge.config import component_fields, field_table
from dglkge.registry import registry_of

API: dict[str, dict[str, list[str]]] = {
    "python": {
        "Train": ["train_job.train", "train_job.DataOptions", "errors.InputError", "errors.JobError"],
        "A run": [
            "inference.run.open_run",
            "inference.run.Run",
            "inference.frames.Questions",
            "inference.exports.torch_models.TorchModel",
        ],
        "Data sets": [
            "data.dataset.Dataset",
            "partition.make_dataset.partition_triples",
            "partition.make_dataset.partition_dataframe",
            "partition.options.Options",
            "partition.options.ReadingOptions",
        ],
        "Evaluation": [
            "evaluation.metrics.Protocol",
            "evaluation.metrics.RankingMetrics",
            "evaluation.metrics.RankingResult",
            "evaluation.metrics.format_table",
        ],
        "Checkpoints": [
            "checkpoint.reader.open_checkpoint",
            "checkpoint.reader.Checkpoint",
            "checkpoint.stores.Store",
        ],
    },
    "script": {
        "Cluster and configuration": [
            "config.load_config",
            "training.script.join_cluster",
            "cli.common.run_command",
        ],
        "Trainer": ["training.trainer.build_trainer", "training.trainer.Trainer"],
        "Epochs": [
            "training.elastic.elastic",
            "training.elastic.Elastic",
            "training.script.remaining_epochs_until",
            "training.script.current_epoch",
            "training.script.finished_epochs",
        ],
        "Callbacks": ["training.callbacks.Callback"],
        "Trackers": ["training.callbacks.Tracker", "training.callbacks.TrackedRun"],
    },
    "components": {
        "Score functions": ["model.score_functions.ScoreFunction", "model.functions.dense.DenseScore"],
        "Losses": ["model.losses.Loss", "model.losses.PointwiseLoss", "model.losses.PairwiseLoss"],
        "Regularizers": ["model.regularizers.Regularizer"],
        "Negatives": ["sampling.negatives.NegativeSampler"],
        "The training step": [
            "step.contracts.Objective",
            "step.contracts.RowTransform",
            "step.contracts.Gradients",
        ],
        "Registration": ["registry.Registry"],
    },
    "optim": {
        "Optimizers": [
            "optim.optimizers.SparseAdagrad",
            "optim.optimizers.RowAdagrad",
            "optim.optimizers.SparseAdam",
        ],
        "Rules of your own": ["optim.sparse_optimizer.SparseOptimizer", "optim.rules.UpdateRule"],
        "Rows in 16 bits": ["optim.narrow_rows.NarrowEmbedding"],
    },
}
"""Page, heading, public names without the package."""

RUN_IS = "`RUN` is the folder of a run, a checkpoint in it, a URL, or a folder of PyTorch-BigGraph or DGL-KE."
TITLES = {
    "python": "From Python",
    "script": "Training script",
    "components": "Components",
    "optim": "Optimizers",
}
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):<code>(~?)!?([\w.]+)</code>")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    files.append(File.generated(config, "reference/configuration.md", content=configuration_page()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for name, groups in API.items():
        sections = [
            f"## {heading}\n\n" + "\n\n".join(f"::: dglkge.{member}" for member in members)
            for heading, members in groups.items()
        ]
        content = "\n\n".join([f"# {TITLES[name]}", *sections]) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for path in sorted((Path(config["docs_dir"]) / "tutorials").glob("*.ipynb")):
        # As Markdown, a notebook looks like the other pages, with its saved outputs, and loads nothing.
        content, _ = MarkdownExporter().from_filename(str(path))
        # The theme styles tables without a class, and lets them scroll on a small screen.
        content = content.replace('<table border="1" class="dataframe">', "<table>")
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Render the roles and literal blocks of docstrings, and formulas as MathML, which needs no script."""
    html = ROLE.sub(_reference, html).replace("<p>::</p>", "").replace("::</p>", ":</p>")
    return FORMULA.sub(lambda match: mathml(unescape(match[2]), match[1] == "div"), html)


def _reference(match: re.Match[str]) -> str:
    name = match[2]
    shown = name.rpartition(".")[2] if match[1] else name
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


def mathml(formula: str, is_block: bool) -> str:
    """Return a TeX formula as MathML."""
    text: str = convert(formula, display="block" if is_block else "inline")
    return text


def configuration_page() -> str:
    """Return a table of every field with its type, default and help."""
    lines = [
        "# Configuration",
        "",
        "Each field can stand in the YAML file and be overridden by `NAME=VALUE` on the command line.",
        "",
        "| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, kind, default, meaning in field_table():
        shown = f"`{_cell(default)}`" if str(default) else "empty"
        lines.append(f"| `{name}` | {_cell(kind)} | {shown} | {_cell(meaning)} |")
    for name, noun in component_fields():
        lines += ["", f"## `{name}`", "", "| name | meaning |", "|---|---|"]
        registry = registry_of(noun)
        lines += [f"| `{member}` | {_cell(registry.get(member).help)} |" for member in registry]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return the help of every command."""
    os.environ["COLUMNS"] = "100"  # argparse's width
    lines = [
        "# Commands",
        "",
        "`RUN` is the folder of a run, a checkpoint in it, a URL, or a folder of PyTorch-BigGraph or DGL-KE.",
    ]
    for name, parser in _commands("dglkge", build_parser(with_arguments=True)):
        lines += ["", f"## `{name}`", "", "```text", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        visible = {action.dest for action in group._choices_actions}
        for word, member in group.choices.items():
            if word in visible:
                yield from _commands(f"{name} {word}", member)


def _cell(text: object) -> str:
    """Return a text that can stand in a cell of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ")
