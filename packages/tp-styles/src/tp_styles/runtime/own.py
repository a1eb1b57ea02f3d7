"""Modules whose own forwards run, on local parameters."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from tp_styles.runtime.arguments import move_inputs, move_outputs
from tp_styles.runtime.axis import Axis
from tp_styles.runtime.embedding import RowLookup
from tp_styles.runtime.forward import Forward, Output, only
from tp_styles.runtime.linear import RowLinear
from tp_styles.runtime.moves import Move
from tp_styles.runtime.parameters import computing_parameter, refuse_computed
from tp_styles.runtime.random_ops import RandomOps
from tp_styles.runtime.shard_parameter import ShardParameter
from tp_styles.spec import Flow, StyleSpec, describe
from tp_styles.transfer import normalized


class OwnForward(Forward):
    """The module's own forward, on local parameters."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.names = describe(module).arguments
        self.leaves = [
            None if flow is None else Output(flow, axis, f"{name} ->", local=spec.local_output, fresh=False)
            for flow in spec.outputs
        ]
        self.places = [(*_owner(module, key), key) for key, _ in spec.parameters]
        self.specs = dict(spec.parameters)
        self.kind = type(module)
        owners = {id(owner): owner for owner, _, _ in self.places}
        self.kinds = [(owner, type(owner)) for owner in owners.values()]
        self.random = RandomOps(axis, module.modules()) if spec.shards_randomness else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with its parameters replaced by local ones for as long as it runs."""
        known = self._known_sizes(args, kwargs)
        moved_args, kwargs = move_inputs(self.moves, self.names, args, kwargs)
        return self.finish(self.run_inside(moved_args, kwargs), known)

    def _known_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
        """Global sizes of dims that the module sees as shards, from inputs that are DTensors."""
        known = {}
        for name, move in self.moves.items():
            index = self.names.index(name)
            value = args[index] if index < len(args) else kwargs.get(name)
            if isinstance(value, DTensor) and isinstance(wanted := normalized(move.flow.wanted, value.dim()), Shard):
                known[wanted.dim] = value.shape[wanted.dim]
        return known

    def run_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The class's own forward, on local parameters."""
        kept: list[tuple[nn.Module, str, Any]] = []
        views = [(owner, type(owner), kind) for owner, kind in self.kinds if type(owner) is not kind]
        try:
            for owner, _, kind in views:  # a subclass that shows local parameters as DTensors: not to this forward
                object.__setattr__(owner, "__class__", kind)
            for owner, attribute, key in self.places:
                found = owner._parameters.get(attribute)
                if found is None:
                    refuse_computed(owner, attribute)
                    continue
                local = computing_parameter(owner, attribute, self.axis, self.specs[key])
                self.parts.check(key, local)
                if isinstance(local, ShardParameter):
                    local = local.view_as(local)  # a plain tensor, whose `size()` is that of the shard
                if local is not found:
                    kept.append((owner, attribute, found))
                    owner._parameters[attribute] = local  # type: ignore[assignment]  # a tensor for the time of the call
            if self.random is not None:
                self.random.begin()
                self.random.enter()
            return self.kind.forward(self.module, *args, **kwargs)
        finally:
            if self.random is not None:
                self.random.end()
            for owner, attribute, found in kept:
                owner._parameters[attribute] = found
            for owner, view, _ in views:
                object.__setattr__(owner, "__class__", view)

    def finish(self, output: Any, known: dict[int, int] | None = None) -> Any:
        """Outputs in the layouts that were asked for, in the structure that they came in."""
        if not self.leaves:
            return output
        return move_outputs(self.leaves, output, self.name, known)


class OwnRowEmbedding(OwnForward):
    """An embedding with a forward of its own, by rows: where it looks up its weight, it gets the whole lookup."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.lookup = RowLookup(module, spec, axis, name)
        self.sum = Move(Flow(Partial(), Replicate()), axis, f"{name} lookup", fresh=True)

    def run_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The class's own forward, with lookups that are summed over the ranks."""
        with _Lookups(self):
            return super().run_inside(args, kwargs)


class _Lookups(TorchFunctionMode):
    """Replaces `torch.nn.functional.embedding` on the module's own weight for the time of its forward."""

    def __init__(self, owner: OwnRowEmbedding) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and len(args) >= 2 and args[1] is self.owner.module._parameters["weight"]:
            return self.owner.sum(self.owner.lookup(args[0], cast(torch.Tensor, args[1])))
        return func(*args, **(kwargs or {}))


class OwnRowLinear(OwnForward):
    """A linear layer with a forward of its own, by input features: it runs without its bias, which is added after."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: Axis, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.row = RowLinear(module, spec, axis, name)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The module's forward on this rank's features, summed, with the bias."""
        args, kwargs = move_inputs(self.moves, self.names, args, kwargs)
        bias = self.module._parameters.get("bias")
        try:
            if bias is not None:
                zeros = torch.zeros_like(bias.to_local() if isinstance(bias, DTensor) else bias)
                self.module._parameters["bias"] = zeros  # type: ignore[assignment]  # for the time of the call
            produced = self.run_inside(args, kwargs)
        finally:
            if bias is not None:
                self.module._parameters["bias"] = bias
        return self.row.finish(produced, self.row.parameter("bias"))


class DividedInput(OwnForward):
    """The module's own forward on a part of its first input, for outputs that are summed over the ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first input divided by the number of ranks."""
        return self.run_inside((args[0] / self.axis.size, *args[1:]), kwargs)


class LatentKV(OwnForward):
    """The module's own forward; the gradient of its last output features is summed over the ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, unchanged."""
        output = self.run_inside(args, kwargs)
        width = only(self.spec).width
        through, direct = output.split([output.shape[-1] - width, width], dim=-1)
        leave = self.leaves[0]
        assert leave is not None
        return torch.cat([through, leave.move(direct)], dim=-1)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
