"""Base of every style: a pure decision, and functions around a module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from tp_styles._torch_compat import TorchParallelStyle
from tp_styles.values import ModuleInfo, ParameterSpec, Split, StyleSpec

PrepareInput = Callable[..., Any]
PrepareOutput = Callable[..., Any]


class Style(TorchParallelStyle):
    """The pure part of a style; `styles.base.ParallelStyle` adds `_apply`. Itself it stands for the planner's own."""

    _prepare_input: PrepareInput | None = None
    _prepare_output: PrepareOutput | None = None
    takes_functions = True

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
        return kind.spec is Style.spec and not kind._apply.__module__.startswith("tp_styles.")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise AssertionError("styles below are added by the planner, and applied by it")

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


@functools.cache
def _argument_names(kind: type[Style]) -> tuple[str, ...]:
    # A user's subclass may take any arguments: its meaning is in the attributes of our base class.
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("tp_styles."))
    parameters = inspect.signature(ours).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL)


def _text(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Placement):
        return repr(value[0])  # one layout may be given without its tuple
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else repr(value)
