"""Dataset folders: what is read, and refused by the file's name; names that must survive; times in order."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dglkge.data import vocabulary as vocabulary_module
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import fingerprint, load_json
from dglkge.data.partition_layout import PartitionLayout
from dglkge.data.vocabulary import MappedNames, RelationVocabulary, Vocabulary, in_time_order
from dglkge.errors import MAX_NAMES_TO_COMPARE, InputError
from dglkge.typing import Relation
from tests.data.toy_folder import BOUNDARIES, NODE_IDS, PERSONS, RELATIONS, TRAIN, VALID, write_toy_folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_toy_folder(tmp_path / "toy")


def test_content_is_that_of_the_files(folder, tmp_path):
    dataset = Dataset.open(str(folder))
    assert dataset.name == dataset.graph_name == "toy" and dataset.entity_types == ["person", "town"]
    assert [dataset.num_entities(type_) for type_ in dataset.entity_types] == [4, 2]
    assert [(r.name, r.lhs, r.rhs) for r in dataset.relations.relations] == RELATIONS
    assert dataset.num_parts == 2 and dataset.part_method == "random" and dataset.fingerprint == "f" * 64
    assert dataset.edge_types == [("person", "person", 0, 3), ("person", "town", 3, 5)]
    assert dataset.graph_config_path == folder / "partitions" / "toy.json"
    assert np.array_equal(dataset.split("train"), TRAIN) and np.array_equal(dataset.split("valid"), VALID)
    assert dataset.split("test").shape == (0, 3)
    assert isinstance(dataset.split("train"), np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        dataset.split("train")[0, 0] = 1
    assert list(dataset.vocabulary("person").names) == PERSONS
    assert list(dataset.vocabulary("town").names) == ["Rome", "Ōsaka"]
    assert dataset.train_weights() is None
    weighted = Dataset.open(write_toy_folder(tmp_path / "weighted", has_weights=True))
    assert weighted.has_weights and weighted.train_weights().tolist() == [0, 1, 2, 3, 4]
    assert weighted.layout().edge_table(1).weights.dtype == np.float32
    shutil.move(folder, tmp_path / "elsewhere")
    assert len(Dataset.open(tmp_path / "elsewhere").layout().edge_table(0).triple_ids)


def test_what_is_not_there_is_refused(folder, tmp_path):
    (tmp_path / "file").touch()
    for act, words in (
        (lambda: Dataset.open(folder).split("dev"), "no split is called 'dev'; known: train, valid, test"),
        (lambda: Dataset.open(folder).vocabulary("land"), "no entity type 'land'; known: person, town"),
        (lambda: Dataset.open(tmp_path / "nothing"), "there is no such folder"),
        (lambda: Dataset.open(tmp_path / "file"), "is a file and no dataset folder; dglkge data build"),
        (lambda: load_json(folder / "b.json"), "cannot read .*b.json: No such file"),
        (lambda: Dataset.open(tmp_path), "it has no dataset.json .dglkge data build makes"),
    ):
        with pytest.raises(InputError, match=words):
            act()


NEEDED = """train.npy valid.npy test.npy relations.tsv entities/town.txt partitions/toy.json
partitions/original_ids_person.npy partitions/node_ids_relation.npy partitions/part1/triple_ids.npy
partitions/part0/edges.npy"""
CUT = "train.npy relations.tsv partitions/part1/edges.npy partitions/toy.json dataset.json"


def test_missing_and_cut_off_files_are_named(folder):
    for name, is_cut in [(name, False) for name in NEEDED.split()] + [(name, True) for name in CUT.split()]:
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        if is_cut:
            path.write_bytes(content[:-9])
        with pytest.raises(InputError) as caught:
            Dataset.open(folder)
        assert str(path) in str(caught.value)
        path.write_bytes(content)
    assert Dataset.open(folder).name == "toy"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("entities/town.txt", "Rome\n", "town.txt has 1 names, dataset.json says 2"),
        ("relations.tsv", "knows\tperson\tperson\n", "relations.tsv has 1 relations, dataset.json says 3"),
        ("valid.npy", np.zeros((2, 3), np.int64), r"d.npy holds an array \(2, 3\) of int64, expected \(1"),
        ("valid.npy", np.array([{"a": 1}], dtype=object), "valid.npy"),
        ("train.npy", "not an array", "train.npy as an npy file of numbers"),
        ("partitions/part1/edges.npy", np.zeros((1, 3), np.int64), "part1/edges.npy holds an array"),
        ("partitions/toy.json", '{"num_parts": 2, "node_map": {"person": [[0, 4]]}}', "toy.json is no desc"),
        # Other values in it; None takes a key out.
        ("dataset.json", {"format_version": 99}, "format version 99, this dglkge reads 1"),
        ("dataset.json", {"format_version": None}, "not of a dglkge dataset: it has no format_version"),
        ("dataset.json", {"num_parts": "2"}, "num_parts is '2', expected int"),
        ("dataset.json", {"entity_types": None}, "entity_types is None, expected dict"),
        ("dataset.json", {"splits": {"train": 5}}, "splits has no number of triples for 'valid'"),
        ("dataset.json", {"num_parts": 3}, "describes 2 partitions, dataset.json says 3"),
        ("dataset.json", {"graph_name": "other"}, "other.json"),
        ("dataset.json", "[1, 2]", "dataset.json holds list, expected a JSON object"),
        ("dataset.json", "{", "dataset.json is cut off or no JSON"),
        ("dataset.json", "\udcff\udcfe", "dataset.json is cut off or no JSON"),
    ],
)
def test_files_that_do_not_fit_are_refused(folder, name, content, message):
    path = folder / name
    if isinstance(content, dict):
        description = {**json.loads(path.read_text()), **content}
        content = json.dumps({key: value for key, value in description.items() if value is not None})
    if isinstance(content, str):
        path.write_text(content, errors="surrogateescape")
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        Dataset.open(folder).vocabulary("town")


def test_fingerprint_is_of_names_sizes_and_contents(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"12")
    second.write_bytes(b"3")
    for paths, content in (([first, second], b"a:2\n12b:1\n3"), ([second, first], b"b:1\n3a:2\n12")):
        assert fingerprint(paths) == hashlib.sha256(content).hexdigest()


def test_ranges_id_maps_and_edge_tables_are_those_of_the_files(folder):
    layout = PartitionLayout.open(folder / "partitions", "toy")
    assert layout.num_parts == 2 and layout.ntypes == ["person", "relation", "town"]
    for ntype, (start, middle, end) in BOUNDARIES.items():
        assert layout.node_range(ntype, 0) == (start, middle)
        assert layout.node_range(ntype, 1) == (middle, end)
        assert layout.num_nodes(ntype) == end and layout.range_starts(ntype).tolist() == [start, middle, end]
        parts = layout.part_of(ntype, np.arange(end))
        assert parts.dtype == np.int64 and parts.tolist() == [0] * middle + [1] * (end - middle)
        assert layout.node_ids(ntype).tolist() == NODE_IDS[ntype]
        assert layout.original_ids(ntype)[NODE_IDS[ntype]].tolist() == list(range(end))
    tables = [layout.edge_table(part_id) for part_id in range(2)]
    assert sorted(np.concatenate([t.triple_ids for t in tables]).tolist()) == list(range(len(TRAIN)))
    for part_id, table in enumerate(tables):
        assert table.weights is None and isinstance(table.edges, np.memmap)
        for triple_id, edge in zip(table.triple_ids.tolist(), table.edges.tolist()):
            head, relation, tail = TRAIN[triple_id].tolist()
            rhs = RELATIONS[relation][2]
            assert edge == [NODE_IDS["person"][head], NODE_IDS["relation"][relation], NODE_IDS[rhs][tail]]
            assert layout.part_of(rhs, np.array([edge[2]])).tolist() == [part_id]


def test_a_machine_needs_the_folder_of_its_own_part_only(folder):
    partitions = folder / "partitions"
    everywhere = PartitionLayout.open(partitions, "toy").edge_table(1).triple_ids.tolist()
    shutil.rmtree(partitions / "part0")
    layout = PartitionLayout.open(partitions, "toy")
    assert layout.num_parts == 2 and layout.edge_table(1).triple_ids.tolist() == everywhere
    with pytest.raises(InputError, match="part0/triple_ids.npy"):
        layout.edge_table(0)
    shutil.rmtree(partitions / "part1")
    with pytest.raises(InputError, match="has no partition: .*part0 and the others are missing"):
        PartitionLayout.open(partitions, "toy")


AWKWARD = ["NA", "null", "1e5", ' "quoted" ', "#comment", "tab\tin", "line\u2028end", "a\rb", "Ōsaka", ""]
BORN, NEAR = Relation("born_in", "person", "town"), Relation("near", "town", "town")
AMBIGUOUS = [BORN, Relation("near", "person", "town"), NEAR]


@given(names=st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8")), unique=True))
@example(names=AWKWARD)
def test_any_names_survive(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "names.txt"
    with pytest.MonkeyPatch.context() as patch:
        for block in (1, 8, 1 << 20):
            patch.setattr(vocabulary_module, "NAMES_BLOCK_BYTES", block)
            Vocabulary(names, "entity").save(path)
            assert path.read_bytes() == "".join(f"{name}\n" for name in names).encode()
            loaded, mapped = Vocabulary.load(path, "entity"), MappedNames(path)
            assert vocabulary_module.read_lines(path) == list(loaded.names) == list(mapped) == names
            assert loaded.ids(names).tolist() == list(range(len(names))) and loaded.ids([]).dtype == np.int64
            assert [mapped[-place] for place in range(1, len(names) + 1)] == names[::-1]
            assert len(mapped) == len(names) and mapped[1:3] == names[1:3]
    with pytest.raises(IndexError):
        mapped[len(names)]


def test_unknown_name_shows_near_ones():
    """Of many names those that begin alike are compared."""
    with pytest.raises(InputError, match=r"unknown entity 'Pariss'; did you mean 'Paris'\?"):
        Vocabulary(["Rome", "Paris"], "entity").id("Pariss")
    names = [f"x{i}" for i in range(MAX_NAMES_TO_COMPARE)] + ["Strasbourg", "Stuttgart"]
    vocabulary = Vocabulary(names, "entity")
    with pytest.raises(InputError, match="did you mean 'Strasbourg'"):
        vocabulary.id("strasburg")
    with pytest.raises(InputError, match="5002 are known, among them 'x0', 'x1'"):
        vocabulary.ids(["x0", "Quito"])


def test_a_damaged_file_is_an_input_error(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary_module, "NAMES_BLOCK_BYTES", 1)
    path = tmp_path / "names.txt"
    for content, message in (
        (None, "cannot read"),
        (b"a\nb", "cut off"),
        (b"a\nbb\n\xff\n", "not UTF-8: invalid start byte at byte 5"),
    ):
        if content is not None:
            path.write_bytes(content)
        for load in (Vocabulary.load, lambda path, _: MappedNames(path)):
            with pytest.raises(InputError, match=message) as caught:
                load(path, "entity")
            assert str(path) in str(caught.value)


def test_relations_have_types_in_their_labels_only_where_the_name_is_ambiguous(tmp_path):
    vocabulary = RelationVocabulary(AMBIGUOUS)
    vocabulary.save(tmp_path / "relations.tsv")
    assert (tmp_path / "relations.tsv").read_text(encoding="utf-8").splitlines()[1] == "near\tperson\ttown"
    assert RelationVocabulary.load(tmp_path / "relations.tsv").relations == AMBIGUOUS
    labels = list(vocabulary.labels.names)
    assert labels == ["born_in", "near (person → town)", "near (town → town)"]
    assert [vocabulary.id(label) for label in labels] == [0, 1, 2]
    assert len(vocabulary) == 3 and vocabulary[2] == AMBIGUOUS[2]
    assert vocabulary.id("near", lhs="town") == 2 and vocabulary.id("near", lhs="person", rhs="town") == 1
    for name, types, message in (
        ("near", {}, r"'near' joins several pairs.*'near \(person → town\)', 'near \(town"),
        ("near", {"rhs": "town"}, "joins several pairs"),
        ("near", {"rhs": "person"}, "'near' does not join any → person; known: "),
        ("born_in", {"lhs": "town"}, "does not join town → any"),
        ("born_im", {}, "unknown relation 'born_im'; did you mean 'born_in'"),
    ):
        with pytest.raises(InputError, match=message):
            vocabulary.id(name, **types)
    (tmp_path / "relations.tsv").write_text("a\tb\tc\na\tb\n")
    with pytest.raises(InputError, match="relations.tsv:2: got 2 fields"):
        RelationVocabulary.load(tmp_path / "relations.tsv")


TIMED = [Relation("visits", "person", "town"), NEAR]


def test_times_are_in_their_order():
    for stamps, granularity, times in (
        (["10", "9", "-3"], None, ["-3", "9", "10"]),
        (["2014", "999", "2020"], None, ["999", "2014", "2020"]),
        (["2014-10-01", "2014-09-30"], None, ["2014-09-30", "2014-10-01"]),
        (["2014-10-01", "2014-09-30", "2014-09-02"], "month", ["2014-09", "2014-10"]),
        (["2014-10-01", "2013-09-30", "2014-09-02"], "year", ["2013", "2014"]),
        (["2014-10-01T12:00", "2014-10-01T09:30"], None, ["2014-10-01T09:30", "2014-10-01T12:00"]),
        (["2014-10-01 12:00:00", "2014-10-01 09:30:00"], "day", ["2014-10-01"]),
        (["2014", "2012"], "year", ["2012", "2014"]),
    ):
        ordered, places = in_time_order(stamps, granularity)
        assert ordered == times
        assert all(stamp.startswith(ordered[place]) for stamp, place in zip(stamps, places, strict=True))
    # Others are refused.
    for stamps, granularity, message in (
        (["2014-01-01", "May"], None, "the time is 'May' and another '2014-01-01'; allowed: all integers"),
        (["2014-01-01", "2014-02-30"], None, "the time is '2014-02-30'"),
        (["2014-01-01", "2014-02"], None, "the time is '2014-02'"),
        (["2014-05-01T12:30", "2014-05-01T24:00"], None, "the time is '2014-05-01T24:00'"),
        (["2014-05-01T12:30", "2014-05-01T12:60"], None, "the time is '2014-05-01T12:60'"),
        (["2014-05-01T23:59:59", "2014-05-01T12:30:99"], None, "the time is '2014-05-01T12:30:99'"),
        (["12", "2014-02"], None, "the time is '2014-02' and another '12'"),
        (["12", "13"], "year", "the time is '12'"),
        (["2014", "2015"], "month", "the time '2014' has no month; allowed: a coarser granularity"),
        (["1", "01"], None, "two texts of the time column are one integer"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            in_time_order(stamps, granularity)


def test_numbers_of_relations_at_a_time():
    made = RelationVocabulary(TIMED, ["1", "2", "3"]).relations
    assert made == [
        Relation(vocabulary_module.label_at(r.name, time), r.lhs, r.rhs) for r in TIMED for time in "123"
    ]
    assert RelationVocabulary(TIMED).relations == TIMED
    # The map of an edge's relation goes with that of its row, and the time stays.
    node_ids, numbers = np.array([2, 0, 1]), np.arange(12)
    edge_ids = vocabulary_module.extended(node_ids, 4)
    assert (edge_ids == 4 * node_ids[numbers // 4] + numbers % 4).all()
    assert vocabulary_module.extended(np.argsort(node_ids), 4)[edge_ids].tolist() == numbers.tolist()


def test_relations_at_times(tmp_path):
    made = RelationVocabulary(TIMED, ["2013", "2014"])
    assert len(made) == 4 and made.num_times == 2 and made.timeless == TIMED
    assert made.id("near @ 2014") == 3 and made.ids_of("visits @ 2013") == [0]
    assert made.at("visits", None) == [0, 1] and made.at(None, "2014") == [1, 3]
    assert made.at("near", "2013") == [2]
    assert made.at(None, None) == [0, 1, 2, 3]
    made.save(tmp_path / "relations.tsv")
    assert RelationVocabulary.load(tmp_path / "relations.tsv").relations == TIMED
    again = RelationVocabulary.load(tmp_path / "relations.tsv", made.times)
    assert again.relations == made.relations
    with pytest.raises(InputError, match="^relation 'visits' has times, from 2013 to 2014; say which"):
        made.id("visits")
    with pytest.raises(InputError, match="^unknown relation 'visit'; did you mean 'visits'?"):
        made.at("visit", "2014")
    with pytest.raises(InputError, match="^unknown time '2015'; did you mean '2014' or '2013'?"):
        made.at("visits", "2015")
