"""Settings and machines that are refused, by plan and training, before anything is created."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from dglkge.cli import plan
from dglkge.config import Config, load_config
from dglkge.config.refusals import ROWS
from dglkge.data.dataset import Dataset
from dglkge.distributed.world import World
from dglkge.errors import InputError, InputErrors
from dglkge.launch import table_storage
from dglkge.model.device import autocast_problem
from dglkge.planning.host import HostMemory
from dglkge.planning.memory import plan_memory
from dglkge.training import job, script
from dglkge.training.building import checks
from dglkge.training.building.checks import check_config, check_dataset
from tests.toy_kg import toy_dataset
from tests.training.test_dense_parameters import NEEDS_SLICES

ON_DEVICE = ("training.device=cpu_staged", "tables.storage=device")

# Settings | a part of the message, where "..." stands for any text. Lines after "with" have its settings too.
# Without a message the last setting does not fit another one, a row of dglkge/config/refusals.py; so does
# each one after "each". machines=2 stands for a job of two machines.
REFUSED = """
# sampling and negatives
sampling.num_ranges=0 | sampling.num_ranges is 0; allowed: at least 1
sampling.num_ranges=4 sampling.order=global | is global and sampling.num_ranges is 4, where every machine
negatives.num_for_tails=0 negatives.num_for_heads=0
negatives.global_share=0 negatives.in_batch_share=1 negatives.degree_power=1
negatives.name=mixd | unknown negative sampler 'mixd'; did you mean 'mixed'? known: 'all_entities', 'mixed'
negatives.global_share=0.5 | the shares of negatives (0.5, 0.0, 0.0) are not allowed
sampling.num_ranges=2 negatives.name=all_entities
sampling.num_ranges=4 training.objective=one_vs_all
with negatives.name=all_entities
negatives.num_for_heads=7 | negatives.num_for_heads is 7; allowed: at most 0
# objectives
training.objective=k_vs_all sampling.order=machine
with training.objective=one_vs_all
each negatives.mask_known=true negatives.num_for_heads=3 negatives.num_for_tails=3 negatives.degree_power=1
each negatives.name=all_entities training.synchronous=false training.batch_statistics=true
loss.name=bce loss.reduction=sum
loss.name=bce loss.confidences=true
loss.name=margin_ranking training.objective.label_smoothing=0.1 | is 0.1 and loss is margin_ranking, which
model.score_function=none_l2 training.relation_prediction=1
model.score_function=transr training.objective=one_vs_all
with training.objective=k_vs_all
regularizer.name=ivr training.objective=k_vs_all | training.objective is k_vs_all and regularizer is ivr,
loss=softmax loss.adversarial_weights=true
loss.relation_weights.a=1 | loss.relation_weights is a and training.objective is k_vs_all...: empty,
each training.edge_sets=[a] training.rows=touched
# model
model.score_function=transformer model.dimension=10 | a multiple of 4 (heads of the attention), got 10
model.score_function=conve model.reciprocal_relations=false | is false and the score function ConvE...: true
model.entity_dropout=1 | model.entity_dropout is 1; allowed: below 1
model.score_function=rotate model.relation_dropout=0.25
model.score_function=complex 'model.relation_operators={near: translation}' | is near and...; allowed: empty,
model.score_function=complex 'model.entity_dimensions={person: 5}' | is person and...; allowed: empty,
model.global_vectors=true model.reciprocal_relations=true
model.global_vectors=true model.reciprocal_relations=false training.synchronous=false
model.init_from= model.init_from.frozen=true | model.init_from.path is not given
model.init_from.path=v.npy checkpoint.init_path=runs/a
imports=no_such_module | cannot import 'no_such_module' (ModuleNotFoundError: No module named
with model.score_function=diagonal+none_cos
optimizer.name=row_adagrad | optimizer.relations is empty and model.score_function is diagonal+none_cos
each optimizer.relations=row_adagrad optimizer.weight_decay=0.1 model.relation_dropout=0.25
# entity dimensions
with model.score_function=affine_cos
with model.score_function=affine_cos 'model.entity_dimensions={person: 5}'
optimizer.relations=row_adagrad
optimizer.name=row_adagrad | optimizer.relations is empty and...; allowed: sparse_adagrad,
each features.files=[person=x.npy] model.init_from.path=v.npy model.global_vectors=true
each training.objective=one_vs_all training.relation_prediction=1
# features
features= features.use=alone | override 'features.use=alone': features.files is not given
with features.files=[person=x.npy]
training.synchronous=false
model.reciprocal_relations=false model.global_vectors=true
features.use=alone model.init_from.path=v.npy
features.mlp.hidden=3,x | features.mlp.hidden.0 is '3,x'; allowed: a whole number
# regularizer
regularizer.name=none regularizer.weight=0.1 | weight has no effect here; it is an option of auto, dura,
model.score_function=rotate regularizer.weight=0.1 | is 0.1 and regularizer.name is auto, which is none for
regularizer.name=n3 model.score_function=rotate regularizer.relation_ratio=0.5
regularizer.name=ivr model.score_function=rotate | compared by an inner product; got rotate
with regularizer.name=dura
model.score_function=transe_l2 | regularizer.name dura takes ... compared by an inner product; got transe_l2
model.score_function=affine_dot | regularizer.name dura takes ... got affine_dot
# loss and averages
loss.name=self_adversarial loss.adversarial_weights=true | no effect here; it is an option of softmax, bce,
loss.name=hinge loss.adversarial_weights=true loss.reduction=sum
loss.name=bce loss.confidences=true training.relation_prediction=0.5
'loss.relation_weights={a: 1, b: x}' | loss.relation_weights.b is 'x'; allowed: a number
loss.name=hinge loss.margin=0 | loss.margin is 0; allowed: a number above 0
model.score_function=tucker training.averaging=2
model.global_vectors=true model.reciprocal_relations=false training.averaging=2
features.files=[person=x.npy] training.averaging=2
training.device=cpu_staged tables.storage=device training.averaging=2
# optimizer
optimizer.relations.name=adagrad | sparse_adagrad
'optimizer.betas=[0.8, 0.9]' | optimizer.betas has no effect here; it is an option of sparse_adam
'optimizer={name: sparse_adam, betas: [0.9, 1]}' | betas must be two numbers in [0, 1), got
optimizer=sparse_adam optimizer.weight_decay=0 optimizer.decoupled_weight_decay=true
optimizer.clip_norm=1 training.synchronous=false
optimizer.schedule=LambdaLR | LambdaLR
optimizer.schedule=StepLR | optimizer.schedule StepLR with no options: torch refuses it:
'optimizer.schedule={step_size: 1}' | optimizer.schedule.name is not given
optimizer.schedule=ReduceLROnPlateau | evaluation.valid_every_epochs is 0, and it follows the valid split
optimizer.schedule.name=ReduceLROnPlateau optimizer.schedule.every=batch
'optimizer.schedule={name: CyclicLR, base_lr: 0.1, max_lr: 1, cycle_momentum: true}' | only learning rates
'optimizer.schedule={name: OneCycleLR, max_lr: 1, total_steps: 3}' | OneCycleLR
# dense parameters
dense.optimizer=SGD | dense.optimizer is SGD with no options and model.score_function is complex, which
'dense.schedule={name: StepLR, step_size: 1}' | is StepLR with step_size=1 and..., nor are there features
each dense.compile=true dense.autocast=bfloat16 dense.lr=0.1 dense.sharding=fsdp
dense.autocast=bfloat16 features.files=[x.npy] | is bfloat16 and..., which has no module; projections
dense.compile=true features.files=[x.npy] | dense.compile is true and..., which has no module; projections
dense.options=[eps=1] | dense.options is now called dense.optimizer, a map
model.score_function=conex training.relation_prediction=1
with model.score_function=tucker
dense.compile=true | dense.compile is true and the module of...tucker has no forward
dense.schedule=ReduceLROnPlateau | evaluation.valid_every_epochs is 0, and it follows the valid split
dense.schedule.name=ReduceLROnPlateau dense.schedule.every=batch
training.synchronous=false
dense.optimizer=adam | unknown dense.optimizer 'adam'; ...did you mean 'Adam'
'dense.optimizer={name: Adam, betas: [0.9, 2]}' | with betas=...: torch refuses it: Invalid beta
'dense.optimizer={name: Adam, eps: 1e-6, momentum: 1}' | unknown option of dense.optimizer Adam 'momentum'
# training
each checkpoint.local=false checkpoint.keep_best=true training.early_stopping.patience=2
training.relation_prediction=2 training.synchronous=false
training.edge_sets=[a,a] | training.edge_sets is ...; allowed: each name once
training.kernels=reference training.matmul_dtype=bfloat16
training.lookup=kvstore training.staleness=1
training.early_stopping.min_gain=0.1 | training.early_stopping.patience is not given
evaluation.metric=mr | unknown evaluation.metric 'mr'; ... known: 'auc', 'hits@1', 'hits@10'
# devices
with training.compile=true training.device=cpu
training.kernels=auto | training.compile is true... and training.device is cpu; allowed: cuda or cpu_staged
with training.compile=true training.device=cpu_staged
each training.objective=one_vs_all training.kernels=reference
with training.compile=true training.device=cpu_staged tables.storage=device
training.kernels=reference
with tables.storage=device
each training.device=auto training.device=cpu
with tables.storage=device training.device=cpu_staged
each tables.dtype=bfloat16 training.synchronous=false training.staleness=1 training.rows=touched
model.reciprocal_relations=false model.global_vectors=true
features.files=[entity=vectors.npy] | and tables.storage is device, ...: null for features,
sampling.num_ranges=2
# two machines
with machines=2 training.synchronous=false
optimizer.clip_value=1 | optimizer.clip_value is 1 and the number of machines is 2, which do not wait for one
training.staleness=1 | training.staleness is 1 and the number of machines is 2, which...: training.synchronous
sampling.num_ranges=2 | sampling.num_ranges is 2 and the number of machines is 2, which do not wait for one
with machines=2 training.device=cpu_staged
tables.storage=device | tables.storage is device and the number of machines is 2, ...; allowed: memory, disk
"""


def rows_of(text: str) -> Iterator[tuple[list[str], str]]:
    for line in text.strip().replace("|\n", "|").splitlines():
        words, _, message = line.partition("|")
        first, *others = settings = shlex.split(words)
        if first == "#":
            common: list[str] = []
        elif first == "with":
            common = others
        elif first == "each":
            yield from (misfit([*common, setting]) for setting in others)
        elif message:
            yield [*common, *settings], re.escape(message.strip()).replace(r"\.\.\.", ".*")
        else:
            yield misfit([*common, *settings])


def misfit(settings: list[str]) -> tuple[list[str], str]:
    """Return the message of a last setting that does not fit another one."""
    *others, (key, value) = (setting.split("=", 1) for setting in settings)
    other_keys = "|".join(re.escape(key) for key, _ in others) or r"\S+"
    return settings, rf"^{key} is {re.escape(value.strip('[]'))} and ({other_keys}) is "


def refusal(*settings: str) -> list[str]:
    num_machines = 2 if "machines=2" in settings else 1
    sets = ["dataset=x", *(setting for setting in settings if setting != "machines=2")]
    try:
        check_config(load_config(None, sets), World(0, num_machines))
    except InputErrors as error:
        return list(error.problems)
    except InputError as error:
        return [str(error)]
    return []


def test_all_are_refused_by_their_message_and_every_row_of_the_table_has_a_case() -> None:
    lines = []
    for settings, pattern in rows_of(REFUSED):
        problems = refusal(*settings)
        assert any("\n" not in line and re.search(pattern, line) for line in problems), (settings, problems)
        lines += problems
    for row in ROWS:
        reason = f", {row.reason}; allowed: {row.allowed.words.split('{')[0]}"
        assert any(line.startswith(f"{row.field} is ") and reason in line for line in lines), row


def test_neighbours_of_refused_settings_are_taken() -> None:
    assert refusal(*ON_DEVICE) == refusal("training.device=auto") == []
    assert refusal("model.score_function=rescal", "regularizer.name=dura") == []


@pytest.fixture
def plan_error(tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    (tmp_path / "config.yaml").write_text("seed: 1\n")

    def run_plan(*settings: str) -> str:
        sets = [word for setting in settings for word in ("--set", setting)]
        status, _, error = call("plan", tmp_path / "config.yaml", *sets)
        assert status == 2
        return error

    return run_plan


@pytest.mark.parametrize(("settings", "dataset"), [
    pytest.param("model.dimension=7", "", id="a component's check"),
    pytest.param("sampling.num_ranges=4 training.objective=one_vs_all", "nowhere", id="the table"),
    pytest.param("optimizer.schedule=StepLR training.loggers=[wandbb]", "", id="several at once"),
])  # fmt: skip
def test_plan_and_training_refuse_alike(settings, dataset, tmp_path, monkeypatch, plan_error):
    """In the same words, before data or machine are looked at."""
    too_early = MagicMock(side_effect=AssertionError("this comes after the configuration was checked"))
    for name in ("read_dataset_size", "host_memory", "measure_rates"):
        monkeypatch.setattr(plan, name, too_early)
    monkeypatch.setattr(checks, "host_memory", too_early)
    monkeypatch.setattr(job, "with_matmul_dtype", too_early)
    sets = [f"dataset={dataset or toy_dataset()}", f"output={tmp_path / 'run'}", *settings.split()]
    printed = plan_error(*sets)
    with pytest.raises(InputError) as caught, script.join_cluster(load_config(None, sets)):
        pytest.fail("the block must not run")
    problems = getattr(caught.value, "problems", [str(caught.value)])
    assert printed == "".join(f"dglkge: error: {problem}\n" for problem in problems)
    assert not (tmp_path / "run").exists()


def test_the_plan_takes_the_number_of_machines_from_the_data_set(tmp_path, monkeypatch, plan_error):
    """A job has it from ip_config.txt."""
    sets = [f"dataset={toy_dataset(2)}", f"output={tmp_path / 'run'}", *ON_DEVICE]
    monkeypatch.setattr(plan, "measure_rates", MagicMock(side_effect=AssertionError))
    (message,) = refusal("machines=2", *sets)
    assert plan_error(*sets) == f"dglkge: error: {message}\n"


# What depends on this machine: torch, compilers, packages.

TUCKER = "model.score_function=tucker"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu() -> None:
    (message,) = refusal("training.device=cuda")
    reason = r"torch .* (built without CUDA|finds no GPU here)"
    assert re.match(rf"training\.device is cuda and {reason}; allowed here: cpu,", message)


def test_a_machine_without_compiler() -> None:
    from torch._inductor import config

    problem = "and no-such-compiler is not in PATH (the environment variable CXX names another one); allowed"
    with config.patch({"cpp.cxx": ("no-such-compiler -O2",)}):
        (message,) = refusal("training.device=cpu_staged", "training.compile=true")
        (module_message,) = refusal("model.score_function=conve", "dense.compile=true")
    assert f"by a C++ compiler, {problem}" in message
    assert module_message == f"dense.compile is true, which takes a C++ compiler, {problem} here: false"


def test_a_type_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(device_type: str, dtype: torch.dtype) -> str | None:
        return "torch 1 has no float16 autocast on cpu" if dtype == torch.float16 else None

    monkeypatch.setattr(checks, "autocast_problem", problem)
    (message,) = refusal("model.score_function=conve", "dense.autocast=float16")
    words = "dense.autocast is float16 and torch 1 has no float16 .* cpu; allowed here: none or bfloat16"
    assert re.match(words, message)
    assert "has no int8 autocast on cpu" in str(autocast_problem("cpu", torch.int8))


@NEEDS_SLICES
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_that_needs_whole_parameters() -> None:
    (message,) = refusal(TUCKER, "dense.sharding=fsdp", "dense.optimizer=Muon")
    assert message.startswith("dense.optimizer is Muon and dense.sharding is fsdp, which gives each trainer")
    assert message.endswith("that work number by number, e.g. Adam, or dense.sharding replicated")


def test_a_torch_without_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 is."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    (message,) = refusal(TUCKER, "dense.sharding=fsdp")
    reason = f"dense.sharding is fsdp, and torch {torch.__version__} has no FSDP2 on processors"
    assert message == f"{reason}; allowed: replicated, or a newer torch (2.13 is tested)"


def test_packages_of_trackers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "is_installed", lambda package: False)
    (message,) = refusal("training.loggers=[mlflow]")
    assert message.endswith("has mlflow, and mlflow is not installed: pip install 'dglkge[mlflow]'")
    monkeypatch.undo()
    (tmp_path / "runs_of_a_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not checks.is_installed("runs_of_a_tracker") and checks.is_installed("json")


LEADER = World(0, 2, 0, 2, launched=True)


def config(*settings: str) -> Config:
    return load_config(None, [f"dataset={toy_dataset()}", "model.dimension=4096", *settings])


def small_machine(monkeypatch: pytest.MonkeyPatch, memory: int, shared_memory: int) -> None:
    monkeypatch.setattr(checks, "host_memory", lambda output, job: HostMemory(memory, shared_memory, 2**40))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Dataset.open(toy_dataset())
    small_machine(monkeypatch, 2**40, 2**20)
    with caplog.at_level(logging.ERROR), pytest.raises(InputError) as refused:
        check_dataset(config(), dataset, LEADER)
    for words in ("not fit into machine 0", "1.0 MiB are there", "training.check_memory=false"):
        assert words in str(refused.value)
    assert "optimizer state" in caplog.text
    # Only the leader of a machine refuses, and the setting overrules it. A process alone needs none.
    check_dataset(config(), dataset, World(1, 2, 1, 2, launched=True))
    check_dataset(config("training.check_memory=false"), dataset, LEADER)
    check_dataset(config(), dataset, World())
    small_machine(monkeypatch, 2**40, 2**30)
    check_dataset(config(), dataset, LEADER)
    small_machine(monkeypatch, 2**20, 2**40)
    with pytest.raises(InputError, match="of memory are needed"), script.join_cluster(config()):
        pass


def test_files_of_a_process_alone_need_no_memory_but_room(monkeypatch, tmp_path):
    dataset = Dataset.open(toy_dataset())
    (planned,) = plan_memory(config("tables.storage=disk"), dataset.size(), 1, 0)
    small_machine(monkeypatch, planned.needed_bytes(in_files=True) - planned.base_bytes, 0)
    with pytest.raises(InputError, match="of memory are needed"):
        check_dataset(config("checkpoint.background=false"), dataset, World())
    in_files = config("tables.storage=disk", f"tables.folder={tmp_path}")
    check_dataset(in_files, dataset, World())
    monkeypatch.setattr(table_storage, "free_bytes", lambda folder: planned.file_bytes)
    room = f"files take 0.00 GB, and none of {tmp_path} has that room"
    with pytest.raises(InputError, match=room), script.join_cluster(in_files):
        pass
