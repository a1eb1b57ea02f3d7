"""`compare`: a model that another library sharded, beside the original of one process.

Every rank builds the original and runs it alone; the sharded model runs once on the same batch. What both compute is
compared: outputs, gradients by name, their norm, and buffers. The comparison draws no random numbers, and afterwards
the sharded model has its former gradients and buffers.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tp_styles._shared.consensus import all_gather_objects, capture_errors
from tp_styles._shared.execution_check import Compared, as_double, random_state_restored
from tp_styles._shared.norms import grad_norm
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import without_dispatch_modes
from tp_styles.check.compare import Output, cotangents, first_different, gradient_lost, layout_of
from tp_styles.check.inputs import ConstantRandomness, tensors_in
from tp_styles.check.rows import Pair, Row, counts, error, gradient_rows, joined, largest, tolerance_of
from tp_styles.check.runs import Trace
from tp_styles.problems import CheckError, PlanError, Problem
from tp_styles.runtime.parameters import full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup

KeyMap = Mapping[str, str | tuple[str, ...] | None] | Callable[[str], str | tuple[str, ...] | None]

# Modules that DistributedDataParallel, FSDP1, torch.compile and activation checkpointing put around others.
WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")

T = TypeVar("T")

SUBJECT = "tp_styles.compare"
SHOWN = 10


@dataclass(frozen=True)
class ComparedModels:
    """Counts of a comparison by `compare`, the same on every rank.

    Attributes:
        compared: Counts of outputs and buffers (`tensors`), of `gradients`, and of all their elements.
        unchecked: Names without a comparison, each with its reason: zero in both models, no counterpart by `key_map`.
        norm: Norm of all gradients of the original; None if gradients were not recorded.
    """

    compared: Compared
    unchecked: tuple[str, ...]
    norm: float | None

    def __str__(self) -> str:
        text = f"equal to the original ({self.compared}"
        text += f"; gradient norm {self.norm:.6g})" if self.norm is not None else ")"
        if self.unchecked:
            more = f" and {len(self.unchecked) - SHOWN} more" if len(self.unchecked) > SHOWN else ""
            text += f"; unchecked: {', '.join(self.unchecked[:SHOWN])}{more}"
        return text


class Constants(ConstantRandomness):
    """Constants in place of random numbers, for a run of the model as it trains (no run of a first call's check)."""


def compare(
    sharded: nn.Module,
    make_original: Callable[[], nn.Module],
    batch: Any,
    key_map: KeyMap | None = None,
    *,
    data_mesh: DeviceMesh | None = None,
    tolerance: float | None = None,
) -> ComparedModels:
    """Compare a sharded model with its original: outputs, gradients by name, gradient norm, buffers.

    Every rank of the default process group calls it. The sharded model may come from any library: transformers,
    accelerate, torchtitan, `fully_shard`, DDP, `parallelize_module`, these styles. Its parameters are plain tensors,
    DTensors or local shards.

    Args:
        sharded: The model as this rank has it.
        make_original: Makes the unsharded model with the same values, on the same device.
        batch: The arguments of both models: a dict of keywords, a tuple of positional arguments, or one tensor. All
            ranks pass the global batch; random inputs need equal seeds.
        key_map: Name of a sharded parameter or buffer -> its name in the original; a tuple of names for one that
            concatenates several along dim 0; None for one without a counterpart, which is listed as unchecked. A
            mapping's keys may hold `*` for one part of a name, as in its values; a name without an entry stays.
        data_mesh: 1-D mesh of ranks that take different rows of the batch, and average gradients (FSDP2's, DDP's): each
            rank of it gets its rows of all tensors of the batch, which divide evenly. None: all take the full batch.
        tolerance: Largest accepted relative error; by default it follows from the coarsest dtype of the computation.

    Returns:
        Counts of what was compared, and the names that were not.

    Raises:
        PlanError: The batch does not divide over `data_mesh`, or a name has no counterpart; on every rank.
        CheckError: The models differ, or one of them raises on some rank; on every rank.
    """
    data = TPGroup(data_mesh) if data_mesh is not None else None
    rows: list[Row] = []
    original = _on_all_ranks("make_original", make_original)
    original.train(sharded.training)
    modes = {_clean(name): module.training for name, module in sharded.named_modules()}  # DDP's own flag is no module's
    for name, module in original.named_modules():
        module.training = modes.get(_clean(name), module.training)
    names = _on_all_ranks("key_map", lambda: _Names(sharded, original, key_map, rows))
    mine = _on_all_ranks("batch", lambda: _rows_of_batch(batch, data))
    with _untouched(sharded), ExitStack() as stack:
        stack.enter_context(random_state_restored())
        if "torch._dynamo" in sys.modules:  # compiled blocks cannot run under a dispatch mode
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        constants = stack.enter_context(Constants())
        norm = _run_both(sharded, original, (mine, batch), data, names, rows, (constants, tolerance))
    return _agreed(rows, norm)


def _run_both(
    sharded: nn.Module,
    original: nn.Module,
    batches: tuple[Any, Any],
    data: TPGroup | None,
    names: _Names,
    rows: list[Row],
    precision: tuple[Constants, float | None],
) -> float | None:
    """Run both models forward, compare; then backward, and compare. Return the norm of the original's gradients."""
    constants, tolerance = precision
    wanted = _on_all_ranks("the original", lambda: _call(original, batches[1]))
    output = _on_all_ranks("the sharded model", lambda: _call(sharded, batches[0]))
    epsilon = max(_gather(constants.epsilon))
    limit = tolerance if tolerance is not None else tolerance_of(epsilon)
    outputs = _compare_outputs(output, wanted, data, rows, limit)
    if any(_gather(any(row.verdict == "differs" for row in rows))):
        _trace(sharded, original, batches, data, rows, limit)
        return None
    norm = None
    ours, its = cotangents(outputs, data.size if data is not None else 1)
    if ours[0] and torch.is_grad_enabled():
        _on_all_ranks("the original's backward", lambda: torch.autograd.backward(*its))
        _on_all_ranks("the sharded backward", lambda: torch.autograd.backward(*ours))
        norm = _compare_gradients(names, rows, 10 * limit)  # gradients are sums over the batch
    _compare_buffers(names, rows, limit)
    return norm


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _rows_of_batch(batch: Any, data: TPGroup | None) -> Any:
    """Return this rank's rows of every tensor of a batch."""
    if data is None:
        return batch
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0:
            return batch
        if batch.shape[0] % data.size:
            raise PlanError(
                Problem(
                    "does-not-divide",
                    "batch",
                    dim=0,
                    found=f"{batch.shape[0]} rows over {data.size} ranks",
                    hint="every rank of data_mesh takes equally many rows: their gradients are averaged with equal"
                    " weights",
                )
            )
        return batch.chunk(data.size)[data.rank]
    if isinstance(batch, Mapping):
        return {key: _rows_of_batch(value, data) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)([_rows_of_batch(value, data) for value in batch])
    return batch


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Leave gradients and buffers of a model as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _gather(value: Any) -> list[Any]:
    """Gather a picklable object of every rank; the check's mode would see each copy of its bytes."""
    with without_dispatch_modes():
        return all_gather_objects(None, value, SUBJECT)


# ---------------------------------------------------------------------------------------------- names


class _Names:
    """Parameters and buffers of both models, by the sharded model's names.

    Raises:
        PlanError: One of the sharded model has no counterpart, or one of the original is left over.
    """

    def __init__(self, sharded: nn.Module, original: nn.Module, key_map: KeyMap | None, rows: list[Row]) -> None:
        self.full = {_clean(n): p for n, p in _parameters(original)}
        full_buffers = {_clean(n): b for n, b in original.named_buffers()}
        self.parameters: dict[str, tuple[nn.Parameter, tuple[nn.Parameter, ...]]] = {}
        self.buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        problems, used = [], set()
        groups: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in _parameters(sharded):
            groups.setdefault(id(parameter), (parameter, []))[1].append(_clean(name))
        for parameter, tied in groups.values():
            for name in tied:
                keys = _mapped(name, key_map)
                if keys is None:
                    rows.append(Row("gradient", name, "unchecked", reason="no counterpart by key_map"))
                elif missing := [key for key in keys if key not in self.full]:
                    problems.append(
                        Problem(
                            "unknown-name",
                            name,
                            found=f"no {', '.join(missing)} in the original",
                            hint="key_map= gives its name in the original; None leaves it out of the comparison",
                        )
                    )
                else:
                    used |= {id(self.full[key]) for key in keys}
                    self.parameters.setdefault(tied[0], (parameter, tuple(self.full[key] for key in keys)))
        for name, parameter in self.full.items():
            if id(parameter) not in used:
                problems.append(
                    Problem(
                        "unknown-name",
                        name,
                        found="in the original alone",
                        hint="the sharded model has no parameter for it: key_map= names the one that stands for it",
                    )
                )
        for name, buffer in sharded.named_buffers():
            name = _clean(name)
            keys = _mapped(name, key_map) or ()
            if len(keys) == 1 and keys[0] in full_buffers:
                self.buffers[name] = buffer, full_buffers[keys[0]]
            else:
                rows.append(Row("buffer", name, "unchecked", reason="a buffer without a counterpart"))
        if problems:
            raise PlanError(problems[:SHOWN], f"{len(problems)} names without a counterpart")


def _clean(name: str) -> str:
    """Return a name without the modules that libraries put around others."""
    return WRAPPERS.sub("", f".{name}").lstrip(".")


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _mapped(name: str, key_map: KeyMap | None) -> tuple[str, ...] | None:
    """Return the original's names of a sharded parameter; None if it has no counterpart."""
    if key_map is None:
        return (name,)
    if not isinstance(key_map, Mapping):
        target = key_map(name)
    elif name in key_map:
        target = key_map[name]
    else:
        target = name
        for pattern, replacement in key_map.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name) if "*" in pattern else None
            if match is not None:
                parts = [replacement] if isinstance(replacement, str) else replacement
                target = None if parts is None else tuple(_filled(part, match.groups()) for part in parts)
                break
    return (target,) if isinstance(target, str) else target


