"""Pages that are made from the code and from notebooks: the configuration reference, the API, the tutorials.

MkDocs calls :func:`on_files` while it builds the site; neither DGL nor torch is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dglkge.config import component_fields, field_table
from dglkge.registry import registry_of

API = {
    "training": (
        "The names that a training script needs",
        [f"dglkge.training.{name}" for name in ("join", "build", "trainer", "epochs")],
    ),
    "optim": ("Optimizers, usable alone", ["dglkge.optim"]),
    "model": ("Score functions, losses, regularizers", ["dglkge.model"]),
    "checkpoint": ("Checkpoints", ["dglkge.checkpoint"]),
    "evaluation": ("Evaluation", ["dglkge.evaluation"]),
    "inference": ("Prediction, similarity, export", ["dglkge.inference"]),
}
"""Page: its title and the modules that it shows."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    files.append(File.generated(config, "reference/configuration.md", content=configuration_page()))
    for name, (title, modules) in API.items():
        content = f"# {title}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for path in sorted((Path(config["docs_dir"]) / "tutorials").glob("*.ipynb")):
        # As Markdown, a notebook looks like the other pages, with its saved outputs, and loads nothing.
        content, _ = MarkdownExporter().from_filename(str(path))
        # The theme styles tables without a class, and lets them scroll on a small screen.
        content = content.replace('<table border="1" class="dataframe">', "<table>")
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=content))
    return files


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
        lines.append(f"| `{name}` | {_cell(kind)} | `{_cell(default)}` | {_cell(meaning)} |")
    for name, noun in component_fields():
        lines += ["", f"## `{name}`", "", "| name | meaning |", "|---|---|"]
        registry = registry_of(noun)
        lines += [f"| `{member}` | {_cell(registry.get(member).help)} |" for member in registry]
    return "\n".join(lines) + "\n"


def _cell(text: object) -> str:
    """Return a text that can stand in a cell of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ")
