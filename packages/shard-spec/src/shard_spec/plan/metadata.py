"""Metadata of a model, read once, without its tensors' data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shard_spec._shared.dtypes import FLOATING, ITEM_BYTES
from shard_spec._shared.problems import PlanError, Problem


def require_floating(*dtypes: object) -> None:
    """Refuse dtypes that a module cannot be converted to; None and flags are no dtype."""
    kinds = [name for name in ITEM_BYTES if name in FLOATING]
    for dtype in dtypes:
        if not isinstance(dtype, bool | None) and dtype not in kinds:  # grads= may be a flag
            raise PlanError(Problem("unsupported-dtype", "dtype", found=repr(dtype), hint=f"one of {', '.join(kinds)}"))


@dataclass(frozen=True)
class TensorMetadata:
    """One parameter or buffer of a model: its global shape and kind.

    Attributes:
        name: FQN, the first of its names if it is tied.
        shape: Global shape.
        dtype: Name of the dtype without ``torch.``.
        kind: ``"parameter"`` or ``"buffer"``.
        requires_grad: True if it gets a gradient.
        aliases: All its FQNs in the order of the modules; more than one if it is tied.
        module_type: Class name of its module, ``"Linear"`` and ``"Embedding"`` for subclasses of torch's too; ``""`` if
            unknown.
        sparse_grad: True if its gradient is sparse, as that of ``nn.Embedding(sparse=True)``: only rows looked up.
        stored_bytes: Bytes of a quantised weight, packed values and scales together; None for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: str = "parameter"
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    module_type: str = ""
    sparse_grad: bool = False
    stored_bytes: int | None = None

    def __post_init__(self) -> None:
        vars(self).update(
            shape=tuple(int(size) for size in self.shape),
            aliases=tuple(self.aliases) or (self.name,),  # at least its own name
        )
        if self.dtype not in ITEM_BYTES:
            raise PlanError(
                Problem("unsupported-dtype", self.name, found=repr(self.dtype), hint=f"one of {', '.join(ITEM_BYTES)}")
            )

    def bytes_of(self, numel: int, dtype: str | None = None) -> int:
        """Return the bytes of ``numel`` elements.

        Args:
            numel: Number of elements, at most that of the tensor.
            dtype: Dtype of floating tensors after a conversion; a quantised weight keeps its packed form.
        """
        if self.stored_bytes is not None:
            return -(-self.stored_bytes * numel // max(self.numel, 1))
        return numel * ITEM_BYTES[dtype if dtype and self.is_floating else self.dtype]

    @property
    def is_floating(self) -> bool:
        """True if the dtype can have a gradient."""
        return self.dtype in FLOATING

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelMetadata:
    """All tensors of a model, and the types of its modules.

    Build it with :func:`metadata_of` from a module (on any device, the meta device included), or from shapes alone.

    Attributes:
        tensors: Parameters and buffers; a tied tensor occurs once.
        modules: FQN of each module to the name of its class; empty if only tensors are known.
        problems: Problems of the model itself (uninitialized parameters, ...).
    """

    tensors: tuple[TensorMetadata, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        vars(self).update(
            tensors=tuple(self.tensors),
            modules=dict(self.modules),
        )

    @cached_property
    def parameters(self) -> tuple[TensorMetadata, ...]:
        """Parameters among the tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == "parameter")

    @property
    def buffers(self) -> tuple[TensorMetadata, ...]:
        """Buffers among the tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == "buffer")

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> ModelMetadata:
        """Build metadata of parameters from names and shapes only."""
        return cls(tuple(TensorMetadata(name, tuple(shape), dtype) for name, shape in shapes.items()))


def original_of(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` wrapped: its names are those of a plan. Other modules pass unchanged."""
    original = getattr(model, "_orig_mod", None) if type(model).__name__ == "OptimizedModule" else None
    return model if original is None else original


def metadata_of(model: nn.Module | ModelMetadata) -> ModelMetadata:
    """Read the metadata of ``model``; ``ModelMetadata`` is returned as it is.

    A DTensor parameter, or a local shard with ``_sharding_info``, counts with its global shape.

    Raises:
        TypeError: When ``model`` is neither.
    """
    if isinstance(model, ModelMetadata):  # read before
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"a plan is about an nn.Module or ModelMetadata, not {type(model).__qualname__}")
    if type(model).__name__ == "OptimizedModule":  # no call for other models: apply asserts its number of frames
        model = original_of(model)
    seen: dict[int, tuple[Any, str, list[str], str, bool]] = {}  # by id: tensor, kind, names, class of module, sparse
    modules: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # every name of tied modules
        modules[path] = class_name = type(module).__name__  # all aliases of a shared module
        for base in (nn.Linear, nn.Embedding):  # subclasses use their weight as torch's class does
            class_name = base.__name__ if isinstance(module, base) else class_name
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    entry = seen.setdefault(id(tensor), (tensor, kind, [], class_name, sparse))
                    entry[2].append(f"{path}.{name}" if path else name)
    metadata, problems = list[TensorMetadata](), list[Problem]()
    for tensor, kind, names, class_name, sparse in seen.values():
        if is_lazy(tensor):  # no shape yet
            hint = "run one forward pass (a lazy module learns its shapes there), then plan"
            problems.append(Problem("uninitialized-parameter", names[0], found="its shape is not known yet", hint=hint))
            continue
        shape, dtype, grad = global_shape(tensor), str(tensor.dtype).removeprefix("torch."), bool(tensor.requires_grad)
        more = class_name, sparse, getattr(tensor, "stored_bytes", None)
        metadata.append(TensorMetadata(names[0], shape, dtype, kind, grad, tuple(names), *more))
    return ModelMetadata(tuple(metadata), modules, tuple(problems))


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the global shape of a parameter that may be a local shard. A DTensor's shape is global already."""
    info = getattr(tensor, "_sharding_info", None)
    return tuple(tensor.shape if info is None else info[2])  # index: it may be a plain tuple