def _filled(target: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        target = target.replace("*", part, 1)
    return target


# ---------------------------------------------------------------------------------------------- outputs


def _compare_outputs(output: Any, wanted: Any, data: TPGroup | None, rows: list[Row], limit: float) -> list[Output]:
    """Compare outputs in their order; return them for the backward."""
    ours, its = list(tensors_in(output)), list(tensors_in(wanted))
    flags = _gather([x.requires_grad for _, x in ours])
    if set(map(len, flags)) != {len(its)}:
        rows.append(Row("output", "-> structure", reason=f"{len(ours)} tensors, {len(its)} originally"))
        return []
    outputs = []
    for (place, own), (_, other), *of_ranks in zip(ours, its, *flags, strict=True):
        name = f"-> {place.path or 'output'}"
        rows += [] if place.is_state else gradient_lost(name, of_ranks, other)
        first = _first_row(own, other, data)
        reference = other.detach() if first is None else other.detach()[first : first + own.shape[0]]
        full, layout, start = _full(own, tuple(reference.shape), data)
        if full is None:
            reason = f"shape {tuple(own.shape)} of {tuple(reference.shape)}, a layout that does not show"
            rows.append(Row("output", name, reason=reason))
            continue
        if data is not None and first is None and other.dim() == 0 and own.is_floating_point():
            full = data.all_reduce(full.reshape(1)).reshape(()) / data.size  # a mean over this rank's rows
        rows.append(Pair("output", name, full, reference, largest(reference)).row(limit))
        outputs.append(Output(own, other, layout, start, starts_backward=not place.is_state, first_row=first))
    return outputs


def _first_row(own: torch.Tensor, other: torch.Tensor, data: TPGroup | None) -> int | None:
    """Return the first of this rank's rows, if the output has only these."""
    if data is None or own.dim() == 0 or own.dim() != other.dim() or own.shape[0] * data.size != other.shape[0]:
        return None
    return int(own.shape[0]) * data.rank


def _full(
    x: torch.Tensor, shape: tuple[int, ...], data: TPGroup | None, like: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, Any, int]:
    """Return a tensor's global value, its layout, and the start of a shard in a plain tensor. None: no layout fits.

    A collective: every rank calls it for the same tensor.
    """
    if isinstance(x, DTensor):
        with without_dispatch_modes():
            full: torch.Tensor = cast(DTensor, x.detach()).full_tensor()
        return (full if tuple(full.shape) == shape else None), "full", 0
    info = sharding_info_of(x if like is None else like)
    if info is not None:
        return full_tensor(x.detach().as_subclass(torch.Tensor), TPGroup(info.mesh), split_of(info)), "full", 0
    where = data.rank if data is not None else 0
    everyone = _gather((where, tuple(x.shape)))
    if all(own == shape for _, own in everyone):
        return x.detach(), "full", 0
    parts = _gather(x.detach().cpu())  # all ranks, or none: a rank of other rows may see another layout
    same = [rank for rank, (other, _) in enumerate(everyone) if other == where]
    layout = layout_of(x, shape, [everyone[rank][1] for rank in same])
    if not isinstance(layout, Shard):
        return (x.detach() if layout else None), layout, 0
    sizes = [everyone[rank][1][layout.dim] for rank in same]
    start = sum(sizes[: same.index(dist.get_rank())])
    return torch.cat([parts[rank] for rank in same], layout.dim).to(x.device), layout, start


# ---------------------------------------------------------------------------------------------- gradients and buffers


def _compare_gradients(names: _Names, rows: list[Row], limit: float) -> float:
    """Compare gradients by name, then their norm; return the original's norm."""
    pairs = []
    originals = {id(p): p for _, parts in names.parameters.values() for p in parts}.values()
    squares = sum(float(as_double(p.grad).square().sum()) for p in originals if p.grad is not None)
    for name, (parameter, full) in names.parameters.items():
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in full]
        wanted = parts[0] if len(parts) == 1 else torch.cat(parts)
        gradient = parameter.grad
        if not any(_gather(gradient is not None)):
            has_one = any(p.grad is not None for p in full)
            reason = "zero in both" if has_one else "no gradient in both"
            row = Row("gradient", name, "unchecked", reason=reason)
            rows.append(row if not largest(wanted) else Row("gradient", name, reason="there is none"))
            continue
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            reason = f"left as a partial sum {gradient.placements}: an optimizer reads it"
            rows.append(Row("gradient", name, reason=reason))
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        value, _, _ = _full(gradient, tuple(wanted.shape), None, like=parameter)
        if value is None:
            reason = f"shape {tuple(gradient.shape)} of {tuple(wanted.shape)}: key_map= names what it consists of"
            rows.append(Row("gradient", name, reason=reason))
            continue
        pairs.append(Pair("gradient", name, value, wanted, largest(wanted)))
    rows += gradient_rows(pairs, limit)
    norm = math.sqrt(squares)
    parameters = [p for p, _ in names.parameters.values()]
    ours_norm = _on_all_ranks("the norm of the gradients", lambda: float(grad_norm(parameters)))
    if abs(ours_norm - norm) > limit * max(norm, ours_norm):
        reason = f"{ours_norm:.6g}, {norm:.6g} originally: plain tensors that hold shards count as replicas"
        rows.append(
            Row("gradient-norm", "all gradients", error=abs(ours_norm - norm) / max(norm, 1e-30), reason=reason)
        )
    return norm


