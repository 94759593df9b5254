"""The configuration: read, overridden, checked, saved; values that do not fit one another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from dglkge.config import Config, component_fields, field_table, load_config, refused_changes
from dglkge.config.load import recipe_files
from dglkge.config.refusals import refuse
from dglkge.config.schema import fields
from dglkge.errors import InputError, InputErrors
from dglkge.registry import registry_of
from tests.toy_kg import REPOSITORY


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_and_overrides_replace_defaults_and_are_saved(tmp_path: Path) -> None:
    text = "dataset: data/x\nmodel: {dimension: 64}\nregularizer: {name: n3, weight: 5e-2}\n"
    words = [
        "model.dimension=32",
        "loss.name=hinge",
        "loss.margin=12",
        "loss.relation_weights={a: 2, b.c: 0.5}",
    ]
    config = load_config(written(tmp_path, text), words)
    assert (config.dataset, config.model.dimension, config.regularizer.weight) == ("data/x", 32, 0.05)
    assert config.loss.relation_weights == {"a": 2.0, "b.c": 0.5}
    assert config.training == Config().training
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    assert load_config(tmp_path / "config.json") == config
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved == config.to_dict() and refused_changes(saved, config.to_dict(), is_finished=False) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "run.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: d\nmodel:\n  dimnsion: 8\n", "3: unknown key 'model.dimnsion'; did you mean 'model.d"),
        ("dataset: d\nmodel:\n  dimension: 1.5\n", "3: model.dimension is 1.5; allowed: a whole number"),
        ("dataset: d\noptimizer:\n  lr: 0\n", "3: optimizer.lr is 0; allowed: a number above 0"),
        ("dataset: d\nseed: -1\n", "2: seed is -1; allowed: at least 0"),
        ("dataset: d\nevaluation: {ties: lucky}\n", "2: evaluation.ties is 'lucky'; allowed: one of real"),
        ("dataset: [\n", "2: not valid YAML"),
        ("- dataset\n", "1: expected 'key: value' lines"),
        ("dataset: d\nmodel: 3\n", "2: unknown key 'model'"),
        ("dataset: d\ntraining:\n  products: a\n", "3: training.products is now called training.matmul"),
        ("dataset: d\nseed: 1\nseed: 2\n", "3: the key seed stands in line 2 already; allowed is once"),
        ("dataset: d\nmodel: {dimension: 4,\n  dimension: 8}\n", "3: the key model.dimension stands in line"),
        (
            "dataset: d\nmodel: {dimension: 4}\nmodel.dimension: 3\n",
            "3: the key model.dimension is given at .*:2",
        ),
        ("seed: 1\n", "dataset is not given; expected the folder of a data set, which dglkge"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    place = "" if message.startswith("dataset") else "run.yaml:.*"
    with pytest.raises(InputError, match=f"{place}{message}"):
        load_config(written(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dimension", "is not of the form key=value"),
        ("model.dimension=[", "model.dimension is '\\['; allowed: a whole number"),
        ("modle.dimension=3", "did you mean 'model.dimension'"),
        ("training.batch_size=0", "override 'training.batch_size=0': training.batch_size is 0; allowed: at"),
        ("training.products=auto", "override 'training.products=auto': training.products is now"),
        ("imports={a: 1}", r"imports is {'a': 1}; allowed: a value or a list of values"),
    ],
)
def test_mistakes_in_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, ["dataset=d", override])


def field(config: Config, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


TEXTS = {
    "output": "0123 1.10 1e3 0x1F 12:30 1_000 2024-01-02 2024-13-45 yes true .inf none".split(),
    "seed": {"0123": 123, "089": 89, "1_000": 1000, "+5": 5, "'5'": 5, '"0123"': 123},
    "optimizer.lr": {"010": 10.0, "'1e-3'": 0.001, "'5'": 5.0, "1e-3": 0.001, "1.e-3": 0.001, "5": 5.0},
    "checkpoint.init_path": {"": "", "''": "", "~": "", "null": "", "none": "none"},
    "regularizer.name": {"none": "none"},
    "training.profile": {"yes": True, "off": False},
}
QUOTED = {"'0123'": "0123", '"a # b"': "a # b", "runs/übung 1": "runs/übung 1"}


@pytest.mark.parametrize("key", TEXTS)
def test_values_are_read_by_the_type_of_their_field(key: str, tmp_path: Path) -> None:
    """In a file and as an override alike: YAML 1.1 alone reads 0123 as 83 and 12:30 as 750."""
    texts = TEXTS[key] if key != "output" else {**{text: text for text in TEXTS[key]}, **QUOTED}
    section, _, name = key.rpartition(".")
    for text, expected in texts.items():
        line = f"{section}:\n  {name}: {text}" if section else f"{name}: {text}"
        for config in (
            load_config(None, ["dataset=d", f"{key}={text}"]),
            load_config(written(tmp_path, f"dataset: d\n{line}\n")),
        ):
            value = field(config, key)
            assert (type(value), value) == (type(expected), expected), text
    for text in ("a: b", "[a]", "#1", "a #1", "@x", "*x", "!x", "a\\b", "it's", "{", "%d"):
        assert load_config(None, ["dataset=d", f"output={text}"]).output == text  # as it stands


def test_values_of_another_type_are_refused(tmp_path: Path) -> None:
    for key, text, shown, allowed in [
        ("dataset", "", "''", "the folder of a data set, which dglkge data build makes"),
        ("output", "null", "''", "a non-empty text"),
        ("evaluation.split", "", "''", "one of train, valid, test, none"),
        ("seed", "1e3", "'1e3'", "a whole number"),
        ("seed", "0x10", "0x10", "a whole number"),
        ("seed", "5.5", "5.5", "a whole number"),
        ("seed", "yes", "yes", "a whole number"),
        ("optimizer.lr", "1:30", "1:30", "a number"),
        ("optimizer.lr", ".inf", ".inf", "a number"),
        ("negatives.degree_power", "1e999", "'1e999'", "a finite number"),
        ("optimizer.lr", "true", "true", "a number"),
        ("training.profile", "2", "2", "true or false"),
    ]:
        section, _, name = key.rpartition(".")
        line = f"{section}:\n  {name}: {text}" if section else f"{name}: {text}"
        dataset = "" if key == "dataset" else "dataset: d\n"
        with pytest.raises(InputError, match=f"{key} is {shown}; allowed: {allowed}"):
            load_config(None, ["dataset=d", f"{key}={text}"])
        with pytest.raises(InputError, match=f"{key} is {shown}; allowed: {allowed}"):
            load_config(written(tmp_path, f"{dataset}{line}\n"))


DOCUMENTED = {
    "always": """dataset output imports training.num_epochs training.batch_statistics training.profile
        training.device training.lookup training.check_memory training.loggers training.progress
        training.callbacks training.averaging training.early_stopping.patience
        training.early_stopping.min_gain dense.sharding checkpoint evaluation tables""".split(),
    "while epochs": """model.init_from.frozen sampling.order tables.dtype tables.rounding dense.autocast
        dense.compile training.batch_size training.kernels training.compile training.matmul_dtype
        training.synchronous training.max_lag training.edge_chunks training.staleness
        training.wire""".split(),
    "never": """seed checkpoint.init_path evaluation.held_out.fraction evaluation.metric training.objective
        training.objective.label_smoothing training.relation_prediction training.edge_sets training.rows
        model loss regularizer sampling negatives optimizer dense features""".split(),
}
"""The table in docs/checkpoints.md: fields, and sections with the fields that stand nowhere else."""


def test_what_may_change_in_a_resume_is_documented():
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text(encoding="utf-8").splitlines()
    rule_of = {key: rule for rule, keys in DOCUMENTED.items() for key in keys}
    for key, path in ((field.key, field.path) for field in fields()):
        rule = rule_of[key] if key in rule_of else rule_of[key.split(".")[0]]
        old, new = 1, 2
        for name in reversed(path):
            old, new = {name: old}, {name: new}
        refused = [f"{key} was 1, is 2"]
        assert refused_changes(old, new, is_finished=True) == ([] if rule == "always" else refused)
        assert refused_changes(old, new, is_finished=False) == (refused if rule == "never" else [])
        assert refused_changes(old, old, is_finished=True) == refused_changes({}, new, is_finished=True) == []
        (row,) = [line for line in page if line.startswith(f"| {rule}")]
        assert any(f"`{word}`" in row for word in (key, key.split(".")[0], key.split(".")[-1])), key
    with_schedule = {"optimizer": {"schedule": {"name": "StepLR"}}}
    assert refused_changes({"optimizer": {"schedule": None}}, with_schedule, is_finished=True)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = "dataset: d\nmodle: {dimension: 8}\nmodel:\n  dimension: -3\n  max_norm: long\n"
    path = written(tmp_path, f"{text}evaluation: {{ties: realistc}}\ntraining: {{products: float32}}\n")
    with pytest.raises(InputErrors) as caught:
        load_config(path, ["optimizer.lr=0"])
    starts = [
        f"{path}:2: unknown key 'modle.dimension'; did you mean 'model.dimension' or 'model.entity_dime",
        f"{path}:4: model.dimension is -3; allowed: at least 1",
        f"{path}:5: model.max_norm is 'long'; allowed: a number",
        f"{path}:6: evaluation.ties is 'realistc'; allowed: one of realistic, optimistic, pessimistic; did ",
        f"{path}:7: training.products is now called training.matmul_dtype",
        "override 'optimizer.lr=0': optimizer.lr is 0; allowed: a number above 0",
    ]
    problems = sorted(caught.value.problems)
    assert [problem[: len(start)] for problem, start in zip(problems, starts)] == starts
    assert len(problems) == 6 and str(caught.value) == "; ".join(caught.value.problems)


def test_modules_to_import(tmp_path: Path) -> None:
    module = tmp_path / "c.py"
    module.write_text("", encoding="utf-8")
    path = written(tmp_path, f"dataset: d\nimports: [os.path, {module}]\n")
    assert load_config(path).imports == ("os.path", str(module))
    assert load_config(path, [], [str(module), "re", "re"]).imports == ("os.path", str(module), "re")
    assert load_config(None, ["dataset=d", "imports=json"]).imports == ("json",)
    assert load_config(None, ["dataset=d", "imports="]).imports == ()


def test_every_field_has_help_which_lists_the_components() -> None:
    texts = {row[0]: row[3] for row in field_table()}
    assert all(texts.values())
    names = ", ".join(name for name in registry_of("score function"))
    assert texts["model.score_function"] == f"how a triple is scored: {names}" and "complex" in names
    nouns = dict(component_fields())
    assert nouns.items() >= {"loss.name": "loss", "negatives.name": "negative sampler"}.items()
    for noun in nouns.values():
        assert all(registry_of(noun).get(name).help for name in registry_of(noun))


def test_recipes_fit_the_schema_for_editors() -> None:
    """As jsonschema, an implementation that shares nothing with pydantic, finds."""
    checker = jsonschema.Draft202012Validator(Config.model_json_schema())
    recipes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in recipe_files().values()]
    assert len(recipes) > 10 and not [error for recipe in recipes for error in checker.iter_errors(recipe)]
    recipe = recipes[0]
    for section, name, value in [
        ("model", "dimension", 0),
        ("evaluation", "ties", "lucky"),
        ("model", "x", 1),
    ]:
        (error,) = checker.iter_errors({**recipe, section: {**recipe.get(section, {}), name: value}})
        assert list(error.absolute_path) in ([section, name], [section])
    (error,) = checker.iter_errors({**recipe, "nothing": {}})
    assert "nothing" in error.message


def test_the_schema_that_ships_is_that_of_the_code() -> None:
    """Every recipe names it."""
    path = REPOSITORY / "dglkge" / "config" / "schema.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    command = "dglkge config schema > dglkge/config/schema.json"
    assert schema == Config.model_json_schema(), f"the file is not that of the settings: {command}"
    for recipe in recipe_files().values():
        first = recipe.read_text(encoding="utf-8").splitlines()[0]
        named = first.removeprefix("# yaml-language-server: $schema=")
        assert (recipe.parent / named).resolve() == path.resolve()


PLUGIN = """
from pydantic import Field
from dglkge.model.losses import LossSettings, PairwiseLoss
class Steep(PairwiseLoss):
    class Settings(LossSettings):
        slope: float = Field(2.0, gt=0)
    def pairs(self, positive, negative):
        return self.settings.slope * (negative - positive)
