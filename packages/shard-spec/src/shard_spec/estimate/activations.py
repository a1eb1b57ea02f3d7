"""Estimate of a step's memory beside the model's state, on the fullest rank.

Forward, loss and backward run once on the meta device. Only shapes are computed, except for values derived from
integer inputs and constants (positions, masks, lengths), since models branch on them. Each memory is followed from its
operator until its last reference goes; the sums of live ones give the peak, and recomputation (checkpointed blocks)
counts as it runs. Sharding along model axes is followed from weight to weight: a column-sharded weight makes its
output sharded, a row-sharded one makes it full, and results of sharded inputs are sharded; backward is the mirror
image. It is an estimate: a real run may fuse or allocate otherwise.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import memory_of, on_every_operator
from shard_spec.estimate.roles import (
    Batch,
    data_axes_of,
    expert_modules,
    forward_inputs,
    is_embedding,
    is_token_batch,
    role,
)
from shard_spec.plan.metadata import require_floating
from shard_spec.plan.resolve import Resolution, resolve

if TYPE_CHECKING:
    from shard_spec.plan.content import PlanContent

Loss: TypeAlias = "str | Callable[[Any, Any], torch.Tensor] | None"

_MAX_VALUES = 1 << 22  # a causal mask of 2,048 x 2,048
_LOSSES = ("causal-lm", "vocab-parallel")


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of a step beside parameters, gradients and optimizer state, on one rank. An estimate.

    Attributes:
        local_bytes: Bytes saved by autograd between forward and backward, if every axis divides evenly.
        whole_bytes: The same without any sharding: one process on the same local batch.
        num_tensors: Number of memories saved by autograd.
        peak_bytes: Most bytes at one time in forward, loss and backward, without gradients of parameters.
        moment: Phase of the peak: ``"forward"``, ``"loss"`` or ``"backward"``.
        loss_bytes: Share of ``peak_bytes`` for logits, loss and the gradient of the logits.
        num_blocks: Number of repeated blocks, the children of a `ModuleList`.
        notes: Uncounted parts, a line each.
    """

    local_bytes: int
    whole_bytes: int
    num_tensors: int
    peak_bytes: int
    moment: str
    loss_bytes: int = 0
    num_blocks: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"about {human_bytes(self.peak_bytes)} of activations on a rank at the peak ({self.moment}), of which "
        text += f"{human_bytes(self.loss_bytes)} for logits and loss; {human_bytes(self.local_bytes)} are kept between "
        return "\n".join([text + "forward and backward (an estimate)", *(f"- {note}" for note in self.notes)])


