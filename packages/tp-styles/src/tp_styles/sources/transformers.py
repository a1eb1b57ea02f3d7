"""Register our styles with transformers: after this import, `from_pretrained` shards with them.

The names of transformers' plans stay: every model's own plan and `DistributedConfig(tp_plan={...})` work as before.
transformers creates, loads and saves the parameters, as its DTensors; a module's forward runs our code.
One name is new: `"kv_replicate"` on an attention module, for fewer key-value heads than ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from tp_styles._torch_compat import is_compiling, is_fake
from tp_styles.check.inputs import Inputs
from tp_styles.plan.model import PlannedModule
from tp_styles.problems import PlanError, Problem, StyleInputError
from tp_styles.runtime.install import install_module
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.sources.names import OLDER, OUTPUTS, TODAY, attention_style, style_of
from tp_styles.styles.base import ParallelStyle
from tp_styles.styles.blocks import ColwiseKVReplicated, ParametersParallel
from tp_styles.values import StyleSpec, describe

__all__ = ["KVReplicate", "RegisteredStyle"]

# transformers calls a style for one parameter or module at a time: parameters first, parents before their children.
# Own parameters of a module -> style names that the plan gives them.
_kinds: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
# Projections whose attention has fewer key-value heads than ranks.
_copied: WeakKeyDictionary[nn.Module, ColwiseKVReplicated] = WeakKeyDictionary()


class RegisteredStyle(TensorParallelLayer):  # type: ignore[misc]  # transformers' class is untyped
    """transformers' style of one name, with our forward.

    Args:
        kind: The name, in today's vocabulary.
        theirs: transformers' registered style of the name.
    """

    def __init__(self, kind: str, theirs: Any) -> None:
        self.kind = kind
        self.theirs = theirs

    def validate_param(
        self, module: nn.Module, param: Any, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Validate as transformers' style does."""
        self.theirs.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Create the placeholder for transformers to load the weight into."""
        _kinds.setdefault(module, {})[param] = self.kind  # for install_forward
        if module in _copied and self.kind != "colwise":
            raise PlanError(
                Problem(
                    "conflicting-arguments",
                    type(module).__name__,
                    found=self.kind,
                    hint='kv_replicate is for "colwise" key and value projections; leave it out',
                )
            )
        full = module._parameters.get(param)
        if module in _copied and full is not None:
            # Copies of some rows have no placement on this mesh: every rank holds all rows, and computes with its own.
            placed = distribute_tensor(full, mesh, [Replicate()], src_data_rank=None)
            module._parameters[param] = nn.Parameter(placed, requires_grad=full.requires_grad)
        else:
            self.theirs.shard_param(module, param, mesh)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Install the forward, or transformers' own if a kernel or a quantizer has replaced it.

        Raises:
            PlanError: The style does not fit the module.
        """
        if "forward" in vars(module) or getattr(module, "_hf_quantized_needs_local_tp", False):
            installed: nn.Module = self.theirs.install_forward(module, mesh)
            return installed
        # transformers sets the configuration of a module with latent keys and values.
        config, own = getattr(module, "config", None), _kinds.get(module, {})
        style = _copied.get(module) or style_of(self.kind, own, config, type(module).__name__)
        return _install(module, style, mesh)


