"""Negative sampling with any score function in plain torch, with a clock: SETTINGS.json.

Scores are computed as DGL-KE computes them: inner products by one matmul, distances by ``cdist``, moduli and
scaled distances by broadcasting to (B, N, D), TransR by a projection of all negatives for each triple, in
chunks that fit in memory. Gradients are autograd's; torch's sparse Adagrad adds equal rows and updates them.
Negatives are shared by a batch. One process, all cores.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

CHUNK_NUMBERS = 1 << 27
"""Numbers of a (B, N, D) tensor: more queries than fit are scored in parts."""
KINDS = {
    "transe_l1": "l1", "transe_l2": "l2", "distmult": "dot", "complex": "dot", "keci": "dot", "simple": "dot",
    "quate": "dot", "rescal": "dot", "rotate": "modulus", "pairre": "scaled", "triplere": "scaled",
    "transr": "projected_l2", "transr_l1": "projected_l1",
}  # fmt: skip
"""How queries are compared with candidates."""


def relation_dim(name: str, dim: int) -> int:
    """Return the width of a relation's row."""
    widths = {"rotate": dim // 2, "pairre": 2 * dim, "triplere": 3 * dim, "rescal": dim * dim}
    widths.update(dict.fromkeys(("transr", "transr_l1"), dim + dim * dim))
    return widths.get(name, dim)


def complex_product(rows: torch.Tensor, real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """Multiply complex rows, [real parts, imaginary parts], by complex numbers."""
    a, b = rows.chunk(2, -1)
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real], -1)


def hamilton_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply quaternions, rows of four parts."""
    a, b, c, d = left.chunk(4, -1)
    e, f, g, h = right.chunk(4, -1)
    real = a * e - b * f - c * g - d * h
    i, j, k = a * f + b * e + c * h - d * g, a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e
    return torch.cat([real, i, j, k], -1)


def queries(name: str, entities: torch.Tensor, relation: torch.Tensor, tails: bool) -> torch.Tensor:
    """Return what is compared with tails (or heads): given heads (or tails) (B, D), relations (B, Dr)."""
    sign = 1 if tails else -1
    dim = entities.shape[1]
    if name in ("transe_l1", "transe_l2"):
        return entities + sign * relation
    if name == "distmult":
        return entities * relation
    if name in ("complex", "keci"):  # keci with p = 0, q = 1, its default, is ComplEx
        real, imaginary = relation.chunk(2, -1)
        return complex_product(entities, real, sign * imaginary)
    if name == "rotate":
        return complex_product(entities, relation.cos(), sign * relation.sin())
    if name == "simple":
        (head, tail), (forward, backward) = entities.chunk(2, -1), relation.chunk(2, -1)
        left, right = (forward, backward) if tails else (backward, forward)
        return torch.cat([tail * right, head * left], -1) / 2
    if name == "quate":
        parts = relation.unflatten(-1, (4, -1))
        unit = parts / parts.norm(dim=1, keepdim=True)
        signs = torch.tensor([1.0, sign, sign, sign]).view(4, 1)
        return hamilton_product(entities, (unit * signs).flatten(1))
    if name == "rescal":
        return torch.einsum("bi,bij->bj" if tails else "bj,bij->bi", entities, relation.view(-1, dim, dim))
    if name == "pairre":
        return functional.normalize(entities, dim=-1) * relation.chunk(2, -1)[0 if tails else 1]
    if name == "triplere":
        head_map, translation, tail_map = relation.chunk(3, -1)
        return functional.normalize(entities, dim=-1) * (head_map if tails else tail_map) + sign * translation
    matrix = relation[:, dim:].view(-1, dim, dim)  # TransR
    return torch.einsum("bi,bij->bj", entities, matrix) + sign * relation[:, :dim]


def compare(
    name: str, query: torch.Tensor, relation: torch.Tensor, rows: torch.Tensor, tails: bool
) -> torch.Tensor:
    """Score queries (B, D) against candidates (N, D), or (B, 1, D) with one for each query: (B, N)."""
    kind, shared = KINDS[name], rows.dim() == 2
    if shared and kind == "dot":
        return query @ rows.T
    if shared and kind in ("l1", "l2"):
        return -torch.cdist(query, rows, p=float(kind[1]))
    query = query.unsqueeze(1)
    if kind == "dot":
        return (query * rows).sum(-1)
    if kind == "scaled":
        rows = functional.normalize(rows, dim=-1) * relation.chunk(2 if name == "pairre" else 3, -1)[
            -1 if tails else 0
        ].unsqueeze(1)
    if kind.startswith("projected"):
        rows = rows @ relation[:, rows.shape[-1] :].view(-1, rows.shape[-1], rows.shape[-1])
    difference = query - rows
    if kind == "modulus":
        return -difference.unflatten(-1, (2, -1)).norm(dim=-2).sum(-1)
    return -difference.norm(p=2 if kind.endswith("l2") else 1, dim=-1)


def sum_of_losses(name: str, true: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of true scores (B, 1) and scores of negatives (B, N)."""
    if name == "softmax":
        return (torch.cat([true, negative], 1).logsumexp(1) - true[:, 0]).sum()
    # Self-adversarial (Sun et al. 2019, eq. 5): the weights have no gradient.
    weights = negative.detach().softmax(1)
    softplus = functional.softplus
    return (softplus(-true[:, 0]) + (weights * softplus(negative)).sum(1)).sum() / 2


