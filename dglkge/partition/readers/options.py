"""Options of reading: format, prefixes, literals, graphs, entity types from triples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dglkge.errors import InputError, unknown_name

LITERALS = ("drop", "entities", "numeric")
DEFAULT_GRAPH = "default"
"""Value of ``--graph`` for the triples that are in no named graph."""

_PREFIX_NAME = re.compile(r"[^\W\d_][\w.-]*|")
_IRI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]*")


@dataclass(frozen=True)
class ReadingOptions:
    """Options of reading files and folders of triples.

    Attributes
    ----------
    format : str, optional
        Name of the input's format; by default it is found out.
    prefixes : mapping of str to str
        IRI of each prefix, before those of the files and the well-known ones.
    full_iris : bool
        Whether IRIs stay as they are.
    base_iri : str, optional
        What relative IRIs are relative to.
    literals : str
        ``"drop"``, ``"entities"``, or ``"numeric"`` for a side file of numbers.
    graphs : tuple of str
        Named graphs to read, as IRI, or ``"default"``. Empty: all.
    types_from : str, optional
        Relation whose triples give the entity types; with GraphML, an attribute of the nodes.
    max_types : int
        Number of entity types made of it, besides ``untyped``.
    relation_attribute, name_attribute : str, optional
        Attributes of GraphML's edges and nodes.
    """

    format: str | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    full_iris: bool = False
    base_iri: str | None = None
    literals: str = "drop"
    graphs: tuple[str, ...] = ()
    types_from: str | None = None
    max_types: int = 20
    relation_attribute: str | None = None
    name_attribute: str | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ReadingOptions:
        """Build the options from a user's mapping.

        Raises
        ------
        InputError
            If there is no such option.
        """
        known = [option.name for option in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_name("reading option", name, known)
        graphs = values.get("graphs", ())
        return cls(**{**values, "graphs": (graphs,) if isinstance(graphs, str) else tuple(graphs)})

    def given(self) -> set[str]:
        """Return the names of the options that differ from their default."""
        default = ReadingOptions()
        return {o.name for o in fields(self) if getattr(self, o.name) != getattr(default, o.name)}


def check_reading(options: ReadingOptions) -> None:
    """Check the values that need no input.

    Raises
    ------
    InputError
        If a value is not allowed.
    """
    if options.literals not in LITERALS:
        raise unknown_name("policy for literals", options.literals, LITERALS)
    if options.max_types < 1:
        raise InputError(f"max_types is {options.max_types}, expected 1 or more")
    for name, iri in options.prefixes.items():
        if not _PREFIX_NAME.fullmatch(name):
            raise InputError(
                f"the prefix {name!r} is not allowed: a letter first, then letters, digits, . _ -"
            )
        _check_iri(f"the IRI of prefix {name!r}", iri)
    if options.base_iri is not None:
        _check_iri("the base IRI", options.base_iri)


def _check_iri(what: str, iri: str) -> None:
    if not _IRI.fullmatch(iri):
        raise InputError(f"{what} is {iri!r}, expected an absolute IRI such as http://example.org/")


def parse_prefixes(texts: list[str]) -> dict[str, str]:
    """Parse the ``--prefix`` options.

    Raises
    ------
    InputError
        If one has no "=", or two give one prefix different IRIs.

    Examples
    --------
    >>> parse_prefixes(["ex=http://example.org/"])
    {'ex': 'http://example.org/'}
    """
    prefixes: dict[str, str] = {}
    for text in texts:
        name, equals, iri = text.partition("=")
        if not equals:
            raise InputError(f"--prefix {text!r} is not allowed; give name=IRI, e.g. ex=http://example.org/")
        # As in Turtle, people write "ex:".
        name = name[:-1] if name.endswith(":") else name
        if prefixes.setdefault(name, iri) != iri:
            raise InputError(f"--prefix {name!r} is given twice: {prefixes[name]} and {iri}")
    return prefixes
