"""Nearest entities against cosines computed one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.errors import InputError
from dglkge.inference import search
from dglkge.inference.search import most_similar
from tests.checkpoint.toy_checkpoint import save_toy, toy_meta, toy_tables


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_against_brute_force(tmp_path, monkeypatch, num_parts, block_bytes):
    meta = toy_meta()
    tables = toy_tables(meta)
    tables["person"].rows.nan_to_num_(posinf=1.0)
    save_toy(tmp_path, meta, tables, num_parts)
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    checkpoint = open_checkpoint(tmp_path)
    ids = torch.tensor([3, 22, 3])
    got = most_similar(checkpoint, checkpoint.shards("person"), "person", ids, k=5)
    rows = tables["person"].rows.double().numpy()
    for id_, answers in zip(ids.tolist(), got):
        cosines = rows @ rows[id_] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[id_])
        cosines[id_] = -2
        expected = np.argsort(-cosines)[:5]
        assert [answer.entity_id for answer in answers] == expected.tolist()
        np.testing.assert_allclose([answer.score for answer in answers], cosines[expected], atol=1e-5)


def test_few_entities_and_rows_of_zeros(tmp_path):
    meta = toy_meta(num_people=3)
    tables = toy_tables(meta)
    tables["person"].rows.zero_()
    save_toy(tmp_path, meta, tables)
    checkpoint = open_checkpoint(tmp_path)
    (answers,) = most_similar(checkpoint, checkpoint.shards("person"), "person", torch.tensor([1]), k=9)
    assert [(answer.entity_id, answer.score) for answer in answers] == [(0, 0.0), (2, 0.0)]
    with pytest.raises(InputError, match="at least 1, got -1"):
        most_similar(checkpoint, checkpoint.shards("person"), "person", torch.tensor([1]), k=-1)
