"""The score functions with modules, one triple of float64 rows at a time, with the parameters of seed 0."""

from __future__ import annotations

import functools

import numpy as np
import torch
from scipy.signal import correlate2d

from dglkge.model.kge_model import build_model

Row = np.ndarray


@functools.cache
def parameters(name: str, dim: int) -> dict[str, np.ndarray]:
    """Return the parameters of a score function by name."""
    module = build_model(name, dim, reciprocal=True).module
    assert module is not None
    return {name: values.detach().double().numpy() for name, values in module.named_parameters()}


def numbers(row: Row) -> np.ndarray:
    """Read a row as complex numbers: first half real, second half imaginary."""
    real, imaginary = np.split(np.asarray(row), 2)
    return real + 1j * imaginary


def tucker(head: Row, relation: Row, tail: Row) -> float:
    """Balazevic et al. 2019, eq. 3."""
    return np.einsum("rht,r,h,t", parameters("tucker", len(head))["core"], relation, head, tail)


def normalized(rows: np.ndarray, gain: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Ba et al. 2016: over a row, with the term of torch in the root."""
    mean, variance = rows.mean(-1, keepdims=True), rows.var(-1, keepdims=True)
    return (rows - mean) / np.sqrt(variance + 1e-5) * gain + offset


def features(name: str, head: Row, rows: Row, height: int, padding: int) -> Row:
    """The layers that ConvE and ConEx have alike: filters are normalized together, with a gain for each."""
    tensors = parameters(name, len(head))
    rows = normalized(rows, tensors["normalized.weight"], tensors["normalized.bias"])
    image = np.pad(rows.reshape(height, -1), padding)
    maps = np.stack([correlate2d(image, kernel, "valid") for (kernel,) in tensors["convolution.weight"]])
    maps = normalized(maps.ravel(), 1, 0).reshape(maps.shape)
    maps = maps * tensors["convolution.gain"] + tensors["convolution.offset"]
    outputs = tensors["linear.weight"] @ maps.clip(0).ravel() + tensors["linear.bias"]
    return normalized(outputs, tensors["output.weight"], tensors["output.bias"]).clip(0)


def conve(head: Row, relation: Row, tail: Row) -> float:
    """Dettmers et al. 2018, eq. 1, with the bias of the tail in its first number."""
    size = len(relation)
    height = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    query = features("conve", head, np.concatenate([head[1:], relation]), 2 * height, padding=0)
    return tail[0] + query @ tail[1:]


def conex(head: Row, relation: Row, tail: Row) -> float:
    """Demir and Ngonga Ngomo 2021, eq. 5."""
    factors = features("conex", head, np.concatenate([head, relation]), 4, padding=1)
    return (numbers(factors) * numbers(head) * numbers(relation) * numbers(tail).conj()).sum().real


@functools.cache
def encoder(dim: int) -> torch.nn.Module:
    """Return torch's layer of 4 heads with the parameters of ours."""
    layer = torch.nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0, "gelu", batch_first=True).double()
    tensors = parameters("transformer", dim)
    values = {"self_attn.in_proj_weight": tensors["layers.0.attended"]}
    values["self_attn.in_proj_bias"] = np.zeros(3 * dim)
    names = {"linear1": "inner", "linear2": "outer", "norm1": "first_norm", "norm2": "second_norm"}
    for theirs, ours in {"self_attn.out_proj": "mixed", **names}.items():
        for kind in ("weight", "bias"):
            values[f"{theirs}.{kind}"] = tensors[f"layers.0.{ours}.{kind}"]
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return layer


def transformer(head: Row, relation: Row, tail: Row) -> float:
    """Vaswani et al. 2017 over (query, head, relation), 1 layer."""
    tensors = parameters("transformer", len(head))
    tokens = np.stack([np.zeros(len(head)), head, relation]) + tensors["positions"]
    tokens = normalized(tokens, tensors["normalized.weight"], tensors["normalized.bias"])
    outputs = encoder(len(head))(torch.from_numpy(tokens)[None]).detach().numpy()
    return outputs[0, 0] @ tail


def tcomplex(head: Row, relation: Row, tail: Row) -> float:
    """Lacroix et al. 2020, eq. 3; the last number of the relation is that of the time."""
    moment = numbers(parameters("tcomplex", len(head))["rows"][int(relation[-1])])
    return (numbers(head) * numbers(relation[:-1]) * moment * numbers(tail).conj()).sum().real


def tntcomplex(head: Row, relation: Row, tail: Row) -> float:
    """Lacroix et al. 2020, eq. 4."""
    moment = numbers(parameters("tntcomplex", len(head))["rows"][int(relation[-1])])
    changing, constant = map(numbers, np.split(relation[:-1], 2))
    return (numbers(head) * (changing * moment + constant) * numbers(tail).conj()).sum().real


MODULES = (tucker, conve, conex, transformer, tcomplex, tntcomplex)
DENSE = {function.__name__: function for function in MODULES}
FORWARD_ONLY = {"conve", "conex", "transformer"}
"""Those that predict heads by relation rows of their own only."""
