"""Triples with a column of times: from files and frames to relations at a time in every partition."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dglkge.cli.main import main
from dglkge.data.dataset import Dataset
from dglkge.data.text_format import parse_columns
from dglkge.errors import InputError
from dglkge.partition.extend import extend_dataset
from dglkge.partition.make_dataset import partition_dataframe, partition_triples
from dglkge.partition.options import Options
from tests.partition_tools.conftest import lines, named, named_triples, owned_triples
from tests.toy_kg import TIMES, temporal_triples

pytestmark = pytest.mark.usefixtures("build_here")

COLUMNS = "head,relation,tail,time"


def facts_of(folder: Path, split: str = "train") -> Counter:
    return Counter(named_triples(folder, split))


def write_types(folder: Path, frame: pd.DataFrame) -> Path:
    """Give every third entity another type, so that a relation joins several pairs of types."""
    names = sorted({*frame["head"], *frame["tail"]})
    lines_of_types = (f"{name}\t{'ab'[place % 3 == 0]}\n" for place, name in enumerate(names))
    (folder / "types.tsv").write_text("".join(lines_of_types))
    return folder / "types.tsv"


def as_facts(frame: pd.DataFrame) -> Counter:
    return Counter(frame[["head", "relation", "tail", "time"]].itertuples(index=False, name=None))


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("typed", [False, True])
def test_every_partition_has_relations_at_their_times(tmp_path, num_parts, typed):
    frame, out = temporal_triples(), tmp_path / "out"
    types = write_types(tmp_path, frame) if typed else None
    options = Options(num_parts=num_parts, method="random", entity_types=types)
    figures = partition_dataframe(frame, out, columns=COLUMNS, options=options)
    dataset = Dataset.open(out)
    num_relations = len(lines(out / "relations.tsv"))
    assert figures["num_times"] == len(TIMES) and figures["num_relations"] == num_relations
    assert lines(out / "times.txt") == list(TIMES) == list(dataset.relations.times)
    assert dataset.num_relations == len(TIMES) * num_relations == len(dataset.relations)
    assert facts_of(out) == as_facts(frame)
    # Rows are those of relations, whatever the time.
    assert len(np.load(out / "partitions" / "original_ids_relation.npy")) == num_relations
    owned = owned_triples(out)
    assert len(owned) == num_parts and sum(owned, Counter()) == as_facts(frame)
    edge_ids, back = dataset.layout().edge_ids("relation"), dataset.layout().original_edge_ids("relation")
    assert back[edge_ids].tolist() == list(range(dataset.num_relations))
    # The same triple at another time is another fact: filters and counts of repetitions see no repetition.
    assert figures["duplicates"]["train"] == 0
    assert dataset.relations[dataset.split("train")[0, 1]].name.rpartition(" @ ")[2] in TIMES


def test_formats(tmp_path):
    """Named columns of CSV in any order, dates of Parquet, integers; the granularity."""
    rows = [("2020-02-10", "a", "r", "b"), ("2019-12-31", "b", "s", "c"), ("2020-02-11", "c", "r", "a")]
    frame = pd.DataFrame(rows, columns=["day", "from", "what", "to"])
    frame.to_csv(tmp_path / "f.csv", index=False)
    frame.assign(day=pd.to_datetime(frame["day"]).dt.date).to_parquet(tmp_path / "f.parquet")
    names = "head=from,relation=what,tail=to,time=day"
    columns = parse_columns(names)
    for name in ("f.csv", "f.parquet"):
        for granularity, length in ((None, 10), ("month", 7), ("year", 4)):
            times = sorted({day[:length] for day, *_ in rows})
            out = tmp_path / f"{name}-{granularity}"
            options = Options(columns=columns, time_granularity=granularity)
            partition_triples(tmp_path / name, out, options)
            assert lines(out / "times.txt") == times
            assert facts_of(out) == Counter((h, r, t, day[:length]) for day, h, r, t in rows)
    days = pd.to_datetime(frame["day"])
    for number, column in enumerate((days, days.dt.to_period("M"), days.dt.date)):
        partition_dataframe(frame.assign(day=column), tmp_path / str(number), columns=names)
        # As queries of a data frame have them.
        assert lines(tmp_path / str(number) / "times.txt") == sorted({*map(str, column)})
    (tmp_path / "ids.tsv").write_text("0\t1\t1\t10\n1\t0\t0\t9\n")
    options = Options(columns=parse_columns("hrtT"), integer_ids=True)
    partition_triples(tmp_path / "ids.tsv", tmp_path / "ids", options)
    assert lines(tmp_path / "ids" / "times.txt") == ["9", "10"]
    made = Dataset.open(tmp_path / "ids")
    assert made.split("train").tolist() == [[0, 3, 1], [1, 0, 0]] and made.description["ids"] == "integers"


def test_intervals(tmp_path):
    """A fact at an interval is one at each time of the data set in it, with its weight."""
    rows = [("a", "r", "b", "2001/2004", 0.5), ("b", "s", "c", "2003", 2.0), ("c", "r", "a", "2002/2002", 4)]
    frame = pd.DataFrame(rows, columns=["head", "relation", "tail", "time", "weight"])
    columns = "head,relation,tail,weight,time"
    partition_dataframe(frame, tmp_path / "out", columns=columns)
    train = np.load(tmp_path / "out" / "train.npy")
    expected = [("a", "r", "b", str(year)) for year in (2001, 2002, 2003, 2004)]
    expected += [("b", "s", "c", "2003"), ("c", "r", "a", "2002")]
    assert lines(tmp_path / "out" / "times.txt") == ["2001", "2002", "2003", "2004"]
    assert named_triples(tmp_path / "out", "train") == expected
    assert np.load(tmp_path / "out" / "train_weights.npy").tolist() == [0.5] * 4 + [2, 4]
    with pytest.raises(InputError, match="the interval '2004/2001' ends before it begins"):
        partition_dataframe(frame.assign(time="2004/2001"), tmp_path / "no", columns=columns)
    partition_dataframe(frame.assign(time="7"), tmp_path / "once", columns=columns)
    assert list(Dataset.open(tmp_path / "once").relations.times) == ["7"]
    days = frame.assign(time=["2001-05-01/2004-02-02", "2003-01-01", "2002-05-01/2002-11-30"])
    options = Options(time_granularity="year")
    partition_dataframe(days, tmp_path / "days", columns=columns, options=options)
    assert np.load(tmp_path / "days" / "train.npy").tolist() == train.tolist()


def test_bad_times(tmp_path, call):
    for content, more, message in (
        ("a\tr\tb\tsoon\n", "", "the time is 'soon'"),
        ("a\tr\tb\t\n", "", "in.tsv:1: the time is empty"),
        ("a\tr\tb\t2020\nb\tr\ta\t2020-01\n", "", "the time is '2020-01' and another '2020'"),
        ("a\tr\tb\t5\n", "--time-granularity year", "the time is '5'"),
        ("a\tr\tb\n", "--columns hrt --time-granularity year", "given, and the triples have no time column"),
    ):
        (tmp_path / "in.tsv").write_text(content)
        status, _, err = call(tmp_path / "in.tsv", "--columns", "hrtT", *more.split())
        assert status == 2 and message in err and err.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("typed", [False, True])
def test_more_triples_at_old_and_new_times(tmp_path, capsys, typed):
    """Every old fact stays, whatever the numbers of the times; new ones are in the edge set."""
    frame, out, more = temporal_triples(), tmp_path / "out", tmp_path / "more"
    types = write_types(tmp_path, frame) if typed else None
    options = Options(num_parts=2, method="random", split=(0.8, 0.1, 0.1), entity_types=types)
    partition_dataframe(frame, out, columns=COLUMNS, options=options)
    old = Dataset.open(out)
    # Before and at the old times, of days, which are cut to their months; a new entity and relation.
    rows = [("e001", "turn", "e002", "2020-12-31"), ("e001", "turn", "e002", f"{TIMES[1]}-05")]
    rows += [("e003", "sees", "e001", "2021-04-30"), ("e004", "turn", "e005", "2020-12-01/2021-05-01")]
    rows += [] if typed else [("novum", "turn", "e001", "2021-09-01")]
    (tmp_path / "more.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    command = f"data extend --dataset {out} --input {tmp_path}/more.tsv --name more -o {more} --columns hrtT"
    assert main(command.split()) == 0
    assert f"1 new relations, {1 if typed else 2} new times" in capsys.readouterr().out
    new = Dataset.open(more)
    times = ["2020-12", *TIMES, *([] if typed else ["2021-09"])]
    assert lines(more / "times.txt") == times
    added = Counter((*row[:3], row[3][:7]) for row in rows if "/" not in row[3])
    added += Counter(("e004", "turn", "e005", time) for time in times[: times.index("2021-05") + 1])
    assert facts_of(more) == facts_of(out) + added
    assert Counter(named(more, new.split("train")[new.edge_set_of_triples() == 1])) == added
    for split in ("valid", "test"):
        assert facts_of(more, split) == facts_of(out, split)
    assert new.relations.timeless[: len(old.relations.timeless)] == old.relations.timeless
    assert sum(owned_triples(more), Counter()) == facts_of(more)


def test_relations_at_all_times_of_the_data_set_are_limited(tmp_path, monkeypatch):
    """Also where those of the input are few: an extended data set, and names that join several types."""
    frame, out, more = temporal_triples(), tmp_path / "out", tmp_path / "more.tsv"
    partition_dataframe(frame, out, columns=COLUMNS)
    more.write_text("e001\tsees\te002\t2022-01\n")
    (tmp_path / "types.tsv").write_text(
        "".join(f"{e}\t{'ab'[e in {'e001', 'e002'}]}\n" for e in {*frame["head"], *frame["tail"]})
    )
    monkeypatch.setattr("dglkge.data.vocabulary.MAX_PAIRS", 3 * len(TIMES))
    message = f"4 relations at {len(TIMES) + 1} times are {4 * (len(TIMES) + 1)}; allowed: up to"
    with pytest.raises(InputError, match=message):
        extend_dataset(out, [more], tmp_path / "new", "more", parse_columns("hrtT"))
    with pytest.raises(InputError, match=f"relations at {len(TIMES)} times are"):
        typed = Options(entity_types=tmp_path / "types.tsv")
        partition_dataframe(frame, tmp_path / "new", columns=COLUMNS, options=typed)
    monkeypatch.setattr("dglkge.data.vocabulary.MAX_PAIRS", 2)
    with pytest.raises(InputError, match="3 relations at 1 times are 3; allowed: up to 2, e.g. by a"):
        partition_dataframe(frame.assign(time="7"), tmp_path / "new", columns=COLUMNS)
    assert not (tmp_path / "new").exists()


def test_triples_with_and_without_times_do_not_mix(tmp_path, capsys):
    partition_dataframe(temporal_triples(), tmp_path / "out", columns=COLUMNS)
    (tmp_path / "timeless.tsv").write_text("a\tr\tb\n")
    (tmp_path / "timed.tsv").write_text("a\tr\tb\t2021-03\n")
    partition_triples(tmp_path / "timeless.tsv", tmp_path / "plain", Options())
    for data, file, columns, having in (
        ("out", "timeless", "hrt", "data set"),
        ("plain", "timed", "hrtT", "input"),
    ):
        command = f"data extend --dataset {tmp_path}/{data} --input {tmp_path}/{file}.tsv --name more"
        assert main(f"{command} -o {tmp_path}/more --columns {columns}".split()) == 2
        assert f"the triples of the {having} have times, and those of the" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_a_split_by_hash_keeps_a_fact_in_one_split(tmp_path):
    """And the quality of the data is measured of relations at a time."""
    frame = temporal_triples()
    twice = pd.concat([frame, frame], ignore_index=True)
    options = Options(split=(0.6, 0.2, 0.2))
    figures = partition_dataframe(twice, tmp_path / "out", columns=COLUMNS, options=options)
    facts = [facts_of(tmp_path / "out", split) for split in ("train", "valid", "test")]
    assert sum(facts, Counter()) == as_facts(twice)
    assert not (facts[0] & facts[1] or facts[0] & facts[2] or facts[1] & facts[2])
    assert figures["duplicates"]["train"] == sum(facts[0].values()) // 2
