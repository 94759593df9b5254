"""Make vectors of the entities of the standard library's graph from their names and docstrings.

    python benchmarks/stdlib_kg.py --output demo/stdlib-triples
    python benchmarks/stdlib_vectors.py --triples demo/stdlib-triples --output demo/stdlib-vectors.parquet

The text of a module, class or function is its name, split into words, and its docstring; that of a method or
argument name, which many classes share, is the name and the docstrings of all methods of that name. Texts
become TF-IDF vectors, and these are reduced by truncated singular value decomposition (latent semantic
analysis). An entity whose text has no word that two texts share has no vector. `model.init_from.path` takes
the file. Needs scikit-learn (pip install scikit-learn).
"""

from __future__ import annotations

import argparse
import ast
import builtins
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stdlib_kg import parsed_files
from stdlib_source import BLOCKS, FUNCTIONS

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def read_docstrings(root: Path) -> dict[str, list[str]]:
    """Return the docstrings of every entity of the graph, by its name there."""
    texts: dict[str, list[str]] = {}
    for name, value in vars(builtins).items():
        if isinstance(value, type) or inspect.isbuiltin(value):
            texts.setdefault(name, []).append(inspect.getdoc(value) or "")
    for name, _, tree in parsed_files(root):
        texts.setdefault(name, []).append(ast.get_docstring(tree) or "")
        add_docstrings(tree.body, name, name, texts)
    return texts


def add_docstrings(body: Iterable[ast.stmt], scope: str, module: str, texts: dict[str, list[str]]) -> None:
    """Add the docstrings of the classes and functions of a body, under the names that the graph has."""
    for node in body:
        if isinstance(node, FUNCTIONS):
            name = f"{scope}.{node.name}" if scope == module else f"method:{node.name}"
            texts.setdefault(name, []).append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.ClassDef):
            name = f"{scope}.{node.name}"
            texts.setdefault(name, []).append(ast.get_docstring(node) or "")
            add_docstrings(node.body, name, module, texts)
        elif isinstance(node, BLOCKS):
            handlers = [stmt for handler in getattr(node, "handlers", []) for stmt in handler.body]
            inner = [*node.body, *handlers, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            add_docstrings(inner, scope, module, texts)


def words_of(name: str) -> str:
    """Return the words of a name: ``email.message.EmailMessage`` is "email message Email Message"."""
    return " ".join(WORD.findall(name.partition(":")[2] or name))


def make_vectors(texts: list[str], width: int, seed: int) -> np.ndarray:
    """Return a vector of length 1 for each text, (n, width) float32; 0 where no word is shared."""
    try:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.preprocessing import normalize
    except ImportError:
        sys.exit("stdlib_vectors.py: error: it needs scikit-learn: pip install scikit-learn")
    counts = TfidfVectorizer(sublinear_tf=True, min_df=2, stop_words="english").fit_transform(texts)
    reduced = TruncatedSVD(min(width, counts.shape[1] - 1), random_state=seed).fit_transform(counts)
    vectors: np.ndarray = normalize(reduced).astype(np.float32)
    return vectors


def write_vectors(path: Path, names: list[str], vectors: np.ndarray) -> None:
    """Write the columns name and embedding."""
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"name": names, "embedding": lists}), path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triples", type=Path, required=True, help="folder that stdlib_kg.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="Parquet file to write")
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--source", type=Path, default=library, help="library to read (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="numbers of a vector (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the decomposition")
    options = parser.parse_args(arguments)
    try:
        lines = (options.triples / "entity_types.tsv").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}; stdlib_kg.py writes it")
    names = [line.split("\t")[0] for line in lines]
    docstrings = read_docstrings(options.source)
    texts = [" ".join([words_of(name), *docstrings.get(name, [])]) for name in names]
    vectors = make_vectors(texts, options.width, options.seed)
    kept = np.flatnonzero(vectors.any(axis=1))
    write_vectors(options.output, [names[place] for place in kept], vectors[kept])
    with_text = sum(any(docstrings.get(name, [])) for name in names)
    print(f"{len(names):,} entities, {with_text:,} of them with a docstring")
    print(f"{len(kept):,} vectors of {vectors.shape[1]} numbers in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
