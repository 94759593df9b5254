"""What the commands print and write, called in this process."""

from __future__ import annotations

import errno
import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dglkge import __version__
from dglkge.checkpoint import open_checkpoint
from dglkge.cli.common import TerminalFormatter, print_columns, run_command, write_json
from dglkge.cli.main import ALIASES, COMMANDS, GROUPS, actions, main
from dglkge.config import load_config
from dglkge.data.known_triples import KnownTriples
from dglkge.distributed.process_memory import human_bytes
from dglkge.errors import InputError
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol
from dglkge.model.kge_model import build_model
from tests.checkpoint.toy_checkpoint import save_toy, toy_meta, toy_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [None, *GROUPS, *COMMANDS])
def test_help_teaches_with_examples(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*(command or "").split(), "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    if command in COMMANDS:
        program = "dglkge-launch" if command == "launch" else f"dglkge {command}"
        assert re.search(
            rf"{program} (\S+/ |--\w|> \w|runs/|datasets/|\S+\.yaml|fb15k237/|fb15k-237|list|  +\w)", text
        )
    else:
        assert all(word in text for word in actions(command or ""))
    assert max(len(line) for line in text.splitlines()) <= 110


@pytest.mark.parametrize("former, name", ALIASES.items())
def test_former_names_are_hidden_aliases(former, name, capsys):
    """Both have the same help; that of all commands has no former name."""
    texts = []
    for words in (former, name):
        with pytest.raises(SystemExit) as exit_:
            main([*words.split(), "--help"])
        assert exit_.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith(f"usage: dglkge {name} ")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert not re.search(rf"^    {former} ", capsys.readouterr().out, re.MULTILINE)


def test_options_of_every_command(capsys):
    """One spelling is shown; --json, -v and -q are everywhere, --import where components are registered."""
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
        text = capsys.readouterr().out
        if name == "launch":
            continue
        assert not re.findall(r"^ +(?:-\w, )?--\w*_\w*", text, re.MULTILINE), name
        assert all(f" {option}" in text for option in ("--json", "-v, --verbose", "-q, --quiet")), name
        reads_no_model = name.startswith(("data ", "job ")) or name == "config recipes"
        assert ("--import" in text) != reads_no_model, name
        assert "--output" not in text or "-o " in text, name


def test_underscores_are_accepted(call, run, tmp_path):
    words = ("--batch_size=5", "--per_relation", "--no_verify", "--limit", "3")
    assert call("evaluate", run, *words, "-o", tmp_path / "a_b.json")[0] == 0
    assert json.loads((tmp_path / "a_b.json").read_text())["num_triples"] == 3  # values keep theirs


@pytest.mark.parametrize(("words", "lines"), [([], 1), (["-q"], 0), (["-v"], 1)])
def test_quiet_hides_warnings(call, run, caplog, words, lines):
    (run / "metrics-test.json").mkdir()
    assert call("evaluate", run, *words)[0] == 0
    assert len(caplog.records) == lines


@pytest.mark.parametrize(
    ("words", "prog", "text"),
    [
        (["confg"], "dglkge", "unknown command 'confg'; did you mean 'config'?"),
        (["data", "biuld"], "dglkge data", "unknown command 'biuld'; did you mean 'build'?"),
        (["data"], "dglkge data", "the following arguments are required: COMMAND"),
        (["data", "build", "--inptu"], "dglkge data build", "unknown option '--inptu'; did you mean "),
        (["similar", "run", "--ytpe=a"], "dglkge similar", "unknown option '--ytpe'; did you mean '--type'?"),
        (["similar", "run", "x", "y"], "dglkge similar", "unexpected argument 'y'"),
        (["predict", "-k", "x", "run"], "dglkge predict", "argument -k/--k: invalid int value: 'x'"),
    ],
)  # fmt: skip
def test_usage_errors_show_the_usage_of_their_command(words, prog, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.startswith(f"usage: {prog} [") and f"\n{prog}: error: {text}" in err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminals_get_no_control_characters_of_names(capsys, monkeypatch, is_terminal):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    name = "a\x1b]0;owned\x07\x9b31mb\tc"

    def body():
        print_columns(["name"], [[name]])
        raise InputError(f"unknown: {name}")

    record = logging.LogRecord("dglkge", logging.WARNING, "", 0, "odd: %s", (name,), None)
    logged = TerminalFormatter("%(message)s").format(record)
    run_command("x", body)
    shown = r"a\x1b]0;owned\x07\x9b31mb" + "\tc" if is_terminal else name
    table = r"a\x1b]0;owned\x07\x9b31mb\tc"
    assert capsys.readouterr() == (f"name\n{table}\n", f"x: error: unknown: {' '.join(shown.split())}\n")
    assert logged == f"odd: {shown}"


def test_metrics_of_a_run_that_cannot_be_written(call, run):
    """They are printed, with a warning; --output is an order."""
    (run / "metrics-test.json").mkdir()  # as a read-only disk, also for root: the rename fails
    status, out, err = call("evaluate", run, "--json")
    assert status == 0 and json.loads(out)["both"]["num_queries"] > 0
    status, out, err = call("evaluate", run, "--json", "--output", run / "metrics-test.json")
    assert status == 2 and err.startswith("dglkge: error: cannot write") and err.count("\n") == 1


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dglkge {__version__}\n"


def test_predict_table(call, run, dataset):
    head, relation, tail = dataset.split("train")[dataset.split("train")[:, 1] == 1][0]
    town, country = dataset.vocabulary("town")[head], dataset.vocabulary("country")[tail]
    status, out, err = call("predict", run, "--head", town, "--relation", "lies_in")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == f"({town}, lies_in, ?): best tails of type country"
    assert lines[1].split() == ["rank", "score", "tail", "known", "from"]
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]
    assert [line.split()[2] for line in lines[2:] if line.endswith(" train")] == [country]
    _, dropped, _ = call("predict", run, "--head", town, "--relation", "lies_in", "--known", "drop")
    assert country not in dropped and len(dropped.splitlines()) == 4
    _, kept, _ = call("predict", run, "--head", town, "--relation", "lies_in", "--known", "keep")
    assert country in kept and "known" not in kept and "train" not in kept


def test_predict_among_the_entities_that_were_seen(call, run, dataset):
    """All of this data set were; without it the option is refused."""
    options = ["--head", "town1", "--relation", "lies_in", "-k", "99", "--json"]
    everything = call("predict", run, *options)
    assert call("predict", run, *options, "--candidates", "seen") == everything
    assert len(json.loads(everything[1])["answers"]) == dataset.num_entities("country")
    words = ("--known", "keep", "--candidates", "seen", "--dataset", "/nowhere")
    status, _, err = call("predict", run, *options, *words)
    assert status == 2 and "/nowhere is no dataset folder" in err


def test_predict_heads_by_the_type_of_the_tail(call, run):
    status, out, _ = call("predict", run, "--relation", "near (person → town)", "--tail", "town1", "--json")
    report = json.loads(out)
    assert status == 0
    assert (report["query"], report["asked"], report["type"]) == (
        "(?, near (person → town), town1)",
        "head",
        "person",
    )
    status, out, _ = call("predict", run, "--head", "person1", "--relation", "near", "--json")
    assert json.loads(out)["relation"] == "near (person → town)"
    status, _, err = call("predict", run, "--relation", "near", "--tail", "town1")
    assert status == 2
    assert "relation 'near' joins several pairs of entity types; say which: 'near (person → town)'" in err


def test_predict_many(call, run, tmp_path):
    queries = tmp_path / "queries.tsv"
    queries.write_text("person1\tknows\t?\n?\tlies_in\tcountry0\n")
    status, out, _ = call("predict", run, "--input", queries, "--topk", "3", "--json")
    reports = json.loads(out)
    assert status == 0
    assert [report["query"] for report in reports] == ["(person1, knows, ?)", "(?, lies_in, country0)"]
    assert [len(report["answers"]) for report in reports] == [3, 3]
    status, out, _ = call("predict", run, "--input", queries, "--topk", "3")
    assert out.count("best tails of type person") == 1 and out.count("best heads of type town") == 1


def test_predict_relations(call, run, dataset):
    head, relation, tail = dataset.split("valid")[0]
    names = dataset.relations[relation]
    words = ["--head", dataset.vocabulary(names.lhs)[head], "--tail", dataset.vocabulary(names.rhs)[tail]]
    status, out, err = call("predict", run, *words, "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["asked"] == "relation" and "relation" not in report and "type" not in report
    fitting = [
        label
        for label, one in zip(dataset.relations.labels.names, dataset.relations.relations)
        if (one.lhs, one.rhs) == (names.lhs, names.rhs)
    ]
    assert sorted(answer["name"] for answer in report["answers"]) == sorted(fitting)
    known = {answer["name"]: answer["known"] for answer in report["answers"]}
    assert known[dataset.relations.labels[relation]] == "valid"
    status, out, _ = call("predict", run, *words)
    assert out.splitlines()[0] == f"({words[1]}, ?, {words[3]}): best relations"


def test_an_unknown_name_in_a_file_of_queries_is_an_answer_of_its_own(call, run, tmp_path):
    queries = tmp_path / "queries.tsv"
    queries.write_text("person1\tknows\t?\n\npersn1\tknows\t?\nperson1\t?\tperson2\n")
    status, out, err = call("predict", run, "--input", queries, "--topk", "2", "--json")
    first, second, third = json.loads(out)
    assert (status, err) == (0, "")
    assert len(first["answers"]) == 2 and third["asked"] == "relation" and "answers" not in second
    assert second["problem"].startswith(f"{queries}:3: unknown entity 'persn1'; did you mean 'person1'")
    status, out, _ = call("predict", run, "--input", queries)
    assert f"(persn1, knows, ?): no answer: {queries}:3: unknown entity" in out
    status, out, err = call("predict", run, "--input", queries, "--strict")
    assert (status, out) == (2, "")
    assert err.startswith(f"dglkge: error: {queries}:3: unknown entity 'persn1'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head", "a"], "give two of --head, --relation and --tail, and the third is predicted"),
        (["--topk", "3"], "or all three for their score. Got none"),
        (["--head", "a", "--tail", "b", "--relation", "knows"], "unknown entity 'a'"),
        (["--triples", "x", "--head", "a"], "give either --triples or one query, not both"),
        (["--input", "nowhere.tsv"], "nowhere.tsv: there is no such file"),
        (["--head", "person1", "--relation", "know"], "unknown relation 'know'; did you mean 'knows'"),
        (["--head", "person1", "--relation", "knows", "--topk", "0"], "answers must be at least 1, got 0"),
    ],
)
def test_predict_refuses(call, run, arguments, words):
    status, out, err = call("predict", run, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("dglkge: error: ") and words in err


def test_predict_without_the_dataset(call, tmp_path, caplog):
    meta = toy_meta()
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    save_toy(tmp_path, meta, tables)
    status, out, _ = call("predict", tmp_path, "--head", "person-1", "--relation", "likes")
    assert status == 0 and len(out.splitlines()) == 12
    assert "known answers are not marked: the run's dataset /nowhere/toy is not there any more" in caplog.text
    status, _, err = call("predict", tmp_path, "--head", "person-1", "--relation", "likes", "--known", "drop")
    assert status == 2 and "/nowhere/toy is not there any more; say with --dataset where it is" in err


def test_similar(call, run):
    status, out, err = call("similar", run, "--entity", "person4", "--topk", "3")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "nearest to person4 among entities of type person"
    assert len(lines) == 5
    status, out, _ = call("similar", run, "--entity", "country1", "--json")
    report = json.loads(out)
    assert report["type"] == "country"
    assert sorted(one["name"] for one in report["similar"]) == ["country0", "country2"]
    assert report["similar"][0]["cosine"] >= report["similar"][1]["cosine"]
    for arguments, words in [
        (["--entity", "nobody"], "no entity of any type is called 'nobody'; with a type"),
        (["--entity", "persn4", "--type", "person"], "unknown entity 'persn4'; did you mean 'person4'"),
        (
            ["--entity", "x", "--type", "planet"],
            "unknown entity type 'planet'; known: 'country', 'person', 'town'",
        ),
    ]:
        status, _, err = call("similar", run, *arguments)
        assert status == 2 and words in err


def test_evaluate(call, run, dataset):
    status, out, _ = call("evaluate", run, "--split", "valid", "--per-relation", "--batch-size", "5")
    assert status == 0
    assert out.startswith("valid split, filtered, all candidates, realistic ties")
    assert "near (town → town)" in out
    written = json.loads((run / "metrics-valid.json").read_text())
    checkpoint = open_checkpoint(run)
    evaluator = RankingEvaluator(
        build_model("complex", 6, True), dataset.relations.relations, Protocol(split="valid")
    )
    known = KnownTriples([dataset.split(split) for split in ("train", "valid", "test")], 5)
    shards = {name: checkpoint.shards(name) for name in dataset.entity_types}
    expected = evaluator.evaluate(dataset.split("valid"), known, checkpoint, shards).to_dict()
    assert {name: written[name] for name in expected} == json.loads(json.dumps(expected))
    assert written["num_triples"] == 14 and written["version"] == 1 and written["dataset"] == dataset.name


def test_evaluate_another_protocol(call, run, tmp_path):
    target = tmp_path / "mine.json"
    options = ["--raw", "--candidates", "4", "--ties", "pessimistic", "--limit", "3", "--json"]
    status, out, _ = call("evaluate", run, *options, "--output", target)
    report = json.loads(out)
    assert status == 0
    assert report == json.loads(target.read_text())
    assert report["num_triples"] == 3
    assert report["protocol"] == {
        "split": "test",
        "filtering": "raw",
        "candidates": "sampled 4",
        "ties": "pessimistic",
        "seed": 0,
    }
    assert not (run / "metrics-test.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--candidates", "many"], "--candidates must be all or a number of at least 1, got 'many'"),
        (["--candidates", "0"], "--candidates must be all or a number of at least 1, got '0'"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--batch-size", "0"], "must be at least 1, got 0"),
        (["--dataset", "/nowhere"], "/nowhere is no dataset folder: there is no such folder"),
        (
            ["--output", "/nowhere/metrics.json"],
            "cannot write /nowhere/metrics.json: No such file or directory",
        ),
    ],
)
def test_evaluate_refuses(call, run, arguments, words):
    status, out, err = call("evaluate", run, *arguments)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_evaluate_refuses_another_dataset(call, run, dataset, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in dataset.path.iterdir():
        (other / path.name).symlink_to(path)
    (other / "dataset.json").unlink()
    description = {**dataset.description, "fingerprint": "0123456789abcdef"}
    (other / "dataset.json").write_text(json.dumps(description))
    status, _, err = call("evaluate", run, "--dataset", other)
    assert status == 2
    assert (
        f"is not the dataset of this run ({dataset.name}): its fingerprint is 0123456789ab, expected " in err
    )


def test_export(call, run, tmp_path):
    status, out, _ = call("export", run, "--format", "npy", "--output", tmp_path / "out", "--table", "town")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        str(tmp_path / "out" / name) for name in ("town.npy", "town.names.txt")
    ]
    assert np.array_equal(np.load(tmp_path / "out/town.npy"), open_checkpoint(run)["town"][:].numpy())
    status, _, err = call("export", run, "--format", "npy", "--output", tmp_path / "out")
    assert status == 2 and "town.npy exists" in err
    status, out, _ = call("export", run, "--format", "tsv", "--output", tmp_path / "all", "--json")
    assert [one["path"].rsplit("/", 1)[1] for one in json.loads(out)] == [
        "country.tsv",
        "person.tsv",
        "town.tsv",
        "relation.tsv",
    ]
    status, _, err = call("export", run, "--format", "tsv", "--output", tmp_path / "x", "--table", "towns")
    assert status == 2 and "unknown table 'towns'; did you mean 'town'" in err


