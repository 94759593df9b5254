"""Relations and their ids. A name that joins several pairs of entity types is several relations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dglkge.data.vocabulary import Vocabulary, read_lines
from dglkge.errors import InputError
from dglkge.typing import Relation


class RelationVocabulary:
    """An ordered list of relations; a relation's place is its original id.

    Parameters
    ----------
    relations : sequence of Relation
        The relation of id 0, 1, 2, ...

    Attributes
    ----------
    labels : Vocabulary
        What people call each relation: its name, or ``name (lhs → rhs)`` where the name joins several
        pairs of entity types.
    """

    def __init__(self, relations: Sequence[Relation]) -> None:
        self.relations = list(relations)
        uses = Counter(relation.name for relation in self.relations)
        self.labels = Vocabulary(
            [r.name if uses[r.name] == 1 else f"{r.name} ({r.lhs} → {r.rhs})" for r in self.relations],
            "relation",
        )
        self._ids_of_name: dict[str, list[int]] = {}
        for id_, relation in enumerate(self.relations):
            self._ids_of_name.setdefault(relation.name, []).append(id_)

    def __len__(self) -> int:
        return len(self.relations)

    def __getitem__(self, id_: int) -> Relation:
        return self.relations[id_]

    def id(self, label_or_name: str, lhs: str | None = None, rhs: str | None = None) -> int:
        """Return the id of a relation.

        Parameters
        ----------
        label_or_name : str
            Its label, or its name together with as much of the entity types as makes it unique.
        lhs, rhs : str, optional
            Entity types of its heads and of its tails.

        Raises
        ------
        InputError
            If there is no such relation, or the name alone does not say which.
        """
        ids = self._ids_of_name.get(label_or_name)
        if ids is None:
            ids = [self.labels.id(label_or_name)]
        fitting = [
            id_
            for id_ in ids
            if lhs in (None, self.relations[id_].lhs) and rhs in (None, self.relations[id_].rhs)
        ]
        if len(fitting) == 1:
            return fitting[0]
        known = ", ".join(repr(self.labels[id_]) for id_ in ids)
        if not fitting:
            wanted = f"{lhs or 'any'} → {rhs or 'any'}"
            raise InputError(f"relation {label_or_name!r} does not join {wanted}; known: {known}")
        raise InputError(
            f"relation {label_or_name!r} joins several pairs of entity types; say which: {known}"
        )

    def save(self, path: Path) -> None:
        """Write one relation per line: name, lhs and rhs, separated by tabs; the line number is the id."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.writelines(f"{r.name}\t{r.lhs}\t{r.rhs}\n" for r in self.relations)

    @classmethod
    def load(cls, path: Path) -> RelationVocabulary:
        """Read what :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is missing, cut off or has a line without three fields.
        """
        relations = []
        for number, line in enumerate(read_lines(path), start=1):
            fields = line.split("\t")
            if len(fields) != 3:
                raise InputError(f"{path}:{number}: got {len(fields)} fields, expected name, lhs and rhs")
            relations.append(Relation(*fields))
        return cls(relations)
