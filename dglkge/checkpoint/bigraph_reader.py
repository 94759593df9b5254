"""Reads a checkpoint of PyTorch-BigGraph, which has no manifest: describes it as one of ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint import hdf5_format, layout
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, CheckpointMeta, FileEntry, Manifest
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError
from dglkge.formats.bigraph import score_function_of
from dglkge.model.choices import BIGRAPH_OPTIMIZER
from dglkge.model.functions.bigraph_operators import OPERATORS
from dglkge.model.functions.bigraph_scores import COMPARATORS
from dglkge.typing import RELATION, Relation


def is_bigraph(folder: Path, version: int) -> bool:
    """Return whether PyTorch-BigGraph wrote a version: without a manifest, and rows without original ids."""
    first = sorted(folder.glob(layout.first_parts_pattern(version)))
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
            ours = hdf5_format.ORIGINAL_IDS in file
    except (OSError, ValueError, CheckpointError):
        return False
    return not ours and isinstance(config, dict) and {"entities", "relations", "entity_path"} <= set(config)


def find_bigraph(folder: Path) -> tuple[Path, int] | None:
    """Return folder and version of PyTorch-BigGraph's checkpoint; None if it wrote none.

    Parameters
    ----------
    folder : Path
        Its own, or our checkpoint's: it may have gone on from the published version, in the folder of that.
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
    """Describe a version that PyTorch-BigGraph wrote.

    Parameters
    ----------
    folder : Path
    version : int
        The number in checkpoint_version.txt.

    Returns
    -------
    Manifest
        Without checksums and fingerprint, which PyTorch-BigGraph does not have. An entity's id is its place
        in the parts, one after the other.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or the model is none that dglkge has.
    """
    path = folder / layout.CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    try:
        return _described(config, folder, version)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        words = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no configuration of PyTorch-BigGraph ({words})") from None


def _described(config: Any, folder: Path, version: int) -> Manifest:
    """Return the manifest of a version, given PyTorch-BigGraph's configuration."""
    with hdf5_format.open_file(folder / layout.model_file(version)) as file:
        score_function = _score_function(config, folder)
        attributes = dict(file.attrs)
        relations = _relations(config, folder)
    files = [
        _entry(folder, layout.embeddings_file(name, part, version), name, part)
        for name, entity in config["entities"].items()
        for part in range(int(entity["num_partitions"]))
    ]
    files.append(_entry(folder, layout.model_file(version), RELATION, 0, len(relations)))
    # PyTorch-BigGraph counts a version for each pass over one edge path and one chunk of its edges. Its epoch
    # is all of these passes.
    passes = 1
    for name in ("iteration/num_edge_paths", "iteration/num_edge_chunks"):
        passes *= max(int(attributes.get(name, 1)), 1)
    counts = {name: sum(one.num_rows for one in files if one.table == name) for name in config["entities"]}
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
        dim=int(config["dimension"]),
        reciprocal=bool(config.get("dynamic_relations", False)),
        optimizer={"name": BIGRAPH_OPTIMIZER, "lr": config.get("lr", 0.01)},
        versions={"torchbiggraph": "unknown"},
    )
    return Manifest(version, meta, files)


def entity_names(folder: Path, meta: CheckpointMeta, entity_type: str, num_parts: int) -> Vocabulary | None:
    """Return the names of a type from PyTorch-BigGraph's lists; None where there are none."""
    names: list[str] = []
    for part in range(num_parts):
        path = _beside(folder, meta.config, layout.entity_names_file(entity_type, part))
        if path is None:
            return None
        names += _json(path)
    return Vocabulary([str(name) for name in names], "entity")


def _score_function(config: Mapping[str, Any], folder: Path) -> str:
    """Return our name of the model.

    Raises
    ------
    CheckpointError
        If dglkge has no such model.
    """
    where = folder / layout.CONFIG_FILE
    operators = {relation["operator"] for relation in config["relations"]}
    comparator = config.get("comparator", "cos")
    if any(entity.get("featurized") for entity in config["entities"].values()):
        # They have no rows of their own.
        raise CheckpointError(f"{where}: featurized entities are not dglkge's; allowed is False")
    if len(operators) > 1:
        raise CheckpointError(
            f"{where}: relations have the operators {', '.join(sorted(operators))}; allowed is one operator "
            "for all relations"
        )
    (operator,) = operators
    name = score_function_of(operator, comparator, bool(config.get("bias")))
    if name is not None:
        return name
    raise CheckpointError(
        f"{where}: operator {operator} with comparator {comparator}; allowed is one of "
        f"{', '.join(OPERATORS)} with one of {', '.join(COMPARATORS)}"
    )


def _relations(config: Mapping[str, Any], folder: Path) -> Sequence[Relation]:
    """Return the relations in the order of their ids."""
    given = config["relations"]
    if not config.get("dynamic_relations"):
        return [Relation(one["name"], one["lhs"], one["rhs"]) for one in given]
    path = _beside(folder, config, layout.RELATION_NAMES_FILE)
    if path is None:
        raise CheckpointError(
            f"{layout.RELATION_NAMES_FILE} is neither in {config['entity_path']} nor in {folder}"
        )
    return [Relation(str(name), given[0]["lhs"], given[0]["rhs"]) for name in _json(path)]


def _entry(folder: Path, name: str, table: str, part: int, num_rows: int | None = None) -> FileEntry:
    """Describe one file by what it holds."""
    path = folder / name
    with hdf5_format.open_file(path) as file:
        shapes = hdf5_format.shapes(file)
    if num_rows is None:
        num_rows = shapes[hdf5_format.EMBEDDINGS][0]
    return FileEntry(name, table, part, num_rows, path.stat().st_size, UNKNOWN_CRC32, UNKNOWN_CRC32, shapes)


def _beside(folder: Path, config: Mapping[str, Any], name: str) -> Path | None:
    """Find a file in the checkpoint's folder, else in PyTorch-BigGraph's entity_path; None if absent."""
    # The folder first: entity_path is a path on the machine that trained, and need not exist here.
    for place in (folder, Path(config.get("entity_path", folder))):
        if (place / name).is_file():
            return place / name
    return None


def _json(path: Path) -> list[Any]:
    """Read a list.

    Raises
    ------
    CheckpointError
        If the file is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(found, list):
        raise CheckpointError(f"{path} is damaged: expected a list")
    return found
