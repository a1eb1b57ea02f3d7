"""The first tensor-parallel styles, with their meaning, on today's DTensor.

`SequenceParallel` here is the pair of linear layers between sequence shards: rows are gathered on the way in and
reduce-scattered on the way out. The class of that name in `tp_styles` itself is today's style for norms and dropout.
`ColwiseParallel` and `RowwiseParallel` here take prepare functions, those of `tp_styles` layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tp_styles.problems import Problem, StyleInputError, StyleOutputError
from tp_styles.styles import linear
from tp_styles.styles.base import ParallelStyle, PrepareInput, PrepareOutput
from tp_styles.values import ModuleInfo, StyleSpec, is_below

__all__ = [
    "ParallelStyle",
    "RowwiseParallel",
    "ColwiseParallel",
    "PairwiseParallel",
    "SequenceParallel",
    "make_input_replicate_1d",
    "make_input_reshard_replicate",
    "make_input_shard_1d",
    "make_input_shard_1d_last_dim",
    "make_sharded_output_tensor",
    "make_output_replicate_1d",
    "make_output_reshard_tensor",
    "make_output_tensor",
    "make_output_shard_1d",
]

Kind = type[StyleInputError] | type[StyleOutputError]


def input_and_mesh(input: object, device_mesh: DeviceMesh | None) -> tuple[torch.Tensor, DeviceMesh]:
    """Return the tensor and the 1-D mesh of a call to an input function.

    Raises:
        StyleInputError: Not a tensor, no mesh, a mesh with several dims, or another mesh than the DTensor's.
    """
    # Hooks pass the tuple of all inputs, and the first one is meant.
    tensor = input[0] if isinstance(input, tuple | list) and input else input
    if device_mesh is None and not isinstance(tensor, DTensor):
        raise StyleInputError(
            Problem("missing-mesh", "input", hint="pass device_mesh="), "device_mesh is not passed nor can be inferred"
        )
    mesh = _one_dim("input", tensor, device_mesh, StyleInputError)
    if not isinstance(tensor, torch.Tensor):
        raise StyleInputError(
            Problem("wrong-type", "input", hint="the first input of the module has to be a tensor"),
            f"Tensor parallel module expects torch.Tensor or DTensor input but received {type(tensor)}!",
        )
    return tensor, mesh


def output_and_mesh(output: object, device_mesh: DeviceMesh | None) -> tuple[DTensor, DeviceMesh]:
    """Return the DTensor and the 1-D mesh of a call to an output function.

    Raises:
        StyleOutputError: Not a DTensor, a mesh with several dims, or another mesh than the DTensor's.
    """
    if not isinstance(output, DTensor):
        raise StyleOutputError(
            Problem("wrong-type", "output", hint="prepare the module's input as a DTensor"),
            f"Expect output of Tensor Parallel to be a DTensor, but found {type(output)}.",
        )
    return output, _one_dim("output", output, device_mesh, StyleOutputError)


def _one_dim(what: str, tensor: Any, mesh: DeviceMesh | None, kind: Kind) -> DeviceMesh:
    mesh = tensor.device_mesh if mesh is None else mesh
    if mesh.ndim != 1:
        raise kind(
            Problem("invalid-mesh", what, hint='pass one axis of it, for example mesh["tp"]'),
            f"device_mesh has dims {mesh.ndim} but expected to be 1 for {what}.",
        )
    if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
        raise kind(
            Problem("mesh-mismatch", what, hint="redistribute keeps a DTensor on its own mesh; pass that mesh"),
            f"The {what} is a DTensor on {tensor.device_mesh}, and device_mesh is {mesh}.",
        )
    return mesh


# ---------------------------------------------------------------------------------------------- inputs


def make_input_shard_1d(
    input: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
    dim: int = 0,
) -> DTensor:
    """Return the input as a DTensor sharded on `dim`. A plain tensor is this rank's shard, a DTensor is redistributed.

    Shards are assumed to be equal on every rank; make a DTensor with `shape=` and `stride=` for others.

    Args:
        input: This rank's shard, or a DTensor.
        device_mesh: 1-D mesh; by default the DTensor's.
        dim: Dim of the input to shard.

    Raises:
        StyleInputError: No tensor, no 1-D mesh, or not the DTensor's mesh (also a `RuntimeError`).
    """
    return _as_dtensor(input, device_mesh, Shard(dim))


def make_input_shard_1d_last_dim(
    input: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
) -> DTensor:
    """`make_input_shard_1d` on the last dim.

    Args:
        input: This rank's shard, or a DTensor.
        device_mesh: 1-D mesh; by default the DTensor's.
    """
    tensor, device_mesh = input_and_mesh(input, device_mesh)
    return _as_dtensor(tensor, device_mesh, Shard(tensor.dim() - 1))


def make_input_replicate_1d(
    input: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
) -> DTensor:
    """Return the input as a replicated DTensor. A plain tensor is the same on every rank, a DTensor is redistributed.

    Args:
        input: The full input, or a DTensor.
        device_mesh: 1-D mesh; by default the DTensor's.
    """
    return _as_dtensor(input, device_mesh, Replicate())


def make_input_reshard_replicate(
    input: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
) -> DTensor:
    """Return the concatenated rows of all ranks' inputs (an all-gather on dim 0).

    Args:
        input: This rank's rows.
        device_mesh: 1-D mesh.
    """
    return make_input_replicate_1d(make_input_shard_1d(input, device_mesh, dim=0), device_mesh)


def _as_dtensor(input: object, device_mesh: DeviceMesh | None, placement: Placement) -> DTensor:
    tensor, device_mesh = input_and_mesh(input, device_mesh)
    if isinstance(tensor, DTensor):
        return tensor.redistribute(device_mesh, [placement])
    return DTensor.from_local(tensor, device_mesh, [placement], run_check=False)


# ---------------------------------------------------------------------------------------------- outputs


def make_output_shard_1d(output: DTensor, device_mesh: DeviceMesh | None = None, dim: int = 0) -> DTensor:
    """Return the output, redistributed to shards of `dim`.

    Args:
        output: The module's output.
        device_mesh: 1-D mesh; by default the output's.
        dim: Dim to shard.

    Raises:
        StyleOutputError: No DTensor, no 1-D mesh, or not the DTensor's mesh (also an `AssertionError`).
    """
    output, device_mesh = output_and_mesh(output, device_mesh)
    return output.redistribute(device_mesh, [Shard(dim)])


def make_output_replicate_1d(output: DTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Return the output, redistributed to be full on every rank.

    Args:
        output: The module's output.
        device_mesh: 1-D mesh; by default the output's.
    """
    output, device_mesh = output_and_mesh(output, device_mesh)
    return output.redistribute(device_mesh, [Replicate()])


