"""Search for names against a loop over all of them, and approximate similarity against the exact one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import dglkge
from dglkge.serving.explorer import Explorer, NameIndex, Neighbours
from tests.checkpoint.toy_checkpoint import ToyTable, save_toy, toy_meta, toy_tables

NAMES = "banana|Straße|strasse 2|Ada|adamant|ADA|a|ä|Madam|🦊 fox|x\ty|日本|本|".split("|")
TEXTS = "|an|a|A|ad|ss|ß|STRASSE|🦊|本|ab|b a|zzz|\n|a\nb|ä|\t".split("|")


def draw_names(count: int) -> list[str]:
    draw = random.Random(0)
    return list({"".join(draw.choices("aAbBß🦊 ", k=draw.randrange(1, 6))) for _ in range(count)})


@pytest.mark.parametrize("names", [NAMES, draw_names(300), []], ids=["chosen", "drawn", "none"])
def test_as_a_loop_over_all_names(names):
    index = NameIndex(names)
    for text in TEXTS:
        folded = text.casefold()
        starting = [id_ for id_, name in enumerate(names) if name.casefold().startswith(folded)]
        ids = list(index.starting(text))
        assert sorted(ids) == starting
        assert [names[id_].casefold() for id_ in ids] == sorted(names[id_].casefold() for id_ in starting)
        inside = [id_ for id_, name in enumerate(names) if folded in name.casefold() and id_ not in starting]
        assert list(index.containing(text)) == inside


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    meta = toy_meta(num_people=3000, dim=16, dataset_path="/nowhere")
    tables = toy_tables(meta)
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(60, 16, generator=generator)
    rows = centres[torch.arange(3000) % 60] + 0.4 * torch.randn(3000, 16, generator=generator)
    tables["person"] = ToyTable(rows, tables["person"].state)
    folder = tmp_path_factory.mktemp("clusters") / "run"
    save_toy(folder / "checkpoint", meta, tables, num_parts=2)
    return dglkge.open_run(folder)


def test_recall_and_cosines(run):
    pytest.importorskip("faiss", reason="faiss is not installed")
    index, hits = Neighbours(run.tables, "person"), 0
    assert index.recall >= 0.95 and 1 <= index.num_searched < index.num_lists
    for entity in range(0, 3000, 100):
        ids, cosines = zip(*index.search(entity, 10))
        names, exact = [f"person-{id_}" for id_ in ids], dict(run.nearest(f"person-{entity}", "person", 3000))
        assert len(ids) == 10 and entity not in ids and list(cosines) == sorted(cosines, reverse=True)
        np.testing.assert_allclose(cosines, [exact[name] for name in names], atol=1e-6)
        hits += len(set(names) & set(list(exact)[:10]))
    assert hits / 300 > 0.9


def test_only_large_types_are_searched_so(run):
    pytest.importorskip("faiss", reason="faiss is not installed")
    assert Explorer(run, 3001).describe()["similarity"] == {"person": {"method": "exact"}}
    explorer = Explorer(run, 3000)
    neighbours = explorer.similar("person-7", None, 5)
    assert neighbours["method"] == "faiss" and len(neighbours["similar"]) == 5
    assert neighbours["similar"][0]["name"] == run.nearest("person-7", "person", 1)[0][0]
    described = explorer.describe()["similarity"]["person"]
    assert described["recall_at_10"] >= 0.95 and described["lists_searched"] < described["lists"]
