"""Every rank's forward of a region, tried in one process before anything is divided.

A region may be divided if each rank, with its own columns and local head counts, hands its row-wise layer exactly its
slice of what the whole module would hand it. That is tried on a copy without weights: linear layers become random maps
of low rank, so that modules of any size (on the meta device too) take milliseconds. The same copy tells

* which parameters act between columns and rows: their gradients are partial sums;
* whether an activation gets there past the columns: its gradient would be partial too, which no style here sums;
* which dropouts act on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tp_styles._torch_compat import tree_flatten
from tp_styles.from_plan.fake_model import (
    Call,
    PassThrough,
    StandIn,
    fresh,
    same_values,
    stream,
    usual_calls,
    without_weights,
)
from tp_styles.values.split import Split


@dataclass(frozen=True)
class Verdict:
    """Result of a simulation.

    Attributes:
        right: Whether the region may be divided; None where its forward could not be run.
        reason: Why not.
        summed: FQNs of parameters that act between columns and rows.
        dropouts: FQNs of dropouts that act on shards.
    """

    right: bool | None
    reason: str = ""
    summed: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()


class Stage:
    """A copy of a model without its weights, and what its modules were called with.

    Args:
        model: The model; it is not touched.
        call: Runs a model on inputs of the caller's; by default some usual calls are tried.
    """

    def __init__(self, model: nn.Module, call: Call | None = None) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.why = ""
        self.calls: dict[str, tuple[Any, Any]] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                self.twin: nn.Module | None = without_weights(model)
            except Exception as error:  # somebody else's module: copying it may fail in any way
                self.twin, self.why = None, f"it could not be copied ({_short(error)})"
                return
            self.why = self._listen(call)

    def _listen(self, call: Call | None) -> str:
        """Run the whole copy once and keep each module's first arguments."""
        assert self.twin is not None
        names = {module: name for name, module in self.twin.named_modules()}

        def listen(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.setdefault(names[module], (args, kwargs))

        heard = [module for module in names if not isinstance(module, StandIn)]
        handles = [module.register_forward_pre_hook(listen, with_kwargs=True) for module in heard]
        why = ""
        for attempt in (call,) if call is not None else usual_calls(self.twin):
            self.calls.clear()
            try:
                attempt(self.twin)
            except Exception as error:
                why = why or f"the model could not be called ({_short(error)})"  # the likeliest call's error
                continue
            why = ""
            break
        for handle in handles:
            handle.remove()
        for module in self.twin.modules():
            if isinstance(module, StandIn):
                module.reset()
        return why

    def rehearse(
        self,
        scope: str,
        columns: Mapping[str, Split],
        row: str,
        row_split: Split,
        inner: Mapping[str, Split],
        sizes: Mapping[str, Mapping[str, int]],
        tp_size: int,
    ) -> Verdict:
        """Try one region.

        Args:
            scope: FQN of the module that holds it.
            columns: FQN of each column-wise layer -> how its outputs are divided.
            row: FQN of the row-wise layer.
            row_split: How its inputs are divided.
            inner: FQN -> split of cut parameters in between.
            sizes: FQN of a module -> attributes that become local.
            tp_size: Number of ranks.
        """
        if self.twin is None:
            return Verdict(None, self.why)
        module = self.twin.get_submodule(scope)
        arguments = self.calls.get(scope) or (self.calls.get("") if not scope else None) or stream(module)
        attempt = _Attempt(self.twin, scope, columns, row, arguments)
        try:
            whole = attempt.whole()
        except Exception as error:
            return Verdict(None, self.why or f"{scope or 'the model'} could not be run ({_short(error)})")
        if isinstance(whole, str):
            return Verdict(None, whole)
        found = attempt.inside(whole)
        if isinstance(found, str):
            return Verdict(False, found)
        for rank in range(tp_size):
            try:
                why = attempt.as_rank(rank, tp_size, row_split, inner, sizes, whole)
            except Exception as error:
                why = f"rank {rank} of {tp_size} alone: {_short(error)}"
            if why:
                return Verdict(False, why)
        return Verdict(True, "", found, tuple(sorted(attempt.dropouts)))


@dataclass
class _Whole:
    """The run that is not divided."""

    rows: list[tuple[torch.Tensor, torch.Tensor]]
    output: Any
    shapes: dict[str, list[torch.Tensor]]
    inputs: list[torch.Tensor]


class _Attempt:
    """Runs of one region's scope: once whole, once for each rank."""

    def __init__(
        self, twin: nn.Module, scope: str, columns: Mapping[str, Split], row: str, arguments: tuple[Any, Any]
    ) -> None:
        self.twin, self.scope, self.columns, self.row = twin, scope, columns, row
        self.arguments = arguments
        self.module = twin.get_submodule(scope)
        self.dropouts: set[str] = set()

    def _stand_in(self, name: str) -> StandIn:
        found = self.twin.get_submodule(name)
        assert isinstance(found, StandIn), name
        return found

    def _reset(self) -> None:
        for module in self.module.modules():
            if isinstance(module, StandIn):
                module.reset()

    def _run(self) -> tuple[Any, dict[str, list[torch.Tensor]], list[torch.Tensor]]:
        args, kwargs = fresh(self.arguments)
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) and x.requires_grad]
        seen: dict[str, list[torch.Tensor]] = {}
        names = {child: name for name, child in self.module.named_modules() if name}

        def watch(child: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                seen.setdefault(names[child], []).append(args[0].detach())

        dropouts = [child for child in names if isinstance(child, nn.modules.dropout._DropoutNd)]
        handles = [child.register_forward_pre_hook(watch) for child in dropouts]
        try:
            with torch.enable_grad():
                return self.module(*args, **kwargs), seen, inputs
        finally:
            for handle in handles:
                handle.remove()

    def whole(self) -> _Whole | str:
        """The undivided run, with the columns' outputs cut from the graph; or why it says nothing."""
        self._reset()
        for name in self.columns:
            self._stand_in(name).cuts_graph = True
        output, shapes, inputs = self._run()
        idle = [name for name in (*self.columns, self.row) if not self._stand_in(name).seen]
        if idle:
            return f"{', '.join(idle)} was not called by {self.scope or 'the model'}"
        return _Whole(list(self._stand_in(self.row).seen), output, shapes, inputs)

    def inside(self, whole: _Whole) -> tuple[str, ...] | str:
        """Parameters between the columns and the row; or why a gradient would be lost."""
        own = {id(p): name for name, p in self.twin.named_parameters()}
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        read = [x for x, _ in whole.rows if x.requires_grad]
        between = _reached(read, parameters)
        entering = _reached(read, whole.inputs)
        if entering:
            return "an activation reaches the row-wise layer past the columns: its gradient would be a partial sum"
        stand_ins = {
            id(p) for m in self.module.modules() if isinstance(m, StandIn | PassThrough) for p in m.parameters()
        }
        bypass = [own[id(p)] for p in between if id(p) in stand_ins]
        if bypass:
            return f"what {', '.join(bypass)} computes reaches the row-wise layer past the columns"
        before = [x for name in self.columns for x, _ in self._stand_in(name).seen if x.requires_grad]
        both = {id(p) for p in _reached(before, parameters)} & {id(p) for p in between}
        if both:
            return f"{', '.join(own[i] for i in both)} acts before the columns and after them"
        return tuple(sorted(own[id(p)] for p in between))

    def as_rank(
        self,
        rank: int,
        tp_size: int,
        row_split: Split,
        inner: Mapping[str, Split],
        sizes: Mapping[str, Mapping[str, int]],
        whole: _Whole,
    ) -> str:
        """One rank's run; the empty text if it hands on its slice of the whole, else what it does."""
        self._reset()
        undo: list[Callable[[], None]] = []
        for name, split in self.columns.items():
            self._stand_in(name).part = _indices(split, rank, tp_size)
        row = self._stand_in(self.row)
        row.part, row.script = _indices(row_split, rank, tp_size), whole.rows
        try:
            for name, split in inner.items():
                undo.append(_exchange(self.twin, name, split, rank, tp_size))
            for name, values in sizes.items():
                undo += [_set(self.twin.get_submodule(name), key, value) for key, value in values.items()]
            output, shapes, _ = self._run()
        finally:
            for back in reversed(undo):
                back()
        if row.failure or len(row.seen) != len(whole.rows):
            return f"rank {rank} of {tp_size} alone {row.failure or 'calls the row-wise layer less often'}"
        if not _outputs_agree(output, whole.output):
            return f"rank {rank} of {tp_size} alone gives another output: something else reads the columns"
        for name, inputs in shapes.items():
            same = [same_values(x, y) for x, y in zip(inputs, whole.shapes.get(name, []), strict=False)]
            # One that is called on full values too has no style: a region tells its calls apart.
            if same and not any(same):
                self.dropouts.add(f"{self.scope}.{name}" if self.scope else name)
        return ""


# ---------------------------------------------------------------------------------------------- comparing


def _reached(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `leaves` that some of `outputs` depend on."""
    if not outputs or not leaves:
        return []
    total = torch.stack([x.double().sum() for x in outputs]).sum()
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [leaf for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None]


def _outputs_agree(one: Any, other: Any) -> bool:
    """The first tensor is the same; others (attention weights) may be of fewer heads, but not of other values."""
    pairs = [
        (x, y)
        for x, y in zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=False)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    ]
    return all(same_values(x, y) or (index > 0 and x.shape != y.shape) for index, (x, y) in enumerate(pairs))


def _indices(split: Split, rank: int, tp_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in split.ranges(rank, tp_size)])


def _exchange(twin: nn.Module, name: str, split: Split, rank: int, tp_size: int) -> Callable[[], None]:
    path, _, key = name.rpartition(".")
    owner = twin.get_submodule(path)
    kept = owner._parameters[key]
    assert kept is not None
    owner._parameters[key] = nn.Parameter(split.take(kept.detach(), rank, tp_size))
    return lambda: owner._parameters.update({key: kept})


def _set(module: nn.Module, key: str, value: int) -> Callable[[], None]:
    kept = getattr(module, key)
    setattr(module, key, value)
    return lambda: setattr(module, key, kept)


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"