def test_inspect(call, run, dataset):
    status, out, _ = call("inspect", run, "--verify")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert "version 1" in out and "finished_epochs 2, batches_done 17, global_batch_size 100" in out
    assert "complex, dimension 6, reciprocal relations" in out
    assert "all 26 files are as they were written" in out
    assert ["person", "40", "6", "2", "sum"] in [line[:5] for line in lines]
    assert ["relation", "5", "12", "1", "sum"] in [line[:5] for line in lines]
    status, out, _ = call("inspect", run / "checkpoint", "--json")
    report = json.loads(out)
    assert (report["version"], report["verified"], report["seed"]) == (1, False, 3)
    assert report["dataset"]["fingerprint"] == dataset.fingerprint
    assert [(table["name"], table["num_rows"]) for table in report["tables"]] == [
        ("country", 3),
        ("person", 40),
        ("town", 10),
        ("relation", 5),
    ]
    files = (run / "checkpoint" / "v1").glob("*.h5")
    assert report["size_bytes"] == sum(path.stat().st_size for path in files)


def test_every_command_says_that_there_is_no_run(call, tmp_path):
    more = {
        "predict": ["--head", "a", "--relation", "b"],
        "similar": ["a"],
        "checkpoint export": ["--format", "npy", "--output", tmp_path / "out"],
        "checkpoint convert": ["--to", "npy", "--output", tmp_path / "out"],
    }
    without = ("plan", "train", "tune", "launch", "job list", "job stop")
    for command in COMMANDS:
        if command in without or command.startswith(("data ", "config ")):
            continue
        status, out, err = call(*command.split(), tmp_path / "nowhere", *more.get(command, []))
        assert (status, out) == (2, "")
        assert err == f"dglkge: error: {tmp_path}/nowhere does not exist; expected the folder of a run\n"


