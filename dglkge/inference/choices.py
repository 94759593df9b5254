"""Names that commands offer as choices. Light: ``dglkge predict --help`` needs neither torch nor pandas."""

from __future__ import annotations

import enum

MISSING = "?"
"""Stands for the missing part of a query in files and messages."""

CANDIDATES = ALL, SEEN = "all", "seen"
"""Candidates of a prediction: all entities of the type, or those seen on that side of the relation."""

FAISS = "faiss"
SEARCHES = (*CANDIDATES, FAISS)
"""Candidates of a completion: also those that an approximate index finds."""

BEAM = 16
"""Entities of each variable of a question that go on, by default."""

IMPORT_FORMATS = ("dglke", "npy", "parquet", "safetensors", "tsv", "word2vec")
"""Formats that :mod:`dglkge.inference.exports.import_tables` reads, sorted."""

EXPORT_FORMATS = tuple(sorted((*IMPORT_FORMATS, "faiss", "huggingface", "lancedb", "projector", "qdrant")))
"""Formats that :mod:`dglkge.inference.exports.export` writes, sorted."""


class Known(str, enum.Enum):
    """Treatment of answers that the data set already contains."""

    MARK = "mark"
    DROP = "drop"
    KEEP = "keep"
