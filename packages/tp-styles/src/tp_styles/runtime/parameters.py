"""Parameters with one rank's shard: created, read, checked and gathered; and their optimizers' first steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_styles._shared.consensus import as_bytes
from tp_styles._shared.dtensor import as_dtensor
from tp_styles._shared.shard_values import Refusing, Ways
from tp_styles._shared.sharding_info import ATTRIBUTE, ShardingInfo, sharding_info_of
from tp_styles._torch_compat import gradient_like, is_compiling, is_fake, is_transformed, local_of
from tp_styles.problems import PlanError, Problem, StyleInputError
from tp_styles.runtime.redistribute import TPGroup, refuse_transforms
from tp_styles.values import ParameterSpec, Split, StyleSpec


class ShardParameter(Refusing, nn.Parameter):
    """A plain local parameter: one rank's shard in a layout beyond DTensor, of fused sections.

    Copies and pickles keep `_sharding_info`; an ordinary parameter would lose it.
    """

    _sharding_info: ShardingInfo
    _ways = Ways(
        read="weight.full_tensor() is the full weight, with a gradient, and {name} of it that of one process;"
        " weight.detach() is the shard alone",
        initialise="initialise before the plan is applied, by reset_parameters() of the module, or by"
        " load_state_dict() of full tensors",
        element="weight.full_tensor()[i, j] is the element of the full weight; weight.detach()[i, j] that of the shard",
        infinities="scale the losses of tensor-parallel ranks alike, and let all ranks skip a step together",
        write="weight.full_tensor() has the rows of the full weight, and load_state_dict() takes them;"
        " weight.detach()[i] is a row of the shard",
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardParameter:
        if id(self) in memo:
            twin: ShardParameter = memo[id(self)]
            return twin
        value = self.detach().clone(memory_format=torch.preserve_format)
        copied = memo[id(self)] = rebuild(value, self.requires_grad, self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self.detach(), self.requires_grad, dict(self.__dict__))

    def full_tensor(self) -> torch.Tensor:
        """Return the full weight on every rank, with a gradient, as a DTensor's `full_tensor()` does.

        Every rank calls it, and uses the result alike: a penalty over it is the one of a single process.
        """
        result: torch.Tensor = _Full.apply(self)  # type: ignore[no-untyped-call]  # torch's Function
        return result


def rebuild(data: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> ShardParameter:
    """Return a parameter with the attributes of another."""
    parameter = ShardParameter(data, requires_grad)
    parameter.__dict__.update(attributes)
    if (info := sharding_info_of(parameter)) is not None:  # a plain tuple after pickling
        setattr(parameter, ATTRIBUTE, info)
    return parameter


def split_of(info: ShardingInfo) -> Split:
    """Return the split of a `_sharding_info` over a 1-D mesh."""
    dim = getattr(info.placements[0], "dim", None)
    if dim is None:
        return Split.replicated()
    if info.sections:
        return Split(dim, info.sections)
    return Split.along(dim, info.shape[dim])


class ShardCheck:
    """Check, in every forward, of the tensors in place of shards.

    A full weight in place of a shard (`module.weight = nn.Parameter(full)`, `functional_call` with a full state dict,
    `weight.data = full`) has shapes that fit each other from a column-wise to a row-wise layer: every rank would
    compute everything, and the sum would be too large by the number of ranks. An ordinary parameter of a shard's size
    (`nn.Parameter(weight.detach() * 2)`, FSDP2's) computes the right output, but a norm takes it for a replica.

    Args:
        module: Module of the parameters.
        spec: Decision for the module.
        axis: Its ranks.
        name: The module's FQN, for errors.
    """

    def __init__(self, module: nn.Module, spec: StyleSpec, axis: TPGroup, name: str) -> None:
        self.module = module
        self.name = name
        self.sizes = {
            key: (
                parameter.split.dim,
                sum(stop - start for start, stop in parameter.split.ranges(axis.rank, axis.size)),
            )
            for key, parameter in spec.parameters
            if parameter.split.dim is not None
        }

    def check(self, names: Sequence[str], locals: Sequence[torch.Tensor | None]) -> None:
        """Check sizes of shards, and sharding metadata of parameters.

        Raises:
            StyleInputError: One has another size.
            PlanError: One is an ordinary parameter.
        """
        for name, local in zip(names, locals, strict=True):
            expected = self.sizes.get(name)
            if expected is None or local is None:
                continue
            dim, size = expected
            if local.size(dim) != size:  # much faster than an entry of `shape`
                where = f"{self.name}.{name}".lstrip(".")
                refuse_transforms(where)
                raise StyleInputError(
                    Problem(
                        "shape-mismatch",
                        where,
                        dim=dim,
                        found=f"{local.shape[dim]} on this rank",
                        hint=f"this rank's shard has {size}: load_state_dict() shards full tensors; or pass the shard",
                    )
                )
            # Other than parameters: a DTensor's local tensor, or a tensor in place for a functional call. Exact types
            # first: this runs in every step, and isinstance on a parameter's class is slow.
            kind = type(local)
            if kind is not ShardParameter and kind is not torch.Tensor and self._is_ordinary(name, local):
                raise PlanError(lost_shard(f"{self.name}.{name}".lstrip("."), local))

    def refuse_ordinary(self) -> None:
        """Refuse ordinary parameters in place of shards before a forward; without it a check would broadcast them.

        Raises:
            PlanError: There is one.
        """
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in self.sizes and self._is_ordinary(name, parameter):
                raise PlanError(lost_shard(f"{self.name}.{name}".lstrip("."), parameter))

    def _is_ordinary(self, name: str, local: torch.Tensor) -> bool:
        """True for a parameter of any class without sharding metadata."""
        if not isinstance(local, nn.Parameter) or hasattr(local, ATTRIBUTE):
            return False
        path, _, attribute = name.rpartition(".")
        # In a trace the local tensor of a DTensor parameter is a parameter too; fake ones lose their attributes.
        held: Any = self.module.get_submodule(path)._parameters.get(attribute)
        return not isinstance(held, DTensor) and not is_fake(local)


def lost_shard(where: str, parameter: torch.Tensor) -> Problem:
    """Return the problem of a parameter in place of a shard. Norms would take it for full."""
    return Problem(
        "local-shard-as-full",
        where,
        found=f"{type(parameter).__name__} in place of a shard",
        hint="norms and state dicts would take it for the full weight: write new values with copy_() or"
        " load_state_dict()"
        "; FSDP2 needs DTensors, which all shards are but those of fused sections, copied key-value heads and numbered"
        " experts: stack the experts' weights, or pass these parameters to fully_shard(ignored_params=...) and reduce"
        " their gradients over its mesh before the optimizer step",
    )


# ---------------------------------------------------------------------------------------------- making


def make_parameter(
    original: nn.Parameter, spec: ParameterSpec, axis: TPGroup, src_data_rank: int | None
) -> nn.Parameter:
    """Return a parameter with this rank's shard of `original`, which is left unchanged.

    It is a DTensor, or in layouts beyond DTensor (fused sections, copied heads) a plain tensor with `_sharding_info`;
    shape, `requires_grad` and user attributes are those of `original`.

    Args:
        original: The full parameter, on every rank.
        spec: Its split.
        axis: Its ranks.
        src_data_rank: Group rank with the source values; None takes each rank's own.
    """
    full = agreed_values(original.detach(), axis, src_data_rank)
    local = spec.split.take(full, axis.rank, axis.size)
    parameter: nn.Parameter
    if spec.split.is_plain(axis.size):
        wrapped = as_dtensor(local, axis.mesh, (spec.split.placement(),), original.shape)
        parameter = nn.Parameter(wrapped, requires_grad=original.requires_grad)
        parameter.__dict__.update(original.__dict__)
        return parameter
    parameter = ShardParameter(local, original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    parameter._sharding_info = sharding_info(spec.split, axis.mesh, original.shape)
    return parameter


def sharding_info(split: Split, mesh: DeviceMesh, shape: torch.Size) -> ShardingInfo:
    """Return the metadata of a local shard; sections only if placements are not enough."""
    sections = () if split.is_plain(mesh.size()) else split.sections
    return ShardingInfo(mesh, (split.placement(),), shape, torch.empty(shape, device="meta").stride(), sections)


def is_shard(parameter: torch.Tensor, split: Split, mesh: DeviceMesh) -> bool:
    """True if a parameter is this rank's shard over a mesh, by the split."""
    if isinstance(parameter, DTensor):
        same = parameter.device_mesh == mesh and parameter.placements == (split.placement(),)
        return same and split.is_plain(mesh.size())
    info = sharding_info_of(parameter)
    return info == sharding_info(split, mesh, info.shape) if info is not None else False


def agreed_values(value: torch.Tensor, axis: TPGroup, src_data_rank: int | None) -> torch.Tensor:
    """Broadcast the source rank's values; return the tensor itself if there is nothing to send."""
    if src_data_rank is None or value.is_meta or axis.size == 1:
        return value
    agreed = value.clone(memory_format=torch.contiguous_format)
    axis.communicate(dist.broadcast, as_bytes(agreed), group_src=src_data_rank)
    return agreed


# ---------------------------------------------------------------------------------------------- reading


def local_parameters(module: nn.Module, *names: str) -> list[torch.Tensor | None]:
    """Return the module's parameters as local tensors with gradient, None for names it lacks.

    A plain tensor in `_parameters` is this rank's shard already, even if a subclass of the module returns something
    else for the attribute. All DTensors with gradients take one autograd node together.
    """
    parameters: list[torch.Tensor | None] = []
    learning: dict[int, DTensor] = {}
    in_graph, with_gradients = is_compiling(), torch.is_grad_enabled()
    own = module._parameters
    for name in names:
        parameter: torch.Tensor | None = own.get(name)
        if parameter is None and name not in own:
            refuse_computed(module, name)
            parameter = getattr(module, name, None)
        # The exact type first: isinstance on a class with a metaclass, like a tensor's, is slow.
        if type(parameter) is not ShardParameter and isinstance(parameter, DTensor):
            if in_graph:
                parameter = parameter.to_local()  # traced, with its own backward
            elif with_gradients and parameter.requires_grad:
                learning[len(parameters)] = parameter
            else:
                parameter = local_of(parameter)  # no gradient: no autograd node
        parameters.append(parameter)
    if learning:
        if is_transformed():
            refuse_transforms("a styled module")
        locals = _Local.apply(*learning.values())  # type: ignore[no-untyped-call]  # torch's Function
        for index, local in zip(learning, locals, strict=True):
            parameters[index] = local
    return parameters


def refuse_computed(module: nn.Module, name: str) -> None:
    """Refuse a parametrization, weight norm or pruning of a shard. It would use the shard's norm.

    Raises:
        PlanError: There is one. On a DTensor they compute the same as on the full weight.
    """
    below = getattr(module._modules.get("parametrizations"), name, nn.Module())
    items = [*below._parameters.items(), *((key, module._parameters.get(key)) for key in (f"{name}_orig", f"{name}_v"))]
    # torch's older weight norm makes an ordinary parameter of a shard.
    if any(isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) for _, parameter in items):
        raise PlanError(
            Problem(
                "local-shard-as-full",
                name,
                found=f"computed from one shard, in {type(module).__name__}",
                hint="put it on and take it off again before the plan is applied",
            )
        )


