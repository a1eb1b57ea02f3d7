"""Forwards of sharded modules: local compute between explicit collectives.

Each class is set as the instance attribute `forward` of its module. They are picklable and copy with the module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from tp_styles._shared.dtensor import as_dtensor
from tp_styles._shared.shard_values import plain
from tp_styles.problems import Problem, StyleInputError
from tp_styles.runtime.dropout import draws, rates_of, tp_rng
from tp_styles.runtime.parameters import (
    ShardCheck,
    local_parameters,
    refuse_computed,
)
from tp_styles.runtime.redistribute import Redistribute, TPGroup
from tp_styles.values import Redistribution, StyleSpec, describe, normalized


def move_inputs(
    moves: dict[str, Any], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply each move to its argument, by position or by name; others are kept."""
    moved = list(args)
    kwargs = dict(kwargs)
    for name, move in moves.items():
        index = names.index(name) if name in names else -1
        if 0 <= index < len(moved):
            moved[index] = _moved(move, moved[index], name)
        elif name in kwargs:
            kwargs[name] = _moved(move, kwargs[name], name)
    return tuple(moved), kwargs


def _moved(move: Callable[[torch.Tensor], torch.Tensor], value: Any, name: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise StyleInputError(
            Problem("wrong-type", name, found=str(type(value)), hint="the style lays out a tensor here"),
            f"Tensor parallel module expects torch.Tensor or DTensor input but received {type(value)}!",
        )
    return move(value)


def move_outputs(leaves: list[Any], output: Any, name: str, known: dict[int, int] | None = None) -> Any:
    """Apply each output's move, keeping the structure: a tensor, tuple, list or ordered dict."""
    if isinstance(output, torch.Tensor):
        _check_count(leaves, 1, name)
        return output if leaves[0] is None else leaves[0](output, known)
    if isinstance(output, dict):
        _check_count(leaves, len(output), name)
        values = [_leave(leave, value, known) for leave, value in zip(leaves, output.values(), strict=True)]
        moved = dict(zip(output, values, strict=True))
        return moved if type(output) is dict else type(output)(moved)  # transformers' ModelOutput
    if isinstance(output, tuple | list):
        _check_count(leaves, len(output), name)
        values = [_leave(leave, value, known) for leave, value in zip(leaves, output, strict=True)]
        if hasattr(output, "_fields"):  # a namedtuple
            return type(output)(*values)
        return type(output)(values)
    raise StyleInputError(
        Problem("wrong-type", f"{name} ->", found=str(type(output)), hint="an output has to be a tensor")
    )


def _leave(leave: Any, value: Any, known: dict[int, int] | None) -> Any:
    return value if leave is None or value is None else leave(value, known)


def _check_count(leaves: list[Any], count: int, name: str) -> None:
    if len(leaves) != count:
        raise StyleInputError(
            Problem(
                "argument-count",
                f"{name} ->",
                found=f"{count} outputs",
                hint=f"the style lays out {len(leaves)}; give None for an output to leave alone",
            ),
            "module outputs and output_layouts should have same length!",  # torch's message
        )


class Forward:
    """Base of all forwards: moves inputs, computes locally, moves outputs.

    Args:
        module: Module of this forward.
        spec: Decision of its style.
        axis: Its ranks.
        name: The module's FQN, for errors.

    Attributes:
        is_checked_alone: Outside of all regions the module is compared with its original by itself: its code is not
            ours. A plain linear layer is ours.
    """

    is_checked_alone = True

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        self.module = module
        self.spec = spec
        self.axis = axis
        self.name = name
        self.moves = {key: Redistribute(flow, axis, f"{name}({key})") for key, flow in spec.inputs}
        summed = Redistribution(Replicate(), Replicate(), gradient=Partial())
        self.sums = {  # copies among the rows of a split are summed alone
            key: (Redistribute(replace(summed, split=declared.split), axis, f"{name}.{key}"), declared.divide_by_tp)
            for key, declared in spec.parameters
            if declared.sum_gradient
        }
        self.parts = ShardCheck(module, spec, axis, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        raise AssertionError("subclasses compute")

    def install_below(self) -> list[tuple[nn.Module, dict[str, Any], list[Callable[[], None]]]]:
        """Change modules below; return each with its former attributes, and functions that remove what was added."""
        return []

    def parameter(self, name: str) -> torch.Tensor | None:
        """Return a local parameter for the computation."""
        return self.parameter_of(self.module, name, name)

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the local parameters of a linear layer for the computation."""
        if self.sums:  # one at a time: some gradients are summed
            weight, bias = self.parameter("weight"), self.parameter("bias")
        else:
            weight, bias = local_parameters(self.module, "weight", "bias")
            self.parts.check(("weight", "bias"), (weight, bias))
        assert weight is not None
        return weight, bias

    def parameter_of(self, owner: nn.Module, attribute: str, name: str) -> torch.Tensor | None:
        """Return a parameter of a module below; `name` is its name from here."""
        (parameter,) = parameters = local_parameters(owner, attribute)
        self.parts.check((name,), parameters)
        if parameter is not None:
            parameter = plain(parameter)  # a module's own code may take the size and the elements of its shard
        if parameter is None or name not in self.sums:
            return parameter
        sum_gradient, divide_by_tp = self.sums[name]
        summed = sum_gradient(parameter)
        return summed / self.axis.size if divide_by_tp else summed  # an equal share on each rank


class Output:
    """Conversion of one local output to its target layout and form."""

    def __init__(self, flow: Redistribution, axis: TPGroup, name: str, *, local: bool, inplace_ok: bool) -> None:
        self.flow = flow
        self.axis = axis
        self.name = name
        self.local = local
        self.move = Redistribute(flow, axis, name, inplace_ok=inplace_ok, uneven=not local)

    def __call__(self, produced: torch.Tensor, known: dict[int, int] | None = None) -> torch.Tensor:
        """Return the output; `known` has global sizes of sharded dims, if the inputs give them."""
        moved = self.move(produced)
        return moved if self.local else self.to_dtensor(moved, produced.shape, known)

    def to_dtensor(self, moved: torch.Tensor, produced: torch.Size, known: dict[int, int] | None) -> torch.Tensor:
        """Return the moved output as a DTensor; `produced` is the local shape before the move."""
        source = normalized(self.flow.src, len(produced))
        outputs = list(produced)
        if isinstance(source, Shard):
            if source.dim == len(produced) - 1 and self.flow.width:
                outputs[source.dim] = self.flow.width
            elif known and source.dim in known:
                outputs[source.dim] = known[source.dim]
            else:
                self.move.check_even(produced[source.dim], source.dim)
                outputs[source.dim] = produced[source.dim] * self.axis.size
        return as_dtensor(moved, self.axis.mesh, (normalized(self.flow.dst, moved.dim()),), torch.Size(outputs))


def only(spec: StyleSpec) -> Redistribution:
    """Return the flow of the first output."""
    flow, *_ = spec.outputs
    assert flow is not None
    return flow


class ColumnLinear(Forward):
    """`nn.Linear` with some of its output features on this rank."""

    is_checked_alone = False

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        ((_, self.enter),) = self.moves.items()
        flow = only(spec)
        self.leave = Output(flow, axis, f"{name} ->", local=spec.local_output, inplace_ok=False)
        # As before a row-wise layer: the local features, in both passes.
        self.stays = spec.local_output and flow.src == flow.dst and flow.gradient in (None, flow.dst)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Compute this rank's output features."""
        weight, bias = self.weight_and_bias()
        output = F.linear(self.enter(input), weight, bias)
        return output if self.stays else self.leave(output)


class ColumnLinearKVReplicated(ColumnLinear):
    """`nn.Linear` in full on every rank; each computes only some output features."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        split = only(spec).split
        assert split is not None
        ((self.start, self.stop),) = split.ranges(axis.rank, axis.size)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Compute this rank's output features."""
        weight, bias = self.weight_and_bias()
        own = None if bias is None else bias[self.start : self.stop]
        return self.leave(F.linear(self.enter(input), weight[self.start : self.stop], own))


class RowLinear(Forward):
    """`nn.Linear` with some of its input features on this rank. It sums partial results, then adds the bias."""

    is_checked_alone = False

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.enter = next(iter(self.moves.values()))
        self.leave = Output(only(spec), axis, f"{name} ->", local=spec.local_output, inplace_ok=True)
        self.adds_whole = isinstance(self.leave.flow.dst, Replicate)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the linear map, summed over the ranks."""
        weight, bias = self.weight_and_bias()
        return self.finish(F.linear(self.enter(input), weight), bias)

    def finish(self, produced: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Sum over the ranks, add the bias, and return the target layout."""
        moved = self.leave.move(produced)
        if bias is not None:  # after the sum: once, not on each rank
            # Under autocast the sum has the lower precision, as the output of `nn.Linear` has.
            bias = bias if bias.dtype == moved.dtype else bias.to(moved.dtype)
            moved = moved + (bias if self.adds_whole else self._bias_part(bias, moved.dim()))
        return moved if self.leave.local else self.leave.to_dtensor(moved, produced.shape, None)

    def _bias_part(self, bias: torch.Tensor, ndim: int) -> torch.Tensor:
        wanted = normalized(self.leave.flow.dst, ndim)
        if isinstance(wanted, Shard) and wanted.dim == ndim - 1:
            assert self.leave.flow.split is not None
            return self.axis.slice(bias, 0, self.leave.flow.split.sizes(self.axis.size))
        if isinstance(wanted, Partial) and self.axis.rank != 0:
            return bias * 0  # only rank 0 adds it; it stays in every rank's graph, as gradients are summed
        return bias


class RowLookup:
    """Lookups in this rank's rows of an embedding; ids of other rows give zeros.

    Args:
        module: The embedding.
        spec: Decision of its style.
        axis: Its ranks.
        name: The module's FQN, for errors.
    """

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        split = dict(spec.parameters)["weight"].split
        ((self.start, self.stop),) = split.ranges(axis.rank, axis.size)
        self.num_rows = split.global_size
        self.module = cast(nn.Embedding, module)
        self.name = name

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand of the lookup."""
        elsewhere = (ids < self.start) | (ids >= self.stop)
        # Ids are checked only on CPU, as in nn.Embedding, without a synchronisation; elsewhere a bad id gives zeros.
        looks = ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling()
        if looks and not bool(((ids >= 0) & (ids < self.num_rows)).all()):
            raise IndexError(f"{self.name}: an id is outside of 0..{self.num_rows - 1}")
        if self.stop == self.start:  # no rows here: a zero computed from the weight keeps all ranks' graphs equal
            return weight.sum() + weight.new_zeros((*ids.shape, weight.shape[1]))
        local = (ids - self.start).masked_fill(elsewhere, 0)  # a valid row, masked out below
        rows = F.embedding(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        padding = self.module.padding_idx
        if padding is None or not self.start <= padding < self.stop or not rows.requires_grad:
            return rows
        return torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)  # no gradient for padding


class RowEmbedding(Forward):
    """`nn.Embedding` with some of its rows on this rank: lookups are summed."""

    is_checked_alone = False

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        ((_, self.enter),) = self.moves.items()
        self.leave = Output(only(spec), axis, f"{name} ->", local=spec.local_output, inplace_ok=True)
        self.lookup = RowLookup(module, spec, axis, name)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids."""
        weight = self.parameter("weight")
        assert weight is not None
        return self.leave(self.lookup(self.enter(input), weight))


class ModuleForward(Forward):
    """The module's own forward, on local parameters."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.names = describe(module).arguments
        self.leaves = [
            None if flow is None else Output(flow, axis, f"{name} ->", local=spec.local_output, inplace_ok=False)
            for flow in spec.outputs
        ]
        paths = [(key, *key.rpartition(".")[::2]) for key, _ in spec.parameters]
        self.places = [(module.get_submodule(path), attribute, key) for key, path, attribute in paths]
        self.specs = dict(spec.parameters)
        self.kind = type(module)
        owners = {id(owner): owner for owner, _, _ in self.places}
        self.kinds = [(owner, type(owner)) for owner in owners.values()]
        self.rates = rates_of(module.modules()) if spec.shards_randomness else []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; local parameters replace its own during the call."""
        sizes = self._known_sizes(args, kwargs)
        moved_args, kwargs = move_inputs(self.moves, self.names, args, kwargs)
        return self.finish(self.run_inside(moved_args, kwargs), sizes)

    def _known_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
        """Return global sizes of the module's sharded dims, from inputs that are DTensors."""
        sizes = {}
        for name, move in self.moves.items():
            index = self.names.index(name)
            value = args[index] if index < len(args) else kwargs.get(name)
            if isinstance(value, DTensor) and isinstance(wanted := normalized(move.flow.dst, value.dim()), Shard):
                sizes[wanted.dim] = value.shape[wanted.dim]
        return sizes

    def run_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the class's own forward, on local parameters."""
        replaced: list[tuple[nn.Module, str, Any]] = []
        views = [(owner, type(owner), kind) for owner, kind in self.kinds if type(owner) is not kind]
        try:
            for owner, _, kind in views:  # a subclass shows local parameters as DTensors; this forward needs local ones
                object.__setattr__(owner, "__class__", kind)
            for owner, attribute, key in self.places:
                original = owner._parameters.get(attribute)
                if original is None:
                    refuse_computed(owner, attribute)
                    continue
                local = self.parameter_of(owner, attribute, key)
                if local is not original:
                    replaced.append((owner, attribute, original))
                    owner._parameters[attribute] = local  # type: ignore[assignment]  # a tensor for the time of the call
            with tp_rng(self.axis.mesh) if draws(self.rates) else nullcontext():
                return self.kind.forward(self.module, *args, **kwargs)
        finally:
            for owner, attribute, original in replaced:
                owner._parameters[attribute] = original
            for owner, view, _ in views:
                object.__setattr__(owner, "__class__", view)

    def finish(self, output: Any, known: dict[int, int] | None = None) -> Any:
        """Return outputs in their target layouts, in their own structure."""
        if not self.leaves:
            return output
        return move_outputs(self.leaves, output, self.name, known)


class ModuleRowEmbedding(ModuleForward):
    """An embedding with its own forward, by rows; its lookups return full rows."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.lookup = RowLookup(module, spec, axis, name)
        self.sum = Redistribute(Redistribution(Partial(), Replicate()), axis, f"{name} lookup", inplace_ok=True)

    def run_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the class's own forward, with lookups summed over the ranks."""
        with _Lookups(self):
            return super().run_inside(args, kwargs)


class _Lookups(TorchFunctionMode):
    """Replacement of `torch.nn.functional.embedding` on the module's own weight, during its forward."""

    def __init__(self, owner: ModuleRowEmbedding) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and len(args) >= 2 and args[1] is self.owner.module._parameters["weight"]:
            return self.owner.sum(self.owner.lookup(args[0], cast(torch.Tensor, args[1])))
        return func(*args, **(kwargs or {}))


class ModuleRowLinear(ModuleForward):
    """A linear layer with its own forward, by input features. The bias is added afterwards."""

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        super().__init__(module, spec, axis, name)
        self.row = RowLinear(module, spec, axis, name)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the module's forward on this rank's features, sum, and add the bias."""
        args, kwargs = move_inputs(self.moves, self.names, args, kwargs)
        bias = self.module._parameters.get("bias")
        try:
            if bias is not None:
                zeros = torch.zeros_like(bias.to_local() if isinstance(bias, DTensor) else bias)  # added in `finish`
                self.module._parameters["bias"] = zeros  # type: ignore[assignment]  # for the time of the call
            produced = self.run_inside(args, kwargs)
        finally:
            if bias is not None:
                self.module._parameters["bias"] = bias
        return self.row.finish(produced, self.row.parameter("bias"))


class DividedInput(ModuleForward):
    """The module's own forward on an equal share of its first input, for summed outputs."""

    is_checked_alone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on the first input divided by the number of ranks."""
        return self.run_inside((args[0] / self.axis.size, *args[1:]), kwargs)


class LatentKV(ModuleForward):
    """The module's own forward. The gradient of its last output features is summed over the ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, unchanged."""
        output = self.run_inside(args, kwargs)
        width = only(self.spec).width
        through, direct = output.split([output.shape[-1] - width, width], dim=-1)
        leave = self.leaves[0]
        assert leave is not None
        return torch.cat([through, leave.move(direct)], dim=-1)
