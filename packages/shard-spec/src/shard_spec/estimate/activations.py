"""Estimate of a step's memory beside the model's state, on the fullest rank.

Forward, loss and backward run once on the meta device. Only shapes are computed, except for values derived from
integer inputs and constants (positions, masks, lengths), since models branch on them. Each memory is followed from its
operator until its last reference goes; the sums of live ones give the peak, and recomputation (checkpointed blocks)
counts as it runs. Sharding along model axes is followed from weight to weight: a column-sharded weight makes its
output sharded, a row-sharded one makes it full, and results of sharded inputs are sharded; backward is the mirror
image. Where a result becomes full, ranks communicate. Along data axes that shard parameters, the groups of FSDP2 are
gathered and scattered as it does. It is an estimate: a real run may fuse or allocate otherwise.
"""

from __future__ import annotations

import functools
import inspect
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from shard_spec._shared.page import human_bytes
from shard_spec._shared.problems import PlanError, Problem
from shard_spec._torch_compat import engine_references, memory_of, on_every_operator, unwatched_detach
from shard_spec.estimate.exchanges import Exchanges, Stages, stages_of, watch_stages
from shard_spec.estimate.kernels import (
    Autocast,
    copied_operands,
    counted_formula,
    flops_of,
    run_operator,
    uncounted_workspace,
)
from shard_spec.estimate.step_options import (
    Batch,
    FullyShard,
    Loss,
    StepOptions,
    Transfer,
    block_names,
    check_options,
    expert_modules,
    forward_inputs,
    is_embedding,
    is_token_batch,
    mapped,
    policy_of,
    role,
    schedule_of,
    tensors_of,
    unit_bytes,
    unit_transfers,
    units_of,
)
from shard_spec.estimate.timeline import Allocation, Groups, SkippedBlocks, Timeline, expanded, repeated_groups
from shard_spec.layout import AxisRoles
from shard_spec.plan.resolve import ModelMetadata, Resolution, original_of

