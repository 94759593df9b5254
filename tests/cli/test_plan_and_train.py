"""``dglkge plan``, ``train`` and ``tune`` before a job is launched: figures, words and refusals."""

from __future__ import annotations

import fcntl
import json
import logging
from functools import partial

import pytest

from dglkge.cli import launch, plan
from dglkge.config import load_config
from dglkge.data.dataset_files import read_dataset_size
from dglkge.launch.arguments import script_config
from dglkge.planning.epoch import TABLE_ITEMS
from dglkge.planning.host import HostMemory
from dglkge.planning.memory import plan_memory
from dglkge.tuning.tune import LOCK_FILE
from tests.toy_kg import partition, ring_triples, toy_dataset

GIB = 2**30


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A machine with 64 GiB of memory, that is measured in a moment."""
    monkeypatch.setattr(plan, "host_memory", lambda output: HostMemory(64 * GIB, 32 * GIB, 16 * GIB))
    monkeypatch.setattr(plan, "MEASURED_SECONDS", 0.001)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(f"dataset: {toy_dataset()}\noutput: {tmp_path / 'run'}\nmodel:\n  dimension: 16\n")
    return path


def test_a_run_a_data_set_and_a_recipe_are_configurations(config_file, tmp_path, report):
    def plan_of(*words):
        return report("plan", *words, "--num-trainers", "2")["machines"]

    run = tmp_path / "some run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(load_config(config_file, []).to_dict()))
    dataset, by_file = toy_dataset(), plan_of(config_file)
    # A data set has settings that follow its size; a file has the defaults.
    defaults = ("model.dimension=16", "training.batch_size=1000", "training.averaging=null")
    assert plan_of(run) == by_file == plan_of(dataset, *defaults)
    assert plan_of(dataset) == plan_of(f"dataset={dataset}") != by_file
    assert plan_of("--recipe", "fb15k237/complex", f"dataset={dataset}") not in (by_file, plan_of(dataset))


def test_table_for_people_and_what_does_not_fit(config_file, monkeypatch, shown, call):
    out = shown("plan", config_file)
    assert out.splitlines()[0].split() == ["machine", "0", "here", "now"]
    assert "64.0 GiB" in out and "an epoch should take about" in out
    monkeypatch.setattr(plan, "host_memory", lambda output: HostMemory(64 * GIB, 4096, GIB))
    status, out, _ = call("plan", config_file, "--num_trainers", "1")
    assert status == 2 and "does not fit: machine 0: " in out and "4.0 KiB are there" in out


def test_memory_of_gpus(config_file, monkeypatch, shown, report, call):
    monkeypatch.setattr(plan, "usable_gpus", lambda: ("0", "1", "2"))
    for device, is_shown in (("cuda", True), ("auto", True), ("cpu_staged", True), ("cpu", False)):
        out = shown("plan", config_file, "--set", f"training.device={device}")
        assert ("GPU memory of each trainer" in out) == is_shown
    printed = report("plan", config_file, "--set", "model.dimension=8")
    config = load_config(config_file, ["model.dimension=8"])
    (expected,) = plan_memory(config, read_dataset_size(config.dataset), 3, 1)
    (machine,) = printed["machines"]
    assert machine["device_bytes_of_a_trainer"] == expected.device_bytes
    assert (machine["memory"], machine["memory_bytes"]) == (dict(expected.memory), expected.memory_bytes)
    assert printed["this_machine"]["shared_memory_bytes"] == 32 * GIB
    assert printed["epoch_seconds"] >= 0 and printed["problems"] == []
    monkeypatch.setattr(plan, "usable_gpus", lambda: ("0",))
    status, out, _ = call("plan", config_file, "--set", "training.device=cuda", "--num_trainers", "2")
    assert status == 2
    assert "does not fit: training.device is cuda, for 2 trainer(s) a machine: 1 GPU(s) here" in out


@pytest.mark.parametrize(
    "words, message",
    [
        ("FILE --set dataset=nowhere", "nowhere is no dataset folder: there is no such folder"),
        ("FILE training.edge_sets=[no]", "unknown edge set 'no'"),
        ("FILE --num_servers 0 --num_trainers 2", "--num-trainers must be"),
        ("FILE --ip_config CLUSTER", "2 machines"),
        ("FILE optimizer.lr=1 more", "give one CONFIG or --recipe, got FILE and more"),
    ],
)
def test_bad_input(config_file, tmp_path, words, message, refusal):
    (tmp_path / "ip_config.txt").write_text("10.0.0.1\n10.0.0.2\n")
    names = {"FILE": str(config_file), "CLUSTER": str(tmp_path / "ip_config.txt")}
    line = refusal("plan", *(names.get(word, word) for word in words.split()))
    assert message.replace("FILE", names["FILE"]) in line


@pytest.mark.parametrize(
    "words",
    ["FILE modl.dimension=3 optimizer.lr=0", "modl.dimension=3 --num_trainers 2 FILE --set=optimizer.lr=0"],
)
def test_mistakes_of_overrides_wherever_they_stand(words, config_file, call):
    status, _, err = call("plan", *(word.replace("FILE", str(config_file)) for word in words.split()))
    first, second = sorted(err.splitlines())
    assert status == 2 and first.startswith("dglkge: error: override 'modl.dimension=3': unknown key ")
    assert second.startswith("dglkge: error: override 'optimizer.lr=0': optimizer.lr is 0; allowed: ")


def test_ranges_are_proposed_within_a_memory(config_file, shown, report):
    sets = ["--set", "model.dimension=2000", "--set", "evaluation.split=none", "--num_trainers", "1"]
    words = ["plan", config_file, *sets]
    (machine,) = report(*words)["machines"]
    assert "ranges" not in machine
    rest = sum(num for item, num in machine["memory"].items() if item not in TABLE_ITEMS)
    room = (machine["memory"]["tables"] + machine["memory"]["optimizer state"]) // 2
    within = partial(report, *words, "--max_memory", rest + room)
    ranges = within()["machines"][0]["ranges"]
    assert ranges["budget_bytes"] == room and ranges["num_ranges"] > 1
    assert ranges["pair_bytes"] <= room and ranges["read_bytes"] >= ranges["table_bytes"]
    assert f"sampling.num_ranges={ranges['num_ranges']} needs" in shown(*words, "--max_memory", rest + room)
    assert "ranges, machine 0: no number of them fits" in shown(*words, "--max_memory", "1M")


@pytest.fixture(autouse=True)
def log_level():
    yield
    logging.getLogger("dglkge").setLevel(logging.NOTSET)


@pytest.fixture
def launched(monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda words: calls.append(words) or 0)
    return calls


def test_a_split_without_triples_is_not_ranked(shown, launched, tmp_path):
    (tmp_path / "source").mkdir()
    ring_triples().to_csv(tmp_path / "source" / "train.tsv", sep="\t", header=False, index=False)
    data = partition(tmp_path / "source", tmp_path / "data", "--split", "1")
    words = ["train", f"dataset={data}", f"output={tmp_path}/run", "--num-trainers", "1"]
    first, *further = shown(*words).splitlines()
    assert first.startswith("chosen for this data set (docs/quality.md): training.num_epochs=")
    assert further[0] == f"nothing is ranked: {data} has no test triples"
    assert further[1].startswith(f"next: dglkge predict {tmp_path}/run --head NAME --relation NAME; dglkge ")
    assert "evaluation.split=none" in launched[0]
    assert "nothing is ranked" not in shown(*words, "evaluation.split=train")
    assert "evaluation.split=none" not in launched[1]


def test_a_small_training_is_one_process(call, launched, dataset, tmp_path):
    words = ("train", f"dataset={dataset.path}", f"output={tmp_path}/run", "training.num_epochs=2")
    status, out, _ = call(*words)
    assert status == 0 and launched == [] and "\ntest split, filtered" in out
    stats = (tmp_path / "run" / "stats.jsonl").read_text().splitlines()
    assert sum('"epoch"' in line for line in stats) == 2 and not (tmp_path / "run" / "logs").exists()
    # Of more than 200,000 triples in all epochs, or with an option of a job, it is a job.
    num_epochs = 200_000 // len(dataset.split("train")) + 1
    assert call(*words[:3], f"training.num_epochs={num_epochs}")[0] == 0
    assert call(*words, "--num-trainers", "2")[0] == 0 and len(launched) == 2


def test_what_is_refused_before_the_launch(refusal, launched, dataset, tmp_path):
    line = refusal("train", f"dataset={tmp_path}/nowhere")
    assert line == f"{tmp_path}/nowhere is no dataset folder: there is no such folder"
    (tmp_path / "file").write_text("")
    line = refusal("train", f"dataset={dataset.path}", f"output={tmp_path}/file")
    assert line == f"output is {tmp_path}/file, which is a file; expected a folder"
    assert launched == []
    # The launcher reads overrides too.
    config = script_config(["train.py", "dataset=d", "--num", "3", "seed=4"], tmp_path)
    assert config is not None and (config.dataset, config.seed) == ("d", 4)
    assert script_config(["train.py", "seed=4"], tmp_path) is None


@pytest.fixture
def tune(tmp_path):
    pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")

    def write(**search):
        fixed = {"dataset": str(toy_dataset(typed=True)), "training.num_epochs": 20}
        content = {"set": fixed, "space": {"optimizer.lr": [0.05, 0.1]}, "search": search}
        (tmp_path / "space.yaml").write_text(json.dumps(content))  # JSON is YAML
        return ["tune", tmp_path / "space.yaml", "--output", tmp_path / "out"]

    return write


def test_the_plan_of_a_search_is_shown_first(tune, tmp_path, shown, report):
    lines = shown(*tune(trials=8, reduction=2), "--dry-run").splitlines()
    assert not (tmp_path / "out").exists()
    assert lines[0].split() == ["trials", "core", "share", "epochs", "trial_cost", "cost"]
    assert [line.split()[0] for line in lines[1:5]] == ["8", "4", "2", "1"]
    assert lines[4].split()[1:] == ["0", "1.0", "20", "1.0", "1.0"]
    assert lines[5].endswith("full trainings, the winner's included; allowed: 3")
    plan = report(*tune(), "--dry-run", "--trials", "4", "--budget", "2")
    assert plan["budget"] == 2 and plan["cost"] <= 2
    assert [rung["trials"] for rung in plan["rungs"]] == [4, 1]
    assert plan["cost"] == pytest.approx(sum(rung["cost"] for rung in plan["rungs"]), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--budget 0.5", "the budget must be at least 1 full training, got 0.5"),
        ("--budget 1", "is too small for a search over 64 trials"),
        ("--num_trainers -1", "--num-trainers must be at least 0, got -1"),
        ("--set model.dim=3", "unknown key 'model.dim'"),
        ("--set training.objective=k_vs_all --set negatives.mask_known=true", "k_vs_all"),
    ],
)
def test_mistakes_of_a_search(tune, tmp_path, refusal, arguments, words):
    assert words in refusal(*tune(), *arguments.split())
    assert not (tmp_path / "out").exists()


def test_one_search_at_a_time(tune, tmp_path, call):
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / LOCK_FILE, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, _, err = call(*tune())
    assert status == 2 and f"another dglkge tune runs in {tmp_path}/out; wait" in err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]
