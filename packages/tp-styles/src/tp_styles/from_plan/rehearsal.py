"""Every rank's forward of a region, tried in one process before anything is divided.

A region may be divided if each rank, with its own columns and local head counts, hands its row-wise layer exactly its
slice of what the whole module would hand it. That is tried on a copy without weights: linear layers become random maps
of low rank, so that modules of any size (on the meta device too) take milliseconds. The same copy tells

* which parameters act between columns and rows: their gradients are partial sums;
* whether an activation gets there past the columns: its gradient would be partial too, which no style here sums;
* which dropouts act on shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tp_styles._torch_compat import tree_flatten, tree_map
from tp_styles.spec import describe
from tp_styles.split import Split
from tp_styles.styles.layers import is_conv1d, linear_shape

RANK = 4
"""Rank of the random maps that stand in for weights."""

LARGEST = 1 << 20
"""Numbers of a parameter that are random in a copy; greater ones repeat one row."""

TOLERANCE = 1e-5
"""Relative: norms and softmax may compute in float32 inside; what mixes channels is off by about 1."""

Call = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Verdict:
    """What a rehearsal showed.

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


class StandIn(nn.Module):
    """A linear layer of low rank, which can give some of its output features only, or compare what it is given."""

    def __init__(self, in_features: int, out_features: int, seed: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.nf, self.nx = out_features, in_features
        self.reads = _random((in_features, RANK), seed) / in_features**0.5
        self.writes = _random((RANK, out_features), seed + 1) / RANK**0.5
        self.adds = nn.Parameter(_random((out_features,), seed + 2))
        self.weight = torch.zeros((), dtype=torch.float64).expand(out_features, in_features)
        self.bias = None
        self.part: torch.Tensor | None = None  # output features to give; of a row, input features to expect
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.script: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.cuts_graph = False
        self.failure = ""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The map; with a `script`, the input is compared with it and its output returned."""
        x: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
        if self.script is not None:
            return self._follow(x)
        out: torch.Tensor = (x.double() @ self.reads) @ self.writes + self.adds
        self.seen.append((x, out))
        if self.cuts_graph:
            out = out.detach()
        return out if self.part is None else out[..., self.part]

    def _follow(self, x: torch.Tensor) -> torch.Tensor:
        assert self.script is not None
        assert self.part is not None
        at = len(self.seen)
        if at >= len(self.script):
            raise ValueError("the row-wise layer is called more often")
        wanted, out = self.script[at]
        self.seen.append((x, out))
        if not _same(x, wanted[..., self.part]):
            self.failure = f"gives {list(x.shape)} of {list(wanted.shape)}, or other values than its slice of the whole"
        return out

    def reset(self) -> None:
        """Forget the last run."""
        self.part, self.script, self.seen, self.failure, self.cuts_graph = None, None, [], "", False


class PassThrough(nn.Module):
    """Stands in for experts, which are expensive and stand between no columns and rows; if they do, that shows."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What it is given first."""
        return x + self.adds


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
                self.twin: nn.Module | None = _copied(model)
            except Exception as error:  # somebody else's module: copying it may fail in any way
                self.twin, self.why = None, f"it could not be copied ({_short(error)})"
                return
            self.why = self._listen(call)

    def _listen(self, call: Call | None) -> str:
        """Run the whole copy once and keep each module's first arguments."""
        assert self.twin is not None
        handles = [
            module.register_forward_pre_hook(_Listener(self.calls, name), with_kwargs=True)
            for name, module in self.twin.named_modules()
            if not isinstance(module, StandIn)
        ]
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
        arguments = self.calls.get(scope) or (self.calls.get("") if not scope else None) or _stream(module)
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


class _Listener:
    def __init__(self, calls: dict[str, tuple[Any, Any]], name: str) -> None:
        self.calls, self.name = calls, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.setdefault(self.name, (args, kwargs))


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
        args, kwargs = _fresh(self.arguments)
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) and x.requires_grad]
        seen: dict[str, list[torch.Tensor]] = {}
        handles = [
            child.register_forward_pre_hook(_Watcher(seen, name))
            for name, child in self.module.named_modules()
            if name and isinstance(child, nn.modules.dropout._DropoutNd)
        ]
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
            if not all(_same(x, y) for x, y in zip(inputs, whole.shapes.get(name, []), strict=False)):
                self.dropouts.add(f"{self.scope}.{name}" if self.scope else name)
        return ""


