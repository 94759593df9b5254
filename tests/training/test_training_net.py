"""Drawn configurations, each by the library's fast code, by its plain twin, and on a device in turn."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dglkge
from tests.toy_kg import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import training_net

NUM_DRAWS = 6
"""Of the 40 that the benchmark trains."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("net")
    training_net.make_dataset(made)
    return made


@pytest.mark.parametrize("data", [training_net.PLAIN, training_net.WEIGHTED])
def test_all_code_paths_compute_the_same(folder: Path, data: str) -> None:
    torch.set_num_threads(1)
    num_compared = 0
    draws = training_net.draw(folder, 3 * NUM_DRAWS)
    here = [draw for draw in draws if (training_net.WEIGHTED in str(draw)) == (data != training_net.PLAIN)]
    with dglkge.join_cluster(training_net.configuration(folder, here[0], "joined")) as cluster:
        for number, settings in enumerate(here[:NUM_DRAWS]):
            results = {}
            for name, variant in training_net.variants(folder, settings).items():
                config = training_net.configuration(folder, variant, f"{data}-{number}-{name}")
                losses = training_net.train(config, cluster)
                contents = dict(training_net.contents(Path(config.output)))
                results[name] = {"losses": np.array(losses), **contents}
            expected = results.pop("auto")
            floats = [key for key, values in expected.items() if np.asarray(values).dtype.kind == "f"]
            for name, got in results.items():
                assert set(got) == set(expected), f"{settings} {name}"
                num_compared += len(floats)
                for key in floats:
                    label = f"{key} of {settings} {name}"
                    np.testing.assert_allclose(got[key], expected[key], rtol=2e-3, atol=2e-4, err_msg=label)
    assert num_compared > 20