class KVReplicate(TensorParallelLayer):  # type: ignore[misc]  # transformers' class is untyped
    """`"kv_replicate"` on an attention module: several ranks compute the same key-value heads.

    For fewer key-value heads than ranks. The plan shards the projections as always, but those of keys and values are
    held in full on every rank. If the heads divide by the ranks, nothing changes.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Leave a parameter of the attention itself to another style."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Make head counts local, and mark the projections before their styles are installed.

        Raises:
            PlanError: The module is not such an attention, or its heads do not divide.
        """
        ends = [key for key in OUTPUTS if isinstance(getattr(module, key, None), nn.Linear)]
        style = attention_style(module, ends)
        if style is None:
            raise PlanError(
                Problem(
                    "module-kind",
                    "kv_replicate",
                    found=f"{type(module).__name__}, not an attention with q_proj, k_proj, v_proj, a projection out,"
                    " head_dim",
                    hint="tp_styles.apply_plan has styles",
                )
            )
        spec = style.spec(describe(module, type(module).__name__), mesh.size())
        _raise(spec)
        for name, value in spec.attributes:
            setattr(module, name, value)
        heads = style.num_kv_heads or 1
        for name in (style.k, style.v) if mesh.size() > heads else ():
            rows = module.get_parameter(f"{name}.weight").shape[0]
            copies = mesh.size() // heads
            _copied[module.get_submodule(name)] = ColwiseKVReplicated(rows, unit=rows // heads, copies=copies)
        own = _kinds.get(module)
        names = style.q, style.k, style.v, style.o
        module.register_forward_pre_hook(ProjectionsCheck(names), prepend=True)
        return _install(module, ParametersParallel(own), mesh) if own else module


class ProjectionsCheck:
    """Check for styles on the projections of an attention with local head counts.

    transformers applies a plan from parents to children without a last step, so the first call is the first chance.

    Args:
        names: Names of the projections.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Check in each call: it costs four look-ups.

        Raises:
            PlanError: A projection has no style.
        """
        plain = [name for name in self.names if "forward" not in vars(module.get_submodule(name))]
        if plain:
            raise PlanError(
                Problem(
                    "conflicting-arguments",
                    type(module).__name__,
                    found=f"kv_replicate, and no style for {', '.join(plain)}",
                    hint='add them to tp_plan as "colwise" (the projection out as "rowwise"), or leave kv_replicate'
                    " out",
                )
            )


def _install(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> nn.Module:
    weight: Any = module._parameters.get("weight")
    if type(module) is nn.Linear and isinstance(weight, DTensor):
        # Peft sizes an adapter by one rank's shard of the base layer, and then wraps its weight as a global DTensor.
        module.out_features, module.in_features = weight.shape
    info = describe(module, type(module).__name__)  # transformers does not pass the name
    spec = style.spec(info, mesh.size())
    _raise(spec)
    for name, parameter in spec.parameters:
        placed = module.get_parameter(name)
        sharded = isinstance(placed, DTensor) and not placed.placements[0].is_replicate()
        if sharded == parameter.split.is_replicated:  # one sharded, the other not
            raise PlanError(
                Problem(
                    "layout-mismatch",
                    info.where(name),
                    found=f"{placed.placements if isinstance(placed, DTensor) else 'in full'}, as the plan has it",
                    hint=f"{style!r} computes with {parameter.split}",
                )
            )
    for name, value in spec.attributes:
        setattr(module, name, value)
    axis = TPGroup(mesh)
    install_module(PlannedModule(info, "", style, spec), module, axis)
    if any(flow.src == Replicate() for _, flow in spec.inputs):
        ReplicatedInputCheck(axis).install(module)
    return module


class ReplicatedInputCheck:
    """Compare a module's inputs between the ranks in its first call: they must be equal.

    Args:
        axis: The ranks.
    """

    def __init__(self, axis: TPGroup) -> None:
        self.axis = axis

    def install(self, module: nn.Module) -> None:
        """Register the hook before all others."""
        self.handle = module.register_forward_pre_hook(self, prepend=True)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Compare, and remove the hook.

        Raises:
            StyleInputError: Inputs differ; on every rank.
        """
        if is_compiling() or not args or not isinstance(args[0], torch.Tensor) or is_fake(args[0]):
            return  # no values to compare
        mode = module.training, torch.is_grad_enabled()
        if Inputs(args[:1], {}, self.axis, mode, {}, ()).differ:  # all ranks raise together
            raise StyleInputError(
                Problem(
                    "ranks-disagree",
                    type(module).__name__,
                    found="other values on each rank",
                    hint="tensor-parallel ranks take the same batch: give each data-parallel group one sampler",
                )
            )
        self.handle.remove()


def _raise(spec: StyleSpec) -> None:
    """Raise a style's problems. transformers passes no module's name, so they name its class."""
    way = (
        "; or tp_styles.apply_plan(model, mesh, from_hf_tp_plan(model)) after an ordinary from_pretrained, which names"
        " the module and takes adapters and further styles"
    )
    if spec.problems:
        raise PlanError([replace(problem, hint=problem.hint + way) for problem in spec.problems])


for name in list(ALL_PARALLEL_STYLES):
    kind = OLDER.get(name, name)
    # Replicated modules run unchanged, and names of expert-parallel plans are not ours: transformers' styles stay.
    if kind in TODAY and kind != "replicate":
        ALL_PARALLEL_STYLES.register(name, RegisteredStyle(kind, ALL_PARALLEL_STYLES[name]))
ALL_PARALLEL_STYLES.register("kv_replicate", KVReplicate())
