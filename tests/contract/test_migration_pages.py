"""The pages for users of other programs: complete, and what they name exists."""

from __future__ import annotations

import re

import pytest
import yaml

from dglkge.config import field_table, load_config
from dglkge.training.building.checks import check_config
from tests.contract.source_tree import ROOT
from tests.contract.test_readme import help_of

PAGES = ("from-dglke.md", "from-pbg.md", "from-pykeen.md")

# Schema of PyTorch-BigGraph 1.0.0 (torchbiggraph/config.py), and the two keys of the regularizer after it.
ENTITY_KEYS = ("num_partitions", "featurized", "dimension")
RELATION_KEYS = ("name", "lhs", "rhs", "weight", "operator", "all_negs")
KEYS = """
entities relations dimension init_scale max_norm global_emb comparator bias loss_fn margin regularization_coef
regularizer entity_path edge_paths checkpoint_path init_path checkpoint_preservation_interval num_epochs
num_edge_chunks max_edges_per_chunk bucket_order workers batch_size num_batch_negs num_uniform_negs
disable_lhs_negs disable_rhs_negs lr relation_lr eval_fraction eval_num_batch_negs eval_num_uniform_negs
background_io verbose hogwild_delay dynamic_relations num_machines num_partition_servers
distributed_init_method distributed_tree_init_order num_gpus num_groups_for_partition_server
num_groups_per_sharded_partition_server partition_shard_size half_precision
""".split()


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_every_key_of_pytorch_biggraph_is_mapped_once():
    text = text_of("from-pbg.md").partition("## Every key")[2].partition("## Comparing")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    mapped = [key for cell in cells for key in re.findall("`([^`]+)`", cell)]
    expected = [*KEYS, *(f"entities.X.{key}" for key in ENTITY_KEYS)]
    assert sorted(mapped) == sorted([*expected, *(f"relations.i.{key}" for key in RELATION_KEYS)])


@pytest.mark.parametrize("page", PAGES)
def test_fields_that_a_page_names_exist(page):
    fields = {name for name, *_ in field_table()}
    sections = {name.partition(".")[0] for name in fields if "." in name}
    named = set(re.findall(r"`(?:\[)?([a-z_]+(?:\.[a-z_]+)+)\b[^`]*`", text_of(page)))
    named = {name for name in named if name.partition(".")[0] in sections}
    named = {name for name in named if not name.endswith((".json", ".jsonl"))}
    assert len(named) > 15 and not named - fields


@pytest.mark.parametrize("page", PAGES)
def test_configurations_of_a_page_can_be_trained(page, tmp_path):
    text = text_of(page)
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for settings in re.findall(r"settings=(\{.*?\n    \})", text, re.DOTALL):
        pairs = yaml.safe_load(re.sub(r"#.*", "", settings))
        blocks.append(yaml.safe_dump({"dataset": "d", **pairs}))
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        values = yaml.safe_load(block)
        dotted = [f"{key}={value}" for key, value in values.items() if "." in key]
        path.write_text(yaml.safe_dump({key: value for key, value in values.items() if "." not in key}))
        check_config(load_config(str(path), dotted))


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page):
    """In tables: an option of `dglkge COMMAND`."""
    pairs = re.findall(r"`(--[\w-]+)`(?:, `--[\w-]+`)* of `dglkge (\w+)`", text_of(page))
    assert not [pair for pair in pairs if pair[0] not in help_of("dglkge", pair[1])]
