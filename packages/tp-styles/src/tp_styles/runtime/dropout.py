"""Random numbers between column-wise and row-wise layers, where ranks hold different shards.

Dropout of attention weights or of hidden channels draws there, often in a function that no style stands on. A mask that
is the same on every rank would drop the same places of every rank's heads or channels. Random operations are seen by
running them: the first call with certain settings runs under a dispatch mode, which makes the generator the rank's own
right before the first operation that draws. Later calls with these settings know the answer, so that switching
generators costs nothing, and breaks no graph, where nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from tp_styles._torch_compat import TorchDispatchMode, is_compiling
from tp_styles.plan.planned import PlannedModule, TPPlan
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.rng import enter_region, leave_region
from tp_styles.values.spec import is_below

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

    def __init__(self, axis: TPGroup, modules: Iterable[nn.Module]) -> None:
        self.axis = axis
        self.modules = list(modules)
        numbers = bool | int | float
        found = [(m, key) for m in self.modules for key, value in vars(m).items() if isinstance(value, numbers)]
        self.owners, self.fields = [module for module, _ in found], [key for _, key in found]
        self.draws: bool | None = False
        self.outside: torch.Tensor | None = None
        self._calls: dict[Any, int] = {}
        self._random: set[Any] = set()
        self._observer: _Observer | None = None
        self._settings: Any = None

    def begin(self) -> None:
        """The forward starts: decide from earlier calls, or observe this one."""
        if self.draws is not False:
            self.end()
        settings = self._read_settings()
        if settings in self._random:
            self.draws = True
        elif is_compiling():
            # Nothing can be observed in a graph; the check's eager run has been here before, unless it is off.
            # A graph depends on there having been calls, not on how many: eager ones between do not recompile it.
            self.draws = settings not in self._calls and any(module.training for module in self.modules)
        elif (calls := self._calls.get(settings, 0)) & (calls - 1) == 0 and len(self._calls) < MAX_SETTINGS:
            # Calls 1, 2, 4, 8 ...: a rate may also change where no setting shows it.
            if not OBSERVES.get():
                self.draws = calls == 0
                return
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
        self.draws = False  # as after a call that draws nothing

    def _switch(self) -> None:
        if self.outside is None:
            self.outside = enter_region(self.axis.rank, torch.device(self.axis.mesh.device_type))

    def _read_settings(self) -> Any:
        # No loops of Python: a steady forward asks, too.
        settings = (*map(len, map(vars, self.modules)), *map(dict.get, map(vars, self.owners), self.fields))
        try:
            hash(settings)
        except TypeError:  # a number has become a list
            return "unhashable"
        return settings


OBSERVES: ContextVar[bool] = ContextVar("tp_styles_observes", default=True)
"""False while a compiled call is compared: under a mode it would run without the compiler; the next call observes."""


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


MODULE_FORWARDS = {
    "module",
    "module-row-linear",
    "module-row-embedding",
    "multihead-attention",
    "foreign",
    "expert-dispatch",
    "latent-kv",
}
"""What runs code that styles do not write themselves."""


class Region:
    """Hooks of one module: after its column-wise layers and before a row-wise one, the generator is the rank's own.

    Only there: what draws before, on whole inputs, and after, on whole outputs, draws the same on every rank. Where
    the module does not call all of its column-wise layers first, nothing is switched. While nothing draws only the
    module's own pre-hook is installed.

    Args:
        random: Switches the generator.
        module: The module.
        columns: Its column-wise layers.
        rows: Its row-wise layers.
    """

    def __init__(self, random: RandomOps, module: nn.Module, columns: list[nn.Module], rows: list[nn.Module]) -> None:
        self.random = random
        self.columns = columns
        self.missing = columns  # replaced, never written to: the compiler forgets what a graph does to a set
        hooks: list[tuple[nn.Module, Any]] = [(module, self.close), *((column, self.called) for column in columns)]
        # Tables, keys and hooks. What is installed is read from the tables, which a run of the check puts back.
        self.hooks: list[tuple[Any, int, Any]] = [
            *((one._forward_hooks, one.register_forward_hook(hook).id, hook) for one, hook in hooks),
            *((row._forward_pre_hooks, row.register_forward_pre_hook(self.leave).id, self.leave) for row in rows),
        ]
        self.key = self.hooks[0][1]
        self.hooks.append((module._forward_hooks_always_called, self.key, True))
        self.install()

    def open(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the module."""
        self.random.begin()
        is_installed = self.key in module._forward_hooks
        if self.random.draws is not False:
            self.missing = self.columns
            if not is_installed:
                # Hooks that a graph's tracing adds would be a side effect of the graph.
                torch.compiler.disable(self.install)() if is_compiling() else self.install()
        elif is_installed and not is_compiling():
            self.remove()

    def install(self) -> None:
        """Install the hooks that switch the generator; in a graph they have to be there before."""
        for table, key, hook in self.hooks:
            table[key] = hook

    def remove(self) -> None:
        """Remove the hooks of `install`."""
        for table, key, _ in self.hooks:
            table.pop(key, None)

    def called(self, column: nn.Module, args: Any, output: Any) -> None:
        """Hook of a column-wise layer."""
        if self.random.draws is not False:
            self.missing = [one for one in self.missing if one is not column]
            if not self.missing:
                self.random.enter()

    def leave(self, row: nn.Module, args: Any) -> None:
        """Pre-hook of a row-wise layer."""
        if self.random.draws is not False:
            self.random.leave()

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the module, called after an error, too."""
        if self.random.draws is not False:
            self.random.end()


def install_regions(model: nn.Module, plan: TPPlan, axis: TPGroup, regions: Regions) -> list[Callable[[], None]]:
    """Hooks of all regions of a plan.

    Args:
        model: The model, parallel already.
        plan: What was done to it.
        axis: Over which ranks.
        regions: Those of `regions_of`.

    Returns:
        Functions that take them back.
    """
    styled = {f.name for f in plan.modules if f.spec.shards_randomness or f.spec.compute == "multihead-attention"}
    removers: list[Callable[[], None]] = []
    for home, (inside, ends) in regions.items():
        apart = {*inside, *ends, *styled, *(other for other in regions if other != home and is_below(other, home))}
        modules = list(_without(model.get_submodule(home), {model.get_submodule(name) for name in apart}))
        module, below = model.get_submodule(home), [model.get_submodule(name) for name in ends]
        for columns in _groups(model, inside, ends):
            region = Region(RandomOps(axis, modules), module, [model.get_submodule(name) for name in columns], below)
            removers += [module.register_forward_pre_hook(region.open).remove, region.remove]
    return removers


def _without(module: nn.Module, apart: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in apart:
        yield module
        for child in module.children():
            yield from _without(child, apart)


def checked_modules(plan: TPPlan, regions: Iterable[str]) -> list[str]:
    """FQNs of regions, and of styled modules with forwards of their own outside of all regions."""
    alone = [
        found.name
        for found in plan.modules
        if found.spec.compute in MODULE_FORWARDS and not any(is_below(found.name, region) for region in regions)
    ]
    return [*regions, *alone]


Regions = dict[str, tuple[list[str], list[str]]]
"""FQN of the innermost module around column-wise and row-wise layers -> FQNs of the former, and of the latter."""


def regions_of(plan: TPPlan) -> Regions:
    """The regions of a plan."""
    rows = [found.name for found in plan.modules if _is_row(found)]
    regions: Regions = {}
    for found in plan.modules:
        home = found.name if _is_column(found) else ""
        while home:
            home = home.rpartition(".")[0]
            if inside := [row for row in rows if is_below(row, home)]:
                regions.setdefault(home, ([], inside))[0].append(found.name)
                break
    return regions


def _is_column(found: PlannedModule) -> bool:
    """Whole input, a shard out."""
    spec = found.spec
    leaves_shard = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].dst, Shard)
    comes_whole = bool(spec.inputs) and not isinstance(spec.inputs[0][1].dst, Shard)
    return leaves_shard and comes_whole and bool(spec.parameters)


def _is_row(found: PlannedModule) -> bool:
    """A shard in, a sum out."""
    spec = found.spec
    sums = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].src, Partial)
    return sums and bool(spec.inputs) and isinstance(spec.inputs[0][1].src, Shard)


def _groups(model: nn.Module, columns: list[str], rows: list[str]) -> list[list[str]]:
    """Columns up to the next row, in the order of registration, where every group has both; else all together."""
    order = [name for name, _ in model.named_modules(remove_duplicate=False) if name in (*columns, *rows)]
    groups: list[list[str]] = [[]]
    for name in order:
        if name in columns:
            groups[-1].append(name)
        elif groups[-1]:
            groups.append([])
    complete = not groups[-1] and len(groups) - 1 == len(rows)
    return groups[:-1] if complete else [list(columns)]