"""
PROGRAM = """
import torch
from dglkge.config import load_config
from dglkge.model.losses import LOSSES
loss = load_config(None, ["dataset=d", "loss={name: steep, slope: 3}"]).loss
print(LOSSES.get(loss.name)(loss)(torch.tensor([1.0]), torch.tensor([[2.0, 4.0]])).item())
load_config(None, ["dataset=d", "loss={name: steep, slope: -3, margin: 1}"])
"""


def test_a_loss_of_an_installed_package_has_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "steep_losses.py").write_text(PLUGIN)
    (tmp_path / "steep-1.0.dist-info").mkdir()
    (tmp_path / "steep-1.0.dist-info" / "METADATA").write_text("Name: steep\nVersion: 1.0\n")
    entry = "[dglkge.losses]\nsteep = steep_losses:Steep\n"
    (tmp_path / "steep-1.0.dist-info" / "entry_points.txt").write_text(entry)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "6.0\n")
    assert "loss.slope is -3; allowed: a number above 0; " in done.stderr
    words = "loss.margin has no effect here; it is an option of hinge, margin_ranking, self_adversarial"
    assert words in done.stderr


def test_recipes_and_defaults_are_refused_nothing() -> None:
    for recipe in recipe_files().values():
        refuse(load_config(recipe))
    refuse(load_config(None, ["dataset=d"]), num_machines=3)


def test_all_refusals_come_at_once() -> None:
    words = "dataset=d training.objective=k_vs_all training.edge_sets=[a] training.synchronous=false"
    words += " negatives.mask_known=true training.early_stopping.patience=3"
    with pytest.raises(InputErrors) as caught:
        refuse(load_config(None, words.split()), num_machines=2)
    assert len(caught.value.problems) == 4
