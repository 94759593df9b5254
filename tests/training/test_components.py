"""``dglkge plan`` and training refuse the same configurations in the same words, before they look further."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dglkge.cli import plan
from dglkge.cli.main import main
from dglkge.config import load_config
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.training import job, join
from dglkge.training.building import checks
from dglkge.training.building.checks import check_config
from tests import warm
from tests.toy_kg import REPOSITORY, toy_dataset

REFUSED = [
    (
        ["sampling.num_ranges=4", "training.objective=one_vs_all"],
        "training.objective is one_vs_all and sampling.num_ranges is 4, where negatives and "
        "batches keep to the ranges of a bucket; allowed: negative_sampling, ",
    ),
    (
        ["sampling.num_ranges=2", "negatives.name=all_entities"],
        "negatives.name is all_entities and sampling.num_ranges is 2, where negatives and "
        "batches keep to the ranges of a bucket; allowed: mixed, ",
    ),
    (["sampling.num_ranges=0"], "sampling.num_ranges is 0; allowed: at least 1"),
    (
        ["sampling.bucket_order=spiral"],
        "sampling.bucket_order is 'spiral'; allowed: one of inside_out, outside_in, affinity, random, "
        "hilbert",
    ),
    (
        ["model.score_function=complex", "model.dimension=7"],
        "the dimension must be even (half real, half imaginary), got 7",
    ),
    (
        ["model.score_function=rotate", "model.dimension=7"],
        "the dimension must be even (half real, half imaginary), got 7",
    ),
    (["model.score_function=complx"], "unknown score function 'complx'; did you mean 'complex'? known: "),
    (["loss.name=softmx"], "unknown loss 'softmx'; did you mean 'softmax'? known: "),
    (["optimizer.name=adam"], "unknown optimizer 'adam'; "),
    (
        ["regularizer.name=n2"],
        "unknown regularizer 'n2'; known: 'auto', 'dura', 'f2', 'ivr', 'lp', 'n3', 'none'",
    ),
    (["regularizer.name=n2", "regularizer.weight=0.1"], "unknown regularizer 'n2'; known"),
    (
        ["regularizer.name=lp", "regularizer.weight=0.1", "regularizer.p=0.5"],
        "regularizer.p is 0.5; allowed: at least 1",
    ),
    (
        ["regularizer.name=none", "regularizer.weight=0.1"],
        "regularizer.weight has no effect here; it is an option of auto, dura, f2, ivr, lp, n3",
    ),
    (
        ["model.score_function=rotate", "regularizer.weight=0.1"],
        "regularizer.weight is 0.1 and regularizer.name is auto, which is none for model.score_function ",
    ),
    (
        ["regularizer.name=n3", "regularizer.product_ratio=2"],
        "regularizer.product_ratio has no effect here; it is an option of dura, ivr",
    ),
    (
        ["regularizer.name=dura", "regularizer.relation_ratio=0.5"],
        "regularizer.relation_ratio has no effect here; it is an option of f2, ivr, lp, n3",
    ),
    (
        ["regularizer.name=dura", "model.score_function=transe_l2"],
        "it is defined for products of entity and relation compared by an inner product; got transe_l2",
    ),
    (
        ["regularizer.name=ivr", "regularizer.weight=0.1", "model.score_function=rotate"],
        "it is defined for products of entity and relation compared by an inner product; got rotate",
    ),
    (
        ["regularizer.name=ivr", "training.objective=k_vs_all"],
        "training.objective is k_vs_all and regularizer is ivr, which multiplies the rows of a "
        "query with that of its answer; allowed: negative_sampling, one_vs_all, ",
    ),
    (
        ["regularizer.name=n3", "regularizer.relation_ratio=0.5", "model.score_function=rotate"],
        "regularizer.relation_ratio is 0.5 and model.score_function is rotate, whose relations "
        "are phases, and have no penalty; allowed: 1, ",
    ),
    (
        ["model.relation_dropout=0.25", "model.score_function=rotate"],
        "model.relation_dropout is 0.25 and model.score_function is rotate, whose relations are phases: an "
        "angle cannot be scaled; allowed: 0",
    ),
    (["model.entity_dropout=1"], "model.entity_dropout is 1.0; allowed: below 1"),
    (
        ["regularizer.name=n3", "regularizer.entity_ratio=-1"],
        "regularizer.entity_ratio is -1.0; allowed: at least 0",
    ),
    (
        ["loss.reduction=sum"],
        "loss.reduction has no effect here; it is an option of bce, hinge, logistic, margin_ranking, squared",
    ),
    (
        ["loss.name=self_adversarial", "loss.adversarial_weights=true"],
        "loss.adversarial_weights has no effect here; it is an option of softmax, bce, hinge, logistic, ",
    ),
    (
        ["loss.name=hinge", "loss.adversarial_weights=true", "loss.reduction=sum"],
        "loss.reduction is sum and loss.adversarial_weights is true, and the weights of a "
        "query's negatives sum to 1; allowed: mean, ",
    ),
    (
        ["training.objective=k_vs_all", "loss.adversarial_weights=true"],
        "loss.adversarial_weights is true and loss is softmax, which weights no negatives over all "
        "candidates; allowed: false, ",
    ),
    (
        ["loss.confidences=true"],
        "loss.confidences has no effect here; it is an option of bce, hinge, logistic, self_adversarial, ",
    ),
    (
        ["loss.confidences=true", "loss.name=bce", "training.objective=one_vs_all"],
        "loss.confidences is true and training.objective is one_vs_all, which does not take it; "
        "allowed: false, ",
    ),
    (
        ["loss.confidences=true", "loss.name=bce", "training.relation_prediction=0.5"],
        "training.relation_prediction is 0.5 and loss.confidences is true, and its softmax has "
        "no label of one answer; allowed: 0, ",
    ),
    (
        ["loss.relation_weights={a: 1, b: x}"],
        "loss.relation_weights is {'a': 1, 'b': 'x'}; allowed: a mapping, {NAME: VALUE}",
    ),
    (["loss.relation_weights.a=-1"], "loss.relation_weights.a is -1.0; allowed: at least 0"),
    (["loss.relation_weights=[a]"], "loss.relation_weights is ['a']; allowed: a mapping, {NAME: VALUE}"),
    (
        ["loss.relation_weights.a=1", "training.objective=k_vs_all"],
        "loss.relation_weights is a and training.objective is k_vs_all, which takes no weights; "
        "allowed: empty, ",
    ),
    (
        ["negatives.num_for_heads=0", "negatives.num_for_tails=0"],
        "negatives.num_for_heads is 0 and negatives.num_for_tails is 0, so no side is trained; "
        "allowed: 0 for one of them, ",
    ),
    (
        ["negatives.mask_known=true", "training.objective=one_vs_all"],
        "negatives.mask_known is true and training.objective is one_vs_all, which has no sampled "
        "negatives; allowed: false, ",
    ),
    (
        ["negatives.degree_power=1", "negatives.global_share=0", "negatives.in_batch_share=1"],
        "negatives.degree_power is 1 and negatives.in_batch_share is 1, and negatives of the "
        "batch are drawn in ",
    ),
    (
        ["negatives.name=all_entities", "negatives.num_for_heads=7"],
        "negatives.num_for_heads is 7; allowed: at most 0",
    ),
    (
        ["negatives.name=all_entities", "negatives.degree_power=1"],
        "negatives.degree_power has no effect here; it is an option of mixed",
    ),
    (
        ["negatives.name=all_entities", "negatives.own_entity=false"],
        "negatives.own_entity has no effect here; it is an option of mixed",
    ),
    (
        ["sampling.order=machine", "training.objective=k_vs_all"],
        "sampling.order is machine and training.objective is k_vs_all, whose batches are queries in an order "
        "of the whole graph; allowed: auto, global",
    ),
    (
        ["sampling.order=global", "sampling.num_ranges=4"],
        "sampling.order is global and sampling.num_ranges is 4, where every machine walks over "
        "ranges of its own; allowed: auto, machine, ",
    ),
    (["sampling.order=local"], "sampling.order is 'local'; allowed: one of auto, machine, global"),
    (["loss.name=hinge", "loss.margin=0"], "loss.margin is 0.0; allowed: a number above 0"),
    (
        ["negatives.name=mixd"],
        "unknown negative sampler 'mixd'; did you mean 'mixed'? known: 'all_entities', 'mixed'",
    ),
    (["imports=no_such_module"], "cannot import 'no_such_module' (ModuleNotFoundError: No module named "),
    (
        ["training.kernels=reference", "training.matmul_dtype=bfloat16"],
        "training.matmul_dtype is bfloat16 and training.kernels is reference, which computes in "
        "float32; allowed: float32, auto, ",
    ),
    (["negatives.global_share=0.5"], "the shares of negatives (0.5, 0.0, 0.0) are not allowed"),
    (
        ["training.lookup=kvstore", "training.staleness=1"],
        "training.staleness is 1 and training.lookup is kvstore, and only lookup exchange reads "
        "ahead; allowed: 0, ",
    ),
]


def forbidden(*arguments, **options):
    raise AssertionError("this comes after the configuration was checked")


@pytest.mark.parametrize("overrides, words", REFUSED, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("dataset", ["", "nowhere"], ids=["dataset", "no dataset"])
def test_plan_and_training_refuse_alike(overrides, words, dataset, tmp_path, monkeypatch, capsys):
    given = [f"dataset={dataset or toy_dataset()}", f"output={tmp_path / 'run'}", *overrides]
    for module, name in (
        (plan, "read_dataset_size"),
        (plan, "host_memory"),
        (plan, "measure_rates"),
        (checks, "host_memory"),
        (job, "with_matmul_dtype"),
    ):
        monkeypatch.setattr(module, name, forbidden)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    words_of_plan = ["plan", str(tmp_path / "config.yaml")]
    for one in given:
        words_of_plan += ["--set", one]
    assert main(words_of_plan) == 2
    said = capsys.readouterr().err
    with pytest.raises(InputError) as caught, join.join_cluster(load_config(None, given)):
        pytest.fail("the block must not run")
    assert said == f"dglkge: error: {caught.value}\n"
    assert words in said
    assert not (tmp_path / "run").exists()


def test_several_machines_that_do_not_wait(tmp_path, monkeypatch, capsys):
    """The plan takes the number of machines from the data set, a job from ip_config.txt."""
    given = [f"dataset={toy_dataset(2)}", "training.synchronous=false", f"output={tmp_path / 'run'}"]
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    monkeypatch.setattr(plan, "measure_rates", forbidden)
    words = ["plan", str(tmp_path / "config.yaml")]
    for one in given:
        words += ["--set", one]
    assert main(words) == 2
    said = capsys.readouterr().err
    with pytest.raises(InputError) as caught:
        check_config(load_config(None, given), World(0, 2))
    assert said == f"dglkge: error: {caught.value}\n"
    assert (
        "training.synchronous is false and the number of machines is 2, and machines share no memory" in said
    )


def test_no_trainers_are_no_plan(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n")
    assert main(["plan", str(tmp_path / "config.yaml"), "--num_trainers", "0"]) == 2
    assert "--num-trainers must be at least 1, and 1 where --num-servers is 0" in capsys.readouterr().err


def test_a_script_ends_with_status_2_and_leaves_nothing(tmp_path):
    command = [*warm.python(), str(REPOSITORY / "examples" / "train.py")]
    command += ["--set", f"dataset={toy_dataset()}", "--set", f"output={tmp_path / 'run'}"]
    command += ["--set", "model.dimension=7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == ("train.py: error: the dimension must be even (half real, half imaginary), got 7\n")
    assert not (tmp_path / "run").exists()


def test_a_plan_needs_no_dgl(tmp_path):
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n")
    code = (
        "import sys; from dglkge.cli.main import main; from dglkge.cli import plan; "
        "plan.MEASURED_SECONDS = 0.001; "
        f"status = main(['plan', {str(tmp_path / 'config.yaml')!r}]); "
        "sys.exit(status if 'dgl' not in sys.modules else 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
