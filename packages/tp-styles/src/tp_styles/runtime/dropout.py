"""Dropout between column-wise and row-wise layers, where ranks hold different shards.

One mask on every rank would drop the same places of every rank's heads or channels. So in training, if a module of
the region has a dropout rate above zero, the default generator is the rank's own from the last column-wise layer to
the row-wise one. Without a rate nothing is switched: other random numbers (drop-path draws one for each
sample) are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from tp_styles.plan.planned import PlannedModule, TPPlan
from tp_styles.runtime.collectives import TPGroup
from tp_styles.runtime.rng import enter_region, leave_region
from tp_styles.values.spec import is_below


def is_rate(module: nn.Module, name: str, value: Any) -> bool:
    """True for a dropout rate: `p` of `nn.Dropout`, `rate`, numbers with "drop" in their names."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):  # its other numbers are no rates
        return name == "p"
    return name == "rate" or ("drop" in name and "path" not in name and "layer" not in name)  # drop-path: equal draws


class RandomOps:
    """Switch to rank-specific random numbers for stretches of a module's forward between shards.

    `begin` and `end` are called around the module's forward, `enter` and `leave` around stretches between shards.

    Args:
        axis: Its ranks.
        modules: Modules that run in the stretch, for their dropout rates.
    """

    def __init__(self, axis: TPGroup, modules: Iterable[nn.Module]) -> None:
        self.axis = axis
        self.rates = [(m, key) for m in modules for key, value in vars(m).items() if is_rate(m, key, value)]
        self.draws = False
        self.outside: torch.Tensor | None = None

    def begin(self) -> None:
        """Start the forward; rates and training flags may have changed since the last one."""
        if self.draws:  # the last forward did not end
            self.end()
        # A plain loop: the compiler guards the values in it.
        for module, key in self.rates:
            if module.training and vars(module).get(key):
                self.draws = True

    def enter(self) -> None:
        """Switch: from here on ranks hold different shards."""
        if self.draws and self.outside is None:
            self.outside = enter_region(self.axis.rank, torch.device(self.axis.mesh.device_type))

    def leave(self) -> None:
        """Switch back: from here on ranks compute the same again."""
        if self.outside is not None:
            leave_region(self.outside, torch.device(self.axis.mesh.device_type))
            self.outside = None

    def end(self) -> None:
        """End the forward, also after an error."""
        self.leave()
        self.draws = False


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
    """Hooks of one module: rank-specific random numbers between its column-wise and row-wise layers.

    Draws before, on full inputs, and after, on full outputs, are the same on every rank. If the module does not call
    all of its column-wise layers first, nothing is switched.

    Args:
        random: Switches the generator.
        columns: The module's column-wise layers.
    """

    def __init__(self, random: RandomOps, columns: list[nn.Module]) -> None:
        self.random = random
        self.columns = columns
        self.missing = columns  # replaced, never mutated: the compiler loses a graph's changes of a set

    def install(self, module: nn.Module, rows: list[nn.Module]) -> list[Callable[[], None]]:
        """Install the hooks on a module, its column-wise and its row-wise layers; return functions to remove them."""
        handles = [module.register_forward_pre_hook(self.open)]
        handles.append(module.register_forward_hook(self.close, always_call=True))  # after an error too
        handles += [column.register_forward_hook(self.called) for column in self.columns]
        handles += [row.register_forward_pre_hook(self.leave) for row in rows]
        return [handle.remove for handle in handles]

    def open(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the module."""
        self.random.begin()
        if self.random.draws:
            self.missing = self.columns

    def called(self, column: nn.Module, args: Any, output: Any) -> None:
        """Hook of a column-wise layer."""
        if self.random.draws:
            self.missing = [one for one in self.missing if one is not column]  # not in place, see `__init__`
            if not self.missing:  # all outputs are sharded from here on
                self.random.enter()

    def leave(self, row: nn.Module, args: Any) -> None:
        """Pre-hook of a row-wise layer."""
        if self.random.draws:
            self.random.leave()

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the module, called after an error, too."""
        if self.random.draws:
            self.random.end()


def install_regions(model: nn.Module, plan: TPPlan, axis: TPGroup, regions: Regions) -> list[Callable[[], None]]:
    """Install the hooks of all regions of a plan.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        axis: Its ranks.
        regions: Those of `regions_of`.

    Returns:
        Functions to remove them.
    """
    styled = {f.name for f in plan.modules if f.spec.shards_randomness or f.spec.compute == "multihead-attention"}
    removers: list[Callable[[], None]] = []
    for home, (inside, ends) in regions.items():
        apart = {*inside, *ends, *styled, *(other for other in regions if other != home and is_below(other, home))}
        modules = list(_without(model.get_submodule(home), {model.get_submodule(name) for name in apart}))
        module, below = model.get_submodule(home), [model.get_submodule(name) for name in ends]
        random = RandomOps(axis, modules)
        for columns in _groups(model, inside, ends) if random.rates else ():
            removers += Region(random, [model.get_submodule(name) for name in columns]).install(module, below)
    return removers


def _without(module: nn.Module, apart: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in apart:
        yield module
        for child in module.children():
            yield from _without(child, apart)


def checked_modules(plan: TPPlan, regions: Iterable[str]) -> list[str]:
    """Return FQNs of regions, and of styled modules with forwards of their own outside of them."""
    alone = [
        found.name
        for found in plan.modules
        if found.spec.compute in MODULE_FORWARDS and not any(is_below(found.name, region) for region in regions)
    ]
    return [*regions, *alone]


Regions = dict[str, tuple[list[str], list[str]]]
"""FQN of the innermost module around column-wise and row-wise layers -> FQNs of the former, and of the latter."""


def regions_of(plan: TPPlan) -> Regions:
    """Return the regions of a plan."""
    rows = [found.name for found in plan.modules if _is_row(found)]
    regions: Regions = {}
    for found in plan.modules:
        home = found.name if _is_column(found) else ""
        while home:  # up to the innermost module around a row too
            home = home.rpartition(".")[0]
            if inside := [row for row in rows if is_below(row, home)]:
                regions.setdefault(home, ([], inside))[0].append(found.name)
                break
    return regions


def _is_column(found: PlannedModule) -> bool:
    """True for a full input and a sharded output."""
    spec = found.spec
    leaves_shard = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].dst, Shard)
    comes_whole = bool(spec.inputs) and not isinstance(spec.inputs[0][1].dst, Shard)
    return leaves_shard and comes_whole and bool(spec.parameters)


def _is_row(found: PlannedModule) -> bool:
    """True for a sharded input and a summed output."""
    spec = found.spec
    sums = len(spec.outputs) == 1 and spec.outputs[0] is not None and isinstance(spec.outputs[0].src, Partial)
    return sums and bool(spec.inputs) and isinstance(spec.inputs[0][1].src, Shard)


def _groups(model: nn.Module, columns: list[str], rows: list[str]) -> list[list[str]]:
    """Group columns up to the next row, in registration order, if every group has both; else all together."""
    order = [name for name, _ in model.named_modules(remove_duplicate=False) if name in (*columns, *rows)]
    groups: list[list[str]] = [[]]
    for name in order:
        if name in columns:
            groups[-1].append(name)
        elif groups[-1]:
            groups.append([])
    complete = not groups[-1] and len(groups) - 1 == len(rows)  # each group ends with a row
    return groups[:-1] if complete else [list(columns)]
