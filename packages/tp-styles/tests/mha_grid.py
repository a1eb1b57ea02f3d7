"""Every way to call `nn.MultiheadAttention` that the tests and the benchmark compare."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import tp_models as models
import tp_styles as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tp_styles.runtime.redistribute import TPGroup

HEADS, SIZE, BATCH, TARGET, SOURCE = 4, 3, 2, 5, 7
WIDTH = HEADS * SIZE


@dataclass(frozen=True)
class Cell:
    """One way: 2 x 3 x 4 x 2 x 3 x 2 = 288 of them. The two `add_` options are refused."""

    batch_first: bool
    inputs: str  # "self", "cross", "sizes" (kdim and vdim)
    mask: str  # "none", "bool", "float3d", "causal"
    padding: bool
    weights: str  # "no", "mean", "heads"
    bias: bool


def cells() -> Iterator[Cell]:
    """All 288."""
    yield from itertools.starmap(
        Cell,
        itertools.product(
            (False, True),
            ("self", "cross", "sizes"),
            ("none", "bool", "float3d", "causal"),
            (False, True),
            ("no", "mean", "heads"),
            (False, True),
        ),
    )


def check(cell: Cell, mesh: DeviceMesh) -> int:
    """Output, weights and all gradients of one cell against the module alone; returns how many numbers."""
    torch.manual_seed(1)
    sizes = {"kdim": 6, "vdim": 10} if cell.inputs == "sizes" else {}
    module = nn.MultiheadAttention(
        WIDTH,
        HEADS,
        bias=cell.bias,
        batch_first=cell.batch_first,
        **sizes,
    ).double()
    for parameter in module.parameters():  # biases start as zero: a wrong one would not be seen
        nn.init.normal_(parameter, std=0.3)
    alone = copy.deepcopy(module)
    tp.apply_plan(module, mesh, tp.MultiheadAttentionParallel(), check="never")
    length = TARGET if cell.inputs == "self" else SOURCE
    shapes = [(TARGET, WIDTH), (length, sizes.get("kdim", WIDTH)), (length, sizes.get("vdim", WIDTH))]
    qkv = [
        torch.randn((BATCH, *shape) if cell.batch_first else (shape[0], BATCH, shape[1]), dtype=torch.float64)
        for shape in shapes
    ]
    if cell.inputs == "self":
        qkv = [qkv[0]] * 3
    options = _masks(cell, length) | {
        "need_weights": cell.weights != "no",
        "average_attn_weights": cell.weights != "heads",
    }
    results = []
    for attention in (module, alone):
        own = {id(x): x.clone().requires_grad_() for x in qkv}
        out, weights = attention(*(own[id(x)] for x in qkv), **options)
        loss = (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        if weights is not None:
            loss = loss + (weights * torch.linspace(0, 1, weights.numel(), dtype=out.dtype).view(weights.shape)).sum()
        loss.backward()
        results.append((out, weights, [x.grad for x in own.values()]))
    (out, weights, inputs), (out_alone, weights_alone, inputs_alone) = results
    pairs = [(out, out_alone), *zip(inputs, inputs_alone, strict=True)]
    if weights_alone is not None:
        pairs.append((weights, weights_alone))
    axis = TPGroup(mesh)
    gradients = models.full_gradients(module, mesh)
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        pairs.append((gradients[name], parameter.grad))
    del axis
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    return sum(other.numel() for _, other in pairs)


def _masks(cell: Cell, length: int) -> dict[str, object]:
    options: dict[str, object] = {}
    causal = torch.ones(TARGET, length, dtype=torch.bool).triu(1)
    if cell.mask == "bool":
        options["attn_mask"] = torch.rand(TARGET, length) < 0.3
        options["attn_mask"][:, 0] = False  # type: ignore[index]  # no row without a key
    elif cell.mask == "float3d":
        options["attn_mask"] = torch.randn(BATCH * HEADS, TARGET, length, dtype=torch.float64)
    elif cell.mask == "causal":
        options |= {"attn_mask": causal, "is_causal": True}
    if cell.padding:
        padding = torch.zeros(BATCH, length, dtype=torch.bool)
        padding[1, -2:] = True
        if cell.mask == "float3d":  # torch warns where the kinds of the two masks differ
            options["key_padding_mask"] = torch.zeros(BATCH, length, dtype=torch.float64).masked_fill(
                padding, float("-inf")
            )
        else:
            options["key_padding_mask"] = padding
    return options
