"""``_sharding_info`` on every parameter of a bridged module.

A leaf says what it is a shard of; a plain parameter says that it is whole on every tensor-parallel rank. Clipping,
replica checks and the styles package read it. Torch loses attributes of parameters when it copies or replaces them, so
the marks are set again whenever that can have happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_ddp_bridge.layout import replicated_layout

if TYPE_CHECKING:
    from tp_ddp_bridge.view import View


@dataclass(frozen=True)
class WholeOn:
    """The mesh on all ranks of which a module's plain parameters are whole.

    Attributes:
        mesh: The largest mesh of the module's DTensors.
    """

    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeOn:
        return self


def mark_leaves(module: nn.Module) -> None:
    """Let every leaf of one module carry the layout it has."""
    views: dict[str, View] = module.__dict__.get("_dp_views", {})
    for name, view in views.items():
        leaf = module._parameters.get(name)
        if leaf is None:
            leaf = module._buffers.get(name)  # type: ignore[assignment]  # a buffer is marked like a parameter
        if leaf is not None and not isinstance(leaf, DTensor) and leaf.shape == view.local_shape:
            leaf._sharding_info = view.layout.info  # type: ignore[attr-defined]  # the house's mark
            leaf._dp_leaf = True  # type: ignore[attr-defined]  # and this package's


def mark_plain(root: nn.Module) -> None:
    """Let every parameter of a bridged root that is no DTensor and no leaf say that it is whole."""
    whole: WholeOn | None = root.__dict__.get("_dp_plain")
    if whole is None:
        return
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor) and not hasattr(parameter, "_sharding_info"):
            parameter._sharding_info = replicated_layout(whole.mesh, parameter).info  # type: ignore[attr-defined]
            parameter._dp_marked = True  # type: ignore[attr-defined]


def mark_plain_after_load(root: nn.Module, incompatible_keys: Any) -> None:
    """Load-state-dict post-hook of a bridged root: ``assign=True`` has put new parameters into place."""
    mark_plain(root)


def is_marked(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` belongs to a bridged module."""
    return "_dp_leaf" in parameter.__dict__ or "_dp_marked" in parameter.__dict__


def unmark_plain(parameter: torch.Tensor) -> None:
    """Take back what ``mark_plain`` said."""
    if parameter.__dict__.pop("_dp_marked", False):
        del parameter._sharding_info  # type: ignore[attr-defined]