def train_batch(
    batch: torch.Tensor,
    entities: torch.nn.Embedding,
    relations: torch.nn.Embedding,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> None:
    """Train one batch of triples (B, 3), both sides."""
    name, num_negatives = settings["score_function"], settings["num_negatives"]
    whole = KINDS[name] in ("dot", "l1", "l2")
    size = len(batch) if whole else max(1, CHUNK_NUMBERS // (num_negatives * settings["dimension"]))
    optimizer.zero_grad()
    for tails in (True, False):
        negatives = torch.randint(entities.num_embeddings, (num_negatives,))
        for first in range(0, len(batch), size):
            head, relation_id, tail = batch[first : first + size].T
            anchor, answer = (head, tail) if tails else (tail, head)
            relation = relations(relation_id)
            query = queries(name, entities(anchor), relation, tails)
            true = compare(name, query, relation, entities(answer).unsqueeze(1), tails)
            negative = compare(name, query, relation, entities(negatives), tails)
            (sum_of_losses(settings["loss"], true, negative) / len(batch)).backward()
    optimizer.step()


def main() -> None:
    """Train some batches by the settings; write the seconds of each."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["num_threads"])
    torch.manual_seed(settings["seed"])
    everything = np.load(settings["triples"])
    dim, size = settings["dimension"], settings["batch_size"]
    entities = torch.nn.Embedding(int(everything[:, [0, 2]].max()) + 1, dim, sparse=True)
    width = relation_dim(settings["score_function"], dim)
    relations = torch.nn.Embedding(int(everything[:, 1].max()) + 1, width, sparse=True)
    for table in (entities, relations):
        torch.nn.init.normal_(table.weight, std=0.1)
    optimizer = torch.optim.Adagrad([entities.weight, relations.weight], lr=settings["lr"])
    order = np.random.default_rng(settings["seed"]).permutation(len(everything))
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < settings["max_batches"] and time.perf_counter() - started < settings["max_seconds"]:
        number = len(seconds)
        batch = torch.from_numpy(everything[order[number * size : (number + 1) * size]].astype(np.int64))
        start = time.perf_counter()
        train_batch(batch, entities, relations, optimizer, settings)
        seconds.append(time.perf_counter() - start)
    Path(settings["timings"]).write_text(json.dumps({"seconds": seconds, "edges": size}))


if __name__ == "__main__":
    main()