def test_plan_says_that_there_is_no_configuration(call, tmp_path):
    status, out, err = call("plan", tmp_path / "nowhere.yaml")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dglkge: error: cannot read the configuration {tmp_path}/nowhere.yaml: ")


def test_run_command(capsys):
    def fail(error):
        def body():
            raise error

        return body

    assert run_command("cmd", lambda: 0) == 0
    assert run_command("cmd", lambda: 7) == 7
    assert run_command("cmd", fail(InputError("two\n  lines"))) == 2
    assert capsys.readouterr().err == "cmd: error: two lines\n"
    assert run_command("cmd", fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "cmd: interrupted\n"
    with pytest.raises(ZeroDivisionError):
        run_command("cmd", fail(ZeroDivisionError()))


def test_columns(capsys):
    print_columns(["n", "name", ""], [[1, "a", ""], [10, "[b]cd", "x"]])
    assert capsys.readouterr().out == " n  name\n 1  a\n10  [b]cd  x\n"
    print_columns(["name"], [["long " * 100]])
    assert capsys.readouterr().out.count("\n") == 2
    print_columns(["only"], [])
    assert capsys.readouterr().out == "only\n"


def test_sizes():
    assert [human_bytes(size) for size in (0, 1023, 1024, 1536, 5 << 20, 3 << 30, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "1024.0 TiB",
    ]


def test_json_files_are_whole_or_not_there(tmp_path):
    write_json(tmp_path / "x.json", {"a": "→"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": "→"}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_evaluate_compares_what_it_reads_with_its_checksums(call, run):
    path = run / "checkpoint" / "v1" / "embeddings_town_1.v1.h5"
    content = bytearray(path.read_bytes())
    place = content.index(open_checkpoint(run).shards("town")[1].rows[2].numpy().tobytes())
    content[place] ^= 1  # the lowest bit of a number, which no reader can see
    path.write_bytes(content)
    status, out, err = call("evaluate", run, "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "embeddings_town_1.v1.h5 is damaged: its checksum is not the one in the manifest" in err
    assert not list(run.glob("metrics*"))
    assert call("evaluate", run, "--json", "--no-verify")[0] == 0


def test_a_metrics_file_on_a_full_disk_is_one_line_and_status_1(call, run, monkeypatch):
    def full(path, *arguments, **options):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    status, out, err = call("evaluate", run, "--json", "--limit", "1")
    assert (status, out) == (1, "")
    assert err == f"dglkge: error: cannot write {run}/metrics-test-first1.json: No space left on device\n"
    assert not list(run.glob("metrics*"))


def test_a_failed_write_elsewhere_keeps_its_traceback(capsys):
    def body():
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_command("cmd", body)


def test_recipes(call, tmp_path):
    status, out, err = call("recipes", "--json")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert (status, err) == (0, "")
    assert found["fb15k237/complex"]["score function"] == "complex" and "fb15k237/space" not in found
    status, out, _ = call("recipes", "fb15k237/complex")
    first, rest = out.split("\n", 1)
    assert (
        rest
        == (ROOT / "dglkge" / "config" / "recipes" / "fb15k237" / "complex.yaml")
        .read_text()
        .split("\n", 1)[1]
    )
    # The schema is named by its place on this machine.
    assert Path(first.removeprefix("# yaml-language-server: $schema=")).is_file()
    status, table, _ = call("recipes")
    assert status == 0 and len(table.splitlines()) == len(found) + 1
    for words in (["recipes", "fb15k237/complx"], ["train", "--recipe", "fb15k237/complx"]):
        status, out, err = call(*words)
        assert (status, out) == (2, "")
        assert err.startswith(
            "dglkge: error: unknown recipe 'fb15k237/complx'; did you mean 'fb15k237/complex'"
        )
    status, _, err = call("train", tmp_path / "a.yaml", "--recipe", "fb15k237/complex")
    assert status == 2 and f"give one CONFIG or --recipe, got {tmp_path}/a.yaml and fb15k237/complex" in err


def test_config(call, tmp_path):
    status, out, err = call("config")
    assert (status, err) == (0, "")
    # What it prints is a configuration of the defaults.
    (tmp_path / "all.yaml").write_text(out.replace("dataset: ''", "dataset: data/x"))
    assert load_config(tmp_path / "all.yaml") == load_config(None, ["dataset=data/x"])
    status, out, _ = call("config", "--diff", tmp_path / "all.yaml", "--json")
    assert json.loads(out).keys() == {"dataset"}
    (tmp_path / "own.yaml").write_text(
        "dataset: d\nloss: {name: hinge, margin: 2}\nmodel: {score_function: {name: keci, p: 1}}\n"
        "optimizer: {schedule: {name: StepLR, step_size: 3}}\n"
    )
    status, out, _ = call("config", "--diff", tmp_path / "own.yaml", "--json")
    found = {key: one["value"] for key, one in json.loads(out).items()}
    assert found == {
        "dataset": "d",
        "model.score_function": "keci",
        "model.score_function.p": 1,
        "loss.name": "hinge",
        "loss.margin": 2.0,
        "optimizer.schedule": {"name": "StepLR", "every": "epoch", "step_size": 3},
    }
    status, out, _ = call("config", "show", "--basic", "--json")
    assert status == 0 and len(json.loads(out)) == 10 and "optimizer.lr" in json.loads(out)
    (tmp_path / "basic.yaml").write_text(call("config", "show", "--basic")[1].replace("''", "data/x"))
    assert load_config(tmp_path / "basic.yaml").model == load_config(None, ["dataset=data/x"]).model
    status, out, _ = call("config", "optimizer", "--json")
    assert all(key.startswith("optimizer.") for key in json.loads(out)) and len(json.loads(out)) > 5
    status, out, err = call("config", "optimzer")
    assert (status, out) == (2, "") and "no field begins with 'optimzer'; known: checkpoint, dataset" in err
    status, out, err = call("config", "--diff", tmp_path)
    assert status == 2 and f"cannot read {tmp_path}/config.json: No such file" in err
