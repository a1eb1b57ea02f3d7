"""Parameters inside a region that are neither columns nor rows: norms of q and k, sinks, scales per head."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.planners.megatron.blocks import Context, Cut
from shard_spec.planners.megatron.linear import Heads, LinearView, from_library, join

_NORM_OF_A_PROJECTION = re.compile(r"(^|[._])(q|k|query|key)(_?(a_)?(layer_?norm|norm|ln))|norm_(q|k)\b")

_ONE_PER_HEAD = ("sinks",)  # of library classes
# Library classes with the norm after their output projection beside q, k and v.
_AFTER_THE_OUTPUT = {"AlbertAttention": ("LayerNorm.weight", "LayerNorm.bias")}


@dataclass(frozen=True)
class Inner:
    """Parameters beside the linears: sharded with the region, replicated, or doubtful.

    Attributes:
        cuts: one entry per head; each rank holds its own entries.
        replicated: the same for every head; gradients have to be summed over the axis.
        numbers: scalars; replicated if a probe shows that the heads are independent.
        doubts: parameters that may act across all heads, of unknown sharding; they forbid sharding unless a probe
            shows that they act before or after the heads.
    """

    cuts: tuple[Cut, ...] = ()
    replicated: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    doubts: tuple[Problem, ...] = ()


def inner_parameters(context: Context, holder: str, linears: tuple[LinearView, ...], heads: Heads) -> Inner:
    """Classify every other parameter of the module `holder`."""
    in_linears = {id(parameter) for view in linears for parameter in view.module.parameters()}
    cuts, replicated, numbers, doubts = [], [], [], []
    after_the_output = _AFTER_THE_OUTPUT.get(type(context.modules[holder]).__name__, ())
    for name, parameter in context.modules[holder].named_parameters():
        if id(parameter) in in_linears:
            continue
        fqn, shape = join(holder, name), tuple(parameter.shape)
        head_dims = [dim for dim, size in enumerate(shape) if size == heads.num_heads]
        others = [size for dim, size in enumerate(shape) if dim not in head_dims[:1] and size != 1]
        owner = context.modules[join(holder, name.rpartition(".")[0])]
        if parameter.numel() == 1 and heads.num_heads > 1:  # its gradient sums over all heads
            numbers.append(fqn)
        elif isinstance(owner, nn.Linear):
            doubts.append(doubt(fqn, shape))  # a projection that is none of q, k, v and output
        elif heads.num_heads == heads.head_dim and shape == (heads.head_dim,):  # per head, or for all heads?
            if _NORM_OF_A_PROJECTION.search(name):
                replicated.append(fqn)
            elif name in _ONE_PER_HEAD and from_library(context.modules[holder]):
                cuts.append(Cut(fqn, "S(0)"))
            else:
                doubts.append(doubt(fqn, shape))
        elif isinstance(owner, nn.Embedding) and shape[-1] == heads.num_heads:
            cuts.append(Cut(fqn, "S(1)"))  # a bias per bucket and head
        elif head_dims and (not others or (others == [heads.head_dim] and len(shape) > 1)):
            cuts.append(Cut(fqn, f"S({head_dims[0]})"))  # a number, or a vector, per head
        elif shape == (heads.num_kv_heads, heads.head_dim):
            cuts.append(Cut(fqn, "S(0)"))  # a vector per key-value head
        elif from_library(context.modules[holder]) and name in after_the_output:
            continue
        elif others == [heads.head_dim] and len(shape) == 1:
            replicated.append(fqn)  # one vector for all heads
        elif _is_input_norm(name, shape, heads):
            continue
        else:
            doubts.append(doubt(fqn, shape))
    return Inner(tuple(cuts), tuple(replicated), tuple(numbers), tuple(doubts))


def _is_input_norm(name: str, shape: tuple[int, ...], heads: Heads) -> bool:
    """Return True for a norm vector before q, k and v: its size is not that of all heads."""
    return (
        len(shape) == 1
        and shape[0] not in (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim)
        and _NORM_OF_A_PROJECTION.search(name) is None
        and "norm" in name.lower()
    )


def doubt(fqn: str, shape: tuple[int, ...]) -> Problem:
    """Report a parameter that keeps its attention replicated."""
    reason = f"a parameter of shape {shape} beside q, k and v that may act across heads"
    hint = "if every head can be computed apart, write the rules of this attention by hand"
    return Problem("partial-gradient", fqn, found=reason, hint=hint)