class _Watcher:
    def __init__(self, seen: dict[str, list[torch.Tensor]], name: str) -> None:
        self.seen, self.name = seen, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor):
            self.seen.setdefault(self.name, []).append(args[0].detach())


# ---------------------------------------------------------------------------------------------- the copy


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy in which linear layers are stand-ins and everything else is small, on the CPU, in float64."""
    memo: dict[int, Any] = {}
    for index, module in enumerate(model.modules()):
        shape = linear_shape(describe(module)) if _is_plain_linear(module) else None
        if shape is not None:
            memo[id(module)] = StandIn(shape.in_features, shape.out_features, 10 * index)
        elif _is_experts(module):
            memo[id(module)] = PassThrough()
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_filled(parameter), requires_grad=parameter.is_floating_point())
    for buffer in model.buffers():
        memo[id(buffer)] = _buffer(buffer)
    return copy.deepcopy(model, memo).eval()


def _is_plain_linear(module: nn.Module) -> bool:
    kind = type(module)
    known = kind.forward is nn.Linear.forward or is_conv1d(kind) or kind.__module__.split(".")[0] == "transformers"
    return known and isinstance(module._parameters.get("weight"), nn.Parameter) and not module._modules


def _is_experts(module: nn.Module) -> bool:
    deep = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    return len(deep) > 1 and type(module).__module__.split(".")[0] == "transformers"


def _filled(value: torch.Tensor) -> torch.Tensor:
    """Something that blocks no flow: ones with noise."""
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=value.dtype)
    if value.numel() <= LARGEST:
        return 1 + 0.3 * torch.randn(value.shape, dtype=torch.float64)
    return (1 + 0.3 * torch.randn(value.shape[-1:], dtype=torch.float64)).expand(value.shape)


def _buffer(value: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    if value.is_meta:
        return torch.ones(value.shape, dtype=dtype)
    return value.detach().to("cpu", dtype)


# ---------------------------------------------------------------------------------------------- calls


def usual_calls(twin: nn.Module) -> list[Call]:
    """Ways in which models are usually called: with ids, or with vectors."""
    vocabulary = min((m.num_embeddings for m in twin.modules() if isinstance(m, nn.Embedding)), default=0)
    ids = (torch.arange(8).view(2, 4) * 3 + 1) % max(min(vocabulary, 64), 1)
    width = next((m.in_features for m in twin.modules() if isinstance(m, StandIn)), 1)
    stream = _random((2, 4, width), 5).requires_grad_()
    other = _random((2, 4, width), 6).requires_grad_()
    by_name: Call = lambda m: m(input_ids=ids, use_cache=False)  # noqa: E731
    pair: Call = lambda m: m(input_ids=ids, decoder_input_ids=ids, use_cache=False)  # noqa: E731
    with_ids: list[Call] = [lambda m: m(ids)]
    with_vectors: list[Call] = [lambda m: m(stream), lambda m: m(stream, other)]
    if hasattr(twin, "config"):
        return [by_name, pair, lambda m: m(input_ids=ids), *with_ids, *with_vectors]
    return with_ids + with_vectors if vocabulary else with_vectors + with_ids


def _stream(module: nn.Module) -> tuple[Any, Any]:
    width = next((m.in_features for m in module.modules() if isinstance(m, StandIn)), 1)
    return (_random((2, 4, width), 5).requires_grad_(),), {}


def _fresh(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    """Copies that a forward may change; those that take part in backward still do."""

    def twin(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return copy.deepcopy(x)
        return x.detach().clone().requires_grad_(x.requires_grad)

    moved: tuple[Any, Any] = tree_map(twin, arguments)
    return moved


# ---------------------------------------------------------------------------------------------- comparing


def _reached(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `leaves` that some of `outputs` depend on."""
    if not outputs or not leaves:
        return []
    total = torch.stack([x.double().sum() for x in outputs]).sum()
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [leaf for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool((one == other).all())
    scale = max(float(other.detach().abs().max()) if other.numel() else 0.0, 1e-12)
    return bool(((one - other).detach().abs() <= TOLERANCE * scale).all())


def _outputs_agree(one: Any, other: Any) -> bool:
    """The first tensor is the same; others (attention weights) may be of fewer heads, but not of other values."""
    pairs = [
        (x, y)
        for x, y in zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=False)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    ]
    return all(_same(x, y) or (index > 0 and x.shape != y.shape) for index, (x, y) in enumerate(pairs))


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


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"
