"""Parameters that hold one rank's part, and how they are made, read and put together again."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tp_styles._shared.sharding_info import Section, ShardingInfo, sharding_info_of
from tp_styles._torch_compat import all_gather_into, gradient_like, is_compiling, local_of
from tp_styles.problems import PlanError, Problem
from tp_styles.runtime.axis import Axis
from tp_styles.runtime.moves import summed_gradient
from tp_styles.runtime.shard_parameter import ShardParameter
from tp_styles.spec import ParameterSpec
from tp_styles.split import Split

Mode = Literal["dtensor", "local"]

# ---------------------------------------------------------------------------------------------- making


def make_parameter(
    original: nn.Parameter, spec: ParameterSpec, axis: Axis, mode: Mode, src_data_rank: int | None
) -> nn.Parameter:
    """A parameter with this rank's part of `original`, which is left as it is.

    Args:
        original: The whole parameter, on every rank.
        spec: Which part.
        axis: Over which ranks.
        mode: `"dtensor"`, or `"local"` for a plain tensor with `_sharding_info`. What a DTensor cannot say (fused
            sections, copies) is local in either mode.
        src_data_rank: Rank in the group whose values count; None takes each rank's own.
    """
    full = agreed_values(original.detach(), axis, src_data_rank)
    local = spec.split.take(full, axis.rank, axis.size)
    return wrap_local(local, original, spec.split, axis, mode)


def wrap_local(local: torch.Tensor, original: torch.Tensor, split: Split, axis: Axis, mode: Mode) -> nn.Parameter:
    """A parameter around this rank's part; shape, `requires_grad` and user attributes come from `original`."""
    shape, stride = original.shape, contiguous_stride(original.shape)
    placements = (split.placement(),)
    parameter: nn.Parameter
    if mode == "dtensor" and split.is_plain(axis.size):
        wrapped = DTensor.from_local(local, axis.mesh, placements, run_check=False, shape=shape, stride=stride)
        parameter = nn.Parameter(wrapped, requires_grad=original.requires_grad)
        parameter.__dict__.update(original.__dict__)
        return parameter
    parameter = ShardParameter(local, original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    parameter._sharding_info = sharding_info(split, axis.mesh, shape)
    return parameter


def sharding_info(split: Split, mesh: DeviceMesh, shape: torch.Size) -> ShardingInfo:
    """Return what a local parameter is a shard of; sections only where placements do not say everything."""
    sections = () if split.is_plain(mesh.size()) else split.sections
    found = tuple(Section(section.size, section.unit, section.copies) for section in sections)
    return ShardingInfo(mesh, (split.placement(),), shape, contiguous_stride(shape), found)


def is_shard(parameter: torch.Tensor, split: Split, mesh: DeviceMesh) -> bool:
    """True if a parameter is this rank's shard over a mesh, as the split has it."""
    if isinstance(parameter, DTensor):
        same = parameter.device_mesh == mesh and parameter.placements == (split.placement(),)
        return same and split.is_plain(mesh.size())
    info = sharding_info_of(parameter)
    return info == sharding_info(split, mesh, info.shape) if info is not None else False


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Stride of a contiguous tensor of that shape."""
    return torch.empty(shape, device="meta").stride()


def agreed_values(value: torch.Tensor, axis: Axis, src_data_rank: int | None) -> torch.Tensor:
    """The values of the source rank on every rank; the tensor itself where there is nothing to agree on."""
    if src_data_rank is None or value.is_meta or axis.size == 1:
        return value
    agreed = value.clone(memory_format=torch.contiguous_format)
    as_bytes = agreed.view(torch.uint8) if agreed.dim() else agreed.view(1).view(torch.uint8)
    dist.broadcast(as_bytes, group=axis.group, group_src=src_data_rank)
    return agreed


# ---------------------------------------------------------------------------------------------- reading


def local_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """The module's parameter as a local tensor with gradient; None where the module has none of that name.

    A plain tensor that stands in `_parameters` is this rank's part already, whatever a subclass of the module may
    show to those who read the attribute.
    """
    parameter: torch.Tensor | None = module._parameters.get(name)
    if parameter is None:
        refuse_computed(module, name)
        parameter = getattr(module, name, None)
        if parameter is None:
            return None
    if isinstance(parameter, DTensor):
        if is_compiling():
            return parameter.to_local()
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return local_of(parameter)
        local: torch.Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]  # torch's Function
        return local
    return parameter


def refuse_computed(module: nn.Module, name: str) -> None:
    """A parametrization, weight norm or pruning that was put on a part works on the part: norms are its own.

    Raises:
        PlanError: There is one. Of a DTensor they give what they give of the whole.
    """
    below = getattr(module._modules.get("parametrizations"), name, nn.Module())
    found = [*below._parameters.items(), *((key, module._parameters.get(key)) for key in (f"{name}_orig", f"{name}_v"))]
    if any(isinstance(parameter, ShardParameter) for _, parameter in found):
        hint = 'apply the plan with params="dtensor", or put it on and take it off again before the plan is applied'
        raise PlanError(
            Problem("part-for-whole", name, found=f"computed from a part, in {type(module).__name__}", hint=hint)
        )


def local_weight_and_bias(module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`local_parameter` of both, in one step of autograd where both are DTensors that learn."""
    weight: torch.Tensor | None = module._parameters.get("weight")
    bias: torch.Tensor | None = module._parameters.get("bias")
    if (
        isinstance(weight, DTensor)
        and isinstance(bias, DTensor)
        and weight.requires_grad
        and bias.requires_grad
        and torch.is_grad_enabled()
        and not is_compiling()
    ):
        both: tuple[torch.Tensor, torch.Tensor] = _Local.apply(weight, bias)  # type: ignore[no-untyped-call]  # torch's
        return both
    return local_parameter(module, "weight"), local_parameter(module, "bias")


class _Local(torch.autograd.Function):
    """`DTensor.to_local` for parameters: a gradient has its parameter's layout, which need not be worked out."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> Any:
        ctx.specs = [parameter._spec for parameter in parameters]
        ctx.set_materialize_grads(False)
        found = tuple([local.view_as(local) for local in map(local_of, parameters)])
        return found if len(found) > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # create_graph=True: a second derivative goes through the wrapper
        wrap = _differentiable if torch.is_grad_enabled() else gradient_like
        return tuple(
            [None if g is None else wrap(g.contiguous(), spec) for g, spec in zip(gradients, ctx.specs, strict=True)]
        )


def _differentiable(gradient: torch.Tensor, spec: Any) -> DTensor:
    return DTensor.from_local(
        gradient, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def computing_parameter(module: nn.Module, name: str, axis: Axis, spec: ParameterSpec) -> torch.Tensor | None:
    """`local_parameter`, with its gradient summed over the ranks if that is asked for."""
    parameter = local_parameter(module, name)
    if parameter is None or not spec.sum_gradient:
        return parameter
    summed = summed_gradient(parameter, axis, spec.split)
    return summed / axis.size if spec.in_sum else summed


# ---------------------------------------------------------------------------------------------- putting together


def full_tensor(parameter: torch.Tensor, axis: Axis, split: Split) -> torch.Tensor:
    """The global value, on every rank, without gradient.

    Args:
        parameter: A DTensor, or this rank's part.
        axis: Over which ranks.
        split: How it is divided.
    """
    local = parameter.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if split.dim is None or local.is_meta:
        if split.dim is not None:
            return local.new_empty(_global_shape(local, split))
        return local.clone()
    return split.join(gather_parts(local, axis, split))


def gather_parts(local: torch.Tensor, axis: Axis, split: Split) -> list[torch.Tensor]:
    """Every rank's part, in rank order, on every rank."""
    assert split.dim is not None
    sizes = split.sizes(axis.size)
    moved = local.movedim(split.dim, 0).contiguous()
    padded = moved.new_zeros((max(sizes), *moved.shape[1:]))
    padded[: moved.shape[0]] = moved
    gathered = padded.new_empty((axis.size, *padded.shape))
    all_gather_into(_bytes(gathered), _bytes(padded), axis.group)
    return [part[:size].movedim(0, split.dim) for part, size in zip(gathered.unbind(0), sizes, strict=True)]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _global_shape(local: torch.Tensor, split: Split) -> list[int]:
    assert split.dim is not None
    shape = list(local.shape)
    shape[split.dim] = split.global_size
    return shape