_MAX_VALUES = 1 << 22  # a causal mask of 2,048 x 2,048
_PRODUCTS = (
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default),
    *(torch.ops.aten.baddbmm.default, torch.ops.aten._grouped_mm.default),
)


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of a step beside parameters, gradients and optimizer state, on one rank. An estimate.

    Attributes:
        local_bytes: Bytes saved by autograd between forward and backward, if every axis divides evenly.
        peak_bytes: Most bytes at one time in forward, loss and backward, without gradients of parameters.
        moment: Phase of the peak: ``"forward"``, ``"loss"`` or ``"backward"``.
        loss_bytes: Share of ``peak_bytes`` for logits, loss and the gradient of the logits.
        gathered_bytes: Share of ``peak_bytes`` for parameters gathered along data axes, and their full gradients.
        notes: Uncounted parts, a line each.
        assumptions: Roles of axes that follow from their names alone, a line each.
        to_come: Share of the gradients that backward has yet to make when most bytes are live: 1.0 at the loss of a
            step without accumulation.
        stage_axis: Mesh axis of pipeline stages; the figures are those of the stage with most; ``""`` without stages.
        by_stage: The estimate of each stage.
        output_bytes: Of what forward returns, which lives as long as a caller keeps it.
    """

    local_bytes: int
    peak_bytes: int
    moment: str
    loss_bytes: int = 0
    gathered_bytes: int = 0
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    to_come: float = 0.0
    stage_axis: str = ""
    by_stage: tuple[ActivationEstimate, ...] = ()
    output_bytes: int = 0

    def __str__(self) -> str:
        text = (
            f"about {human_bytes(self.peak_bytes)} of activations on a rank at the peak ({self.moment}), of which "
            f"{human_bytes(self.loss_bytes)} for logits and loss, {human_bytes(self.gathered_bytes)} for gathered "
            f"layers; {human_bytes(self.local_bytes)} are kept between forward and backward (an estimate)"
        )
        return "\n".join([text, *(f"- {note}" for note in (*self.notes, *self.assumptions))])


def activations_of(step: Step, module: nn.Module, options: StepOptions) -> ActivationEstimate:
    """Return the activations of a step; see ``ShardingPlan.activations``."""
    notes = list(step.notes)
    if step.roles.axes("expert") and expert_modules(step.metadata.parameters):
        notes.append("experts: routing decides how many tokens an expert of a rank gets; this is a lower bound")
    if step.flow.values.reads_routes:
        notes.append("the forward reads a choice of topk (routing): it counts as even, experts in turn by token")
    if any(each.stored_bytes is not None for each in step.metadata.parameters):
        notes.append("quantised weights: copies that kernels dequantise for a product are not counted")
    if any(op == "all_gather" and name == "attention" for _, op, _, name, *_ in step.flow.timeline.all("sent")):
        notes.append("keys of all ranks: a mask for a kernel that is not causal by offset is not counted")
    # A module on meta is planned for an accelerator, and its kernels make no such copies.
    on_cpu = [each.dtype for each in module.parameters() if each.device.type == "cpu"]
    if on_cpu and (dtype := options.get("dtype")):
        on_cpu = [getattr(torch, dtype)]
    policy = [getattr(torch, str(dtype)) for dtype in policy_of(options).values() if dtype is not None and on_cpu]
    if not {torch.bfloat16, torch.float16}.isdisjoint((*on_cpu, *policy)):
        what = "products, and of casts between the policy's dtypes" if policy else "products"
        notes.append(f"kernels for bfloat16 and float16 on a CPU copy the operands of {what}; this is a lower bound")
    workspace, formula = (", ".join(sorted(step.flow.inexact[kind])) for kind in ("workspace", "formula"))
    if on_cpu and workspace:
        notes.append(f"not counted: workspace of {workspace} on CPU; this is a lower bound")
    if formula:
        notes.append(f"backward of {formula}: counted by its formula, of which kernels keep less: an upper bound")
    if options.get("autocast") and any(isinstance(each, nn.RNNCellBase) for each in module.modules()):
        notes.append("cells of recurrent layers: casts of autocast within them are not counted")
    if any(isinstance(each, nn.RNNBase) for each in module.modules()):
        notes.append("recurrent layers: kernels that take all steps at once allocate more; this is a lower bound")
    # Gradients of earlier batches are there, unless `fully_shard` holds them in full until the last one, and so are the
    # views of DDP.
    is_scattered = any(weight.scattered for weight in step.flow.weights.values())
    if alone := [axis for axis in step.roles.data if is_scattered and step.flow.axes[axis] == 1]:
        notes.append(f"{alone[0]}: fully_shard on a mesh with it, too, holds the results of reductions longer (HSDP)")
    lasts = options.get("accumulate", 1) > 1 and not (is_scattered and options.get("sync") == "last")
    no_more = lasts or options.get("ddp") == "views"
    local_bytes = Counter(step.ends["inputs"])
    for size, stage in (each.kept for each in step.flow.timeline.all("+")):
        local_bytes[stage] += size

    def estimate(stage: int) -> ActivationEstimate:
        peak, moment, shares, to_come = step.flow.timeline.peak(step.first_of_loss, stage)
        to_come = 0.0 if no_more else to_come
        local, more = local_bytes[stage], (tuple(notes), step.roles.assumptions)
        output = step.ends["outputs"][stage]
        return ActivationEstimate(local, peak, moment, *shares, *more, to_come, output_bytes=output)

    if step.stages is None:
        return estimate(0)
    saved = human_bytes(max(local_bytes.values(), default=0))
    notes.append(f"{step.stages.axis}: one batch at a time on each stage; for each more in flight add up to {saved}")
    if any(each.gathered for each in step.flow.timeline.all("+")):
        notes.append(f"{step.stages.axis}: layers outside of the blocks count as gathered on the first stage")
    by_stage = tuple(map(estimate, range(step.stages.count)))
    fullest = max(by_stage, key=lambda each: each.peak_bytes)
    return replace(fullest, stage_axis=step.stages.axis, by_stage=by_stage)


def simulate(resolution: Resolution, module: nn.Module, batch: Batch, **options: Unpack[StepOptions]) -> Step:
    """Run forward, loss and backward on the meta device, and return what was recorded.

    Of many blocks that are alike a few run, if the log of the step is that of all of them.
    """
    with ESTIMATE_LOCK:
        repeated = repeated_groups(original_of(module), resolution)
        if repeated:
            with suppress(Exception):  # a step in which all blocks run raises its own error
                step = _simulated(resolution, module, batch, options, repeated)
                if step is not None:
                    return step
        step = _simulated(resolution, module, batch, options, [])
        assert step is not None  # nothing was left out
        return step


# Held by an estimate, since its step puts tensors on meta in the place of the model's own.
ESTIMATE_LOCK = threading.RLock()


def _simulated(
    resolution: Resolution, module: nn.Module, batch: Batch, options: StepOptions, repeated: list[Groups]
) -> Step | None:
    """Return a step in which the middle of the ``repeated`` groups is written; None if its log does not allow that."""
    check_options(options)
    module = original_of(module)
    dtype, loss, units = options.get("dtype"), options.get("loss", "causal-lm"), options.get("units")
    mesh, roles = resolution.one_mesh, resolution.axis_roles(options.get("data_axes"))
    transfers = unit_transfers(resolution, roles, options)
    if getattr(type(module), "forward", None) is nn.Module.forward:  # nn.Module's own raises
        raise PlanError(
            Problem(
                "unverified",
                "batch",
                found=f"a {type(module).__name__} has no forward, so its activations are unknown",
                hint="give a module whose forward calls its parts, or count their forwards one by one",
            )
        )
    model_axes, gathers = list(roles.axes("model")), loss != "vocab-parallel"
    sizes = unit_bytes(resolution, transfers, options)
    compute = policy_of(options)["param_dtype"] or dtype
    members = units_of(resolution.metadata, units)
    scattered = {each.name for unit in sizes for each in members[unit]}
    expert_axes = tuple(axis for axis in roles.axes("expert") if mesh.axis_size(axis) > 1)
    more: dict[str, Any] = {"scattered": scattered, "expert_axes": expert_axes}
    state, weights = _meta_state(module, resolution, model_axes, compute, gathers=gathers, **more)
    devices, lower = {each.device.type for each in module.parameters()}, options.get("autocast")
    autocast = Autocast(getattr(torch, lower) if lower else None, "cpu" if devices == {"cpu"} else "cuda")
    context = tuple(axis for axis in roles.axes("context") if mesh.axis_size(axis) > 1)
    flow, kind = _Flow(weights, dict(mesh.axes), gathers), options.get("context", "gather")
    flow.values.on_cpu = devices <= {"cpu"}
    flow.adds_gradients = options.get("accumulate", 1) > 1 or options.get("ddp") == "views"
    exchanges = Exchanges(dict(mesh.axes), context, kind, flow.record, flow.bytes_on_rank)
    # all ranks' batch: a data rank gets its share
    arguments, named = flow.values.inputs(forward_inputs(module, batch, mesh, roles))
    # Modules of transformers with this attribute checkpoint their blocks themselves.
    checkpointing = options.get("checkpointing", False) and not any(
        getattr(each, "gradient_checkpointing", False) for each in module.modules()
    )
    if checkpointing and "use_cache" in inspect.signature(module.forward).parameters:
        named.setdefault("use_cache", False)  # recomputed blocks would append their keys and values again
    tokens = (named.get("input_ids", arguments[0] if arguments else None)) if is_token_batch(batch) else None
    own_batch = tokens if tokens is not None else (arguments, named)
    step = Step(module, flow, loss, own_batch, roles=roles, metadata=resolution.metadata, autocast=autocast)
    step.stages, step.transfers = stages_of(resolution), tuple(transfers)
    skipped = SkippedBlocks(module, repeated, flow.timeline, flow.axes_of)
    names = [name for name in block_names(resolution.metadata) if name not in skipped.names]
    blocks = [module.get_submodule(name) for name in names]
    parameters = {unit: [state[each.name] for each in members[unit]] for unit in sizes}
    for unit in [unit for unit in sizes if f"{unit}.".startswith(tuple(f"{name}." for name in skipped.names))]:
        del sizes[unit]
    engine_references()  # counted once, outside of the modes below
    with (
        _checkpointed(blocks if checkpointing else []),
        _attributes_kept(module, flow.values.written),
        torch.enable_grad(),  # also under the caller's no_grad
        on_every_operator(flow.run),
        _TorchFunctions(flow, autocast, exchanges),
        torch.device("meta") if flow.values.on_cpu else nullcontext(),  # new tensors lie beside the model
        FullyShard(module, sizes, parameters, schedule_of(options), flow.buffer) as fully_shard,
        skipped,
    ):
        handles = flow.sum_experts(module, resolution)
        handles += exchanges.watch_experts(module, resolution, expert_axes)
        if step.stages is not None:
            handles += watch_stages(module, step.stages, flow.timeline.enter, flow.record, flow.timeline.in_backward)
        try:
            torch.func.functional_call(step, _by_place(module, state), (arguments, named), tie_weights=False)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower() and not isinstance(error, NotImplementedError):
                raise  # the forward's own
            raise PlanError(needs_values(error)) from error
        finally:
            for handle in handles:
                handle.remove()
    if not skipped.is_complete:
        return None
    step.notes += fully_shard.notes
    step.notes += _unreached(
        resolution.metadata, skipped.names, {n for n, t in state.items() if memory_of(t) in flow.reached}
    )
    for groups in repeated:
        log = expanded(flow.timeline.log, groups)
        if log is None:
            return None
        flow.timeline.log = log
    return step


def _unreached(metadata: ModelMetadata, skipped: Iterable[str], reached: set[str]) -> list[str]:
    """Return a note on parameters that no gradient reaches, such as a teacher's under ``no_grad``."""
    left = tuple(f"{name}." for name in skipped)  # blocks that count as others do
    silent = [t.name for t in metadata.parameters if t.trains and t.name not in reached and not t.name.startswith(left)]
    if not silent or not reached:
        return []
    names = ", ".join(silent[:3]) + (", ..." if len(silent) > 3 else "")
    counted = "their gradients, optimizer state and messages are counted: an upper bound"
    return [f"no gradient reaches {len(silent)} parameters in this step ({names}); {counted}"]


