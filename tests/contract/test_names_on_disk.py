"""Names on disk are typed once: in the owner of the data set's names, and in that of the checkpoint's."""

from __future__ import annotations

import ast
import inspect

from dglkge.checkpoint import layout
from dglkge.data import dataset_files
from tests.contract.source_tree import called_name, sources

OWNERS = (dataset_files, layout)
OF_OTHERS = {
    "dglkge/inference/exports/dglke_files.py": {"config.json", "relations.tsv"},
    "dglkge/inference/exports/hub.py": {"config.json"},
    "benchmarks/measuring/pbg_peer.py": {"dynamic_rel_count.txt", "entities", "train", "format_version"},
    **{f"benchmarks/{name}.py": {"partition.log"} for name in ("growth", "out_of_core", "quality")},
    "dglkge/cli/checkpoints.py": {"num_parts"},
    "dglkge/report/page.py": {"finished_epochs", "has_weights", "num_parts", "num_relations"},
    "dglkge/training/statistics/stats.py": {"batches_done", "epoch_loss"},
}
"""Names of ours that stand for something else in a file: DGL-KE's and PyTorch-BigGraph's files, a log that a
benchmark writes, figures of a report."""


def constants(space: object) -> set[str]:
    """Return all texts that a module or class names in upper case."""
    values = [value for name, value in vars(space).items() if name.isupper()]
    values += [item for value in values if isinstance(value, tuple) for item in value]
    return {value for value in values if isinstance(value, str)}


CLASSES = [item for owner in OWNERS for item in vars(owner).values() if inspect.isclass(item)]
TEXTS = set().union(*map(constants, (*OWNERS, *CLASSES))) - {layout.TEMPORARY_SUFFIX}
FILES = {text for text in TEXTS if "." in text}
FIELDS = {text for text in constants(dataset_files.Field) | constants(layout.Progress) if "_" in text}


def names_in(node: ast.AST) -> list[tuple[ast.expr, set[str]]]:
    """Return what a node says, joins to a path or looks up, each with the owners' names for that."""
    if isinstance(node, ast.Constant):
        return [(node, FILES)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [(node.right, TEXTS)]
    if isinstance(node, ast.Subscript):
        return [(node.slice, FIELDS)]
    if isinstance(node, ast.Call) and called_name(node) in ("Path", "joinpath", "with_name", "join"):
        return [(argument, TEXTS) for argument in node.args]
    if isinstance(node, ast.Call) and called_name(node) in ("get", "pop"):
        return [(argument, FIELDS) for argument in node.args[:1]]
    return []


def retyped(tree: ast.AST) -> set[tuple[int, str]]:
    """Return (line, text) of each owned name that a file types itself."""
    nodes = list(ast.walk(tree))
    expressions = [node.value for node in nodes if isinstance(node, ast.Expr)]
    docstrings = {id(value) for value in expressions if isinstance(value, ast.Constant)}
    return {
        (name.lineno, name.value)
        for node in nodes
        if id(node) not in docstrings
        for name, owned in names_in(node)
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
        if name.value in owned or name.value.rpartition("/")[2] in FILES
    }


def test_no_name_is_typed_twice():
    assert {"dataset.json", "manifest.json", "lease.json"} <= FILES and "graph_name" in FIELDS
    assert {"checkpoint", "partitions", "entities"} <= TEXTS
    owners = {owner.__name__ for owner in OWNERS}
    assert not [
        f"{source.name}:{line} types {text!r}: take it from its owner"
        for source in sources("dglkge", "partition_tools", "examples", "benchmarks")
        if source.module not in owners
        for line, text in retyped(source.tree)
        if text not in OF_OTHERS.get(source.name, ())
    ]


def test_checker_finds_a_retyped_name_and_lets_other_texts_pass():
    texts = ["open(folder / 'dataset.json')", "open('runs/a/metrics.json')", "run / 'checkpoint'"]
    texts += ["os.path.join(data, 'partitions')", "description['graph_name']", "progress.get('batches_done')"]
    assert [len(retyped(ast.parse(text))) for text in texts] == [1] * len(texts)
    texts = ["'See dataset.json.'", "command = 'checkpoint'", "config['name']", "name = path.name + '.tmp'"]
    assert not [text for text in texts if retyped(ast.parse(text))]
