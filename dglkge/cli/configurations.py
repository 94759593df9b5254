"""``dglkge config``: the fields of a configuration, and the configurations that ship."""

from __future__ import annotations

import argparse
import textwrap
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from dglkge.checkpoint.layout import RUN_CONFIG_FILE
from dglkge.cli.common import IMPORT, command, flag, option, print_columns, print_text
from dglkge.config import load_config
from dglkge.config.load import NAMED_SCHEMA, recipe_file, recipe_files
from dglkge.config.load import SCHEMA as SCHEMA_FILE
from dglkge.config.schema import DECIDED_FIELDS, Config, field_table, fields, value_at
from dglkge.data.dataset_files import load_json
from dglkge.errors import InputError

WIDTH = 106
"""Characters of a comment line."""

BASIC = (
    *("dataset", "output", "model.score_function", "model.dimension", "loss.name", "negatives.num_uniform"),
    *("optimizer.lr", "regularizer.weight", "training.batch_size", "training.num_epochs"),
)
"""Fields that a first run sets."""


@command(
    option("section PREFIX", "only fields that begin so", nargs="?"),
    flag("--basic", "only the ten fields that a first run sets"),
    option("--diff RUN", "fields of a run or YAML file that differ from defaults"),
    IMPORT,
)
def show(args: argparse.Namespace) -> Any:
    """Print every field of a configuration with its default and help, as YAML that can be edited,
    or the fields of a run or of a file that differ from the defaults.

    Examples
    --------
      dglkge config show                        all fields
      dglkge config show --basic                the ten that a first run sets
      dglkge config show optimizer              those of a section
      dglkge config show > my.yaml              a file to change
      dglkge config show --diff runs/mine       what a run has changed
      dglkge config show --diff my.yaml --json
    """
    values = None if args.diff is None else differences(Path(args.diff))
    prefix = f"{args.section.rstrip('.')}." if args.section else ""
    shown = [
        (field, text)
        for field, (_, _, _, text) in zip(fields(), field_table())
        if f"{field.key}.".startswith(prefix)
        and (values is None or field.key in values)
        and (not args.basic or field.key in BASIC)
    ]
    if args.section is not None and not shown and values is None:
        known = ", ".join(sorted({field.key.partition(".")[0] for field in fields()}))
        raise InputError(f"no field begins with {args.section!r}; known: {known}")
    if args.json:
        return {
            field.key: {"default": _plain(field.default), "help": text}
            | ({} if values is None else {"value": values[field.key]})
            for field, text in shown
        }
    headings: set[str] = set()
    for field, text in shown:
        *sections, name = field.key.split(".")
        # An option of a component stands below the component's name.
        for section in () if field.tag else accumulate(sections, "{}.{}".format):
            if section not in headings:
                headings.add(section)
                is_optional = values is None and field.section and section.startswith(f"{field.section}.")
                mark = "# " if is_optional else ""
                print_text(f"{'  ' * section.count('.')}{mark}{section.rpartition('.')[2]}:")
        indent, default = "  " * field.key.count("."), _yaml(_plain(field.default))
        if values is not None:
            print_text(f"{indent}{name}: {_yaml(values[field.key])}  # default: {default}")
            continue
        for line in textwrap.wrap(text, WIDTH - len(indent)):
            print_text(f"{indent}# {line}")
        # Only the options of the default are in effect; those of others are comments.
        mark = "# " if field.tag or not field.is_default else ""
        print_text(f"{indent}{mark}{name}: {default}")
    return 0


def differences(path: Path) -> dict[str, Any]:
    """Return the fields, by dotted name, in which a run or a YAML file differs from the defaults."""
    tree = load_json(path / RUN_CONFIG_FILE) if path.is_dir() else load_config(str(path), []).to_dict()
    values = [(field, value_at(tree, field.path)) for field in fields()]
    return {
        field.key: value
        for field, value in values
        if value not in (None, _plain(field.default)) and field.key not in DECIDED_FIELDS
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _yaml(value: Any) -> str:
    """Return a value as YAML writes it on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...")


@command(option("name RECIPE", "print this one", nargs="?"))
def recipes(args: argparse.Namespace) -> Any:
    """List the configurations that ship, or print one of them. docs/quality.md has their MRR and time.

    Examples
    --------
      dglkge config recipes
      dglkge config recipes fb15k237/complex > my.yaml      a file to change
      dglkge train --recipe fb15k237/complex --set dataset=data/mine --set output=runs/mine
    """
    if args.name is not None:
        return load_config(str(recipe_file(args.name)), []).to_dict()
    rows = []
    for name, path in recipe_files().items():
        recipe = load_config(str(path), [])
        sizes = {"dimension": recipe.model.dimension, "epochs": recipe.training.num_epochs}
        rows.append({"name": name, "score function": recipe.model.score_function.name, **sizes})
    return rows


@recipes.shows
def _print_recipes(result: Any, args: argparse.Namespace) -> None:
    if args.name is None:
        print_columns(list(result[0]), [list(row.values()) for row in result])
    else:
        # A copy lies elsewhere: it names the schema by its place on this machine.
        text = recipe_file(args.name).read_text(encoding="utf-8").rstrip()
        print_text(text.replace(NAMED_SCHEMA, str(SCHEMA_FILE), 1))


@command(IMPORT)
def schema(_args: argparse.Namespace) -> dict[str, Any]:
    """Print a JSON Schema of configurations. Editors complete and check files that name it.

    Examples
    --------
      dglkge config schema > schema.json     a file's first line: # yaml-language-server: $schema=schema.json
    """
    return Config.model_json_schema()
