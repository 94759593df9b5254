"""A version that PyTorch-BigGraph wrote: found in a folder, and described as one of ours."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from dglkge.checkpoint import hdf5_format, layout
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, CheckpointMeta, FileEntry, Manifest
from dglkge.errors import CheckpointError
from dglkge.formats.bigraph_files import read_operators, read_relations, read_score_function
from dglkge.model.choices import BIGRAPH_OPTIMIZER
from dglkge.model.functions.bigraph_operators import MATRICES
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION


def is_bigraph(folder: Path, version: int) -> bool:
    """Return whether PyTorch-BigGraph wrote a version: without a manifest, and rows without original ids."""
    first = sorted(folder.glob(layout.embeddings_file("*", 0, version)))
    if not first:
        return False
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        # It may have gone on from a version of ours, in the folder of that, with the next number.
        if json.loads((folder / layout.MANIFEST_FILE).read_text(encoding="utf-8"))["version"] == version:
            return False
    try:
        config = json.loads((folder / layout.CONFIG_FILE).read_text(encoding="utf-8"))
        with hdf5_format.open_file(first[0]) as file:
            # The name of the first part and the keys of config.json are equal in both formats. Only our files
            # have original ids.
            has_ids = hdf5_format.ORIGINAL_IDS in file
    except (OSError, ValueError, CheckpointError):
        return False
    return (
        not has_ids and isinstance(config, dict) and {"entities", "relations", "entity_path"} <= set(config)
    )


def find_bigraph(folder: Path) -> tuple[Path, int] | None:
    """Return folder and version of PyTorch-BigGraph's checkpoint; None if it wrote none.

    The folder is its own, or our checkpoint's: it may have gone on from the published version, inside that.
    """
    for _ in range(2):
        try:
            version = layout.parse_version((folder / layout.VERSION_FILE).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            return None
        if version and is_bigraph(folder, version):
            return folder, version
        folder = folder / layout.version_folder(version or 0)
    return None


def read_manifest(folder: Path, version: int) -> Manifest:
    """Describe a version that PyTorch-BigGraph wrote, without checksums and fingerprint, which it lacks.

    An entity's id is its place in the parts, one after the other. CheckpointError if a file is missing or
    damaged, or the model is none that dglkge has.
    """
    path = folder / layout.CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    try:
        with hdf5_format.open_file(folder / layout.model_file(version)) as file:
            score_function, operators = read_score_function(config, folder), read_operators(config)
            attributes = dict(file.attrs)
            relations = read_relations(config, folder)
        files = [
            _entry(folder, layout.embeddings_file(name, part, version), name, part)
            for name, entity in config["entities"].items()
            for part in range(int(entity["num_partitions"]))
        ]
        files.append(_entry(folder, layout.model_file(version), RELATION, 0, len(relations)))
        # PyTorch-BigGraph counts a version for each pass over one edge path and one chunk of its edges. Its
        # epoch is all of these passes.
        numbers = ("iteration/num_edge_paths", "iteration/num_edge_chunks")
        passes = math.prod(max(int(attributes.get(name, 1)), 1) for name in numbers)
        counts = dict.fromkeys(config["entities"], 0)
        for entry in files[:-1]:
            counts[entry.table] += entry.num_rows
        dims = {
            name: int(entity.get("dimension") or config["dimension"])
            for name, entity in config["entities"].items()
        }
        dim = max(dims.values())
        meta = CheckpointMeta(
            config=config,
            dataset_name="unknown",
            dataset_path="",
            dataset_fingerprint="",
            entity_types=counts,
            relations=relations,
            progress={
                Progress.FINISHED_EPOCHS: version // passes,
                Progress.BATCHES_DONE: 0,
                Progress.GLOBAL_BATCH_SIZE: 1,
            },
            seed=0,
            score_function=score_function,
            dim=dim,
            reciprocal=bool(config.get("dynamic_relations", False)),
            optimizer={"name": BIGRAPH_OPTIMIZER, "lr": config.get("lr", 0.01)},
            versions={"torchbiggraph": "unknown"},
            operators=operators if len(set(operators)) > 1 else (),
            dims={name: width for name, width in dims.items() if width < dim},
        )
        if meta.dims and not SCORE_FUNCTIONS.get(score_function).maps_widths:
            raise CheckpointError(
                f"{path}: entities have the dimensions {dims} and relations the operators "
                f"{', '.join(set(operators))}; allowed with several dimensions: {', '.join(sorted(MATRICES))}"
            )
        return Manifest(version, meta, files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        words = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no configuration of PyTorch-BigGraph ({words})") from None


def _entry(folder: Path, name: str, table: str, part: int, num_rows: int | None = None) -> FileEntry:
    """Describe one file by what it holds."""
    path = folder / name
    with hdf5_format.open_file(path) as file:
        shapes = hdf5_format.shapes(file)
    if num_rows is None:
        num_rows = shapes[hdf5_format.EMBEDDINGS][0]
    return FileEntry(name, table, part, num_rows, path.stat().st_size, UNKNOWN_CRC32, UNKNOWN_CRC32, shapes)