def make_output_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Return the full output as a plain tensor on every rank.

    Args:
        output: The module's output.
        device_mesh: 1-D mesh; by default the output's.
    """
    return make_output_replicate_1d(output, device_mesh).to_local()


def make_sharded_output_tensor(output: DTensor, _device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Return this rank's shard of the output as a plain tensor.

    Args:
        output: The module's output, not a partial sum.
        _device_mesh: Only checked; output functions are called with one.

    Raises:
        StyleOutputError: As `make_output_shard_1d`, or the output is a partial sum.
    """
    output, _ = output_and_mesh(output, _device_mesh)
    if any(isinstance(placement, Partial) for placement in output.placements):  # it has no local meaning
        raise StyleOutputError(
            Problem("partial-value", "output", hint="use make_output_tensor or make_output_reshard_tensor"),
            f"The output is a partial sum ({output.placements}): its local tensor is not a shard of the result.",
        )
    return output.to_local()


def make_output_reshard_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Return this rank's output rows as a plain tensor (a reduce-scatter on dim 0).

    Args:
        output: The module's output.
        device_mesh: 1-D mesh; by default the output's.
    """
    return make_output_shard_1d(output, device_mesh).to_local()


class _BetweenFunctions(ParallelStyle):
    """Today's style, but with DTensors between prepare functions other than the default ones."""

    takes_functions = True
    defaults: tuple[PrepareInput, PrepareOutput]

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """See `ParallelStyle.spec`."""
        decided = super().spec(info, tp_size)
        if (self._prepare_input, self._prepare_output) == self.defaults or not decided.parameters:
            return decided
        return replace(StyleSpec(compute="dtensor"), parameters=decided.parameters, problems=decided.problems)


