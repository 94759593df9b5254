"""The ``--columns`` option."""

from __future__ import annotations

import pytest

from dglkge.data.text_format import Columns, parse_columns
from dglkge.errors import InputError


@pytest.mark.parametrize(
    "text, order",
    [
        ("head,relation,tail", ("head", "relation", "tail")),
        ("tail, head ,relation", ("tail", "head", "relation")),
        ("weight,head,relation,tail", ("weight", "head", "relation", "tail")),
        ("hrt", ("head", "relation", "tail")),
        ("htr", ("head", "tail", "relation")),
        ("wtrh", ("weight", "tail", "relation", "head")),
    ],
)
def test_roles_in_the_order_of_the_columns(text, order):
    columns = parse_columns(text)
    assert columns.order == order and columns.names == {}
    assert columns.names_or_roles == {role: role for role in order}


def test_pairs_name_the_columns():
    columns = parse_columns("tail=o, head=s,relation=a=b,weight=score")
    assert columns.names == {"tail": "o", "head": "s", "relation": "a=b", "weight": "score"}
    assert columns.names_or_roles is columns.names and "weight" in columns.order


@pytest.mark.parametrize(
    "text, names",
    [
        ("subject,predicate,object", {"head": "subject", "relation": "predicate", "tail": "object"}),
        ("s,p,o,conf", {"head": "s", "relation": "p", "tail": "o", "weight": "conf"}),
        ("head,rel,tail", {"head": "head", "relation": "rel", "tail": "tail"}),
    ],
)
def test_bare_names_stand_for_head_relation_tail_and_weight(text, names):
    assert parse_columns(text).names == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hr",
        "hrtt",
        "head,relation",
        "head,head,tail",
        "head,relation,tail,tail",
        "s,p",
        "a,b,c,d,e",
        "head=s,relation=p",
        "head=s,relation=p,tail=o,head=q",
        "head=s,relation=p,tail=s",
        "head=s,relation=p,tail=",
        "head=s,p,o",
        "s,,o",
    ],
)
def test_what_gives_no_triple_is_refused(text):
    with pytest.raises(InputError, match="allowed are roles in the order of the columns") as caught:
        parse_columns(text)
    assert repr(text) in str(caught.value)


def test_default_is_head_relation_tail():
    assert Columns() == parse_columns("head,relation,tail")