def estimate_activations(
    plan: PlanContent,
    module: nn.Module,
    batch: Batch,
    *,
    data_axes: Iterable[str] | None = None,
    dtype: str | None = None,
    loss: Loss = "causal-lm",
    checkpointing: bool = False,
) -> ActivationEstimate:
    """Estimate one step; see ``ShardingPlan.activations``."""
    require_floating(dtype)
    if isinstance(loss, str) and loss not in _LOSSES:
        hint = f"one of {', '.join(map(repr, _LOSSES))}, a function loss(output, batch), or None"
        raise PlanError(Problem("invalid-argument", "loss", found=repr(loss), hint=hint))
    if getattr(type(module), "forward", None) is nn.Module.forward:  # nn.Module's own raises
        text = f"a {type(module).__name__} has no forward, so its activations are unknown"
        hint = "give a module whose forward calls its parts, or count their forwards one by one"
        raise PlanError(Problem("unverified", "batch", found=text, hint=hint))
    resolution = resolve(plan, module)
    mesh, data = resolution.one_mesh, data_axes_of(resolution.one_mesh, data_axes)
    model_axes = [axis for axis in mesh.axis_names if axis not in data]
    state, effects = _meta_state(module, resolution, model_axes, dtype, gathers=loss != "vocab-parallel")
    flow = _Flow(effects, dict(mesh.axes))
    # all ranks' batch: a data rank gets its share
    arguments, named = flow.inputs(forward_inputs(module, batch, prod(map(mesh.axis_size, data))))
    blocks = _blocks_of(module)
    # Modules of transformers with this attribute checkpoint their blocks themselves.
    checkpointing = checkpointing and not any(
        getattr(each, "gradient_checkpointing", False) for each in module.modules()
    )
    if checkpointing and "use_cache" in inspect.signature(module.forward).parameters:
        named.setdefault("use_cache", False)  # recomputed blocks would append their keys and values again
    tokens = (named.get("input_ids", arguments[0] if arguments else None)) if is_token_batch(batch) else None
    step = _Step(module, flow, loss, tokens if tokens is not None else (arguments, named))
    with (
        _checkpointed(blocks if checkpointing else []),
        torch.enable_grad(),  # also under the caller's no_grad
        on_every_operator(flow.run),
        _TorchFunctions(flow),
    ):
        torch.func.functional_call(step, {f"model.{name}": each for name, each in state.items()}, (arguments, named))
    notes = step.notes
    if expert_modules(resolution.metadata.parameters):
        notes.append("experts: routing decides how many tokens an expert of a rank gets; this is a lower bound")
    # A module on meta is planned for an accelerator, and its kernels make no such copies.
    on_cpu = [each.dtype for each in module.parameters() if each.device.type == "cpu"]
    if dtype and on_cpu:
        on_cpu = [getattr(torch, dtype)]
    if not {torch.bfloat16, torch.float16}.isdisjoint(on_cpu):
        notes.append("kernels for bfloat16 and float16 on a CPU copy the operands of products; this is a lower bound")
    peak, moment, of_loss = flow.timeline.peak(step.first_of_loss)
    return ActivationEstimate(
        step.local_bytes, step.whole_bytes, step.num_kept, peak, moment, of_loss, len(blocks), tuple(notes)
    )


