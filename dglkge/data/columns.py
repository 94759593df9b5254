"""Which column of a file holds the head, the relation, the tail and the weight of a triple."""

from __future__ import annotations

from dataclasses import dataclass, field

from dglkge.errors import InputError

ROLES = ("head", "relation", "tail")
WEIGHT = "weight"
_LETTERS = {"h": "head", "r": "relation", "t": "tail", "w": WEIGHT}
_FORMS = (
    "allowed are roles in the order of the columns (head,relation,tail[,weight] or hrt, htr, ...), "
    "role=name pairs (head=subject,relation=predicate,tail=object) "
    "or the names of the head, relation and tail columns (subject,predicate,object)"
)


@dataclass(frozen=True)
class Columns:
    """Where a triple's parts stand.

    Attributes
    ----------
    order : tuple of str
        The roles, in the order of the columns of a file without a header.
    names : mapping of str to str
        The column name of each role; the file then has a header. Empty: by place, unless the header of
        a CSV or Parquet file has the roles themselves as names.
    """

    order: tuple[str, ...] = ROLES
    names: dict[str, str] = field(default_factory=dict)

    @property
    def has_weight(self) -> bool:
        """Whether one of the columns is the weight."""
        return WEIGHT in self.order

    @property
    def names_or_roles(self) -> dict[str, str]:
        """Column name of each role, where columns have names."""
        return self.names or {role: role for role in self.order}


def parse_columns(text: str) -> Columns:
    """Understand the ``--columns`` option.

    Parameters
    ----------
    text : str
        Roles in order (``head,relation,tail,weight`` or ``hrtw``), ``role=name`` pairs, or three or four
        column names standing for head, relation, tail and weight.

    Raises
    ------
    InputError
        If a role is missing or stands twice.

    Examples
    --------
    >>> parse_columns("htr").order
    ('head', 'tail', 'relation')
    >>> parse_columns("subject,predicate,object").names["tail"]
    'object'
    """
    items = [item.strip() for item in text.split(",")]
    if len(items) == 1 and set(items[0]) <= set(_LETTERS):
        items = [_LETTERS[letter] for letter in items[0]]
    names: dict[str, str] = {}
    if all("=" in item for item in items):
        pairs = [item.split("=", 1) for item in items]
        roles = [role.strip() for role, _ in pairs]
        names = {role.strip(): name.strip() for role, name in pairs}
    elif any("=" in item for item in items):
        raise InputError(f"--columns {text!r} mixes role=name with bare names; {_FORMS}")
    elif set(items) <= {*ROLES, WEIGHT}:
        roles = items
    else:
        roles = [*ROLES, WEIGHT][: len(items)]
        names = dict(zip(roles, items))
        if len(items) > 4:
            raise InputError(f"--columns {text!r} names {len(items)} columns; {_FORMS}")
    if sorted(roles) not in (sorted(ROLES), sorted([*ROLES, WEIGHT])):
        raise InputError(f"--columns {text!r} does not give head, relation and tail once each; {_FORMS}")
    if names and (len(set(names.values())) < len(names) or "" in names.values()):
        raise InputError(f"--columns {text!r} gives an empty column name or one name twice; {_FORMS}")
    return Columns(tuple(roles), names)
