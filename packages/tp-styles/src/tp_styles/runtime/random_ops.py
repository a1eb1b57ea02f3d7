"""Random operations where ranks hold different shards: seen by running them, not by reading code.

The first call with certain settings runs under a dispatch mode, which makes the generator the rank's own right before
the first operation that draws. Later calls with these settings know the answer, so that switching generators costs
nothing, and breaks no graph, where nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tp_styles._torch_compat import TorchDispatchMode, is_compiling
from tp_styles.rng import enter_region, leave_region
from tp_styles.runtime.axis import Axis

RATES = "dropout_p", "dropout", "p"
"""Arguments of operations that draw nothing where they are zero."""

MAX_SETTINGS = 64
"""A module whose numbers change with every call is taken to draw, from here on."""


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a call of a torch operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in RATES:
            rate = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return rate is None or bool(rate)
    return True


class RandomOps:
    """Random numbers of a stretch of a module's forward: the rank's own where ranks hold different shards.

    `begin` and `end` stand around the module's forward, `enter` and `leave` around stretches between shards.

    Args:
        axis: Over which ranks.
        modules: Modules whose forwards run in the stretch; their numbers and their training flags are the settings.
    """

    def __init__(self, axis: Axis, modules: Iterable[nn.Module]) -> None:
        self.axis = axis
        self.fields = [(module, tuple(_numbers(module))) for module in modules]
        self.draws: bool | None = False
        self.outside: torch.Tensor | None = None
        self._calls: dict[Any, int] = {}
        self._random: set[Any] = set()
        self._observer: _Observer | None = None
        self._settings: Any = None

    def begin(self) -> None:
        """The forward starts: decide from earlier calls, or observe this one."""
        self.end()
        settings = self._read_settings()
        calls = self._calls.get(settings, 0)
        if settings in self._random:
            self.draws = True
        elif is_compiling():
            # Nothing can be observed in a graph; the check's eager run has been here before, unless it is off.
            self.draws = calls == 0 and any(module.training for module, _ in self.fields)
        elif calls & (calls - 1) == 0 and len(self._calls) < MAX_SETTINGS:
            # Calls 1, 2, 4, 8 ...: a rate may also change where no setting shows it.
            self.draws, self._settings = None, settings
            self._observer = _Observer(self._switch)
            self._observer.__enter__()  # type: ignore[no-untyped-call]  # torch's
        else:
            self.draws = len(self._calls) >= MAX_SETTINGS and calls == 0
            self._calls[settings] = calls + 1

    def enter(self) -> None:
        """From here on ranks hold different shards."""
        if self._observer is not None:
            self._observer.is_armed = self._observer.was_armed = True
        elif self.draws:
            self._switch()

    def leave(self) -> None:
        """From here on ranks compute alike again."""
        if self._observer is not None:
            self._observer.is_armed = False
        if self.outside is not None:
            leave_region(self.outside, torch.device(self.axis.mesh.device_type))
            self.outside = None

    def end(self) -> None:
        """The forward has ended, also with an error."""
        self.leave()
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            if observer.was_armed:
                self._calls[self._settings] = self._calls.get(self._settings, 0) + 1
            if observer.has_drawn:
                self._random.add(self._settings)

    def _switch(self) -> None:
        if self.outside is None:
            self.outside = enter_region(self.axis.rank, torch.device(self.axis.mesh.device_type))

    def _read_settings(self) -> Any:
        found: list[Any] = []
        for module, names in self.fields:
            attributes = vars(module)
            found.append(len(attributes))
            found += [attributes.get(name) for name in names]
        try:
            hash(settings := tuple(found))
        except TypeError:  # a number has become a list
            return "unhashable"
        return settings


class _Observer(TorchDispatchMode):
    """Calls a function before the first operation that draws, while armed."""

    def __init__(self, before_first: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.before_first = before_first
        self.is_armed = self.was_armed = self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation's result."""
        if self.is_armed and is_random(func, args, kwargs or {}):
            self.has_drawn = True
            self.before_first()  # once more after the region was left and entered again
        return func(*args, **(kwargs or {}))


def _numbers(module: nn.Module) -> Iterable[str]:
    return (name for name, value in vars(module).items() if isinstance(value, bool | int | float))
