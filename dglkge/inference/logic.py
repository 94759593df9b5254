"""Questions of several hops: their text, and their tree of links with conjunction, disjunction, negation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dglkge.errors import InputError

EXAMPLE = '"?city : (Douglas Adams, born in, ?city), not (?city, capital of, ?country)"'


@dataclass(frozen=True)
class Fact:
    """A triple; a head or tail that begins with ``?`` is a variable."""

    head: str
    relation: str
    tail: str

    def __str__(self) -> str:
        return f"({self.head}, {self.relation}, {self.tail})"


@dataclass(frozen=True)
class Not:
    """The contrary of a part."""

    part: Formula


@dataclass(frozen=True)
class And:
    """All of some parts. A variable that is not mentioned outside stands for some entity."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Or:
    """At least one of some parts."""

    parts: tuple[Formula, ...]


Formula = Fact | Not | And | Or


@dataclass(frozen=True)
class Question:
    """What is asked for, a variable, and the formula that its entities fulfil.

    Examples
    --------
    >>> parse("?x : (Alice, knows, ?y), (?y, likes, ?x)").answer
    '?x'
    """

    answer: str
    formula: Formula


MOST_OPEN = 100
"""Open parentheses at most."""


def is_variable(term: str) -> bool:
    """Return whether a term is a variable."""
    return term.startswith("?")


def facts(formula: Formula) -> Iterator[Fact]:
    """Yield the triples of a formula."""
    if isinstance(formula, Fact):
        yield formula
    else:
        for part in (formula.part,) if isinstance(formula, Not) else formula.parts:
            yield from facts(part)


def variables(formula: Formula) -> set[str]:
    """Return the variables of a formula."""
    return {term for fact in facts(formula) for term in (fact.head, fact.tail) if is_variable(term)}


def parse(text: str) -> Question:
    """Read a question: ``?x : `` and triples joined by commas (and), ``or``, ``not`` and parentheses.

    Commas bind closer than ``or``. A name with a comma or unmatched parentheses stands in double quotes.
    """
    answer, colon, rest = text.partition(":")
    answer = answer.strip()
    if not colon or not is_variable(answer):
        raise InputError(f"a question begins with a variable and a colon, as {EXAMPLE}; got {text!r}")
    formula = _parse(rest)
    if answer not in variables(formula):
        raise InputError(f"{answer} is asked for, and no triple has it")
    return Question(answer, formula)


def _parse(text: str) -> Formula:
    text = text.strip()
    for words, kind in (((" or ",), Or), ((",", " and "), And)):
        parts = _split(text, words)
        if len(parts) > 1:
            return kind(tuple(map(_parse, parts)))
    if _is_group(text) and not text.startswith("("):
        return Not(_parse(text[3:]))
    if not (text.startswith("(") and text.endswith(")")):
        raise InputError(f"expected a triple (head, relation, tail), got {text!r}; a question is {EXAMPLE}")
    inner = text[1:-1].strip()
    terms = [_unquoted(term) for term in _split(inner, (",",))]
    if len(terms) == 3 and not inner.startswith("(") and not any(_is_group(term) for term in terms):
        return Fact(*terms)
    if _is_group(inner):
        return _parse(inner)
    raise InputError(f"a triple has head, relation and tail, got {len(terms)} parts in {text!r}")


def _is_group(term: str) -> bool:
    return term.startswith("(") or (term.startswith("not") and term[3:].lstrip().startswith("("))


def _unquoted(term: str) -> str:
    name = re.sub('^"(.*)"$', r"\1", term.strip(), flags=re.DOTALL)
    if not name:
        raise InputError("a triple has an empty name")
    return name


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Divide a text where a separator stands outside of parentheses and quotes."""
    parts, depth, start, is_quoted = [], 0, 0, False
    for match in re.finditer("|".join(['["()]', *separators]), text):
        if match[0] == '"':
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (match[0] == "(") - (match[0] == ")")
            if depth > MOST_OPEN:
                raise InputError(f"allowed are {MOST_OPEN} open parentheses; got more in {text[:40]!r}...")
            if depth < 0:
                raise InputError(f"a parenthesis closes that was not opened: {text[: match.end()]!r}")
            if depth == 0 and match[0] in separators:
                parts.append(text[start : match.start()])
                start = match.end()
    if depth or is_quoted:
        raise InputError(f"a {'quote' if is_quoted else 'parenthesis'} is not closed: {text!r}")
    return [*parts, text[start:]]
