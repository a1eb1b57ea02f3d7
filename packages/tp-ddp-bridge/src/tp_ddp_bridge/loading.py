"""Loading a state dict into leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_ddp_bridge.view import View


class Loading:
    """One module's part of one ``load_state_dict``.

    What the state dict gives under a view's name is cut to this rank's part, and torch goes on with the local part. A
    value that does not fit is reported under its key and the leaf is left as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        error_msgs: list[str],
    ) -> None:
        self.module = module
        self.state_dict = state_dict
        self.prefix = prefix
        self.assign = bool(local_metadata.get("assign_to_params_buffers", False))
        self.error_msgs = error_msgs
        self.before: dict[str, torch.Tensor] = {}

    def local_state_dict(self) -> dict[str, Any]:
        """The state dict with local parts under the views' names."""
        local = dict(self.state_dict)
        views: dict[str, View] = self.module.__dict__["_dp_views"]
        for name, view in views.items():
            key = self.prefix + name
            leaf: torch.Tensor | None = self.module._parameters.get(name)
            if leaf is None:
                leaf = self.module._buffers.get(name)
            if (
                key not in local
                or leaf is None
                or isinstance(leaf, DTensor)
                or not isinstance(local[key], torch.Tensor)
            ):
                continue
            self.before[name] = leaf
            part = self._part(view, key, local[key])
            local[key] = leaf.detach() if part is None else part
        return local

    def _part(self, view: View, key: str, value: torch.Tensor) -> torch.Tensor | None:
        layout = view.layout
        if value.shape != layout.shape:
            local = (
                " (that is one rank's part: load DTensors or full tensors)" if value.shape == view.local_shape else ""
            )
            self.error_msgs.append(
                f"size mismatch for {key}: the checkpoint has shape {tuple(value.shape)}{local}, the model's global "
                "shape is "
                f"{tuple(layout.shape)} ({layout})."
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
