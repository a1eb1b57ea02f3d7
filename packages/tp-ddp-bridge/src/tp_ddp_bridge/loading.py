"""Loading a state dict into leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge.view import View


class Loading(dict[str, Any]):
    """One module's part of one ``load_state_dict``: the state dict, which gives this rank's part of what is read from
    it.

    What stands under a view's name is cut when torch asks for it, after the module's own code has renamed or changed
    entries. A value that does not fit is reported under its key, and the leaf is left as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        error_msgs: list[str],
    ) -> None:
        super().__init__(state_dict)
        self.module = module
        self.assign = bool(local_metadata.get("assign_to_params_buffers", False))
        self.error_msgs = error_msgs
        views: dict[str, View] = module.__dict__["_dp_views"]
        self.names = {prefix + name: name for name in views}
        self.before: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        name = self.names.get(key)
        if name is None or not isinstance(value, torch.Tensor):
            return value
        leaf: torch.Tensor | None = self.module._parameters.get(name)
        if leaf is None:
            leaf = self.module._buffers.get(name)
        if leaf is None or isinstance(leaf, DTensor):
            return value
        self.before[name] = leaf
        part = self._part(self.module.__dict__["_dp_views"][name], key, value)
        return leaf.detach() if part is None else part

    def _part(self, view: View, key: str, value: torch.Tensor) -> torch.Tensor | None:
        layout = view.layout
        if value.shape != layout.shape:
            local = (
                " (that is one rank's part: load DTensors or full tensors)" if value.shape == view.local_shape else ""
            )
            self.error_msgs.append(
                f"size mismatch for {key}: the checkpoint has shape {tuple(value.shape)}{local}, the model's global "
                "shape "
                f"is {tuple(layout.shape)} ({layout})."
            )
            return None
        if isinstance(value, DTensor):
            return layout.localize(value)
        part = layout.cut(value)
        return part.clone() if self.assign and not layout.is_replicated else part

    def finish(self) -> None:
        """After ``assign=True``: names that were tied to one leaf are tied to the new one, with the value loaded
        last.
        """
        if not self.assign:
            return
        _assigned[0] += 1
        for name, before in self.before.items():
            after = self.module._parameters.get(name)
            if after is None or after is before or isinstance(after, DTensor):
                continue
            replaced = before.__dict__.get("_dp_assigned")
            if replaced is None:
                before.__dict__["_dp_assigned"] = after
                continue
            with torch.no_grad():
                replaced.copy_(after)
            self.module._parameters[name] = replaced


_assigned = [0]


def times_assigned() -> int:
    """Changes whenever ``load_state_dict(assign=True)`` has given a bridged module other leaves."""
    return _assigned[0]


@contextmanager
def pre_hooks_run(module: nn.Module, state_dict: dict[str, Any], *rest: Any) -> Iterator[None]:
    """Run the module's load-state-dict pre-hooks now, on global tensors, and not again within the block."""
    hooks = module._load_state_dict_pre_hooks
    for hook in hooks.values():
        hook(state_dict, *rest)
    module._load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        module._load_state_dict_pre_hooks = hooks
