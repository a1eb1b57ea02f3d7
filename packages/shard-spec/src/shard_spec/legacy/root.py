"""Hooks of the root module: gradients of full parameters are summed, and what came after the call is compared.

What was added after `shard_module` was not compared: its values may differ between the ranks. It is adopted once all
ranks have the same; without that its gradients would stay each rank's own, and the ranks would drift apart silently.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec import _torch_compat
from shard_spec._shared.consensus import assert_consistent, tensor_hash
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import eager_only
from shard_spec.apply.tensors import LayGradient, SumGradient, is_sharded, replica_problems, summed_over
from shard_spec.legacy.forwards import ShardedForward
from shard_spec.legacy.rows import NOT_RUN, BatchRows


class CompareAndHook:
    """Forward pre-hook of the root: compares the module with the other ranks' and hooks what lacks its hook.

    Copies of a module and parameters that start to need a gradient later get their hooks at the next forward. So do
    parameters that were swapped with others, as ``module.to()`` does under
    ``torch.__future__.set_swap_module_params_on_conversion``: their hooks are listed still and run no more.
    """

    def __init__(self, rows: BatchRows, *, everything: bool, others: Sequence[nn.Module]) -> None:
        """Take the module as it is for compared, from the first `adopt` on.

        The call decided about ``everything`` in it, or only about what runs sharded. ``others`` are modules that a
        Sharder decides about.
        """
        self.rows = rows
        self.everything = everything
        self.others = list(others)
        self._known: dict[str, object] = {}  # FQN to the parameter, or to the module that has the buffer
        self._summed = 0  # checksum of the names of summed gradients since the last forward, in their order
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy has parameters of its own, which no rank has compared and which have lost their hooks.
        return {**vars(self), "_known": {}, "_summed": 0, "_handles": []}

    @eager_only
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Compare; a collective of 64 bytes where the ranks agree."""
        self.rows.totals.clear()
        # Sums of gradients that are not of one parameter, where ranks took other branches, mix them without an error.
        lines = [f"gradients summed since the last forward: {self._summed:08x}"]
        problems: list[Problem] = []
        self._summed = 0
        for fqn, owner, tensor in self._tensors(module):
            forward, name = owner.__dict__.get("forward"), fqn.rpartition(".")[2]
            plain = not is_sharded(tensor)
            if plain and isinstance(forward, ShardedForward) and name in forward.sharded:
                problems.append(
                    Problem(
                        "not-sharded",
                        fqn,
                        found="it was sharded, and is full now",
                        hint="undo() first, or put the sharded parameter back",
                    )
                )
            frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
            line = f"{fqn}: {str(tensor.dtype).removeprefix('torch.')}, {'whole' if plain else 'a shard'}{frozen}"
            # Ranks never compared a new tensor; a buffer may be replaced in its module.
            before = self._known.get(fqn)
            is_new = before is not (tensor if isinstance(tensor, nn.Parameter) else owner)
            if plain and self.everything and is_new:
                problems += replica_problems([owner], fqn)
                line += f", new, with values {tensor_hash(tensor).tolist()}"
            lines.append(line)
        error = PlanError(problems) if problems else None
        hint = "change the module alike on every rank; shard_module(new, ShardingPlan({})) gives all rank 0's values"
        subject = "the forward of a module that shard_module sharded"
        assert_consistent(self.rows.group.group, subject, lines, error, hint=hint, state=NOT_RUN)
        self.adopt(module)

    def adopt(self, module: nn.Module) -> None:
        """Take the module for compared, and hook its parameters; sends nothing."""
        tensors: dict[str, object] = {}
        for fqn, owner, tensor in self._tensors(module):
            tensors[fqn] = tensor if isinstance(tensor, nn.Parameter) else owner
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
                continue
            hook: SumGradient | LayGradient
            if isinstance(tensor, DTensor):
                hook = LayGradient(tuple(tensor.placements))
                ours = any(isinstance(each, LayGradient) for each in _torch_compat.tensor_hooks(tensor))
            else:
                hook = SumGradient(self.rows.group, partial(self._note, fqn))
                ours = any(each.group is self.rows.group.group for each in summed_over(tensor))
            if ours:
                tensor._backward_hooks = tensor._backward_hooks  # registers them again: swap_tensors stops them
            elif not is_sharded(tensor) or _runs_sharded(owner):
                self._handles.append(tensor.register_hook(hook))
        self._known = tensors

    def remove(self) -> None:
        """Take the hooks of parameters away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, name: str) -> None:
        self._summed = zlib.crc32(name.encode(), self._summed)

    def _tensors(self, root: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
        """Each parameter and saved buffer that the call decides about: FQN, the module that has it, the tensor."""
        stack, seen = [("", root)], {id(root), *map(id, self.others)}
        while stack:
            path, module = stack.pop()
            if self.everything or _runs_sharded(module):
                for name, parameter in module._parameters.items():
                    elsewhere = parameter is not None and any(
                        each.group is not self.rows.group.group for each in summed_over(parameter)
                    )
                    if parameter is not None and not elsewhere:
                        yield path + name, module, parameter
            for name, buffer in module._buffers.items() if self.everything else ():
                # Others are what a forward keeps for itself.
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield path + name, module, buffer
            for name, child in reversed(module._modules.items()):
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    stack.append((f"{path}{name}.", child))


def _runs_sharded(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), ShardedForward)
