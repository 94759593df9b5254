"""What a user can choose when triples become a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dglkge.data.text_format import Columns
from dglkge.errors import InputError, unknown_name
from dglkge.typing import RELATION

METHODS = ("metis", "random")


@dataclass(frozen=True)
class Options:
    """What to make of the triples.

    Attributes
    ----------
    num_parts : int
        Number of partitions.
    method : str
        ``"metis"`` or ``"random"``.
    seed : int
        Of ``random``, of the relations' owners and of a split by fractions. METIS itself takes none.
    columns : Columns
        Where the parts of a triple stand.
    entity_types : Path, optional
        File of entity and type.
    integer_ids : bool
        Whether the triples are of integers from 0 instead of names.
    entity_map, relation_map : Path, optional
        Files of integer id and name.
    split : (float, float, float), optional
        Fractions of train, valid and test to split one set of triples into.
    overwrite : bool
        Whether to replace a dataset that lies at the output.
    name : str, optional
        Name of the dataset; by default the output folder's.
    progress : bool, optional
        Whether to show progress on stderr; by default where that is a terminal.
    """

    num_parts: int = 1
    method: str = "metis"
    seed: int = 0
    columns: Columns = Columns()
    entity_types: Path | None = None
    integer_ids: bool = False
    entity_map: Path | None = None
    relation_map: Path | None = None
    split: tuple[float, float, float] | None = None
    overwrite: bool = False
    name: str | None = None
    progress: bool | None = None


def check_options(options: Options) -> None:
    """Check what can be checked before any triple is read.

    Raises
    ------
    InputError
        If a value is not allowed or a file is missing.
    """
    if options.method not in METHODS:
        raise unknown_name("partition method", options.method, METHODS)
    if options.num_parts < 1:
        raise InputError(f"the number of partitions is {options.num_parts}, expected 1 or more")
    if not 0 <= options.seed < 2**63:
        raise InputError(f"the seed is {options.seed}, expected 0 to 2**63 - 1")
    if (options.entity_map or options.relation_map) and not options.integer_ids:
        raise InputError("an entity or relation map was given, but the ids are not said to be integers")
    for path in (options.entity_types, options.entity_map, options.relation_map):
        if path is not None and not path.is_file():
            raise InputError(f"{path}: there is no such file")


def check_num_parts(num_parts: int, counts: dict[str, int]) -> None:
    """Check that every partition can own a node of every type; DGL cannot store one that does not.

    Raises
    ------
    InputError
        If there are fewer entities of some type, or relations, than partitions.
    """
    for noun, count in counts.items():
        if num_parts > count:
            what = "relations" if noun == RELATION else f"entities of type {noun!r}"
            raise InputError(
                f"{num_parts} partitions are more than there are {what} ({count}): "
                "every partition must own at least one"
            )