class ColwiseParallel(_BetweenFunctions, linear.ColwiseParallel):
    """Shard the output features of an `nn.Linear` (or `nn.Embedding`) over the ranks.

    Args:
        _prepare_input: Makes the input a replicated DTensor.
        _prepare_output: Converts the output DTensor for the next module.
    """

    defaults = make_input_replicate_1d, make_sharded_output_tensor

    def __init__(
        self,
        _prepare_input: PrepareInput | None = make_input_replicate_1d,
        _prepare_output: PrepareOutput | None = make_sharded_output_tensor,
    ) -> None:
        linear.ColwiseParallel.__init__(self)
        self._prepare_input, self._prepare_output = _prepare_input, _prepare_output


class RowwiseParallel(_BetweenFunctions, linear.RowwiseParallel):
    """Shard the input features of an `nn.Linear`. Each rank computes a partial sum of every output feature.

    Args:
        _prepare_input: Makes the input a DTensor sharded on the last dim.
        _prepare_output: Converts the output DTensor, a partial sum, for the next module.
    """

    defaults = make_input_shard_1d_last_dim, make_output_tensor

    def __init__(
        self,
        _prepare_input: PrepareInput | None = make_input_shard_1d_last_dim,
        _prepare_output: PrepareOutput | None = make_output_tensor,
    ) -> None:
        linear.RowwiseParallel.__init__(self)
        self._prepare_input, self._prepare_output = _prepare_input, _prepare_output


class PairwiseParallel(ParallelStyle):
    """Shard a module's immediate linear layers in pairs, by columns and by rows.

    `_prepare_input` runs before the first of them and `_prepare_output` after the last; between them activations are
    DTensors. With an odd number the last one stays as it is. A module with fewer than two of them passes the style on
    to its children.

    Args:
        _prepare_input: Default `make_input_replicate_1d`.
        _prepare_output: Default `make_output_tensor`.
    """

    def __init__(
        self, _prepare_input: PrepareInput | None = None, _prepare_output: PrepareOutput | None = None
    ) -> None:
        super().__init__(
            make_input_replicate_1d if _prepare_input is None else _prepare_input,
            make_output_tensor if _prepare_output is None else _prepare_output,
        )

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return styles for the linear layers below; see `ParallelStyle.spec`."""
        kinds = dict(info.children)
        if issubclass(info.kind, nn.MultiheadAttention):
            return StyleSpec(problems=(_attention(info),))
        parents = [name for name in ("", *kinds) if len(_linears(name, kinds)) > 1]
        parents = [name for name in parents if not any(is_below(name, other) for other in parents if other != name)]
        problems = [
            _attention(info, name)
            for name, kind in kinds.items()
            if issubclass(kind, nn.MultiheadAttention) and not any(is_below(name, parent) for parent in parents)
        ]
        if not parents and not problems:
            problems.append(
                Problem(
                    "module-kind",
                    info.where(),
                    found="no module with two linear layers right below it",
                    hint="name the layers: ColwiseParallel for the first and RowwiseParallel for the second",
                )
            )
        children = [pair for parent in parents for pair in self._pairs(_linears(parent, kinds))]
        return StyleSpec(compute="none", children=tuple(children), problems=tuple(problems))

    def _pairs(self, linears: list[str]) -> list[tuple[str, ParallelStyle]]:
        columns, rows = linears[: len(linears) // 2 * 2 : 2], linears[1::2]
        styles: list[tuple[str, ParallelStyle]] = []
        for column, row in zip(columns, rows, strict=True):
            styles.append((column, ColwiseParallel(self._prepare_input if column == columns[0] else None, None)))
            styles.append((row, RowwiseParallel(None, self._prepare_output if row == rows[-1] else None)))
        return styles


class SequenceParallel(PairwiseParallel):
    """`PairwiseParallel` between sequence shards: rows are gathered before and reduce-scattered after, on dim 0."""

    def __init__(self) -> None:
        super().__init__(make_input_reshard_replicate, make_output_reshard_tensor)


def _linears(parent: str, kinds: dict[str, type[nn.Module]]) -> list[str]:
    return [name for name, kind in kinds.items() if name.rpartition(".")[0] == parent and issubclass(kind, nn.Linear)]


def _attention(info: ModuleInfo, name: str = "") -> Problem:
    return Problem(
        "module-kind",
        info.where(name),
        found="nn.MultiheadAttention",
        hint="its projections are one fused weight; a pair of linear layers is not what it holds",
    )
