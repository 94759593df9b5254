"""Search for names against a loop over all of them."""

from __future__ import annotations

import random

import pytest

from dglkge.serving.indexes import NameIndex

NAMES = "Straße|strasse 2|Ada|adamant|ADA|a|ä|Madam|🦊 fox|x\ty|日本|本|".split("|")
TEXTS = "|a|A|ad|ss|ß|STRASSE|🦊|本|ab|b a|zzz|\n|a\nb|ä|\t".split("|")


def draw_names(count: int) -> list[str]:
    draw = random.Random(0)
    return list({"".join(draw.choices("aAbBß🦊 ", k=draw.randrange(1, 6))) for _ in range(count)})


@pytest.mark.parametrize("names", [NAMES, draw_names(300), []], ids=["chosen", "drawn", "none"])
def test_as_a_loop_over_all_names(names):
    index = NameIndex(names)
    for text in TEXTS:
        folded = text.casefold()
        starting = [id_ for id_, name in enumerate(names) if name.casefold().startswith(folded)]
        found = list(index.starting(text))
        assert sorted(found) == starting
        assert [names[id_].casefold() for id_ in found] == sorted(names[id_].casefold() for id_ in starting)
        inside = [id_ for id_, name in enumerate(names) if folded in name.casefold() and id_ not in starting]
        assert list(index.containing(text)) == inside


def test_a_name_that_has_the_text_twice_is_found_once():
    assert list(NameIndex(["banana"]).containing("an")) == [0]
