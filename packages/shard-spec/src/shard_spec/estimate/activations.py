"""Activations: an estimate of what autograd keeps between forward and backward, on the rank that keeps most.

The forward runs once on the meta device: shapes only, but for what follows from integer inputs and constants
(positions, masks, lengths), whose values are computed as well, since models branch on them. What autograd saves is
counted once for each memory that holds it, parameters and buffers left out. Which of it a model axis shards is
followed from weight to weight: the output of a weight with sharded output features is sharded, that of one with
sharded input features is full again, and everything computed from something sharded is sharded. It is an estimate
because a real run may fuse, recompute or allocate otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import memory_of, on_every_operator
from shard_spec.estimate.roles import Batch, data_axes_of, forward_inputs, role
from shard_spec.plan.metadata import require_floating
from shard_spec.plan.resolve import Resolution, resolve

if TYPE_CHECKING:
    from shard_spec.plan.content import PlanContent


_MAX_VALUES = 1 << 22  # a causal mask of 2,048 x 2,048


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes that autograd keeps between forward and backward. An estimate, see the module.

    Attributes:
        local_bytes: Bytes on one rank, where every axis cuts evenly.
        whole_bytes: Bytes if nothing were cut: one process on the same local batch.
        num_tensors: Number of memories that were counted.
        checkpointed_bytes: Bytes on one rank if each block is recomputed in backward: the inputs of all blocks, what
            the largest block keeps, and what lies outside of them. A block is a child of a `ModuleList`.
        num_blocks: Number of such blocks.
    """

    local_bytes: int
    whole_bytes: int
    num_tensors: int
    checkpointed_bytes: int = 0
    num_blocks: int = 0

    def __str__(self) -> str:
        text = f"about {human_bytes(self.local_bytes)} of activations on a rank (an estimate)"
        if self.num_blocks:
            text += f"; about {human_bytes(self.checkpointed_bytes)} with each of {self.num_blocks} blocks checkpointed"
        return text


def estimate_activations(
    plan: PlanContent,
    module: nn.Module,
    batch: Batch,
    *,
    data_axes: Iterable[str] | None = None,
    dtype: str | None = None,
) -> ActivationEstimate:
    """The estimate for one forward; see ``ShardingPlan.activations``."""
    require_floating(dtype)
    found = resolve(plan, module)
    mesh, data = found.one_mesh, data_axes_of(found.one_mesh, data_axes)
    state, effects = _meta_state(module, found, set(mesh.axis_names) - set(data), dtype)
    flow = _Flow(effects)
    blocks = _Blocks(module)
    kept: dict[int, tuple[int, nn.Module | None]] = {}  # memory -> local bytes, block that keeps it
    whole = 0

    def local_bytes(tensor: torch.Tensor) -> int:
        size = tensor.untyped_storage().nbytes()
        for axis in flow.cut.get(memory_of(tensor), frozenset()):
            size = -(-size // mesh.axis_size(axis))
        return size

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal whole
        memory = memory_of(tensor)
        if memory not in flow.effects and memory not in kept:
            flow.alive.append(tensor)
            kept[memory] = local_bytes(tensor), blocks.current
            whole += tensor.untyped_storage().nbytes()
        return tensor

    arguments, named = flow.inputs(forward_inputs(module, batch, prod(map(mesh.axis_size, data))))
    kept_by = saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), kept_by, on_every_operator(flow.run), _TorchFunctions(flow), blocks:
        output = torch.func.functional_call(module, state, arguments, named)
    del output
    local = sum(size for size, _ in kept.values())
    # Checkpointed, the inputs of all blocks are kept, and beside them what the block keeps that is recomputed just now.
    by_block: dict[nn.Module | None, int] = {}
    for memory, (size, block) in kept.items():
        if memory not in blocks.inputs:
            by_block[block] = by_block.get(block, 0) + size
    outside = by_block.pop(None, 0) + sum(map(local_bytes, blocks.inputs.values()))
    checkpointed = outside + max(by_block.values(), default=0)
    return ActivationEstimate(local, whole, len(kept), min(local, checkpointed), blocks.count)


class _TorchFunctions(TorchFunctionMode):
    """Attention without dropout as a fused kernel, which keeps queries, keys, values, output and one sum a row.

    On the meta device torch would pick its unfused formula, which keeps every score. Lists of integers that index a
    tensor keep their values there.
    """

    def __init__(self, flow: _Flow) -> None:
        super().__init__()
        self._flow = flow

    def __enter__(self) -> Any:
        # A mode does not see calls inside torch's Python functions (nn.MultiheadAttention's forward is one): these look
        # the name up in their module.
        self._unfused = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attention  # put back on leaving
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *error: Any) -> None:
        functional.scaled_dot_product_attention = self._unfused
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(map(self._index, args[1]))
        return (self._attention if func is self._unfused else func)(*args, **(kwargs or {}))

    def _index(self, index: Any) -> Any:
        listed = isinstance(index, list) and index and all(type(at) is int for at in index)
        return self._flow.inputs(torch.tensor(index, device="cpu")) if listed else index

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        fused = self._fused(*args, **kwargs)
        return self._unfused(*args, **kwargs) if fused is None else fused

    @staticmethod
    def _fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # the kernel reads shared heads where they lie
    ) -> torch.Tensor | None:
        equal = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
        # Torch broadcasts one head over many with the unfused formula alone.
        equal = equal and (enable_gqa or query.shape[:2] == key.shape[:2] == value.shape[:2])
        if dropout_p or not equal or (attn_mask is not None and attn_mask.requires_grad):
            return None
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # the kernel adds it, and keeps it in the dtype of the scores
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
        output: torch.Tensor = found[0]
        return output


