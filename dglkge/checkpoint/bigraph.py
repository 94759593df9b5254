"""A version that PyTorch-BigGraph wrote: found in a folder, and described as one of ours."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from dglkge.checkpoint import hdf5_format, layout
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, CheckpointMeta, FileEntry, Manifest
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.errors import CheckpointError
from dglkge.formats.bigraph_files import read_operators, read_relations, read_score_function
from dglkge.model.choices import BIGRAPH_OPTIMIZER
from dglkge.model.functions.bigraph_operators import MATRICES
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION


def is_bigraph(folder: Path, version: int) -> bool:
    """Return whether PyTorch-BigGraph wrote a version: without a manifest, and rows without original ids."""
    files = LeasedFolder(folder)
    first = sorted(folder.glob(layout.embeddings_file("*", 0, version)))
    with contextlib.suppress(OSError, CheckpointError):
        ours = layout.parse_object(files.read(layout.MANIFEST_FILE))
        config = layout.parse_object(files.read(layout.CONFIG_FILE))
        # It may have gone on from a version of ours, in the folder of that, with the next number.
        is_another = ours.get("version") != version
        if first and is_another and {"entities", "relations", "entity_path"} <= set(config):
            with hdf5_format.open_file(first[0]) as file:
                # The name of the first part and the keys of config.json are equal in both formats. Only our
                # files have original ids.
                return hdf5_format.ORIGINAL_IDS not in file
    return False


def find_bigraph(folder: Path) -> tuple[Path, int] | None:
    """Return folder and version of PyTorch-BigGraph's checkpoint; None if it wrote none.

    The folder is its own, or our checkpoint's: it may have gone on from the published version, inside that.
    """
    with contextlib.suppress(OSError, ValueError):
        for _ in range(2):
            text = (folder / layout.VERSION_FILE).read_text(encoding="utf-8")
            version = layout.parse_version(text.strip()) or 0
            if is_bigraph(folder, version):
                return folder, version
            folder = folder / layout.version_folder(version)
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
            # PyTorch-BigGraph counts a version for each pass over one edge path and one chunk of its edges.
            # Its epoch is all of these passes.
            numbers = ("iteration/num_edge_paths", "iteration/num_edge_chunks")
            passes = math.prod(max(int(file.attrs.get(name, 1)), 1) for name in numbers)
        progress = {Progress.FINISHED_EPOCHS: version // passes, Progress.BATCHES_DONE: 0}
        score_function, operators = read_score_function(config, folder), read_operators(config)
        entities, relations = config["entities"], read_relations(config, folder)
        files = [
            _entry(folder, layout.embeddings_file(name, part, version), name, part)
            for name, entity in entities.items()
            for part in range(int(entity["num_partitions"]))
        ]
        files.append(_entry(folder, layout.model_file(version), RELATION, 0, len(relations)))
        counts = {name: sum(entry.num_rows for entry in files if entry.table == name) for name in entities}
        dims = {
            name: int(entity.get("dimension") or config["dimension"]) for name, entity in entities.items()
        }
        dim = max(dims.values())
        meta = CheckpointMeta(
            config=config,
            dataset_name="unknown",
            entity_types=counts,
            relations=relations,
            progress={**progress, Progress.GLOBAL_BATCH_SIZE: 1},
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
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no configuration of PyTorch-BigGraph ({reason})") from None


def _entry(folder: Path, name: str, table: str, part: int, num_rows: int = 0) -> FileEntry:
    """Describe one file by what it holds."""
    with hdf5_format.open_file(folder / name) as file:
        shapes = hdf5_format.shapes(file)
    num_rows = num_rows if table == RELATION else shapes[hdf5_format.EMBEDDINGS][0]
    size = (folder / name).stat().st_size
    return FileEntry(name, table, part, num_rows, size, UNKNOWN_CRC32, UNKNOWN_CRC32, shapes)
