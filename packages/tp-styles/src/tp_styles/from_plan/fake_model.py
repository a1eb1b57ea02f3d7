"""A copy of a model without its weights, for rehearsals: linear layers are random maps of low rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tp_styles._torch_compat import tree_map
from tp_styles.styles.layers import is_conv1d, linear_shape
from tp_styles.values.spec import describe

RANK = 4
"""Rank of the random maps that stand in for weights."""

LARGEST = 1 << 20
"""Numbers of a parameter that are random in a copy; greater ones repeat one row."""

TOLERANCE = 1e-5
"""Relative: norms and softmax may compute in float32 inside; what mixes channels is off by about 1."""

Call = Callable[[nn.Module], object]


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
        if not same_values(x, wanted[..., self.part]):
            self.failure = f"gives {list(x.shape)} of {list(wanted.shape)}, or values other than its slice"
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
        """Return the first argument."""
        return x + self.adds


def without_weights(model: nn.Module) -> nn.Module:
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


def stream(module: nn.Module) -> tuple[Any, Any]:
    """Arguments of a module that takes one activation, as wide as its first linear layer asks for."""
    width = next((m.in_features for m in module.modules() if isinstance(m, StandIn)), 1)
    return (_random((2, 4, width), 5).requires_grad_(),), {}


def fresh(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    """Copies that a forward may change; those that take part in backward still do."""

    def twin(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return copy.deepcopy(x)
        return x.detach().clone().requires_grad_(x.requires_grad)

    moved: tuple[Any, Any] = tree_map(twin, arguments)
    return moved


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are equal, up to float32 inside."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool((one == other).all())
    scale = max(float(other.detach().abs().max()) if other.numel() else 0.0, 1e-12)
    return bool(((one - other).detach().abs() <= TOLERANCE * scale).all())
