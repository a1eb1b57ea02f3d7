"""Modules that run with one of their tensors sharded, decided by their class before anything moves."""

from __future__ import annotations

import torch
from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.legacy.forwards.base import ShardedForward
from shard_spec.legacy.forwards.embedding import ShardedEmbedding
from shard_spec.legacy.forwards.embedding_bag import ShardedEmbeddingBag
from shard_spec.legacy.forwards.linear import ShardedLinear

_FORWARDS: tuple[type[ShardedForward], ...] = (ShardedLinear, ShardedEmbedding, ShardedEmbeddingBag)
_HINT = (
    "shard_module runs nn.Linear, nn.Embedding and nn.EmbeddingBag; for other modules use tp-styles, or a Sharder, "
    "or plan.apply, which leaves the forward to you"
)


def forward_for(module: nn.Module) -> type[ShardedForward] | None:
    """Return the sharded forward that can replace the one of ``module``, or None."""
    replaced = module.__dict__.get("forward")
    if replaced is not None and not isinstance(replaced, ShardedForward):
        return None
    return next((each for each in _FORWARDS if type(module).forward is each.original), None)


def unsupported_forward(root: nn.Module, path: str, name: str, fqn: str) -> Problem | None:
    """Return why the module at ``path`` cannot run with its tensor ``name`` sharded; None when it can.

    A sharded forward uses the parameters that it lists and no other tensor. Any other forward may compute with each
    tensor that it can reach, so a floating-point tensor there is refused. A table of integers or bools is taken: a
    forward that mixes it with plain tensors is refused by torch, and one that does not gets DTensor's own result.
    """
    module = root.get_submodule(path)
    forward = forward_for(module)
    if forward is not None and "weight" not in module._parameters:
        return _problem(fqn, f"the weight of this {type(module).__name__} is computed, by a parametrization or a hook")
    if forward is not None and name in forward.tensors:
        if isinstance(root.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
            return _problem(fqn, "nn.MultiheadAttention reads this weight itself, not through the module that has it")
        return _option_problem(module, fqn)
    if forward is not None:
        return None
    if "forward" in module.__dict__:
        return _problem(fqn, f"the forward of this {type(module).__name__} was replaced on the instance")
    tensor = module._parameters.get(name, module._buffers.get(name))
    assert tensor is not None
    for reader in _enclosing(root, path):
        own = type(reader).forward is not nn.Module.forward
        if own and (_inexact(tensor) or type(reader).__module__.startswith("torch.")):
            return _problem(fqn, f"the forward of {type(reader).__qualname__} may compute with this tensor itself")
        if own:
            return None
    return None


def _enclosing(root: nn.Module, path: str) -> list[nn.Module]:
    """The module at ``path`` and those around it, innermost first."""
    names = path.split(".") if path else []
    return [root.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]


def _inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _option_problem(module: nn.Module, fqn: str) -> Problem | None:
    """An option of the module that its sharded forward does not have."""
    found = ""
    if getattr(module, "sparse", False):
        found = f"{type(module).__name__}(sparse=True): a DTensor has no sparse gradient"
    if isinstance(module, nn.EmbeddingBag) and module.scale_grad_by_freq:
        found = "EmbeddingBag(scale_grad_by_freq=True) has no sharded forward"
    return Problem("unsupported-option", fqn, found=found, hint="turn the option off") if found else None


def _problem(fqn: str, found: str) -> Problem:
    return Problem("module-not-shardable", fqn, found=found, hint=_HINT)
