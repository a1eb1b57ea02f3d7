"""Local parameters go on to be parts of global ones, when others replace them; or there is an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tp_styles._torch_compat import is_compiling
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.shard_parameter import ShardParameter, split_of


class _StandIn:
    """Stands in a module's place of a method that does not know of local parameters.

    Args:
        module: The module.
        names: Its local parameters.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module = module
        self.names = names

    def parts(self) -> dict[str, ShardParameter]:
        """The local parameters that still know of what they are parts."""
        found = {name: self.module._parameters.get(name) for name in self.names}
        return {name: part for name, part in found.items() if isinstance(part, ShardParameter)}


class KeepParts(_StandIn):
    """Stands as a module's `_apply`: `to_empty()` and its like make new parameters, which know nothing."""

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        """The module's own `_apply`; new parameters remember what the old ones did."""
        module = self.module
        before = {name: (part, dict(vars(part))) for name, part in self.parts().items()}
        type(module)._apply(module, fn, recurse)
        for name, (old, known) in before.items():
            new = module._parameters.get(name)
            if new is old and type(new) is nn.Parameter:  # swapped: the same object, another inside
                object.__setattr__(new, "__class__", ShardParameter)
                vars(new).update(known)
            elif new is not None and new is not old:
                module._parameters[name] = _remembering(new, known)
        return module


class ResetWhole(_StandIn):
    """Stands as a module's `reset_parameters`: it runs on whole parameters, and their parts are taken.

    Bounds depend on the number of input features: on a part of the columns they would be too wide.
    """

    def __call__(self) -> None:
        """The module's own `reset_parameters`, with the default generator alike on every rank."""
        module: Any = self.module
        kept = {name: part for name, part in self.parts().items() if not part.is_meta}
        try:
            for name, part in kept.items():
                module._parameters[name] = nn.Parameter(part.detach().new_zeros(part._sharding_info.shape))
            type(module).reset_parameters(module)
            whole = {name: module._parameters[name].detach() for name in kept}
        finally:
            module._parameters.update(kept)
        with torch.no_grad():
            for name, part in kept.items():
                mesh = part._sharding_info.mesh
                part.copy_(split_of(part._sharding_info).take(whole[name], mesh.get_local_rank(), mesh.size()))


def _remembering(new: torch.Tensor, known: dict[str, Any]) -> ShardParameter:
    parameter = ShardParameter(new.detach(), new.requires_grad)
    parameter.__dict__.update(known)
    parameter.grad = new.grad
    return parameter


class PartsAreKnown:
    """Pre-hook that is there for the first forward: local parameters are still parts of global ones.

    Args:
        names: Local parameters of the module.
        name: The module's FQN.
    """

    def __init__(self, names: tuple[str, ...], name: str) -> None:
        self.names = names
        self.name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look, and take the hook away.

        Raises:
            PlanError: Somebody has put ordinary parameters in their place.
        """
        if is_compiling():
            return
        check_parts(module, self.names, self.name)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
            del module._forward_pre_hooks[key]


def check_parts(module: nn.Module, names: tuple[str, ...], prefix: str) -> None:
    """See that parameters which were made local know what they are a part of.

    Raises:
        PlanError: Some do not: state dicts and norms would take a part for the whole.
    """
    lost = [name for name in names if _is_lost(module._parameters.get(name))]
    if lost:
        raise PlanError(
            Problem(
                "part-unknown",
                f"{prefix}.{name}".lstrip("."),
                found=f"{type(module._parameters[name]).__name__} in place of a local part",
                hint="what replaced it (FSDP2 does) takes the part for the whole, in state dicts and norms: give it a"
                ' DTensor, which params="dtensor" does for all but fused sections and copied key-value heads',
            )
            for name in lost
        )


def _is_lost(parameter: torch.Tensor | None) -> bool:
    if not isinstance(parameter, nn.Parameter | DTensor):
        return False  # none; or a tensor for the time of a functional call
    return not hasattr(parameter, "_sharding_info")
