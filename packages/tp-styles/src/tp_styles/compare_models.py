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
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tp_styles._shared.consensus import all_gather_objects, capture_errors
from tp_styles._shared.execution_check import Compared, as_double, random_state_restored, relative_error
from tp_styles._shared.norms import grad_norm
from tp_styles._shared.sharding_info import sharding_info_of
from tp_styles._torch_compat import without_dispatch_modes
from tp_styles.check.compare import largest
from tp_styles.check.inputs import ConstantRandomness, tensors_in, varied
from tp_styles.problems import CheckError, PlanError, Problem
from tp_styles.runtime.parameters import full_tensor, split_of
from tp_styles.runtime.redistribute import TPGroup

KeyMap = Mapping[str, str | tuple[str, ...] | None] | Callable[[str], str | tuple[str, ...] | None]

# Modules that DistributedDataParallel, FSDP1, torch.compile and activation checkpointing put around others.
WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")

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


@dataclass
class Findings:
    """Differences of this rank, by kind and name, and counts."""

    errors: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    compared: Compared = field(default_factory=Compared)
    unchecked: dict[str, str] = field(default_factory=dict)

    def differ(self, kind: str, name: str, error: float = math.inf, detail: str = "") -> None:
        """Add a difference."""
        self.errors[kind, name] = error, detail


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
    findings = Findings()
    original, fault = capture_errors(make_original)
    _raise_on_all("make_original", fault)
    assert original is not None
    original.train(sharded.training)
    modes = {_clean(name): module.training for name, module in sharded.named_modules()}  # DDP's own flag is no module's
    for name, module in original.named_modules():
        module.training = modes.get(_clean(name), module.training)
    names, fault = capture_errors(lambda: _Names(sharded, original, key_map, findings))
    _raise_on_all("key_map", fault)
    assert names is not None
    mine, fault = capture_errors(lambda: _rows_of_batch(batch, data))
    _raise_on_all("batch", fault)
    with _untouched(sharded), ExitStack() as stack:
        stack.enter_context(random_state_restored())
        if "torch._dynamo" in sys.modules:  # compiled blocks cannot run under a dispatch mode
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        constants = stack.enter_context(Constants())
        norm = _run_both(sharded, original, (mine, batch), data, names, findings, (constants, tolerance))
    return _agreed(findings, norm)


def _run_both(
    sharded: nn.Module,
    original: nn.Module,
    batches: tuple[Any, Any],
    data: TPGroup | None,
    names: _Names,
    findings: Findings,
    precision: tuple[Constants, float | None],
) -> float | None:
    """Run both models forward, compare; then backward, and compare. Return the norm of the original's gradients."""
    constants, tolerance = precision
    wanted, fault = capture_errors(lambda: _call(original, batches[1]))
    _raise_on_all("the original", fault)
    output, fault = capture_errors(lambda: _call(sharded, batches[0]))
    _raise_on_all("the sharded model", fault)
    epsilon = max(_gather(constants.epsilon))
    limit = tolerance if tolerance is not None else max(1e-9, epsilon * (8 if epsilon > 1e-4 else 1000))
    pairs = _compare_outputs(output, wanted, data, findings, limit)
    if any(_gather(bool(findings.errors))):
        _trace(sharded, original, batches, data, findings, limit)
        return None
    norm = None
    if pairs and torch.is_grad_enabled():
        starts = [(pair.wanted, varied(pair.wanted)) for pair in pairs]
        _, fault = capture_errors(lambda: torch.autograd.backward(*_columns(starts)))
        _raise_on_all("the original's backward", fault)
        scale = data.size if data is not None else 1
        starts = [(pair.output, pair.cotangent(scale)) for pair in pairs]
        _, fault = capture_errors(lambda: torch.autograd.backward(*_columns(starts)))
        _raise_on_all("the sharded backward", fault)
        norm = _compare_gradients(names, findings, 10 * limit)  # gradients are sums over the batch
    _compare_buffers(names, findings, limit)
    return norm


