"""Dropout between column-wise and row-wise layers, where ranks hold different shards.

One mask on every rank would drop the same places of every rank's heads or channels. So in training, if a module of
the region has a dropout rate above zero, the default generator is the rank's own from the last column-wise layer to
the row-wise one. Without a rate nothing is switched: other random numbers (drop-path draws one for each
sample) are the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tp_styles.plan.model import Regions, TPPlan
from tp_styles.runtime.redistribute import TPGroup
from tp_styles.values import is_below


@contextmanager
def tp_rng(mesh: DeviceMesh) -> Iterator[None]:
    """Draw random numbers inside from the rank and the default generator's state at entry.

    Masks over shards differ from rank to rank, and are the same again when activation checkpointing restores the
    default generator and repeats the region. Outside, the default generator continues equally on every rank, however
    many numbers each has drawn inside.

    Args:
        mesh: 1-D tensor-parallel mesh.
    """
    device = torch.device(mesh.device_type)
    outside = enter_region(mesh.get_local_rank(), device)
    try:
        yield
    finally:
        leave_region(outside, device)


def enter_region(rank: int, device: torch.device) -> torch.Tensor:
    """Make the default generator rank-specific; return the state for `leave_region`."""
    generator = default_generator(device)
    mixed = hashlib.blake2b(f"{_drawn_seed(generator)} {rank}".encode(), digest_size=8).digest()
    outside = generator.get_state()
    generator.manual_seed(int.from_bytes(mixed, "little") >> 2)  # never negative
    return outside


def leave_region(outside: torch.Tensor, device: torch.device) -> None:
    """Restore the default generator's state of all ranks."""
    default_generator(device).set_state(outside)


def default_generator(device: torch.device) -> torch.Generator:
    """Return dropout's generator on this device."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch, device.type).default_generators
    index: int | None = device.index  # None for "this rank's"
    index = getattr(torch, device.type).current_device() if index is None else index
    generator: torch.Generator = generators[index]
    return generator


def _drawn_seed(generator: torch.Generator) -> str:
    """Return a function of the generator's state, and advance it. No device is waited for."""
    if generator.device.type == "cpu":
        return str(torch.randint(2**62, (), generator=generator, device=generator.device).item())
    offset = generator.get_offset()
    seed = f"{generator.initial_seed()} {offset}"
    generator.set_offset(offset + 4)  # offsets of CUDA generators are multiples of four
    return seed


def is_rate(module: nn.Module, name: str, value: Any) -> bool:
    """True for a dropout rate: `p` of `nn.Dropout`, `rate`, numbers with "drop" in their names."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):  # its other numbers are no rates
        return name == "p"
    return name == "rate" or ("drop" in name and "path" not in name and "layer" not in name)  # drop-path: equal draws


# Modules and names of attributes that are dropout rates.
Rates = list[tuple[nn.Module, str]]


def rates_of(modules: Iterable[nn.Module]) -> Rates:
    """Dropout rates of modules."""
    return [(m, key) for m in modules for key, value in vars(m).items() if is_rate(m, key, value)]


def draws(rates: Rates) -> bool:
    """True if dropout draws now: rates and training flags change between calls."""
    return any([module.training and vars(module).get(key) for module, key in rates])  # noqa: C419  # a list is guarded


class Region:
    """Hooks of one module: rank-specific random numbers between its column-wise and row-wise layers.

    Only there: what draws before, on whole inputs, and after, on whole outputs, draws the same on every rank. Where
    the module does not call all column-wise layers of a group first, nothing is switched.

    Args:
        axis: Over which ranks.
        rates: Dropout rates of modules between the layers.
        groups: The module's column-wise layers, each group before a row-wise one.
    """

    def __init__(self, axis: TPGroup, rates: Rates, groups: list[list[nn.Module]]) -> None:
        self.rank, self.device = axis.rank, torch.device(axis.mesh.device_type)
        self.rates, self.groups = rates, groups
        # Replaced, not written to: the compiler forgets what graphs do to sets.
        self.missing: list[list[nn.Module]] = []
        self.outside: torch.Tensor | None = None

    def install(self, module: nn.Module, rows: list[nn.Module]) -> list[Callable[[], None]]:
        """Install the hooks on a module and its layers; return functions to remove them."""
        handles = [module.register_forward_pre_hook(self.open)]
        handles.append(module.register_forward_hook(self.close, always_call=True))
        handles += [column.register_forward_hook(self.called) for group in self.groups for column in group]
        handles += [row.register_forward_pre_hook(self.leave) for row in rows]
        return [handle.remove for handle in handles]

    def open(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the module."""
        self.leave(module, args)
        self.missing = self.groups if draws(self.rates) else []

    def called(self, column: nn.Module, args: Any, output: Any) -> None:
        """Hook of a column-wise layer. The last of its group to be called opens the stretch between shards."""
        self.missing = [[layer for layer in group if layer is not column] for group in self.missing]
        for group, missing in zip(self.groups, self.missing, strict=False):
            if not missing and self.outside is None and any(layer is column for layer in group):
                self.outside = enter_region(self.rank, self.device)

    def leave(self, row: nn.Module, args: Any) -> None:
        """Pre-hook of a row-wise layer."""
        if self.outside is not None:
            leave_region(self.outside, self.device)
            self.outside = None

    def close(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the module, called after an error, too."""
        self.leave(module, args)
        self.missing = []


def install_regions(model: nn.Module, plan: TPPlan, axis: TPGroup, regions: Regions) -> list[Callable[[], None]]:
    """Install the hooks of all regions of a plan.

    Args:
        model: The model, with the plan applied.
        plan: The plan.
        axis: Its ranks.
        regions: Those of the plan.

    Returns:
        Functions to remove them.
    """
    styled = {f.name for f in plan.modules if f.spec.shards_randomness or f.spec.compute == "multihead-attention"}
    removers: list[Callable[[], None]] = []
    for block, (inside, ends) in regions.items():
        apart = {*inside, *ends, *styled, *(other for other in regions if other != block and is_below(other, block))}
        modules = list(_without(model.get_submodule(block), {model.get_submodule(name) for name in apart}))
        module, below = model.get_submodule(block), [model.get_submodule(name) for name in ends]
        if rates := rates_of(modules):
            groups = [[model.get_submodule(name) for name in names] for names in _groups(model, inside, ends)]
            removers += Region(axis, rates, groups).install(module, below)
    return removers


def _without(module: nn.Module, apart: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in apart:
        yield module
        for child in module.children():
            yield from _without(child, apart)


def _groups(model: nn.Module, columns: list[str], rows: list[str]) -> list[list[str]]:
    """Group columns up to the next row, in registration order. They stay together if a group lacks either."""
    order = [name for name, _ in model.named_modules(remove_duplicate=False) if name in (*columns, *rows)]
    groups: list[list[str]] = [[]]
    for name in order:
        if name in columns:
            groups[-1].append(name)
        elif groups[-1]:
            groups.append([])
    complete = not groups[-1] and len(groups) - 1 == len(rows)  # each group ends with a row
    return groups[:-1] if complete else [list(columns)]