class _Step(nn.Module):
    """Forward, loss and backward as one call: recomputation in backward needs the same parameters on meta."""

    def __init__(self, model: nn.Module, flow: _Flow, loss: Loss, batch: Any) -> None:
        super().__init__()
        self.model = model
        self.notes: list[str] = []
        self.local_bytes = self.whole_bytes = self.num_kept = 0
        self.first_of_loss: int | None = None  # allocation of the logits
        self._flow, self._loss, self._batch = flow, loss, batch

    def forward(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        flow, timeline = self._flow, self._flow.timeline
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if memory_of(tensor) not in flow.effects:  # parameters are counted elsewhere
                storages[memory_of(tensor)] = tensor.untyped_storage()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self.model(*arguments, **named)
        # A checkpointed block keeps its inputs without autograd's hooks: count all live memory but the output.
        returned = {memory_of(tensor) for tensor in _held(output, set())}
        sizes = {memory: flow.local_bytes(memory, storage) for memory, storage in storages.items()}
        num_bytes = {memory: storage.nbytes() for memory, storage in storages.items()}
        for memory, (allocation, nbytes) in flow.alive.items():
            if memory not in returned:
                sizes.setdefault(memory, timeline.sizes[allocation])  # setdefault: hooks' entries win
                num_bytes.setdefault(memory, nbytes)
        self.local_bytes, self.whole_bytes, self.num_kept = sum(sizes.values()), sum(num_bytes.values()), len(sizes)
        storages.clear()  # only the step itself may keep memory alive
        logits = self._logits_of(output)
        if logits is not None:
            self.first_of_loss = flow.alive.get(memory_of(logits), (None, 0))[0]
        timeline.begin("loss")
        scalars = self._scalars(output, logits)
        if logits is None or not logits.requires_grad:
            timeline.begin("backward")
        else:
            logits.register_hook(lambda grad: timeline.begin("backward"))  # fires when the loss's own backward is done
        self._backward(scalars)

    def _logits_of(self, output: Any) -> torch.Tensor | None:
        """Return the scores over a vocabulary: the field ``logits``, or a 3-d output as wide as an embedding table."""
        tables = {each.num_embeddings for each in self.model.modules() if isinstance(each, nn.Embedding)}
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if isinstance(output, torch.Tensor) and output.dim() == 3 and output.shape[-1] in tables:
            logits = output
        return logits if isinstance(logits, torch.Tensor) and logits.is_floating_point() else None

    def _scalars(self, output: Any, logits: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the tensors to start backward from: the loss, or else every output."""
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return [own]  # computed by the model from labels
        if callable(self._loss):
            return [self._loss(output, self._batch)]
        tokens = self._batch
        loss_by_tokens = self._loss is not None and isinstance(tokens, torch.Tensor)
        if loss_by_tokens and logits is not None and logits.shape[:-1] == tokens.shape:
            # transformers' models compute their loss in float32, others in the dtype of the logits.
            scores = logits if logits is output else logits.float()
            return [functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())]
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not (len(outputs) == 1 and outputs[0].dim() == 0):  # a scalar is a loss
            self.notes.append("the loss is not counted: pass labels in batch, or loss=")
        return outputs

    def _backward(self, outputs: list[torch.Tensor]) -> None:
        timeline, alive = self._flow.timeline, self._flow.alive

        def exclude(parameter: torch.Tensor) -> None:
            # Gradients of parameters are counted elsewhere, exactly and by layout.
            assert parameter.grad is not None
            timeline.excluded.add(alive.get(memory_of(parameter.grad), (-1, 0))[0])

        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(exclude)
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        try:
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        except Exception as error:  # no shape function for an operator; forward's figures are valid all the same
            reason = (str(error).splitlines() or [""])[0][:120]
            self.notes.append(f"backward is not counted: {type(error).__name__}: {reason}")


class _Timeline:
    """Log of allocations and frees, in order, with the peak of live bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # local bytes by allocation
        self.excluded: set[int] = set()
        self._events: list[tuple[int, int]] = []  # (allocation, +1 or -1)
        self._begins: dict[str, int] = {"forward": 0}  # moment -> its first event

    def begin(self, moment: str) -> None:
        self._begins.setdefault(moment, len(self._events))  # the first time counts

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        self._events.append((len(self.sizes) - 1, 1))
        return len(self.sizes) - 1

    def free(self, allocation: int) -> None:
        self._events.append((allocation, -1))

    def peak(self, logits: int | None) -> tuple[int, str, int]:
        """Return the most live bytes, their moment, and the share of logits and loss.

        Args:
            logits: Allocation of the logits; later allocations until backward passes it belong to the loss.
        """
        begins = dict(self._begins)
        if logits is not None:
            begins["loss"] = min(begins["loss"], self._events.index((logits, 1)))
        end_of_loss = begins.get("backward", len(self._events))
        of_loss: set[int] = set()
        current = current_loss = best = best_loss = at_best = 0
        for at, (allocation, sign) in enumerate(self._events):
            if allocation in self.excluded:
                continue
            if logits is not None and sign > 0 and begins["loss"] <= at < end_of_loss:
                of_loss.add(allocation)
            current += sign * self.sizes[allocation]
            current_loss += sign * self.sizes[allocation] * (allocation in of_loss)
            if current > best:
                best, best_loss, at_best = current, current_loss, at  # the loss's share at the same event
        return best, max((begin, moment) for moment, begin in begins.items() if begin <= at_best)[1], best_loss


class _TorchFunctions(TorchFunctionMode):
    """Attention without dropout as a fused kernel; it saves queries, keys, values, output and one sum a row.

    Integer lists that index a tensor keep their values.
    """

    def __init__(self, flow: _Flow) -> None:
        super().__init__()
        # On the meta device torch would pick its unfused formula, which saves every score.
        self._flow = flow

    def __enter__(self) -> Any:
        # A mode does not see calls inside torch's Python functions (nn.MultiheadAttention's forward is one), but these
        # look the name up in their module.
        self._unfused = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attention  # undone in __exit__
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
        enable_gqa: bool = False,  # the kernel reads shared heads in place
    ) -> torch.Tensor | None:
        equal = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
        # Torch broadcasts one head over many in the unfused formula only.
        equal = equal and (enable_gqa or query.shape[:2] == key.shape[:2] == value.shape[:2])
        if dropout_p or not equal or (attn_mask is not None and attn_mask.requires_grad):
            return None
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # the kernel adds it, and saves it in the dtype of the scores
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
        output: torch.Tensor = attention[0]
        return output


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks: children of a `ModuleList`, blocks inside other blocks excluded."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    inner = {id(below) for each in lists for child in each for below in child.modules() if below is not child}
    return [child for each in lists if id(each) not in inner for child in each]


@contextmanager
def _checkpointed(blocks: list[nn.Module]) -> Iterator[None]:
    """Recompute each block in backward within this context."""
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.__dict__["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            block.__dict__.pop("forward")  # the class's forward again
            if own is not None:
                block.__dict__["forward"] = own


@dataclass(frozen=True)
class _Effect:
    """Axes that make results of a parameter sharded, or full; backward differs."""

    sharded: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    backward_sharded: frozenset[str] = frozenset()
    backward_full: frozenset[str] = frozenset()


class _Flow:
    """Track, memory by memory, the sharding axes and lifetime of each result."""

    def __init__(self, effects: dict[int, _Effect], axes: Mapping[str, int]) -> None:
        self.effects = effects  # by memory of a parameter or buffer
        self.timeline = _Timeline()
        self.alive: dict[int, tuple[int, int]] = {}  # memory -> (allocation, bytes without sharding)
        self._axes = axes
        self._cut: dict[int, frozenset[str]] = {}  # memory -> axes
        self._given: dict[int, torch.Tensor] = {}  # id of an input -> that input on meta
        self._originals: list[Any] = []  # keeps ids valid: an id is free again after its input
        self._given_memory: set[int] = set()  # inputs and their views belong to the caller
        self._values = WeakTensorKeyDictionary()  # tensor on meta -> its values, if known

    def inputs(self, value: Any) -> Any:
        """Move inputs to meta; integers keep their values, and integers on meta count as zeros."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._given:  # one tensor as query, key and value stays one
                return self._given[id(value)]
            meta = self._given[id(value)] = value.detach().to("meta")
            self._originals.append(value)
            self._given_memory.add(memory_of(meta))
            if not value.is_floating_point() and not value.is_complex() and value.numel() <= _MAX_VALUES:
                self._values[meta] = torch.zeros_like(value, device="cpu") if value.is_meta else value.cpu()
            return meta
        return _mapped(value, self.inputs)

    def local_bytes(self, memory: int, storage: torch.UntypedStorage) -> int:
        """Return the bytes of a memory on one rank."""
        size = storage.nbytes()
        for axis in self._cut.get(memory, frozenset()):
            size = -(-size // self._axes[axis])  # rounded up: the fullest rank
        return size

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and record its results."""
        if operator is torch.ops.aten._local_scalar_dense.default:  # item(): python code branches on it
            source = self._value(args[0])
            if source is None:
                text = "forward reads a value that follows from parameters or floating-point inputs"
                hint = "the estimate runs on shapes; measure this model, or estimate its parts"
                raise PlanError(Problem("unverified", "batch", found=text, hint=hint))
            return source.item()
        if operator is torch.ops.aten._grouped_mm.default:
            # Torch's shape function takes bfloat16 alone, its kernels more. Autograd is above: it saves the originals.
            halves = (each.to(torch.bfloat16) for each in args[:2])
            result = operator(*halves, *args[2:], **kwargs).to(args[0].dtype)
        else:
            result = operator(*args, **kwargs)
        self._follow_values(operator, args, kwargs, result)
        sharded: frozenset[str] = frozenset()
        full: frozenset[str] = frozenset()
        # Backward runs without grad mode, recomputation within it with grad mode.
        forward = torch.is_grad_enabled() or "backward" not in self.timeline._begins
        for tensor in _tensors((args, kwargs)):
            memory = memory_of(tensor)
            effect = self.effects.get(memory)
            if effect is None:
                sharded |= self._cut.get(memory, frozenset())
            else:
                sharded |= effect.sharded if forward else effect.backward_sharded
                full |= effect.full if forward else effect.backward_full
        for tensor in _tensors(result):
            if tensor.is_meta and memory_of(tensor) not in self.effects and memory_of(tensor) not in self._given_memory:
                self._note(tensor.untyped_storage(), memory_of(tensor), sharded - full)
        return result

    def _note(self, storage: torch.UntypedStorage, memory: int, axes: frozenset[str]) -> None:
        """Record a result: of new memory, or of live memory (a view, an in-place result)."""
        self._cut[memory] = axes
        if memory in self.alive:
            self.timeline.sizes[self.alive[memory][0]] = self.local_bytes(memory, storage)  # last writer decides
            return
        allocation = self.timeline.allocate(self.local_bytes(memory, storage))
        self.alive[memory] = allocation, storage.nbytes()

        def free() -> None:
            self.timeline.free(allocation)
            if self.alive.get(memory, (-1, 0))[0] == allocation:  # the address may have been reused meanwhile
                del self.alive[memory], self._cut[memory]

        weakref.finalize(storage, free).atexit = False  # no work at interpreter exit

    def _follow_values(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute small results for real if all inputs are known: integers and constants."""
        made = list(_tensors(result))
        small = all(tensor.numel() <= _MAX_VALUES for tensor in made)
        if not made or not small or torch.Tag.nondeterministic_seeded in operator.tags:  # random results are not known
            return
        if any(self._value(tensor) is None for tensor in _tensors((args, kwargs))):
            return
        real = operator(*self._real(args), **self._real(kwargs))
        for tensor, values in zip(made, _tensors(real), strict=True):
            self._values[tensor] = values

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; tensors off meta are constants of the forward, such as index lists."""
        return self._values.get(tensor) if tensor.is_meta else tensor

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._value(value)
        return torch.device("cpu") if isinstance(value, torch.device) else _mapped(value, self._real)


def _meta_state(
    module: nn.Module, resolution: Resolution, model_axes: list[str], dtype: str | None, *, gathers: bool
) -> tuple[dict[str, torch.Tensor], dict[int, _Effect]]:
    """Return parameters and buffers on meta, and the effect of each one's sharding on results.

    Args:
        gathers: True if outputs that no later weight takes sharded (logits) are gathered.
    """
    state: dict[str, torch.Tensor] = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    roles: dict[str, dict[str, str]] = {}
    for name in tensors:
        metadata = resolution.tensor(name)
        layout = resolution.layouts.get(metadata.name)
        roles[name] = {} if layout is None else {axis: role(metadata, layout, axis) for axis in model_axes}
    # Column-sharded weights behind the last row-sharded one belong to the model's head.
    names = list(roles)
    last_row = {
        axis: max((at for at, name in enumerate(names) if roles[name].get(axis) == "row"), default=-1)
        for axis in model_axes
    }
    effects = {}
    for at, (name, tensor) in enumerate(tensors.items()):
        item = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        shape = resolution.tensor(name).shape
        meta = torch.empty(shape, dtype=item, device="meta", requires_grad=tensor.requires_grad)  # never allocated
        state[name] = meta
        by_role: dict[str, set[str]] = {kind: set() for kind in ("row", "column", "cut", "gathered", "whole")}
        for axis, kind in roles[name].items():
            gathered = kind == "column" and gathers and at > last_row[axis]
            # A tied table is looked up as a table, but as a head it gives scores to gather.
            gathered |= kind == "row" and is_embedding(resolution.tensor(name))
            by_role["gathered" if gathered else kind].add(axis)
        effects[memory_of(meta)] = _Effect(
            sharded=frozenset(by_role["column"] | by_role["cut"]),
            full=frozenset(by_role["row"] | by_role["gathered"]),
            backward_sharded=frozenset(by_role["row"]),  # mirror image of forward
            backward_full=frozenset(by_role["column"] | by_role["gathered"]),
        )
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


def _held(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield an output's tensors, also from attributes of its objects (a key-value cache)."""
    if isinstance(value, torch.Tensor | Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        yield from (
            [value] if isinstance(value, torch.Tensor) else (each for item in items for each in _held(item, seen))
        )
    elif hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))  # objects may refer to each other in circles
        yield from _held(vars(value), seen)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to each item of a list, tuple or dict; other values pass unchanged."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(function, value)) if type(value) in (list, tuple) else value
    return value