class _Local(torch.autograd.Function):
    """`DTensor.to_local` for parameters: a gradient has its parameter's layout, without inference."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> Any:
        ctx.specs = [parameter._spec for parameter in parameters]
        ctx.set_materialize_grads(False)  # None for a parameter without gradient
        return tuple([local.view_as(local) for local in map(local_of, parameters)])  # views, for autograd

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pairs = zip(gradients, ctx.specs, strict=True)
        if not torch.is_grad_enabled():
            return tuple([g if g is None else gradient_like(g.contiguous(), spec) for g, spec in pairs])
        return tuple(  # create_graph=True: a second derivative goes through the wrapper
            [
                None if g is None else as_dtensor(g.contiguous(), s.mesh, s.placements, s.shape, s.stride)
                for g, s in pairs
            ]
        )


# ---------------------------------------------------------------------------------------------- putting together


class _Full(torch.autograd.Function):
    """The full value of a shard in sections; each rank takes its rows of the gradient, which all ranks have alike."""

    @staticmethod
    def forward(ctx: Any, shard: ShardParameter) -> Any:
        info = shard._sharding_info
        axis, split = TPGroup(info.mesh), split_of(info)
        ctx.take = functools.partial(split.take, rank=axis.rank, tp_size=axis.size)
        return full_tensor(shard.as_subclass(torch.Tensor), axis, split)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.take(gradient)


def full_tensor(parameter: torch.Tensor, axis: TPGroup, split: Split) -> torch.Tensor:
    """Return the global value, on every rank, without gradient.

    Args:
        parameter: A DTensor, or this rank's shard.
        axis: Its ranks.
        split: Its split.
    """
    local = parameter.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if split.dim is None or local.is_meta:
        shape = [split.global_size if dim == split.dim else size for dim, size in enumerate(local.shape)]
        return local.new_empty(shape) if split.dim is not None else local.clone()
    return split.join(axis.gather_parts(local, split.dim, split.sizes(axis.size)))
