"""`ParallelStyle`, the base of every style: a pure decision, and functions around a module."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.values import ModuleInfo, ParameterSpec, Split, StyleSpec

PrepareInput = Callable[..., Any]
PrepareOutput = Callable[..., Any]


class ParallelStyle(TorchParallelStyle):
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

    _prepare_input: PrepareInput | None = None  # of a subclass that does not call `__init__`
    _prepare_output: PrepareOutput | None = None
    takes_functions = True
    # `apply.apply_staged`, which stands above plans: `styles.base` sets it.
    _applies: ClassVar[Callable[..., Any]]

    @abstractmethod
    def __init__(self, _prepare_input: PrepareInput | None, _prepare_output: PrepareOutput | None) -> None:
        self._prepare_input = _prepare_input
        self._prepare_output = _prepare_output

    def spec(self, info: ModuleInfo, tp_size: int) -> StyleSpec:
        """Return the style's decision for a module over `tp_size` ranks. Pure.

        Args:
            info: The module.
            tp_size: Number of ranks.

        Returns:
            The decision, with all reasons against it in `.problems`.
        """
        replicated = tuple((parameter.name, ParameterSpec(Split.replicated())) for parameter in info.parameters)
        return StyleSpec(compute="dtensor", parameters=replicated)

    @property
    def is_foreign(self) -> bool:
        """True if the style defines only an `_apply` of its own, and no `spec`."""
        kind = type(self)
        return kind.spec is ParallelStyle.spec and not kind._apply.__module__.startswith("tp_styles.")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ParallelStyle._applies(module, device_mesh, self, self.src_data_rank)
        return module

    def _arguments(self) -> dict[str, object]:
        """Return the constructor's arguments (equal to attributes), for the repr and for comparing two styles."""
        return {name: getattr(self, name) for name in _argument_names(type(self))}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={_text(value)}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({inside})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._arguments() == other._arguments()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._arguments())))  # values may be unhashable


class AddedByPlanner(ParallelStyle):
    """Style of a module that the plan does not name: around parallel layers, or `rest="replicated"`."""

    def __init__(self) -> None:
        super().__init__(None, None)


@functools.cache
def _argument_names(kind: type[ParallelStyle]) -> tuple[str, ...]:
    # A user's subclass may take any arguments: its meaning is in the attributes of our base class.
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("tp_styles."))
    parameters = inspect.signature(ours).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL)


def _text(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Placement):
        return repr(value[0])  # one layout may be given without its tuple
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else repr(value)