def _columns(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


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

    def __init__(self, sharded: nn.Module, original: nn.Module, key_map: KeyMap | None, findings: Findings) -> None:
        self.findings = findings
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
                    findings.unchecked[name] = "no counterpart by key_map"
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
                findings.unchecked[name] = "a buffer without a counterpart"
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


@dataclass
class _Pair:
    """An output of both models with a gradient, and this rank's part of the original's.

    Attributes:
        output: The sharded model's.
        wanted: The original's, full.
        start: First row of this rank's rows; None if it has all rows.
        layout: `"full"`, or the dim and the start of this rank's shard of the rows.
    """

    output: torch.Tensor
    wanted: torch.Tensor
    start: int | None
    layout: tuple[int, int] | None

    def cotangent(self, scale: int) -> torch.Tensor:
        """Return the gradient of the output. Rows of a rank count `scale` times, since gradients are averaged."""
        value = varied(self.wanted)
        local = self.output
        if self.start is not None:
            value = value[self.start : self.start + self.wanted.shape[0] // scale] * scale
        if isinstance(local, DTensor):
            placements = [p if isinstance(p, Shard) else Replicate() for p in local.placements]
            return distribute_tensor(value, local.device_mesh, placements, src_data_rank=None)
        if self.layout is not None:
            dim, start = self.layout
            value = value.narrow(dim, start, local.shape[dim])
        return value.contiguous()


def _compare_outputs(output: Any, wanted: Any, data: TPGroup | None, findings: Findings, limit: float) -> list[_Pair]:
    """Compare outputs in their order; return those that gradients start at."""
    ours, its = list(tensors_in(output)), list(tensors_in(wanted))
    counts = _gather(len(ours))
    if set(counts) != {len(its)}:
        findings.differ("output", "-> structure", detail=f"{len(ours)} tensors, {len(its)} originally")
        return []
    pairs = []
    for (place, own), (_, other) in zip(ours, its, strict=True):
        name = f"-> {place.path or 'output'}"
        start = _first_row(own, other, data)
        reference = other if start is None else other[start : start + own.shape[0]]
        placed = _full(own, tuple(reference.shape), data)
        if placed is None:
            findings.differ(
                "output",
                name,
                detail=f"shape {tuple(own.shape)} of {tuple(reference.shape)}, a layout that does not show",
            )
            continue
        full, layout = placed
        if data is not None and start is None and other.dim() == 0 and own.is_floating_point():
            full = data.all_reduce(full.detach().reshape(1)).reshape(()) / data.size  # a mean over this rank's rows
        _compare_values("output", name, full.detach(), reference.detach(), findings, limit)
        if own.requires_grad and other.requires_grad and not place.is_state:
            pairs.append(_Pair(own, other, start, layout))
    return pairs


def _first_row(own: torch.Tensor, other: torch.Tensor, data: TPGroup | None) -> int | None:
    """Return the first of this rank's rows, if the output has only these."""
    if data is None or own.dim() == 0 or own.dim() != other.dim() or own.shape[0] * data.size != other.shape[0]:
        return None
    return int(own.shape[0]) * data.rank


def _full(
    x: torch.Tensor, shape: tuple[int, ...], data: TPGroup | None, like: torch.Tensor | None = None
) -> tuple[torch.Tensor, tuple[int, int] | None] | None:
    """Return a tensor's global value; for a shard in a plain tensor also its dim and start. None: no layout fits.

    A collective: every rank calls it for the same tensor.
    """
    if isinstance(x, DTensor):
        with without_dispatch_modes():
            full: torch.Tensor = cast(DTensor, x.detach()).full_tensor()
        return (full, None) if tuple(full.shape) == shape else None
    info = sharding_info_of(x if like is None else like)
    if info is not None:
        return full_tensor(x.detach().as_subclass(torch.Tensor), TPGroup(info.mesh), split_of(info)), None
    where = data.rank if data is not None else 0
    metas = _gather((where, tuple(x.shape)))
    if all(meta == shape for _, meta in metas):
        return x.detach(), None
    same = [rank for rank, (other, _) in enumerate(metas) if other == where]
    parts = _gather(x.detach().cpu())
    dims = [
        d for d in range(len(shape)) if any(len(metas[r][1]) != len(shape) or metas[r][1][d] != shape[d] for r in same)
    ]
    if len(dims) != 1 or any(len(metas[r][1]) != len(shape) for r in same):
        return None
    (dim,) = dims
    if sum(metas[rank][1][dim] for rank in same) != shape[dim]:
        return None
    me = same.index(dist.get_rank())
    start = sum(metas[rank][1][dim] for rank in same[:me])
    return torch.cat([parts[rank] for rank in same], dim).to(x.device), (dim, start)


def _compare_values(
    kind: str, name: str, ours: torch.Tensor, wanted: torch.Tensor, findings: Findings, limit: float, floor: float = 0.0
) -> None:
    """Compare two full tensors, and count them; zeros in both are no comparison."""
    error = relative_error(ours, wanted, norm=math.inf, floor=floor, any_dtype=True)
    if error > limit:
        findings.differ(kind, name, error, _ratio(ours, wanted))
    elif wanted.numel() and largest(wanted) <= floor * limit:
        findings.unchecked[name] = "zero in both"
    else:
        findings.compared.add(wanted, gradient=kind == "gradient")


def _ratio(ours: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return a text if one value is a multiple of the other: the usual trace of a wrong divisor or a lost sum."""
    if ours.shape != wanted.shape or not largest(wanted) or not largest(ours):
        return "" if largest(ours) else "it is zero"
    mine, other = as_double(ours).flatten(), as_double(wanted).flatten().to(ours.device)
    factor = float(mine @ other / (other @ other))
    if factor and float((mine - factor * other).norm()) <= 1e-4 * float(mine.norm()):
        return f"it is {factor:.4g} times the original's"
    return ""


# ---------------------------------------------------------------------------------------------- gradients and buffers


def _compare_gradients(names: _Names, findings: Findings, limit: float) -> float:
    """Compare gradients by name, then their norm; return the original's norm."""
    pairs = []
    originals = {id(p): p for _, parts in names.parameters.values() for p in parts}.values()
    squares = sum(float(as_double(p.grad).square().sum()) for p in originals if p.grad is not None)
    for name, (parameter, full) in names.parameters.items():
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in full]
        wanted = parts[0] if len(parts) == 1 else torch.cat(parts)
        has_one = any(p.grad is not None for p in full)
        gradient = parameter.grad
        everyone = _gather(gradient is not None)
        if not any(everyone):
            if largest(wanted):
                findings.differ("gradient", name, detail="there is none")
            else:
                findings.unchecked[name] = "zero in both" if has_one else "no gradient in both"
            continue
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            findings.differ(
                "gradient", name, detail=f"left as a partial sum {gradient.placements}: an optimizer reads it"
            )
        if not all(everyone) and gradient is None:
            gradient = torch.zeros_like(parameter)
        assert gradient is not None
        placed = _full(gradient, tuple(wanted.shape), None, like=parameter)
        if placed is None:
            findings.differ(
                "gradient",
                name,
                detail=f"shape {tuple(gradient.shape)} of {tuple(wanted.shape)}: key_map= names what it consists of",
            )
            continue
        pairs.append((name, placed[0], wanted))
    # True zeros (the bias of keys before a softmax) are rounding in both models: the floor is of all gradients.
    floor = 1e-2 * max((largest(wanted) for _, _, wanted in pairs), default=0.0)
    for name, ours, wanted in pairs:
        _compare_values("gradient", name, ours, wanted, findings, limit, floor)
    norm = math.sqrt(squares)
    ours_norm, fault = capture_errors(lambda: float(grad_norm([p for p, _ in names.parameters.values()])))
    _raise_on_all("the norm of the gradients", fault)
    assert ours_norm is not None
    if abs(ours_norm - norm) > limit * max(norm, ours_norm):
        findings.differ(
            "gradient-norm",
            "all gradients",
            abs(ours_norm - norm) / max(norm, 1e-30),
            f"{ours_norm:.6g}, {norm:.6g} originally: plain tensors that hold shards count as replicas",
        )
    return norm


def _compare_buffers(names: _Names, findings: Findings, limit: float) -> None:
    for name, (buffer, wanted) in names.buffers.items():
        placed = _full(buffer, tuple(wanted.shape), None)
        if placed is None:
            findings.unchecked[name] = "a buffer in another layout"
        else:
            _compare_values("buffer", name, placed[0], wanted.detach(), findings, limit)


# ---------------------------------------------------------------------------------------------- the place of a mistake


def _trace(
    sharded: nn.Module,
    original: nn.Module,
    batches: tuple[Any, Any],
    data: TPGroup | None,
    findings: Findings,
    limit: float,
) -> None:
    """Run both once more, and name the first module with another output."""
    with torch.no_grad():
        theirs, fault = capture_errors(lambda: _outputs_of_modules(original, batches[1]))
        _raise_on_all("the original", fault)
        ours, fault = capture_errors(lambda: _outputs_of_modules(sharded, batches[0]))
        _raise_on_all("the sharded model", fault)
    assert ours is not None
    assert theirs is not None
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
                error = relative_error(full, reference, norm=math.inf, any_dtype=True)
                equal[name] = equal.get(name, True) and error <= limit
    everyone = _gather(equal)
    for name in theirs:
        verdicts = [verdict[name] for verdict in everyone if name in verdict]
        if not verdicts or all(verdicts):
            continue
        # Inside of a block, outputs may be partial sums or heads of a rank: an equal module around it clears them.
        around = [outer for outer in theirs if outer != name and (not outer or name.startswith(f"{outer}."))]
        if any(all(v[outer] for v in everyone if outer in v) and any(outer in v for v in everyone) for outer in around):
            continue
        findings.differ("place", name or type(original).__name__, 0.0)
        return


def _outputs_of_modules(model: nn.Module, batch: Any) -> dict[str, list[torch.Tensor]]:
    """Return the first tensor of each module's outputs, by name, in the order in which modules finish."""
    outputs: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = _clean(name)) -> None:
            first = next((x for _, x in tensors_in(output) if x.is_floating_point()), None)
            if first is not None:
                outputs.setdefault(name, []).append(first.detach().clone())

        handles.append(module.register_forward_hook(keep))
    try:
        _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


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


def _agreed(findings: Findings, norm: float | None) -> ComparedModels:
    """Return the joined counts, or raise the joined differences; the same on every rank."""
    everyone: list[Findings] = _gather(findings)
    place = next((name for other in everyone for kind, name in other.errors if kind == "place"), "")
    worst: dict[tuple[str, str], tuple[float, str, list[int]]] = {}
    for rank, other in enumerate(everyone):
        for key, (error, detail) in other.errors.items():
            before = worst.get(key, (-1.0, "", []))
            ranks = [*before[2], rank]
            worst[key] = (error, detail, ranks) if error > before[0] else (*before[:2], ranks)
    worst = {key: value for key, value in worst.items() if key[0] != "place"}
    if worst:
        problems = []
        for (kind, name), (error, detail, ranks) in sorted(worst.items(), key=lambda item: -item[1][0])[:SHOWN]:
            reason = f"{kind} differs from the original's" + (f" by {error:.2g}" if math.isfinite(error) else "")
            reason += f": {detail}" if detail else ""
            reason += f"; both part first at the output of {place}" if place and kind == "output" else ""
            reason += f" (ranks {', '.join(map(str, ranks))})" if len(ranks) < len(everyone) else ""
            problems.append(Problem("check-mismatch", name, found=reason, hint=HINTS[kind]))
        more = f", the {SHOWN} largest" if len(worst) > SHOWN else ""
        raise CheckError(problems, f"{len(worst)} differences from the original{more}:")
    unchecked = {name: reason for other in everyone for name, reason in other.unchecked.items()}
    if not findings.compared:
        raise CheckError(
            Problem(
                "check-mismatch",
                SUBJECT,
                found="nothing could be compared",
                hint="pass a batch, and models that return tensors",
            )
        )
    return ComparedModels(findings.compared, tuple(f"{name} ({why})" for name, why in unchecked.items()), norm)


def _raise_on_all(what: str, fault: Exception | None) -> None:
    """Raise any rank's error on every rank.

    Raises:
        PlanError: The fault of a rank was a `PlanError` that is no failed check.
        CheckError: Some other error.
    """
    everyone = _gather(_as_problems(what, fault))
    by_rank = {rank: problems for rank, (problems, _) in enumerate(everyone) if problems}
    if not by_rank:
        return
    is_plan = all(plan for problems, plan in everyone if problems)
    problems = list(dict.fromkeys(problem for of_rank in by_rank.values() for problem in of_rank))[:SHOWN]
    ranks = f" (ranks {', '.join(map(str, by_rank))})" if len(by_rank) < dist.get_world_size() else ""
    raise (PlanError if is_plan else CheckError)(problems, f"{what} raised{ranks}:") from fault


def _as_problems(what: str, fault: Exception | None) -> tuple[tuple[Problem, ...], bool]:
    if fault is None:
        return (), True
    if isinstance(fault, PlanError):
        return fault.problems, not isinstance(fault, CheckError)
    lines = str(fault).splitlines() or [""]
    return (
        Problem(
            "check-raises",
            what,
            found=f"{type(fault).__name__}: {lines[0]}",
            hint="call the model alone with this batch first",
        ),
    ), False
