"""Prefixes: IRIs as short names for people, in a way that can be undone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

WELL_KNOWN = {
    "bibo": "http://purl.org/ontology/bibo/",
    "cc": "http://creativecommons.org/ns#",
    "chebi": "http://purl.obolibrary.org/obo/CHEBI_",
    "dbc": "http://dbpedia.org/resource/Category:",
    "dbo": "http://dbpedia.org/ontology/",
    "dbp": "http://dbpedia.org/property/",
    "dbr": "http://dbpedia.org/resource/",
    "dc": "http://purl.org/dc/elements/1.1/",
    "dcat": "http://www.w3.org/ns/dcat#",
    "dcterms": "http://purl.org/dc/terms/",
    "doap": "http://usefulinc.com/ns/doap#",
    "fb": "http://rdf.freebase.com/ns/",
    "foaf": "http://xmlns.com/foaf/0.1/",
    "geo": "http://www.w3.org/2003/01/geo/wgs84_pos#",
    "gn": "http://www.geonames.org/ontology#",
    "go": "http://purl.obolibrary.org/obo/GO_",
    "obo": "http://purl.obolibrary.org/obo/",
    "org": "http://www.w3.org/ns/org#",
    "owl": "http://www.w3.org/2002/07/owl#",
    "prov": "http://www.w3.org/ns/prov#",
    "qb": "http://purl.org/linked-data/cube#",
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    "rdfs": "http://www.w3.org/2000/01/rdf-schema#",
    "schema": "http://schema.org/",
    "sdo": "https://schema.org/",
    "sh": "http://www.w3.org/ns/shacl#",
    "sioc": "http://rdfs.org/sioc/ns#",
    "skos": "http://www.w3.org/2004/02/skos/core#",
    "sosa": "http://www.w3.org/ns/sosa/",
    "time": "http://www.w3.org/2006/time#",
    "up": "http://purl.uniprot.org/core/",
    "vcard": "http://www.w3.org/2006/vcard/ns#",
    "void": "http://rdfs.org/ns/void#",
    "wd": "http://www.wikidata.org/entity/",
    "wdt": "http://www.wikidata.org/prop/direct/",
    "wikibase": "http://wikiba.se/ontology#",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
    "yago": "http://yago-knowledge.org/resource/",
}
"""Prefixes that are used without being declared. A declared one of the same name replaces it."""


class PrefixTable:
    """A table of prefixes in which every name and every IRI stands once.

    The name of an IRI is ``prefix:rest`` for the longest IRI of the table that it begins with. An IRI without
    a prefix is its own name, or ``<IRI>`` if it could be taken for a name with a prefix. So two IRIs never
    have the same name, and :meth:`expand` gives the IRI back.

    Parameters
    ----------
    tables : mappings of str to str
        The IRI of each prefix. An earlier table wins, within a table the earlier entry: a later prefix of the
        same name, or for the same IRI, is not used.

    Examples
    --------
    >>> table = PrefixTable({"ex": "http://example.org/"})
    >>> table.shorten("http://example.org/Rome"), table.expand("ex:Rome"), table.shorten("ex:Rome")
    ('ex:Rome', 'http://example.org/Rome', '<ex:Rome>')
    """

    def __init__(self, *tables: Mapping[str, str]) -> None:
        self.iris: dict[str, str] = {}
        names: dict[str, str] = {}
        for table in tables:
            for name, iri in table.items():
                if iri and name not in self.iris and iri not in names:
                    self.iris[name] = iri
                    names[iri] = name
        self._names = names
        self._sorted = sorted(names)
        # For each IRI of the table the longest other one that it begins with, or -1.
        self._parents: list[int] = []
        for place, iri in enumerate(self._sorted):
            self._parents.append(self._longest(iri, place - 1))
        self.used: dict[str, str] = {}

    def shorten(self, iri: str) -> str:
        """Return the name of an IRI."""
        place = self._longest(iri, bisect_right(self._sorted, iri) - 1)
        if place >= 0:
            stem = self._sorted[place]
            name = self._names[stem]
            self.used[name] = stem
            return f"{name}:{iri[len(stem) :]}"
        return f"<{iri}>" if iri.partition(":")[0] in self.iris else iri

    def expand(self, name: str) -> str:
        """Return the IRI of a name; a text that is no name of the table is returned as it is."""
        if name.startswith("<") and name.endswith(">"):
            return name[1:-1]
        prefix, colon, rest = name.partition(":")
        return self.iris[prefix] + rest if colon and prefix in self.iris else name

    def _longest(self, iri: str, place: int) -> int:
        # In sorted order, an IRI that another one begins with is its predecessor or one of the predecessor's
        # own beginnings.
        while place >= 0 and not iri.startswith(self._sorted[place]):
            place = self._parents[place]
        return place
