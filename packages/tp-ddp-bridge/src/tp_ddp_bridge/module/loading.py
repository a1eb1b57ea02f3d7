"""Load a state dict into leaves: each rank keeps its own shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tp_ddp_bridge.layout import Layout

_assigned: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()
"""Leaf replaced by ``assign=True`` -> its new leaf, for the other names of a tie."""


def leaf_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return what stands in a module under the name of a parameter or buffer."""
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


class ShardingStateDict(dict[str, Any]):
    """One module's entries of a state dict; reading an entry gives this rank's shard.

    An entry under a leaf's name is sharded when torch reads it, after the module's own code has renamed or changed
    entries. A value that does not fit is reported under its key, and the leaf keeps its values.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        error_msgs: list[str],
    ) -> None:
        super().__init__(state_dict)
        self.module = module
        self.layouts = layouts
        self.assign = bool(local_metadata.get("assign_to_params_buffers", False))
        self.error_msgs = error_msgs
        self.names = {prefix + name: name for name in layouts}
        self.before: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        name = self.names.get(key)
        if name is None or not isinstance(value, torch.Tensor):
            return value
        leaf = leaf_of(self.module, name)
        if leaf is None or isinstance(leaf, DTensor):
            return value
        self.before[name] = leaf
        local = self._local(self.layouts[name], leaf.shape, key, value)
        return leaf.detach() if local is None else local  # a mismatch is reported, and changes nothing

    def _local(self, layout: Layout, local_shape: torch.Size, key: str, value: torch.Tensor) -> torch.Tensor | None:
        if value.shape != layout.shape:
            is_local = value.shape == local_shape
            local = " (one rank's shard: load DTensors or full tensors)" if is_local else ""
            self.error_msgs.append(
                f"size mismatch for {key}: the checkpoint has shape {tuple(value.shape)}{local}, the model's global "
                f"shape is {tuple(layout.shape)} ({layout})."
            )
            return None
        if isinstance(value, DTensor):
            return layout.localize(value)
        shard = layout.shard(value)
        # A shard of a full tensor may alias it; an assigned one would keep the full storage alive.
        return shard.clone() if self.assign and not layout.is_replicated else shard

    def finish(self) -> None:
        """Tie leaves again after ``assign=True``: one new leaf, with the value loaded last."""
        if not self.assign:
            return
        for name, before in self.before.items():
            after = self.module._parameters.get(name)
            if after is None or after is before or isinstance(after, DTensor):
                continue
            tied = _assigned.setdefault(before, after)
            if tied is after:
                continue
            with torch.no_grad():
                tied.copy_(after)
            self.module._parameters.update({name: cast(nn.Parameter, tied)})  # not refused as a copy of the present one


@contextmanager
def run_pre_hooks_first(module: nn.Module, state_dict: dict[str, Any], *rest: Any) -> Iterator[None]:
    """Run the module's load-state-dict pre-hooks now, on global tensors, and not again within the block."""
    hooks = module._load_state_dict_pre_hooks
    for hook in hooks.values():
        hook(state_dict, *rest)
    module._load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        module._load_state_dict_pre_hooks = hooks
