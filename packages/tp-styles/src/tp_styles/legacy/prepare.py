"""Functions to prepare a module's input and output for tensor parallelism over a 1-D mesh.

Each takes the tensor (or, from a hook, the tuple of inputs, and prepares the first) and the mesh; a
DTensor has its own mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tp_styles.problems import Problem, StyleInputError, StyleOutputError

Kind = type[StyleInputError] | type[StyleOutputError]


def input_and_mesh(input: object, device_mesh: DeviceMesh | None) -> tuple[torch.Tensor, DeviceMesh]:
    """Return the tensor and the 1-D mesh of a call to an input function.

    Raises:
        StyleInputError: Not a tensor, no mesh, a mesh with several dims, or another mesh than the DTensor's.
    """
    # Hooks pass the tuple of all inputs, and the first one is meant.
    tensor = input[0] if isinstance(input, tuple | list) and input else input
    if device_mesh is None and not isinstance(tensor, DTensor):
        problem = Problem("missing-mesh", "input", hint="pass device_mesh=")
        raise StyleInputError(problem, "device_mesh is not passed nor can be inferred")
    mesh = _one_dim("input", tensor, device_mesh, StyleInputError)
    if not isinstance(tensor, torch.Tensor):
        summary = f"Tensor parallel module expects torch.Tensor or DTensor input but received {type(tensor)}!"
        hint = "the first input of the module has to be a tensor"
        raise StyleInputError(Problem("wrong-type", "input", hint=hint), summary)
    return tensor, mesh


def output_and_mesh(output: object, device_mesh: DeviceMesh | None) -> tuple[DTensor, DeviceMesh]:
    """Return the DTensor and the 1-D mesh of a call to an output function.

    Raises:
        StyleOutputError: Not a DTensor, a mesh with several dims, or another mesh than the DTensor's.
    """
    if not isinstance(output, DTensor):
        summary = f"Expect output of Tensor Parallel to be a DTensor, but found {type(output)}."
        hint = "prepare the module's input as a DTensor"
        raise StyleOutputError(Problem("wrong-type", "output", hint=hint), summary)
    return output, _one_dim("output", output, device_mesh, StyleOutputError)


def _one_dim(what: str, tensor: Any, mesh: DeviceMesh | None, kind: Kind) -> DeviceMesh:
    mesh = tensor.device_mesh if mesh is None else mesh
    if mesh.ndim != 1:
        summary = f"device_mesh has dims {mesh.ndim} but expected to be 1 for {what}."
        raise kind(Problem("invalid-mesh", what, hint='pass one axis of it, for example mesh["tp"]'), summary)
    if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
        summary = f"The {what} is a DTensor on {tensor.device_mesh}, and device_mesh is {mesh}."
        hint = "redistribute keeps a DTensor on its own mesh; pass that mesh"
        raise kind(Problem("mesh-mismatch", what, hint=hint), summary)
    return mesh


# ---------------------------------------------------------------------------------------------- inputs


def make_input_shard_1d(
    input: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
    dim: int = 0,
) -> DTensor:
    """Return the input as a DTensor sharded on `dim`: a plain tensor is this rank's shard, a DTensor is redistributed.

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
    """Return the input as a replicated DTensor: a plain tensor is the same on every rank, a DTensor is redistributed.

    Args:
        input: The full input, or a DTensor.
        device_mesh: 1-D mesh; by default the DTensor's.
    """
    return _as_dtensor(input, device_mesh, Replicate())


def make_input_reshard_replicate(
    input: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
) -> DTensor:
    """Return the concatenated rows of all ranks' inputs on every rank (an all-gather on dim 0).

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
        summary = f"The output is a partial sum ({output.placements}): its local tensor is not a shard of the result."
        hint = "use make_output_tensor or make_output_reshard_tensor"
        raise StyleOutputError(Problem("partial-value", "output", hint=hint), summary)
    return output.to_local()


def make_output_reshard_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Return this rank's output rows as a plain tensor (a reduce-scatter on dim 0).

    Args:
        output: The module's output.
        device_mesh: 1-D mesh; by default the output's.
    """
    return make_output_shard_1d(output, device_mesh).to_local()
