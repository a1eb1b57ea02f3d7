"""Argument checks of the prepare functions, before anything is moved."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from tp_styles.problems import Problem, StyleInputError, StyleOutputError


def first_input(input: object) -> object:
    """The tensor to prepare: hooks hand over the tuple of all inputs, and the first one is meant."""
    if isinstance(input, tuple | list) and input:
        return input[0]
    return input


def input_and_mesh(input: object, device_mesh: DeviceMesh | None) -> tuple[torch.Tensor, DeviceMesh]:
    """The tensor and the 1-D mesh of a call to an input function.

    Raises:
        StyleInputError: Not a tensor, no mesh, a mesh with several dims, or another mesh than the DTensor's.
    """
    tensor = first_input(input)
    if device_mesh is None:
        if not isinstance(tensor, DTensor):
            raise _input_error("missing-mesh", "device_mesh is not passed nor can be inferred", "pass device_mesh=")
        device_mesh = tensor.device_mesh
    if device_mesh.ndim != 1:
        summary = f"device_mesh has dims {device_mesh.ndim} but expected to be 1 for input."
        raise _input_error("invalid-mesh", summary, 'pass one axis of it, for example mesh["tp"]')
    if not isinstance(tensor, torch.Tensor):
        summary = f"Tensor parallel module expects torch.Tensor or DTensor input but received {type(tensor)}!"
        raise _input_error("wrong-type", summary, "the first input of the module has to be a tensor")
    if isinstance(tensor, DTensor) and tensor.device_mesh != device_mesh:
        summary = f"The input is a DTensor on {tensor.device_mesh}, and device_mesh is {device_mesh}."
        raise _input_error("mesh-mismatch", summary, "redistribute keeps a DTensor on its own mesh; pass that mesh")
    return tensor, device_mesh


def output_and_mesh(output: object, device_mesh: DeviceMesh | None) -> tuple[DTensor, DeviceMesh]:
    """The DTensor and the 1-D mesh of a call to an output function.

    Raises:
        StyleOutputError: Not a DTensor, a mesh with several dims, or another mesh than the DTensor's.
    """
    if not isinstance(output, DTensor):
        summary = f"Expect output of Tensor Parallel to be a DTensor, but found {type(output)}."
        raise _output_error("wrong-type", summary, "prepare the module's input as a DTensor")
    if device_mesh is None:
        device_mesh = output.device_mesh
    if device_mesh.ndim != 1:
        summary = f"device_mesh has dims {device_mesh.ndim} but expected to be 1 for output."
        raise _output_error("invalid-mesh", summary, 'pass one axis of it, for example mesh["tp"]')
    if output.device_mesh != device_mesh:
        summary = f"The output is a DTensor on {output.device_mesh}, and device_mesh is {device_mesh}."
        raise _output_error("mesh-mismatch", summary, "redistribute keeps a DTensor on its own mesh; pass that mesh")
    return output, device_mesh


def refuse_partial(output: DTensor) -> None:
    """A partial sum has no local meaning.

    Raises:
        StyleOutputError: The output is one.
    """
    if any(isinstance(placement, Partial) for placement in output.placements):
        summary = f"The output is a partial sum ({output.placements}): its local tensor is not a shard of the result."
        raise _output_error("partial-value", summary, "use make_output_tensor or make_output_reshard_tensor")


def _input_error(code: str, summary: str, hint: str) -> StyleInputError:
    return StyleInputError(Problem(code, "input", hint=hint), summary)


def _output_error(code: str, summary: str, hint: str) -> StyleOutputError:
    return StyleOutputError(Problem(code, "output", hint=hint), summary)