def _compare_buffers(names: _Names, rows: list[Row], limit: float) -> None:
    for name, (buffer, wanted) in names.buffers.items():
        full, _, _ = _full(buffer, tuple(wanted.shape), None)
        if full is None:
            rows.append(Row("buffer", name, "unchecked", reason="a buffer in another layout"))
        else:
            rows.append(Pair("buffer", name, full, wanted.detach(), largest(wanted)).row(limit))


# ---------------------------------------------------------------------------------------------- the place of a mistake


def _trace(
    sharded: nn.Module,
    original: nn.Module,
    batches: tuple[Any, Any],
    data: TPGroup | None,
    rows: list[Row],
    limit: float,
) -> None:
    """Run both once more, and name the first module with another output."""
    with torch.no_grad():
        theirs = _on_all_ranks("the original", lambda: _outputs_of_modules(original, batches[1]))
        ours = _on_all_ranks("the sharded model", lambda: _outputs_of_modules(sharded, batches[0]))
    equal: dict[str, bool] = {}
    for name, wanted in theirs.items():
        outputs = ours.get(name)
        shared = _gather(outputs is not None and len(outputs) == len(wanted))
        if not all(shared) or outputs is None:
            continue
        for own, other in zip(outputs, wanted, strict=True):
            start = _first_row(own, other, data)
            reference = other if start is None else other[start : start + own.shape[0]]
            full = own
            if isinstance(own, DTensor):
                with without_dispatch_modes():
                    full = own.full_tensor()
            if full.shape == reference.shape:  # a shard inside of a parallel block shows nothing
                equal[name] = equal.get(name, True) and error(full, reference) <= limit
    everyone = _gather(equal)
    if any(not all(own.values()) for own in everyone):
        place = first_different([*theirs], everyone)
        rows.append(Row("place", place or type(original).__name__, error=0.0))


