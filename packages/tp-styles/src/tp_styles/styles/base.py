"""The contract of every style."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.spec import ModuleInfo, ParameterSpec, StyleSpec
from tp_styles.split import Split

PrepareInput = Callable[..., Any]
PrepareOutput = Callable[..., Any]


class ParallelStyle(TorchParallelStyle):
    """How a module is made tensor parallel.

    Subclass it to write a style of your own, in one of three ways:

    * hand functions for the first input and for the output to `super().__init__`: they are called around the module as
      `_prepare_input(inputs, device_mesh)` and `_prepare_output(output, device_mesh)`, and its parameters become
      replicated DTensors (subclass `ColwiseParallel` or `RowwiseParallel` to have them sharded);
    * define `spec(info, tp_size)`: a pure function, so that `explain` and `validate` know about it;
    * define `_apply(module, device_mesh)` as in torch: it is then called as it is.

    Args:
        _prepare_input: Called with the module's inputs and the mesh; returns the prepared first input, or all of them.
        _prepare_output: Called with the module's output and the mesh; returns the prepared output.
    """

    _prepare_input: PrepareInput | None
    _prepare_output: PrepareOutput | None

    @abstractmethod
    def __init__(self, _prepare_input: PrepareInput | None, _prepare_output: PrepareOutput | None) -> None:
        self._prepare_input = _prepare_input
        self._prepare_output = _prepare_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """What the style does to a module of a tensor-parallel group of `tp_size` ranks. Pure.

        Args:
            info: The module.
            tp_size: Number of ranks.

        Returns:
            The decision, with everything that speaks against it in `.problems`.
        """
        replicated = tuple((parameter.name, ParameterSpec(Split.replicated())) for parameter in info.parameters)
        return StyleSpec(compute="dtensor", parameters=replicated)

    @property
    def is_foreign(self) -> bool:
        """Whether the style only says how it is applied (`_apply`), and not what it means (`spec`)."""
        kind = type(self)
        return kind._apply is not ParallelStyle._apply and kind.spec is ParallelStyle.spec

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from tp_styles.apply import apply_style

        return apply_style(module, device_mesh, self, src_data_rank=self.src_data_rank)

    def _arguments(self) -> dict[str, object]:
        """What was passed to the constructor, for the repr and for comparing two styles."""
        return {"_prepare_input": self._prepare_input, "_prepare_output": self._prepare_output}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={_text(value)}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({inside})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._arguments() == other._arguments()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._arguments())))


def _text(value: object) -> str:
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else repr(value)
