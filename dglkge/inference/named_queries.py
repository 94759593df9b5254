"""Queries by name, as written on the command line or in a file, their ids, and answers by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError
from dglkge.inference.choices import MISSING
from dglkge.inference.search import LinkQuery
from dglkge.typing import Side


@dataclass(frozen=True)
class NamedQuery:
    """A triple with one entity missing, by names.

    Attributes
    ----------
    side : Side
        The missing side.
    entity : str
        The given entity.
    relation : str
        A relation's name or label.
    """

    side: Side
    entity: str
    relation: str

    def __str__(self) -> str:
        parts = (self.entity, self.relation, MISSING)
        return "(" + ", ".join(parts if self.side is Side.TAIL else parts[::-1]) + ")"


@dataclass(frozen=True)
class NamedAnswer:
    """One candidate found, by name.

    Attributes
    ----------
    name : str
    score : float
        Higher is better; a cosine for similar entities.
    known : str or None
        First split of the data set that contains the triple; None if no split does, or if known answers
        were not marked.
    probability : float or None
        Calibrated probability that the triple is true, if it was asked for.
    """

    name: str
    score: float
    known: str | None = None
    probability: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The best answers to one query.

    Attributes
    ----------
    query : NamedQuery
    relation : str
        The relation's label, which names its entity types if several relations share the name.
    answer_type : str
        Entity type of the answers.
    is_marked : bool
        Whether known answers are marked.
    answers : list of NamedAnswer
        The best first.
    """

    query: NamedQuery
    relation: str
    answer_type: str
    is_marked: bool
    answers: list[NamedAnswer]


def resolve(
    query: NamedQuery, relations: RelationVocabulary, vocabulary: Callable[[str], Vocabulary]
) -> LinkQuery:
    """Look up the ids of a query's names.

    A relation's name may join several pairs of entity types. It then stands for the one pair whose type on
    the given side has the entity.

    Parameters
    ----------
    query : NamedQuery
    relations : RelationVocabulary
    vocabulary : callable
        Returns the names of an entity type.

    Raises
    ------
    InputError
        If a name is unknown (the message lists the nearest ones), or the relation is ambiguous.
    """
    # Relations of one name are tried first by the given entity: users rarely give the types' names.
    fitting = [
        id_
        for id_, relation in enumerate(relations.relations)
        if relation.name == query.relation and query.entity in vocabulary(relation.anchor_type(query.side))
    ]
    # Otherwise the vocabulary decides; its error lists the labels, which name the types.
    relation_id = fitting[0] if len(fitting) == 1 else relations.id(query.relation)
    anchor_type = relations[relation_id].anchor_type(query.side)
    return LinkQuery(query.side, vocabulary(anchor_type).id(query.entity), relation_id)


def read_queries(path: Path) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Read a file of queries: head, relation and tail separated by tabs, ``?`` for the missing one.

    Returns
    -------
    queries : list of (str, str, str)
    places : list of str
        ``file:line`` of each.

    Raises
    ------
    InputError
        If the file cannot be read, or a line is not a query.
    """
    try:
        # Bytes, since open() in text mode would decode by the locale.
        # Only at line feeds, as vocabularies: a name may contain other characters that end lines for Python.
        lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8").split("\n")]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    queries, places = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != 3 or fields.count(MISSING) != 1:
            raise InputError(
                f"{path}:{number}: got {line!r}; expected head, relation and tail separated by tabs, "
                "with ? for one of them"
            )
        queries.append((fields[0], fields[1], fields[2]))
        places.append(f"{path}:{number}")
    if not queries:
        raise InputError(f"{path} has no queries")
    return queries, places