class _Blocks:
    """Repeated blocks of a model while it runs: which one runs now, and what entered each."""

    def __init__(self, module: nn.Module) -> None:
        lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
        inner = {id(below) for each in lists for child in each for below in child.modules() if below is not child}
        self.blocks = [child for each in lists if id(each) not in inner for child in each]
        self.count = len(self.blocks)
        self.current: nn.Module | None = None
        self.inputs: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for block in self.blocks:
            self._handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._leave, always_call=True))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.current = block
        for tensor in _tensors((args, kwargs)):
            if tensor.is_floating_point():
                self.inputs[memory_of(tensor)] = tensor

    def _leave(self, *_: object) -> None:
        self.current = None


class _Flow:
    """Follows, memory by memory, along which axes each result is cut."""

    def __init__(self, effects: dict[int, tuple[frozenset[str], frozenset[str]]]) -> None:
        self.effects = effects  # memory of a parameter -> (axes it makes cut, axes it makes whole)
        self.cut: dict[int, frozenset[str]] = {}
        self.alive: list[torch.Tensor] = []  # a memory's address means something only while the memory lives
        self.given: dict[int, torch.Tensor] = {}  # id of an input -> that input on meta
        self.values: dict[int, torch.Tensor] = {}  # id of a tensor on meta -> its values, where they are known

    def inputs(self, value: Any) -> Any:
        """Return inputs on meta; integers keep their values, those that are on meta already count as zeros."""
        if isinstance(value, torch.Tensor):
            if id(value) in self.given:  # one tensor as query, key and value stays one
                return self.given[id(value)]
            meta = self.given[id(value)] = value.detach().to("meta")
            if not value.is_floating_point() and not value.is_complex() and value.numel() <= _MAX_VALUES:
                self.values[id(meta)] = torch.zeros_like(value, device="cpu") if value.is_meta else value.cpu()
            return meta
        return _mapped(value, self.inputs)

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and note what it made."""
        if operator is torch.ops.aten._local_scalar_dense.default:
            known = self._value(args[0])
            if known is None:
                found = "forward reads a value that follows from parameters or floating-point inputs"
                hint = "the estimate runs on shapes; measure this model, or estimate its parts"
                raise PlanError(Problem("unverified", "batch", found=found, hint=hint))
            return known.item()
        if operator is torch.ops.aten._grouped_mm.default:
            # Torch's shape function takes bfloat16 alone, its kernels more. Autograd is above: it keeps the originals.
            halves = (each.to(torch.bfloat16) for each in args[:2])
            result = operator(*halves, *args[2:], **kwargs).to(args[0].dtype)
        else:
            result = operator(*args, **kwargs)
        self._follow_values(operator, args, kwargs, result)
        axes: frozenset[str] = frozenset()
        gone: frozenset[str] = frozenset()
        for tensor in _tensors((args, kwargs)):
            memory = memory_of(tensor)
            made, whole = self.effects.get(memory, (self.cut.get(memory, frozenset()), frozenset()))
            axes, gone = axes | made, gone | whole
        for tensor in _tensors(result):
            memory = memory_of(tensor)
            self.alive.append(tensor)
            if memory not in self.effects:
                self.cut[memory] = axes - gone
        return result

    def _follow_values(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute small results for real where all that they are computed from is known: integers and constants."""
        made = list(_tensors(result))
        small = all(tensor.numel() <= _MAX_VALUES for tensor in made)
        if not made or not small or torch.Tag.nondeterministic_seeded in operator.tags:
            return
        if any(self._value(tensor) is None for tensor in _tensors((args, kwargs))):
            return
        real = operator(*self._real(args), **self._real(kwargs))
        self.alive += made
        self.values.update(zip(map(id, made), _tensors(real), strict=True))

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Values of a tensor; one that is not on meta is a constant of the forward, such as a list that indexes."""
        return self.values.get(id(tensor)) if tensor.is_meta else tensor

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._value(value)
        return torch.device("cpu") if isinstance(value, torch.device) else _mapped(value, self._real)


def _meta_state(
    module: nn.Module, found: Resolution, model_axes: set[str], dtype: str | None
) -> tuple[dict[str, torch.Tensor], dict[int, tuple[frozenset[str], frozenset[str]]]]:
    """Parameters and buffers on meta, and what each one's cuts do to what is computed with it."""
    state: dict[str, torch.Tensor] = {}
    effects = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        metadata = found.tensor(name)
        kept = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        meta = torch.empty(metadata.shape, dtype=kept, device="meta", requires_grad=tensor.requires_grad)
        state[name] = meta
        made, whole = set(), set()
        layout = found.layouts.get(metadata.name)
        for axis in model_axes if layout is not None else ():
            assert layout is not None
            kind = role(metadata, layout, axis)
            if kind == "row":
                whole.add(axis)
            elif kind != "whole":
                made.add(axis)
        effects[memory_of(meta)] = (frozenset(made), frozenset(whole))
    return state, effects


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a list, tuple or dict with ``function`` of each item; other values as they are."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(function, value)) if type(value) in (list, tuple) else value
    return value