class Step(nn.Module):
    """Forward, loss and backward as one call: recomputation in backward needs the same parameters on meta."""

    def __init__(
        self,
        model: nn.Module,
        flow: _Flow,
        loss: Loss,
        batch: Any,
        *,
        roles: AxisRoles,
        metadata: ModelMetadata,
        autocast: Autocast,
    ) -> None:
        super().__init__()
        self.model = model
        self.notes: list[str] = []
        # By stage, inputs that stay until backward, and outputs.
        self.ends = {"inputs": Counter[int](), "outputs": Counter[int]()}
        self.stages: Stages | None = None
        self.transfers: tuple[Transfer, ...] = ()  # of its units along data axes
        self.first_of_loss: Allocation | None = None  # allocation of the logits
        self.flow, self.roles, self.metadata = flow, roles, metadata
        self._loss, self._batch, self._autocast = loss, batch, autocast

    def forward(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        flow, timeline = self.flow, self.flow.timeline
        # Only the step itself may keep memory alive: what its branches drop is freed.
        storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if memory_of(tensor) not in flow.weights:  # parameters are counted elsewhere
                storages[memory_of(tensor)] = weakref.ref(tensor.untyped_storage()), timeline.stage
            return unwatched_detach(tensor)  # a result that holds its own node would outlive a branch without backward

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self.model(*arguments, **named)
        self._mark_kept(storages, output)
        # Scores over a vocabulary: the field ``logits``, or a 3-d output as wide as an embedding table.
        tables = {each.num_embeddings for each in self.model.modules() if isinstance(each, nn.Embedding)}
        field = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if isinstance(output, torch.Tensor) and output.dim() == 3 and output.shape[-1] in tables:
            field = output
        logits = field if isinstance(field, torch.Tensor) and field.is_floating_point() else None
        if logits is not None:
            self.first_of_loss = flow.alive.get(memory_of(logits))
        if self._loss == "vocab-parallel" and not (logits is not None and flow.is_sharded(logits)):
            raise PlanError(
                Problem(
                    "conflicting-arguments",
                    "loss",
                    found="loss='vocab-parallel', and the plan shards no logits of this model along a model axis",
                    hint="shard the head's vocabulary, as MegatronPlanner does, or use the loss 'causal-lm'",
                )
            )
        timeline.begin("loss")
        scalars = self._scalars(output, logits)
        if logits is None or not logits.requires_grad:
            timeline.begin("backward")
        else:
            logits.register_hook(lambda grad: timeline.begin("backward"))  # fires when the loss's own backward is done
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(flow.gradient)
        scalars = [tensor for tensor in scalars if tensor.requires_grad]
        self._autocast.end()
        try:
            torch.autograd.backward(scalars, [torch.ones_like(tensor) for tensor in scalars])
        except Exception as error:  # no shape function for an operator; forward's figures are valid all the same
            reason = (str(error).splitlines() or [""])[0][:120]
            self.notes.append(f"backward is not counted: {type(error).__name__}: {reason}")

    def _mark_kept(self, storages: Mapping[int, tuple[weakref.ref[torch.UntypedStorage], int]], output: Any) -> None:
        """Mark what stays until backward: memory that autograd's hooks have seen, with the stage that saved it."""
        flow = self.flow
        # A checkpointed block keeps its inputs without autograd's hooks: count all live memory but the output.
        returned = {memory_of(tensor) for tensor in tensors_of(output, set())}
        for memory, allocation in flow.alive.items():
            if memory in returned:
                self.ends["outputs"][allocation.stage] += allocation.size
            elif not allocation.gathered:
                allocation.kept = allocation.size, allocation.stage
        for memory, (reference, stage) in storages.items():
            storage = reference()
            if storage is None:
                continue
            size = flow.local_bytes(memory, storage)
            if memory in flow.alive:
                flow.alive[memory].kept = size, stage
            else:  # an input's
                self.ends["inputs"][stage] += size

    def _scalars(self, output: Any, logits: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the tensors to start backward from: the loss, or else every output."""
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return [own]  # computed by the model from labels
        if callable(self._loss):
            loss: Any = self._loss(output, self._batch)
            trains = any(parameter.requires_grad for parameter in self.model.parameters())
            if not isinstance(loss, torch.Tensor) or (trains and not loss.requires_grad):
                result = "a tensor without a gradient" if isinstance(loss, torch.Tensor) else f"{loss!r:.180}"
                hint = "return the tensor that backward() starts from"
                raise PlanError(Problem("invalid-argument", "loss", found=f"it returned {result}", hint=hint))
            return [loss]
        tokens = self._batch
        loss_by_tokens = self._loss is not None and isinstance(tokens, torch.Tensor)
        if loss_by_tokens and logits is not None and logits.shape[:-1] == tokens.shape:
            # transformers' models compute their loss in float32, others in the dtype of the logits.
            scores = logits if logits is output else logits.float()
            return [functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())]
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if not (len(outputs) == 1 and outputs[0].dim() == 0):  # a scalar is a loss
            self.notes.append("the loss is not counted: pass labels in batch, or loss=")
        return outputs


class _TorchFunctions(TorchFunctionMode):
    """Attention without dropout as a fused kernel. It saves queries, keys, values, output and one sum a row.

    Integer lists that index a tensor keep their values.
    """

    def __init__(self, flow: _Flow, autocast: Autocast, exchanges: Exchanges) -> None:
        super().__init__()
        # On the meta device torch would pick its unfused formula, which saves every score.
        self._flow, self._autocast, self._exchanges = flow, autocast, exchanges
        self._has_efficient = autocast.device != "cpu"  # kernels for values of another size than keys

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and args[0].is_meta:
            return func(self._flow.values.read(args[0]), *args[1:], **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(map(self._index, args[1]))
        if func in _CONSTANTS and torch.device((kwargs or {}).get("device") or "cpu").type == "meta":
            if func is torch.tensor or not isinstance(args[0], torch.Tensor):
                return self._flow.values.constant(*args, **(kwargs or {}))
            args = self._flow.values.beside(args[0]), *args[1:]  # on a CPU torch hands a tensor on without a copy
        if func is torch.empty and (kwargs or {}).get("pin_memory"):
            return self._flow.values.on_host(func(*args, **{**(kwargs or {}), "pin_memory": False, "device": "meta"}))
        if func is torch.Tensor.to and memory_of(args[0]) in self._flow.values.host:
            back = func(*args, **(kwargs or {}))  # on the accelerator again, in new memory
            return back.clone() if memory_of(back) == memory_of(args[0]) else back
        if func in (functional.multi_head_attention_forward, torch.autograd.backward):
            with self:  # a mode does not see what torch's Python functions call: attention, recomputation in backward
                return _seen_inside(func)(*args, **(kwargs or {}))
        args, kwargs = self._autocast.arguments(getattr(func, "__name__", ""), args, kwargs or {})
        return (self._attention if func is functional.scaled_dot_product_attention else func)(*args, **kwargs)

    def _index(self, index: Any) -> Any:
        listed = isinstance(index, list) and index and all(type(at) is int for at in index)
        return self._flow.values.inputs(torch.tensor(index, device="cpu")) if listed else index

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,  # the kernel reads shared heads in place
    ) -> torch.Tensor:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            equal = q.dim() == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1]
            # Torch broadcasts one head over many in the unfused formula only.
            equal = equal and (enable_gqa or q.shape[:2] == k.shape[:2] == v.shape[:2])
            alike = q.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
            if self._has_efficient and alike and not (equal or dropout_p or mask is not None):  # values of another size
                efficient = torch.ops.aten._scaled_dot_product_efficient_attention
                return efficient(q, k, v, None, True, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]  # torch's
            if dropout_p or not equal or (mask is not None and mask.requires_grad):
                unfused = functional.scaled_dot_product_attention
                return unfused(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            if mask is not None and mask.dtype == torch.bool:
                mask = mask.to(q.dtype)  # the kernel adds it, and saves it in the dtype of the scores
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
            )
            return results[0]  # type: ignore[no-any-return]  # torch's

        return self._exchanges.attend(query, key, value, attn_mask, attention)


_CONSTANTS = torch.tensor, torch.as_tensor, torch.asarray


def _seen_inside(function: Any) -> Any:
    """Return a copy of one of torch's Python functions that runs its own code even while a mode is active."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


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


@contextmanager
def _attributes_kept(module: nn.Module, written: _Written) -> Iterator[None]:
    """Take back what forwards store or write within this context: stored tensors would be on the meta device.

    Args:
        module: The model: attributes of its modules, and containers and objects within these, four levels deep.
        written: Memory that is not on meta, with its content before the first write.
    """
    contents: dict[int, tuple[Any, Any]] = {}  # id of a container to it and a copy
    for each in module.modules():
        contents[id(each.__dict__)] = each.__dict__, dict(each.__dict__)
        for name, value in each.__dict__.items():
            if name not in _INTERNAL:
                _copy_containers(value, contents, 4)
    try:
        yield
    finally:
        for container, content in contents.values():
            _restore(container, content)
        for storage, before in written.values():
            storage.copy_(before)


_INTERNAL = frozenset(vars(nn.Module()))  # tables of a module, which estimates do not write
_PLAIN = bool, int, float, str, type(None), torch.dtype, torch.device, FunctionType, functools.partial


def _copy_containers(value: Any, contents: dict[int, tuple[Any, Any]], depth: int) -> None:
    """Copy a container, and those that it and the attributes of its objects hold, by their ids."""
    if not depth or type(value) in _PLAIN or isinstance(value, nn.Module | type | torch.Tensor):
        return
    if id(value) in contents:
        return
    if isinstance(value, list | dict | set | deque):
        plain = dict if isinstance(value, dict) else set if isinstance(value, set) else list
        contents[id(value)] = value, plain(value)
        for item in list(value.values() if isinstance(value, dict) else value):
            _copy_containers(item, contents, depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        _copy_containers(value.__dict__, contents, depth)


def _restore(container: Any, content: Any) -> None:
    """Put back what was added, replaced or removed. A dict or list is never empty: another thread may read it."""
    if isinstance(container, dict):
        for added in container.keys() - content.keys():
            del container[added]
        for key, value in content.items():
            if container.get(key, content) is not value:
                container[key] = value
    elif isinstance(container, set):
        container.intersection_update(content)
        container.update(content)
    elif list(map(id, container)) != list(map(id, content)):
        if isinstance(container, list):
            container[:] = content
        else:
            container.clear()
            container.extend(content)


@dataclass(frozen=True)
class _Weight:
    """Model axes that shard a parameter or buffer, by the use of its shards."""

    name: str
    column: frozenset[str]  # sharded results; the gradient of the input is summed
    row: frozenset[str]  # of sharded inputs; the results are summed
    ends: frozenset[str]  # sharded results (scores of a vocabulary), which are gathered
    other: frozenset[str]  # of no use that is known
    is_weight: bool  # a matrix, not a bias
    scattered: bool  # FSDP2 scatters its gradient
    blocks: int  # of experts on different ranks: the gradient of each lies on its own


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default)


def needs_values(error: Exception | None) -> Problem:
    """Return the problem of a forward that needs a tensor's values, with the line of its code that asks for them."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    library = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    own = [frame for frame in frames if not frame.filename.startswith(library)]
    where = f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    if "not on the expected device" in str(error):
        reason = f"the forward makes or keeps a tensor on another device than the model{where}"
        return Problem("unverified", "batch", found=reason, hint="make it with device=x.device, or register a buffer")
    cause = f" ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})" if error else ""
    return Problem(
        "unverified",
        "batch",
        found=f"the forward reads a tensor's value, and shapes have none{where}{cause}",
        hint="measure this model, or estimate it without this line: masks and sizes from integer inputs are followed",
    )


_Written: TypeAlias = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]  # by memory: it, and a copy


class _Values:
    """Values of integer inputs and constants, which run for real beside the meta device: models branch on them."""

    def __init__(self) -> None:
        self.given_memory: set[int] = set()  # inputs and their views belong to the caller
        self._given: dict[int, torch.Tensor] = {}  # id of an input -> that input on meta
        self._originals: list[Any] = []  # keeps ids valid: an id is free again after its input
        self._known = WeakTensorKeyDictionary()  # tensor on meta -> its values, if known
        self.host: set[int] = set()  # memory of tensors moved off the accelerator, which nothing counts
        self.on_cpu = False  # the model is: tensors made in its forward lie beside it
        self.written: _Written = {}
        self._routes = False  # a choice of experts was made up
        self.reads_routes = False  # and the forward has read values since

    def inputs(self, value: Any) -> Any:
        """Move inputs to meta; integers keep their values, and integers on meta count as zeros."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._given:  # one tensor as query, key and value stays one
                return self._given[id(value)]
            meta = self._given[id(value)] = value.detach().to("meta")
            self._originals.append(value)
            self.given_memory.add(memory_of(meta))
            if not value.is_floating_point() and not value.is_complex() and value.numel() <= _MAX_VALUES:
                self._known[meta] = torch.zeros_like(value, device="cpu") if value.is_meta else value.cpu()
            return meta
        return mapped(value, self.inputs)

    def beside(self, value: Any) -> Any:
        """Move tensors of the CPU to meta: lists of numbers, arrays, attributes that are no buffers."""
        if isinstance(value, torch.Tensor):
            moves = self.on_cpu and not value.is_meta and value.dim() and memory_of(value) not in self.host
            return self.inputs(value) if moves else value
        return mapped(value, self.beside)

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy memory that is not on meta, such as a counter of the caller's, before its first write."""
        for each in tensors:
            memory, storage = memory_of(each), each.untyped_storage()
            if not each.is_meta and memory not in self.written and storage.device.type != "meta":
                self.written[memory] = storage, storage.clone()

    def positions(self, indices: Any) -> list[Any]:
        """Return indices of a tensor with masks of known values as positions, whose number is then known."""
        listed: list[Any] = []
        for index in indices:
            values = None if index is None or index.dtype != torch.bool else self.of(index)
            listed += [index] if values is None else [self.known(each) for each in values.nonzero(as_tuple=True)]
        return listed

    def of_some_shape(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose result's shape depends on values, such as ``nonzero``, if they are all known."""
        if any(self.of(tensor) is None for tensor in tensors_of((args, kwargs))):
            return operator(*args, **kwargs)  # raises: the meta device has no values
        self.reads_routes |= self._routes
        result = operator(*self._real(args), **self._real(kwargs))
        return self.known(result) if isinstance(result, torch.Tensor) else mapped(result, self.known)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that Python code asks for; unknown ones are refused with the line that asks."""
        values = self.of(tensor)
        if values is None:
            raise PlanError(needs_values(None))
        self.reads_routes |= self._routes
        return values

    def constant(self, data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **_: Any) -> Any:
        """Return ``torch.tensor(data)`` on meta, with its values known if ``data`` has no unknown ones."""
        if any(self.of(tensor) is None for tensor in tensors_of(data)):
            raise PlanError(needs_values(None))
        values = torch.tensor(self._real(data), dtype=dtype, device="cpu")
        return self.known(values).requires_grad_(requires_grad)

    def route_evenly(self, indices: torch.Tensor, dim: int, size: int) -> None:
        """Give the indices of an unknown ``topk`` values as of even routing: experts in turn, token by token.

        Args:
            indices: Result of ``topk`` on meta.
            dim: Dim of the choice.
            size: Number of candidates along ``dim``.
        """
        if self.of(indices) is None and indices.dim() and indices.numel() <= _MAX_VALUES:
            shape = indices.movedim(dim, -1).shape
            self._known[indices] = (torch.arange(indices.numel()) % size).view(shape).movedim(-1, dim)
            self._routes = True

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor on meta as one in the host's memory."""
        self.host.add(memory := memory_of(tensor))
        weakref.finalize(tensor.untyped_storage(), self.host.discard, memory).atexit = False
        return tensor

    def to_host(self, tensor: torch.Tensor, kwargs: Any) -> torch.Tensor:
        """Copy a tensor to the CPU: as its values if they are known, or else as an uncounted one on meta."""
        values = self.of(tensor)
        if values is not None:
            return torch.ops.aten._to_copy.default(values, **kwargs)  # type: ignore[no-any-return]  # untyped
        return self.on_host(torch.empty_like(tensor, dtype=kwargs.get("dtype") or tensor.dtype))

    def known(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on meta whose values are known."""
        meta = torch.empty_like(value, device="meta")
        self._known[meta] = value
        return meta

    def follow(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute small results for real if all inputs are known: integers and constants."""
        results = list(tensors_of(result))
        small = results and all(tensor.numel() <= _MAX_VALUES for tensor in results)
        computable = small and torch.Tag.nondeterministic_seeded not in operator.tags
        if not computable or any(self.of(tensor) is None for tensor in tensors_of((args, kwargs))):
            return
        try:
            real = operator(*self._real(args), **self._real(kwargs))
        except (NotImplementedError, RuntimeError):
            return  # the CPU lacks this kernel, as histc of integers: the values stay unknown
        for tensor, values in zip(results, tensors_of(real), strict=True):
            self._known[tensor] = values

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor. Tensors off meta are constants of the forward, such as index lists."""
        if tensor.is_meta:
            return self._known.get(tensor)  # type: ignore[no-any-return]  # torch's
        return None if memory_of(tensor) in self.host else tensor

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        return torch.device("cpu") if isinstance(value, torch.device) else mapped(value, self._real)


class _Flow:
    """Track, memory by memory, the sharding axes and lifetime of each result."""

    def __init__(self, weights: dict[int, _Weight], axes: Mapping[str, int], gathers: bool) -> None:
        self.weights = weights  # by memory of a parameter or buffer
        self._gathers = gathers  # scores over a sharded vocabulary
        self.adds_gradients = False
        self.reached: set[int] = set()  # memory of parameters that got a gradient
        # Operators whose kernels on a CPU allocate more than is counted; those whose backward allocates less.
        self.inexact: dict[str, set[str]] = {"workspace": set(), "formula": set()}
        self.timeline = Timeline()
        self.alive: dict[int, Allocation] = {}  # by memory
        self.axes = axes  # name of each mesh axis to its size
        self._cut: dict[int, frozenset[str]] = {}  # memory -> axes
        # (axis, column-sharded weight) -> allocation of its input
        self._sources: dict[tuple[str, str], Allocation | None] = {}
        self._summed: set[tuple[str, Allocation | None]] = (
            set()
        )  # (axis, allocation) of inputs whose gradient is summed
        self.values = _Values()

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Return True if ranks of a model axis hold different parts of ``tensor``."""
        return bool(self.axes_of(tensor))

    def axes_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the model axes that shard ``tensor``."""
        return self._cut.get(memory_of(tensor), frozenset())

    def local_bytes(self, memory: int, storage: torch.UntypedStorage) -> int:
        """Return the bytes of a memory on one rank."""
        size = storage.nbytes()
        for axis in self._cut.get(memory, frozenset()):
            size = -(-size // self.axes[axis])  # rounded up: the fullest rank
        return size

    def bytes_on_rank(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a contiguous copy of ``tensor`` on one rank."""
        shards = prod(self.axes[axis] for axis in self.axes_of(tensor))
        return -(-tensor.numel() * tensor.itemsize // shards)

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator, and record its results beside the copies that its kernel makes of operands."""
        for kind, name in ("workspace", uncounted_workspace(operator, args)), ("formula", counted_formula(operator)):
            if name:
                self.inexact[kind].add(name)
        tensors = list(tensors_of((args, kwargs)))
        copied = copied_operands(operator, args, tensors, on_cpu=self.values.on_cpu)
        copies = [self.timeline.allocate(self.bytes_on_rank(each)) for each in copied]
        result = self._observe(operator, args, kwargs, tensors)
        if flops := flops_of(operator, args, kwargs, result):
            memories = [memory_of(each) for each in tensors]
            weights = [self.weights[memory] for memory in memories if memory in self.weights]
            axes = frozenset().union(
                *(self._cut.get(memory, frozenset()) for memory in memories),
                *(each.column | each.row | each.ends | each.other for each in weights),
            )
            flops //= prod(self.axes[axis] for axis in axes)
            self.timeline.log.append(("flops", (flops, self.timeline.stage)))
        for copy in copies:
            self.timeline.free(copy)
        return result

    def _observe(self, operator: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if operator._schema.is_mutable:
            self.values.before_write(tensors)
        if operator is torch.ops.aten._local_scalar_dense.default:  # item(): python code branches on it
            return self.values.read(args[0]).item()
        if operator is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return self.values.to_host(args[0], kwargs)
        if operator is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return (
                args[0].copy_(values)
                if (values := self.values.of(args[1])) is not None
                else self.values.on_host(args[0])
            )
        num_meta = sum(each.is_meta for each in tensors) if self.values.on_cpu else 0
        if 0 < num_meta < len(tensors):
            args, kwargs = self.values.beside(args), self.values.beside(kwargs)
            tensors = list(tensors_of((args, kwargs)))
        if operator in _INDEXING:
            args = args[0], self.values.positions(args[1]), *args[2:]
        by_values = torch.Tag.dynamic_output_shape in operator.tags and operator not in _INDEXING
        result = (self.values.of_some_shape if by_values else run_operator)(operator, args, kwargs)
        self.values.follow(operator, args, kwargs, result)
        if operator is torch.ops.aten.topk.default:
            dim = args[2] if len(args) > 2 else -1
            self.values.route_evenly(result[1], dim, args[0].shape[dim] if args[0].dim() else 1)
        # Views of weights and inputs are no new results.
        results = [
            each
            for each in tensors_of(result)
            if each.is_meta
            and (memory := memory_of(each)) not in self.weights
            and memory not in self.values.given_memory
            and memory not in self.values.host
        ]
        if not results:
            return result
        used = [self.weights[memory_of(each)] for each in tensors if memory_of(each) in self.weights]
        inputs = [memory_of(each) for each in tensors if memory_of(each) not in self.weights]
        sharded = frozenset[str]().union(*(self._cut.get(memory, ()) for memory in inputs))
        # Backward runs without grad mode, recomputation within it with grad mode.
        recomputes = torch.is_grad_enabled() and self.timeline.in_backward()
        forward = torch.is_grad_enabled() or not self.timeline.in_backward()
        collectives: list[tuple[str, str, str]] = []  # (axis, operation, name of the weight)
        for weight in used:
            looked_up = operator is torch.ops.aten.embedding.default
            if forward:
                summed = weight.row | (weight.ends if looked_up else frozenset())  # a tied table is a head, too
                gathered = weight.ends - summed if self._gathers else frozenset()
                collectives += [(axis, "all_reduce", weight.name) for axis in summed]
                collectives += [(axis, "all_gather", weight.name) for axis in gathered]
                sharded = (sharded | weight.column | weight.ends) - summed - gathered
                if not (recomputes or looked_up):
                    source = next((self.alive[memory] for memory in inputs if memory in self.alive), None)
                    self._sources.update({(axis, weight.name): source for axis in weight.column | weight.ends})
            else:
                sharded = (sharded | weight.row) - weight.column - weight.ends
                for axis in weight.column | weight.ends:
                    # Layers with one input (query, key, value) share the sum of its gradient.
                    source = self._sources.pop((axis, weight.name), None)
                    if (axis, source) not in self._summed:
                        self._summed.add((axis, source))
                        collectives.append((axis, "all_reduce", weight.name))
            # A product of two sharded operands is a sum over the shards, full in size.
            sharded = sharded ^ weight.other if operator in _PRODUCTS else sharded | weight.other
        for tensor in results:
            self._note(tensor.untyped_storage(), memory_of(tensor), sharded)
            for axis, op, name in collectives:
                self.communicate(axis, op, "activations", name, tensor)
        return result

    def communicate(self, axis: str, op: str, what: str, name: str, tensor: torch.Tensor) -> None:
        """Record a collective whose result is ``tensor``."""
        self.record(axis, op, what, name, self.local_bytes(memory_of(tensor), tensor.untyped_storage()))

    def record(self, axis: str, op: str, what: str, name: str, size: int) -> None:
        """Record a collective of the stage that runs."""
        self.timeline.log.append(("sent", (axis, op, what, name, size, self.timeline.stage)))

    def sum_experts(self, module: nn.Module, resolution: Resolution) -> list[Any]:
        """Sum outputs, and gradients of inputs, of modules with several experts in one parameter. Return the hooks."""
        handles = []
        axes: dict[str, frozenset[str]] = {}  # FQN of the module -> axes that shard its weights
        experts = expert_modules(resolution.metadata.parameters)
        for weight in self.weights.values():
            owner = weight.name.rpartition(".")[0]
            if owner in experts and weight.other:
                axes[owner] = axes.get(owner, frozenset()) | weight.other
        for name in axes:

            def reduced(tensor: torch.Tensor, name: str = name) -> None:
                for axis in axes[name]:
                    self.communicate(axis, "all_reduce", "activations", name, tensor)
                self._cut[memory_of(tensor)] = self._cut.get(memory_of(tensor), frozenset()) - axes[name]

            def before(module: nn.Module, args: Any, kwargs: Any, reduced: Any = reduced) -> None:
                for tensor in tensors_of((args, kwargs)):
                    if tensor.requires_grad:
                        tensor.register_hook(reduced)

            def after(module: nn.Module, args: Any, output: Any, reduced: Any = reduced) -> None:
                for tensor in tensors_of(output):
                    reduced(tensor)

            unit = module.get_submodule(name)
            handles += [unit.register_forward_pre_hook(before, with_kwargs=True), unit.register_forward_hook(after)]
        return handles

    def buffer(self, size: int, *, lasting: bool = False) -> torch.Tensor:
        """Allocate a buffer of FSDP2, or a shard of gradients that stays until the end of the step."""
        buffer = torch.empty(size, dtype=torch.uint8, device="meta")
        allocation = self.alive[memory_of(buffer)]
        allocation.gathered, allocation.lasting = not lasting, lasting
        return buffer

    def gradient(self, parameter: torch.Tensor) -> None:
        """Leave a gradient to the exact count, or to its unit until it is scattered."""
        self.reached.add(memory_of(parameter))
        if parameter.grad is None:
            return  # added to the gradient of earlier batches
        if parameter.grad.layout != torch.strided:
            return  # the exact count has none: it stays among the activations
        memory, weight = memory_of(parameter.grad), self.weights[memory_of(parameter)]
        allocation = self.alive.get(memory) or Allocation(0, 0)  # of memory that nothing counts
        if weight.blocks > 1:
            allocation.size = parameter.grad.nbytes // weight.blocks
        # Full gradients of earlier batches, and DDP's views, are there: this one is added, or copied, and freed.
        is_added = self.adds_gradients and not weight.scattered
        allocation.gathered, allocation.lasting = weight.scattered, not (weight.scattered or is_added)
        own = weight.column | weight.row | weight.ends | weight.other
        for axis in self._cut.get(memory, frozenset()) - own:  # a full parameter used on shards (norms of heads)
            allocation.size = parameter.grad.nbytes
            self.record(axis, "all_reduce", "gradients", weight.name, parameter.grad.nbytes)
        if is_added:
            parameter.grad = None

    def _note(self, storage: torch.UntypedStorage, memory: int, axes: frozenset[str]) -> None:
        """Record a result: of new memory, or of live memory (a view, an in-place result)."""
        self._cut[memory] = axes
        if memory in self.alive:
            self.alive[memory].size = self.local_bytes(memory, storage)  # last writer decides
            return
        allocation = self.timeline.allocate(self.local_bytes(memory, storage))
        self.alive[memory] = allocation

        def free() -> None:
            self.timeline.free(allocation)
            if self.alive.get(memory) is allocation:  # the address may have been reused meanwhile
                del self.alive[memory], self._cut[memory]

        weakref.finalize(storage, free).atexit = False  # no work at interpreter exit


def _by_place(module: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on meta by each place of ``module`` under the attribute ``model``.

    A tied parameter has several places. A module with several names has its places once: restored twice,
    `functional_call` would leave the model with the tensors on meta.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    by_tensor = {id(tensor): state[name] for name, tensor in named.items()}
    places = {}
    for path, owner in module.named_modules():
        for leaf, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places[".".join(filter(None, ("model", path, leaf)))] = by_tensor[id(tensor)]
    return places


def _meta_state(
    module: nn.Module,
    resolution: Resolution,
    model_axes: list[str],
    dtype: str | None,
    *,
    gathers: bool,
    scattered: set[str],
    expert_axes: tuple[str, ...],
) -> tuple[dict[str, torch.Tensor], dict[int, _Weight]]:
    """Return parameters and buffers on meta, and the axes that shard each one.

    Outputs that no later weight takes sharded (logits) stay so unless ``gathers`` is True.
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
    weights, experts = {}, expert_modules(resolution.metadata.parameters)
    for at, (name, tensor) in enumerate(tensors.items()):
        item = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        shape = resolution.tensor(name).shape
        meta = torch.empty(shape, dtype=item, device="meta", requires_grad=tensor.requires_grad)  # never allocated
        state[name] = meta
        uses: dict[str, set[str]] = {kind: set() for kind in ("row", "column", "cut", "ends", "whole")}
        for axis, kind in roles[name].items():
            end = kind == "column" and gathers and at > last_row[axis]
            # A tied table is looked up as a table, but as a head it gives scores to gather.
            end |= kind == "row" and is_embedding(resolution.tensor(name))
            uses["ends" if end else kind].add(axis)
        column, row, ends, other = (frozenset(uses[kind]) for kind in ("column", "row", "ends", "cut"))
        own = resolution.tensor(name).name
        layout = resolution.layouts.get(own) if own.rpartition(".")[0] in experts else None
        sharded = () if layout is None else layout.sharded_axes
        blocks = prod(resolution.one_mesh.axis_size(axis) for axis in expert_axes if axis in sharded)
        weights[memory_of(meta)] = _Weight(own, column, row, ends, other, len(shape) > 1, own in scattered, blocks)
    return state, weights
