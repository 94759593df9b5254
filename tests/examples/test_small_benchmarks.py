"""Small benchmarks: their cases and rows, refusals, and formulas in plain torch that are the library's."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import bucket_order
import bucket_schedules
import device
import gpu
import influence
import quality
import rules
import start
from dglkge import open_run
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.model.kge_model import build_model
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.training.building.checks import check_config
from dglkge.training.building.components import configured_loss, configured_model, configured_regularizer
from dglkge.typing import Side
from measuring import plain_torch_scores
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.model.dense_oracle import DENSE
from tests.toy_kg import toy_dataset

DIM = 8
PLAIN = [name for name in SCORE_FUNCTIONS if name not in DENSE and not SCORE_FUNCTIONS.get(name).has_times]
"""Score functions without a module and without times."""


def test_bucket_orders():
    """One range comes first."""
    expected = [(1, ""), (4, "inside_out"), (4, "random"), (8, "inside_out"), (8, "random")]
    assert bucket_order.kinds("4,1,8", "inside_out,random") == expected
    with pytest.raises(InputError, match="unknown order 'inside'; did you mean 'inside_out'"):
        bucket_order.kinds("4", "inside")


def test_row_of_rules(tmp_path):
    run = save_toy_run(tmp_path / "run", Dataset.open(toy_dataset()))
    row = rules.measure(str(run))
    assert row["chains"] > 0 and row["data"] == "dataset"
    assert row["both MRR"] == round(open_run(run).with_rules().evaluate("test").both.mrr, 4)
    assert row["model MRR"] == round(open_run(run).evaluate("test").both.mrr, 4) < row["rules first MRR"]


@pytest.mark.usefixtures("warm_executable")
def test_reasons_are_removed(capsys, monkeypatch):
    train, runs = influence.trained, []

    def trained(args, work, without):
        if len(runs) == 2:  # two trainings show it
            return runs[-1]
        runs.append(train(args, work, without))
        num_triples = len(runs[-1].dataset.split("train"))
        assert num_triples == len(runs[0].dataset.split("train")) - len(without)
        return runs[-1]

    monkeypatch.setattr(influence, "trained", trained)
    words = ["--triples", str(toy_dataset().parent / "source"), "--recipe", "nations/complex"]
    few = ["--links", "3", "--reasons", "2", "--set", "training.num_epochs=2", "--set", "model.dimension=8"]
    assert influence.main([*words, *few]) == 0
    title, *_, nothing, strongest, drawn, weakest = capsys.readouterr().out.splitlines()
    assert title.startswith("3 test triples, ")
    assert nothing.split(" | ")[1:4] == ["0", "0.00", "0 of 3"]
    for line, kind in ((strongest, "strongest"), (drawn, "drawn"), (weakest, "weakest")):
        assert line.startswith(f"| {kind} | ") and 3 <= int(line.split(" | ")[1]) <= 12
    monkeypatch.undo()
    assert influence.main([*words, "--links", "3", "--triples", "nowhere"]) == 2
    assert "nowhere has no train.tsv" in capsys.readouterr().err


def test_no_schedule_saves_traffic(capsys):
    words = ["--entities", "4000", "--edges", "20000", "--ranges", "8", "--batch", "50"]
    for machines in ("2", "4"):
        assert bucket_schedules.main([*words, "--machines", machines]) == 0
        lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
        assert [line[0] for line in lines] == ["same", "rotated heads", "shifted"]
        same, *schedules = [(float(line[1]), int(line[3])) for line in lines]
        for rows, reads in schedules:
            # Batches cut the same buckets at other places.
            assert rows == pytest.approx(same[0], rel=0.02) and reads > same[1]
    # Where both ends of an edge are own, all rows are.
    words = ["--edges", "2000", "--entities", "100", "--local", "1", "--negatives", "0"]
    args = bucket_schedules.build_parser().parse_args(words)
    graph = bucket_schedules.make_graph(args)
    assert bucket_schedules.count_rows(args, graph, bucket_schedules.walks(args, "same")) == 0


def test_cases_of_devices_can_be_trained(capsys):
    cases = [settings for settings, _ in device.cases(device.build_parser().parse_args([])).values()]
    for settings in (*cases, gpu.speed_settings("1000"), [*gpu.ON_GPU, *gpu.RANKED]):
        check_config(load_config(None, ["dataset=x", *settings]))
    args = device.build_parser().parse_args(["--compile"])
    compiled = [load_config(None, ["dataset=x", *sets]) for sets, _ in device.cases(args).values()]
    assert [config.training.compile for config in compiled] == [False, False, True, True, False]
    assert device.main(["--device", "gpu"]) == 2
    known = "known: auto, cpu, cuda, cpu_staged"
    assert capsys.readouterr().err == f"device.py: 'gpu' is no device; {known}\n"
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert capsys.readouterr().err == f"gpu.py: torch {torch.__version__} finds no GPU here\n"


def test_every_recipe_is_a_valid_configuration():
    paths, runs = quality.recipes(""), set()
    assert len(paths) >= 2
    for path in paths:
        config = load_config(str(path), [])
        model = configured_model(config)
        assert model.dim == config.model.dimension
        configured_loss(config)
        configured_regularizer(config, model)
        # One folder for the data set, shared by its recipes, and an own one for the run.
        assert config.dataset == f"data/{path.parent.name}", path
        runs.add(config.output)
    assert len(runs) == len(paths)


def test_row_of_a_recipe():
    words = "unknown recipe 'fb15k237/complx'; did you mean 'fb15k237/complex'"
    with pytest.raises(InputError, match=words):
        quality.recipes("fb15k237/complx")
    (path,) = quality.recipes("fb15k237/complex")
    sides = {"mrr": 0.35678, "hits@1": 0.25, "hits@3": 0.4, "hits@10": 0.5}
    metrics = {"both": sides, "ties": {"pessimistic": {"both": {**sides, "mrr": 0.3}}}}
    run = SimpleNamespace(wall_seconds=123.4, peak_bytes=1.26e9)
    row = quality.recipe_row("FB15k-237", path, run, metrics)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["FB15k-237", "`fb15k237/complex.yaml`"] and ".388" in cells[-1]
    assert cells[3:10] == [".357", ".250", ".400", ".500", ".300", "123", "1.3"]


def test_every_score_function_has_a_peer():
    compared = {name for name in PLAIN if SCORE_FUNCTIONS.get(name).__module__.startswith("dglkge")}
    assert set(plain_torch_scores.KINDS) == compared


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", PLAIN)
def test_scores_are_equal(name, side):
    score_function = build_model(name, DIM, True).score_function
    draw = torch.Generator().manual_seed(0)
    shape = {"generator": draw, "dtype": torch.float64}
    entities, candidates = torch.randn(5, DIM, **shape), torch.randn(5, DIM, **shape)
    relation = torch.randn(5, plain_torch_scores.relation_dim(name, DIM), **shape)
    tails = side is Side.TAIL
    expected = score_function.compare_plainly(score_function.query(entities, relation, side), candidates)
    query = plain_torch_scores.queries(name, entities, relation, tails)
    torch.testing.assert_close(plain_torch_scores.compare(name, query, relation, candidates, tails), expected)
    pairs = plain_torch_scores.compare(name, query, relation, candidates.unsqueeze(1), tails)
    torch.testing.assert_close(pairs.squeeze(1), expected.diagonal())


def test_seconds_of_a_start():
    code = "import time; begin = time.process_time()\nwhile time.process_time() - begin < 0.3: pass"
    seconds, processors = start.timed([sys.executable, "-c", code])
    assert 0.3 <= processors <= seconds + 0.1
    with pytest.raises(RuntimeError, match="ended with status 3"):
        start.timed([sys.executable, "-c", "raise SystemExit(3)"])
