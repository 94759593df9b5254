"""Names on disk are typed once: in the owner of the data set's names, and in that of the checkpoint's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from dglkge.checkpoint import layout
from dglkge.data import dataset_files
from tests.contract.source_tree import called_name, sources

OWNERS = (dataset_files, layout)

SUFFIXES = {layout.TEMPORARY_SUFFIX}
"""Conventions of all programs; not the names of files."""

OF_OTHERS = {
    "dglkge/inference/exports/dglke_files.py": {"config.json", "relations.tsv"},
    "dglkge/inference/exports/hub.py": {"config.json"},
    "benchmarks/measuring/pbg_peer.py": {
        "dynamic_rel_count.txt",
        "entity_count_\0_\0.txt",
        "entities",
        "train",
        "format_version",
    },
    "benchmarks/cluster_hosts.py": {"v\0"},
    "benchmarks/growth.py": {"partition.log"},
    "benchmarks/out_of_core.py": {"partition.log"},
    "benchmarks/quality.py": {"partition.log"},
    "dglkge/cli/checkpoints.py": {"num_parts"},
    "dglkge/report/page.py": {"finished_epochs", "has_weights", "num_parts", "num_relations"},
    "dglkge/training/statistics/stats.py": {"batches_done", "epoch_loss"},
}
"""Names of ours that stand for something else in a file: DGL-KE's and PyTorch-BigGraph's files, a log that a
benchmark writes, figures of a report."""


def owned_texts(owner: ModuleType) -> set[str]:
    """Return all texts that an owner names in upper case, those of its classes among them."""
    texts: set[str] = set()
    for space in (owner, *(item for item in vars(owner).values() if inspect.isclass(item))):
        for name, value in vars(space).items():
            if name.isupper() and isinstance(value, (str, tuple)):
                texts |= (
                    {value} if isinstance(value, str) else {item for item in value if isinstance(item, str)}
                )
    return texts


def owned_templates(owner: ModuleType) -> set[str]:
    """Return the names that an owner's functions make, with ``\\0`` in the place of each argument."""
    functions: list[Any] = [item for _, item in inspect.getmembers(owner, inspect.isfunction)]
    for _, item in inspect.getmembers(owner, inspect.isclass):
        functions += [function for _, function in inspect.getmembers(item, inspect.isfunction)]
    templates = set()
    for function in functions:
        name = function.__name__
        makes_names = name.endswith(("_file", "_files", "_folder", "_pattern", "_pointer"))
        is_other = name.startswith(("is_", "parse_", "temporary", "receipt_"))
        if function.__module__ == owner.__name__ and makes_names and not is_other:
            templates.add(function(*("\0" for _ in inspect.signature(function).parameters)))
    return templates


TEXTS = set().union(*map(owned_texts, OWNERS)) - SUFFIXES
FILES = {text for text in TEXTS if "." in text}
FIELDS = {
    value
    for fields in (dataset_files.Field, layout.Progress)
    for name, value in vars(fields).items()
    if name.isupper() and "_" in value
}
WORDS = TEXTS - FILES
TEMPLATES = set().union(*map(owned_templates, OWNERS))


def path_words(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield what is joined to a path."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        if isinstance(node, ast.Call) and called_name(node) in ("Path", "joinpath", "with_name", "join"):
            yield from node.args


def looked_up(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield what looks a field up."""
    for node in nodes:
        if isinstance(node, ast.Subscript):
            yield node.slice
        if isinstance(node, ast.Call) and called_name(node) in ("get", "pop"):
            yield from node.args[:1]


def retyped(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, text) of each owned name that a file types itself."""
    literals, all_nodes = [], list(ast.walk(tree))
    # Texts that stand alone: docstrings.
    skipped = {id(node.value) for node in all_nodes if isinstance(node, ast.Expr)}
    for node in all_nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            if node.value in FILES or node.value.rpartition("/")[2] in FILES:
                literals.append((node.lineno, node.value))
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            text = "".join(map(str, parts)).rpartition("/")[2]
            if text in TEMPLATES or any(text.endswith(name) for name in FILES if "/" in "".join(parts)):
                literals.append((node.lineno, text))
    for nodes, names in ((path_words(all_nodes), WORDS), (looked_up(all_nodes), FIELDS)):
        literals += [
            (node.lineno, node.value)
            for node in nodes
            if isinstance(node, ast.Constant) and node.value in names
        ]
    return literals


def test_owners_have_names():
    assert {"dataset.json", "manifest.json", "lease.json"} <= FILES | TEMPLATES
    assert {"part\0", "part-\0", "node_ids_\0.npy", "embeddings_\0_\0.v\0.h5", "epoch_\0"} <= TEMPLATES
    assert {"checkpoint", "partitions", "entities"} <= WORDS and "graph_name" in FIELDS


def test_no_name_is_typed_twice():
    owners = {owner.__name__ for owner in OWNERS}
    assert not [
        f"{source.name}:{line} types {text!r}: take it from its owner"
        for source in sources("dglkge", "partition_tools", "examples", "benchmarks")
        if source.module not in owners
        for line, text in retyped(source.tree)
        if text not in OF_OTHERS.get(source.name, ())
    ]


RETYPED = """
open(folder / 'dataset.json')
open('runs/a/metrics.json')
NAME = 'checkpoint_version.txt'
path = run / 'checkpoint'
path = os.path.join(data, 'partitions')
description['graph_name']
progress.get('batches_done')
name = f'model.v{version}.h5'
name = f'part{number}'
name = f'{folder}/part{number}'
name = f'{folder}/stats.jsonl'
"""
OTHER_TEXTS = """
'See dataset.json.'
command = 'checkpoint'
columns = ('partition', 'entities')
config['name']
name = f'{table}.npy'
name = path.name + '.tmp'
raise ValueError(f'{path} has no dataset.json')
"""


def test_checker_finds_a_retyped_name_and_lets_other_texts_pass():
    assert sorted({line for line, _ in retyped(ast.parse(RETYPED))}) == list(range(2, 13))
    assert retyped(ast.parse(OTHER_TEXTS)) == []
