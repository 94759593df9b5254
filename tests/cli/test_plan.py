"""``dglkge plan``: its figures, its refusal, its words."""

from __future__ import annotations

import json
from functools import partial

import pytest

from dglkge.cli import plan
from dglkge.config import load_config
from dglkge.data.dataset_files import read_dataset_size
from dglkge.planning.epoch import TABLE_ITEMS
from dglkge.planning.host import HostMemory
from dglkge.planning.memory import plan_memory
from tests.toy_kg import toy_dataset

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


def planned(config_file, num_trainers, *overrides):
    """The plan of the one machine by the function below the command."""
    config = load_config(config_file, list(overrides))
    (machine,) = plan_memory(config, read_dataset_size(config.dataset), num_trainers, 1)
    return machine


def test_json_holds_the_plan(config_file, report):
    printed = report("plan", config_file, "--set", "model.dimension=8", "--num_trainers", "3")
    expected = planned(config_file, 3, "model.dimension=8")
    assert printed["machines"][0]["memory"] == dict(expected.memory)
    assert printed["machines"][0]["memory_bytes"] == expected.memory_bytes
    assert printed["this_machine"]["shared_memory_bytes"] == 32 * GIB
    assert printed["epoch_seconds"] >= 0 and printed["problems"] == []


def test_a_run_a_data_set_and_a_recipe_are_configurations(config_file, tmp_path, report):
    def plan_of(*words):
        return report("plan", *words, "--num-trainers", "2")["machines"]

    run = tmp_path / "some run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(load_config(config_file, []).to_dict()))
    dataset, larger = toy_dataset(), "model.dimension=16"
    by_file = plan_of(config_file)
    # A data set has settings that follow its size; a file has the defaults.
    assert (
        plan_of(run)
        == by_file
        == plan_of(dataset, larger, "training.batch_size=1000", "training.averaging=null")
    )
    assert plan_of(dataset) == plan_of(f"dataset={dataset}") != by_file
    recipe = plan_of("--recipe", "fb15k237/complex", f"dataset={dataset}")
    assert recipe != by_file and recipe != plan_of(dataset)


def test_table_for_people(config_file, shown):
    out = shown("plan", config_file)
    assert out.splitlines()[0].split() == ["machine", "0", "here", "now"]
    assert "64.0 GiB" in out and "an epoch should take about" in out


def test_what_does_not_fit_is_status_2(config_file, monkeypatch, call):
    monkeypatch.setattr(plan, "host_memory", lambda output: HostMemory(64 * GIB, 4096, GIB))
    status, out, _ = call("plan", config_file, "--num_trainers", "1")
    assert status == 2 and "does not fit: machine 0: " in out and "4.0 KiB are there" in out


def test_memory_of_gpus(config_file, monkeypatch, shown, report, call):
    """A figure of its own where trainers use GPUs; as many trainers as GPUs."""
    monkeypatch.setattr(plan, "usable_gpus", lambda: ("0", "1", "2"))
    for device, is_shown in (("cuda", True), ("auto", True), ("cpu_staged", True), ("cpu", False)):
        out = shown("plan", config_file, "--set", f"training.device={device}")
        assert ("GPU memory of each trainer" in out) == is_shown
    (machine,) = report("plan", config_file)["machines"]
    expected = planned(config_file, 3)
    assert machine["device_bytes_of_a_trainer"] == expected.device_bytes
    assert machine["memory"] == dict(expected.memory)
    monkeypatch.setattr(plan, "usable_gpus", lambda: ("0",))
    status, out, _ = call("plan", config_file, "--set", "training.device=cuda", "--num_trainers", "2")
    assert status == 2
    assert "does not fit: training.device is cuda, for 2 trainer(s) a machine: 1 GPU(s) here" in out


@pytest.mark.parametrize(
    "words, message",
    [
        ("FILE --set dataset=nowhere", "cannot read nowhere/dataset.json"),
        ("FILE --num_servers 0 --num_trainers 2", "--num-trainers must be"),
        ("FILE --set model.dimnsion=3", "model.dimension"),
        ("FILE --ip_config CLUSTER", "2 machines"),
        ("FILE --max_memory much", "'much' is no size"),
        ("FILE optimizer.lr=1 more", "give one CONFIG or --recipe, got FILE and more"),
        ("nowhere.yaml", "cannot read the configuration nowhere.yaml: "),
    ],
)
def test_bad_input(config_file, tmp_path, words, message, refusal):
    (tmp_path / "ip_config.txt").write_text("10.0.0.1\n10.0.0.2\n")
    names = {"FILE": str(config_file), "CLUSTER": str(tmp_path / "ip_config.txt")}
    assert message.replace("FILE", names["FILE"]) in refusal(
        "plan", *(names.get(word, word) for word in words.split())
    )


@pytest.mark.parametrize(
    "words",
    [
        "FILE modl.dimension=3 optimizer.lr=0",
        "FILE --set modl.dimension=3 --num_trainers 2 optimizer.lr=0",
        "modl.dimension=3 --num_trainers 2 FILE --set=optimizer.lr=0",
    ],
)
def test_all_mistakes_of_overrides_are_printed_each_on_a_line(words, tmp_path, call):
    """Words KEY=VALUE override fields, wherever they stand."""
    path = tmp_path / "run.yaml"
    path.write_text("dataset: d\nseed: x\n", encoding="utf-8")
    status, _, err = call("plan", *(word.replace("FILE", str(path)) for word in words.split()))
    assert status == 2 and sorted(err.splitlines()) == [
        f"dglkge: error: {path}:2: seed is 'x'; allowed: a whole number",
        "dglkge: error: override 'modl.dimension=3': unknown key 'modl.dimension'; did you mean "
        "'model.dimension' or 'model.entity_dimensions'?",
        "dglkge: error: override 'optimizer.lr=0': optimizer.lr is 0.0; allowed: a number above 0",
    ]


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
