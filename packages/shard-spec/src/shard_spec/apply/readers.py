"""Which modules can run with one of their tensors sharded: told from their code, before anything moves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn

from shard_spec._shared.problems import Problem
from shard_spec.apply.forwards.base import ShardedForward
from shard_spec.apply.forwards.embedding import ShardedEmbedding
from shard_spec.apply.forwards.embedding_bag import ShardedEmbeddingBag
from shard_spec.apply.forwards.linear import ShardedLinear

_FORWARDS: tuple[type[ShardedForward], ...] = (ShardedLinear, ShardedEmbedding, ShardedEmbeddingBag)
_BUILDING = frozenset(
    {"__init__", "reset_parameters", "_reset_parameters", "init_weights", "_init_weights", "extra_repr"}
)
_READS_ALL = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "getattr"})
_HINT = (
    "shard_module runs nn.Linear, nn.Embedding and nn.EmbeddingBag; for other modules use tp-styles, or a Sharder, "
    "or plan.apply, which leaves the forward to you"
)


def forward_for(module: nn.Module) -> type[ShardedForward] | None:
    """The sharded forward that can stand in for the one of ``module``, or None."""
    replaced = module.__dict__.get("forward")
    if replaced is not None and not isinstance(replaced, ShardedForward):
        return None
    return next((each for each in _FORWARDS if type(module).forward is each.original), None)


def reader_problem(root: nn.Module, path: str, name: str, fqn: str) -> Problem | None:
    """Why the module at ``path`` cannot run when its tensor ``name`` is sharded; None when it can.

    It can when a sharded forward stands in for its own, or when no code reads the tensor by its name.
    """
    module = root.get_submodule(path)
    forward = forward_for(module)
    if forward is not None and "weight" not in module._parameters:
        return _problem(fqn, f"the weight of this {type(module).__name__} is computed, by a parametrization or a hook")
    if forward is not None and name in forward.tensors:
        parent = _parent(root, path)
        if isinstance(parent, nn.MultiheadAttention):
            return _problem(fqn, "nn.MultiheadAttention reads this weight itself, not through the module that has it")
        return _switch_problem(module, fqn)
    if "forward" in module.__dict__ and forward is None:
        return _problem(fqn, f"the forward of this {type(module).__name__} was replaced on the instance")
    if forward is None and _reads(_kind(module), name):
        return _problem(fqn, f"the forward of {type(module).__qualname__} works with this tensor itself")
    holder = path
    while holder and not _has_forward(type(root.get_submodule(holder))):
        holder, _, attribute = holder.rpartition(".")
        owner = root.get_submodule(holder)
        if _reads(_kind(owner), attribute):
            return _problem(fqn, f"the forward of {type(owner).__qualname__} takes this tensor out of {attribute!r}")
    return None


def _switch_problem(module: nn.Module, fqn: str) -> Problem | None:
    """An option of the module that its sharded forward does not have."""
    found = ""
    if getattr(module, "sparse", False):
        found = f"{type(module).__name__}(sparse=True): a DTensor has no sparse gradient"
    if isinstance(module, nn.EmbeddingBag) and module.scale_grad_by_freq:
        found = "EmbeddingBag(scale_grad_by_freq=True) has no sharded forward"
    return Problem("option-not-shardable", fqn, found=found, hint="turn the option off") if found else None


def _problem(fqn: str, found: str) -> Problem:
    return Problem("module-not-shardable", fqn, found=found, hint=_HINT)


def _parent(root: nn.Module, path: str) -> nn.Module | None:
    return root.get_submodule(path.rpartition(".")[0]) if path else None


def _has_forward(kind: type) -> bool:
    return getattr(kind, "forward", None) is not nn.Module.forward


def _kind(module: nn.Module) -> type:
    return type(module)


@cache
def _reads(kind: type, name: str) -> bool:
    """Whether code of ``kind`` may read the attribute ``name`` while it runs.

    Torch's own modules count as reading all of theirs. Of others, every function is searched for the name, except
    those that only build the module.
    """
    for cls in kind.__mro__:
        if cls in (nn.Module, object):
            continue
        functions = {each: value for each, value in vars(cls).items() if each not in _BUILDING}
        if cls.__module__.startswith("torch.") and "forward" in functions:
            return True
        for value in functions.values():
            if _READS_ALL & (names := set(_names(value))) or name in names:
                return True
    return False


def _names(value: object) -> Iterator[str]:
    """The attribute and global names in a function, and in the functions inside of it."""
    if isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from _names(function)
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType):
        yield from _code_names(value.__code__)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)
        elif isinstance(constant, str):
            yield constant  # getattr(self, "name") spells it as a constant
