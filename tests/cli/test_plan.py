"""``dglkge plan``: its figures, its refusal, its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dglkge.cli import plan
from dglkge.cli.main import main
from dglkge.config import load_config
from dglkge.data.dataset_files import read_dataset_size
from dglkge.planning.host import HostMemory
from dglkge.planning.memory import plan_memory
from dglkge.planning.ranges import OF_TABLES
from tests.toy_kg import toy_dataset

GIB = 2**30


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(f"dataset: {toy_dataset()}\noutput: {tmp_path / 'run'}\nmodel:\n  dimension: 16\n")
    return path


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "host_memory", lambda output: HostMemory(64 * GIB, 32 * GIB, 16 * GIB))
    monkeypatch.setattr(plan, "MEASURED_SECONDS", 0.001)


def test_json_holds_the_plan(config_file: Path, there: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(config_file), "--set", "model.dimension=8", "--num_trainers", "3", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    config = load_config(config_file, ["model.dimension=8"])
    (host,) = plan_memory(config, read_dataset_size(config.dataset), 3, 1)
    assert report["machines"][0]["memory"] == dict(host.memory)
    assert report["machines"][0]["memory_bytes"] == host.memory_bytes
    assert report["this_machine"]["shared_memory_bytes"] == 32 * GIB
    assert report["epoch_seconds"] >= 0
    assert report["problems"] == []


def test_a_run_a_data_set_and_a_recipe_are_configurations(
    config_file: Path, tmp_path: Path, there: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan_of(*words: str) -> dict:
        assert main(["plan", *words, "--num-trainers", "2", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["machines"]

    run = tmp_path / "some run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(load_config(config_file, []).to_dict()))
    dataset = str(toy_dataset())
    by_file, larger = plan_of(str(config_file)), "model.dimension=16"
    assert plan_of(str(run)) == by_file == plan_of(dataset, larger)
    assert plan_of(dataset) == plan_of(f"dataset={dataset}") != by_file
    recipe = plan_of("--recipe", "fb15k237/complex", f"dataset={dataset}")
    assert recipe != by_file and recipe != plan_of(dataset)


def test_table_for_people(config_file: Path, there: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_file)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["machine", "0", "here", "now"]
    assert "64.0 GiB" in out
    assert "an epoch should take about" in out


def test_what_does_not_fit_is_status_2(
    config_file: Path, there: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "host_memory", lambda output: HostMemory(64 * GIB, 4096, GIB))
    assert main(["plan", str(config_file), "--num_trainers", "1"]) == 2
    out = capsys.readouterr().out
    assert "does not fit: machine 0: " in out
    assert "4.0 KiB are there" in out


def test_memory_of_gpus(
    config_file: Path, there: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure of its own where trainers use GPUs; as many trainers as GPUs."""
    monkeypatch.setattr(plan, "usable_gpus", lambda: ("0", "1", "2"))
    for device, is_shown in (("cuda", True), ("auto", True), ("cpu_staged", True), ("cpu", False)):
        assert main(["plan", str(config_file), "--set", f"training.device={device}"]) == 0
        assert ("GPU memory of each trainer" in capsys.readouterr().out) == is_shown
    config = load_config(config_file)
    (host,) = plan_memory(config, read_dataset_size(config.dataset), 3, 1)
    assert main(["plan", str(config_file), "--json"]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"]
    assert machine["device_bytes_of_a_trainer"] == host.device_bytes
    assert machine["memory"] == dict(host.memory)


def test_cuda_without_gpus_is_status_2(
    config_file: Path, there: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "usable_gpus", lambda: ("0",))
    words = ["plan", str(config_file), "--set", "training.device=cuda", "--num_trainers", "2"]
    assert main(words) == 2
    expected = "does not fit: training.device is cuda, for 2 trainer(s) a machine: 1 GPU(s) here"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--set", "dataset=nowhere"], "cannot read nowhere/dataset.json"),
        (["--num_servers", "0", "--num_trainers", "2"], "--num-trainers must be"),
        (["--set", "model.dimnsion=3"], "model.dimension"),
    ],
)
def test_bad_input(
    config_file: Path, there: None, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config_file), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_of_another_size(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "ip_config.txt"
    cluster.write_text("10.0.0.1\n10.0.0.2\n")
    assert main(["plan", str(config_file), "--ip_config", str(cluster)]) == 2
    assert "2 machines" in capsys.readouterr().err


def test_ranges_are_proposed_within_a_memory(
    config_file: Path, there: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "model.dimension=2000", "--set", "evaluation.split=none", "--num_trainers", "1"]
    words = ["plan", str(config_file), *sets, "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert "ranges" not in report["machines"][0]
    memory = dict(report["machines"][0]["memory"])
    others = sum(num for what, num in memory.items() if what not in OF_TABLES)
    room = (memory["tables"] + memory["optimizer state"]) // 2
    assert main([*words, "--max_memory", str(others + room)]) == 0
    found = json.loads(capsys.readouterr().out)["machines"][0]["ranges"]
    assert found["budget_bytes"] == room and found["num_ranges"] > 1
    assert found["pair_bytes"] <= room and found["read_bytes"] >= found["table_bytes"]
    assert main([*words[:-1], "--max_memory", str(others + room)]) == 0
    assert f"sampling.num_ranges={found['num_ranges']} needs" in capsys.readouterr().out
    assert main([*words[:-1], "--max_memory", "1M"]) == 0
    assert "ranges, machine 0: no number of them fits" in capsys.readouterr().out
    assert main([*words[:-1], "--max_memory", "much"]) == 2
    assert "'much' is no size" in capsys.readouterr().err