def _outputs_of_modules(model: nn.Module, batch: Any) -> dict[str, list[Any]]:
    """Return the first tensor of each module's outputs, if of floats, in the order in which modules finish."""
    trace = Trace({module: _clean(name) for name, module in model.named_modules()}, keeps=True)
    handles = [module.register_forward_hook(trace.leave) for module in model.modules()]
    try:
        _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: [x for x in outputs if x is not None and x.is_floating_point()] for name, outputs in trace.outputs.items()
    }


# ---------------------------------------------------------------------------------------------- one verdict


HINTS = {
    "output": "look at the named module's style or plan: a layer that reads a shard as the full activation, a bias"
    " that each rank adds before a sum, other weights than the original's",
    "gradient": "a sum over ranks is missing or made twice, or a divisor is not the number of data-parallel ranks"
    " (set_gradient_divide_factor, gradient averaging beside a sum)",
    "buffer": "each rank updates it from its own rows: SyncBatchNorm, or a broadcast",
    "gradient-norm": "tp_styles.clip_grad_norm_ counts shards of every kind; a parameter that holds a shard as a plain"
    " tensor has to become a DTensor",
}


def _agreed(rows: list[Row], norm: float | None) -> ComparedModels:
    """Return the joined counts, or raise the joined differences; the same on every rank."""
    everyone = _gather([row for row in rows if row.verdict != "equal"])
    of_all = joined(everyone)
    place = next((row.name for row in of_all if row.kind == "place"), "")
    differences = [row for row in of_all if row.verdict == "differs" and row.kind != "place"]
    if differences:
        problems = []
        for row in sorted(differences, key=lambda row: -row.error)[:SHOWN]:
            reason = row.text("the original's")
            reason += f"; both part first at the output of {place}" if place and row.kind == "output" else ""
            reason += f" (ranks {', '.join(map(str, row.ranks))})" if len(row.ranks) < len(everyone) else ""
            problems.append(Problem("check-mismatch", row.name, found=reason, hint=HINTS[row.kind]))
        more = f", the {SHOWN} largest" if len(differences) > SHOWN else ""
        raise CheckError(problems, f"{len(differences)} differences from the original{more}:")
    if not (compared := counts(rows)):
        raise CheckError(
            Problem(
                "check-mismatch",
                SUBJECT,
                found="nothing could be compared",
                hint="pass a batch, and models that return tensors",
            )
        )
    return ComparedModels(compared, tuple(f"{row.name} ({row.reason})" for row in of_all), norm)


def _on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise any rank's error on every rank.

    Raises:
        PlanError: The fault of a rank was a `PlanError` that is no failed check.
        CheckError: Some other error.
    """
    result, fault = capture_errors(work)
    is_plan = isinstance(fault, PlanError) and not isinstance(fault, CheckError)
    problems: tuple[Problem, ...] = ()
    if isinstance(fault, PlanError):
        problems = fault.problems
    elif fault is not None:
        text = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}"
        problems = (Problem("check-raises", what, found=text, hint="call the model alone with this batch first"),)
    everyone = _gather((problems, is_plan))
    failed = [rank for rank, (own, _) in enumerate(everyone) if own]
    if not failed:
        return cast(T, result)
    of_plans = all(everyone[rank][1] for rank in failed)
    unique = list(dict.fromkeys(problem for own, _ in everyone for problem in own))[:SHOWN]
    ranks = f" (ranks {', '.join(map(str, failed))})" if len(failed) < len(everyone) else ""
    raise (PlanError if of_plans else CheckError)(unique, f"{what} raised{ranks}:") from fault
