"""Search spaces: what a file says, and what is refused."""

from __future__ import annotations

import re

import pytest

from dglkge.errors import InputError
from dglkge.tuning.space import Parameter, SearchSettings, load_space

GOOD = """
set: {dataset: data/x, model: {dimension: 200}, training.num_epochs: 12}
space:
  optimizer.lr: {low: 1e-2, high: 1.0, log: true}
  model.dimension: {low: 100, high: 400, step: 100}
  loss.name: [softmax, self_adversarial]
  regularizer.weight: [0, 1e-3, 0.1]
  negatives.own_entity: [true, false]
search: {trials: 20, budget: 2.5}
"""


def load(tmp_path, text, overrides=()):
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return load_space(path, overrides)


def test_every_kind_of_parameter(tmp_path):
    space = load(tmp_path, GOOD, ["seed=3"])
    assert space.config is None and space.search == SearchSettings(20, 4, 2.5, 0)
    assert space.parameters == (
        Parameter("optimizer.lr", low=0.01, high=1.0, log=True),
        Parameter("model.dimension", low=100, high=400, step=100),
        Parameter("loss.name", choices=("softmax", "self_adversarial")),
        Parameter("regularizer.weight", choices=(0, 0.001, 0.1)),
        Parameter("negatives.own_entity", choices=(True, False)),
    )
    assert [parameter.is_whole for parameter in space.parameters[:2]] == [False, True]
    values = {"optimizer.lr": 1.5e-05, "negatives.own_entity": False, "regularizer.weight": 0}
    config = space.configuration(values, ["training.num_epochs=2"])
    assert (config.dataset, config.model.dimension, config.seed) == ("data/x", 200, 3)
    assert (config.optimizer.lr, config.training.num_epochs) == (1.5e-05, 2)
    assert config.negatives.own_entity is False
    (tmp_path / "base.yaml").write_text("dataset: data/y\nmodel: {dimension: 50}\n")
    space = load(tmp_path, f"config: {tmp_path}/base.yaml\nspace: {{optimizer.lr: [0.1]}}")
    config = space.configuration({"optimizer.lr": 0.1})
    assert (config.dataset, config.model.dimension) == ("data/y", 50) and space.search == SearchSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "expected 'key: value' lines"),
        ("a: [", "not valid YAML"),
        ("spaces: {}", "unknown key 'spaces'; did you mean 'space'?"),
        ("set: {dataset: x}", "space is not given"),
        ("space: {}", "space is {}; allowed: at least 1"),
        ("space: {optimiser.lr: [1]}", "unknown field 'optimiser.lr'; did you mean 'optimizer.lr'"),
        ("space: {training.num_epochs: [1]}", "training.num_epochs cannot be searched"),
        ("space: {optimizer.lr: 3}", "optimizer.lr is 3; allowed: a list of choices, or low and high"),
        ("space: {optimizer.lr: []}", "is []; allowed: at least 1"),
        ("space: {optimizer.lr: [0.1, 0.1]}", "allowed: each value once"),
        ("space: {optimizer.lr: {low: 1}}", "optimizer.lr: high is not given"),
        ("space: {optimizer.lr: {low: 1, high: 1}}", "allowed: low below high"),
        ("space: {optimizer.lr: {low: 0, high: 1, log: true}}", "with log a low above 0"),
        ("space: {optimizer.lr: {low: 1, high: 2, log: 3}}", "log is 3; allowed: true or false"),
        ("space: {optimizer.lr: {low: 1, high: 2, log: true, step: 1}}", "without log a step above 0"),
        ("space: {optimizer.lr: {low: 1, hihg: 2}}", "unknown key 'hihg'; did you mean 'high'"),
        ("space: {optimizer.lr: {low: -1, high: 2}}", "optimizer.lr is -1.0; allowed: a number above 0"),
        ("space: {loss.name: [softmax]}\nset: {dataset: x, model.dimension: x}", "dimension is 'x'; allowed"),
        ("space: {optimizer.lr: [1]}\nsearch: {trial: 3}", "unknown key 'trial'; did you mean 'trials'"),
        ("space: {optimizer.lr: [1]}\nsearch: {trials: 1.5}", "trials is 1.5; allowed: a whole number"),
        ("space: {optimizer.lr: [1]}\nsearch: {budget: a}", "budget is 'a'; allowed: a number"),
        ("space: {optimizer.lr: [1]}\nsearch: {seed: -1}", "seed is -1; allowed: at least 0"),
        ("config: 3\nspace: {optimizer.lr: [1]}", "config is 3; allowed: a text"),
        ("config: /no.yaml\nspace: {optimizer.lr: [1]}", "cannot read the configuration /no.yaml"),
    ],
)
def test_mistakes(tmp_path, text, words):
    if text.startswith("space: {") and "set:" not in text:
        text = f"set: {{dataset: x}}\n{text}"
    with pytest.raises(InputError, match=re.escape(words)):
        load(tmp_path, text)
