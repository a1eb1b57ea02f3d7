"""The contract of every style."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles.apply import apply_staged
from tp_styles.plan.style import PrepareInput, PrepareOutput, Style

__all__ = ["ParallelStyle", "PrepareInput", "PrepareOutput"]


class ParallelStyle(Style):
    """Base class of every style: makes a module tensor parallel.

    Subclass it to write a style of your own, in one of three ways:

    * hand functions for the first input and for the output to `super().__init__`: they are called around the module as
      `_prepare_input(inputs, device_mesh)` and `_prepare_output(output, device_mesh)`, and its parameters become
      replicated DTensors (subclass `ColwiseParallel` or `RowwiseParallel` to have them sharded);
    * define `spec(info, tp_size)`: a pure function, used by `plan_styles` and `explain`;
    * define `_apply(module, device_mesh)` as in torch: it is then called as it is.

    Args:
        _prepare_input: Called with the module's inputs and the mesh; returns the prepared first input, or all of them.
        _prepare_output: Called with the module's output and the mesh; returns the prepared output.
    """

    @abstractmethod
    def __init__(self, _prepare_input: PrepareInput | None, _prepare_output: PrepareOutput | None) -> None:
        self._prepare_input = _prepare_input
        self._prepare_output = _prepare_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        apply_staged(module, device_mesh, self, self.src_data_rank)
        return module
