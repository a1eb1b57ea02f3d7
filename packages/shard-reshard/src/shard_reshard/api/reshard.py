"""Reshard one tensor: the one-shot function, and the object for repeated use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shard_reshard._shared.consensus import problems_of
from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard._torch_compat import PLAIN_TYPES, has_tangent, is_transforming, outside_of_graphs
from shard_reshard.execution.checks import Match, Shards, as_list, as_result, has_memory, record_guards
from shard_reshard.execution.exchange import Workspace
from shard_reshard.execution.mover import Finish, Mover, NotPicklable, ReshardWork, schedules, shared_mover
from shard_reshard.group import GroupInfo, all_gather_row, data_device, group_info, raise_on_all_ranks
from shard_reshard.layout.parse import LayoutLike, layout_mismatches, layout_value, resolve_layout
from shard_reshard.layout.shard_map import dtype_name, loses_values
from shard_reshard.planning import ReshardPlan, cached_plan, resolve_layouts

_KEYED_TYPES = {*PLAIN_TYPES, type(None)}


@outside_of_graphs
def reshard(
    tensor: Shards,
    src: LayoutLike | None,
    dst: LayoutLike,
    *,
    shape: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    out: Shards = None,
    async_op: bool = False,
    dtype: torch.dtype | None = None,
    max_workspace_bytes: int | None = None,
    check: str = "first",
) -> Any:
    """Move a tensor from one layout to another: one all-to-all, differentiable.

    Every rank of ``group`` calls it with the same layouts. Backward is an exchange too: a rank with a result outside of
    its loss adds ``0 * result.sum()`` to it, or its peers wait for it.

    Args:
        tensor: This rank's local tensor (a list for several boxes, None if it has none), or a DTensor.
        src: Layout of the tensor, see `LayoutLike`. None for a DTensor, which has one.
        dst: Layout of the result.
        shape: Global shape. May be left out if a DTensor or boxes give it.
        group: The union of the ranks of both layouts; None is the default group.
        out: Tensors to fill instead of fresh ones.
        async_op: Return a handle; its ``wait()`` returns the result.
        dtype: The destination's dtype, if it is not the source's. The same on every rank.
        max_workspace_bytes: See `plan_reshard`.
        check: "first" compares plans between ranks at their first use in a group, "always" at every call.

    Returns:
        The local tensor in the destination layout (a list for several boxes, None for none), or a `ReshardWork`.

    Raises:
        PlanError: On every rank alike, before any transfer.
        RuntimeError: If the collective fails.
    """
    world: Any = dist.group.WORLD if group is None else group
    key, mover = None, None
    # Arguments by value; of tensors only the dtype, of a layout that may reference tensors nothing.
    layouts = layout_value(src), layout_value(dst)
    if world is not None and None not in layouts and {type(tensor), type(out)} <= _KEYED_TYPES:
        both: Any = tensor, out
        dtypes = [None if value is None else value.dtype for value in both]
        size = shape if shape is None or not isinstance(shape, Sequence) else tuple(shape)
        key = *layouts, size, *dtypes, dtype, max_workspace_bytes, check
        try:
            mover = schedules.entries["call"].get(world, {}).get(key)
        except TypeError:  # shapes and options are of any type
            key = None
    if mover is None:
        members = group_info(group)
        try:
            dtensor: Any = tensor
            if hasattr(dtensor, "device_mesh") and hasattr(dtensor, "to_local"):  # it has layout and shape
                shape = tuple(dtensor.shape) if shape is None else shape
                if src is None:
                    src = (dtensor.device_mesh, tuple(dtensor.placements))
                elif differs := layout_mismatches(
                    "src", dtensor, resolve_layout(src, shape, members.to_group), members
                ):
                    raise PlanError(differs)
                tensor = dtensor.to_local()
            tensor, out = as_list(tensor), None if out is None else as_list(out)  # once: they may be iterators
        except Exception as error:
            raise_on_all_ranks(members, error)
        options: Any = {"out": out or (), "max_workspace_bytes": max_workspace_bytes, "check": check}
        mover, alone = find_mover(members, tensor, src, dst, shape, dtype=dtype, **options)
        if key is not None and alone:  # else ranks exchange dtypes in every call, all of them
            schedules.put(members.group, "call", key, mover)
    return move(mover, tensor, out, async_op)


class Resharder(NotPicklable):
    """Reshard tensors repeatedly by one plan, with cached views, buffers and checks.

    A second call while a handle is in flight is refused: both would use the kept buffers. Tensors in the same memory as
    before (and such an ``out``) are referenced until a call with other memory.

    ``copy.deepcopy`` (of a module with one) creates another for the same plan and group, with buffers of its own; it
    cannot be pickled, but its ``plan`` can.

    Args:
        plan: From `plan_reshard`.
        group: The union of the ranks of both layouts; None is the default group.
        check: "first" or "always", see `reshard`.
    """

    def __init__(self, plan: ReshardPlan, group: dist.ProcessGroup | None = None, *, check: str = "first") -> None:
        if not isinstance(plan, ReshardPlan):
            hint = "pass plan_reshard(shape, dtype, src, dst)"  # type: ignore[unreachable]  # callers are untyped
            raise refusal("wrong-type", "plan", found=f"{plan!r:.100}", hint=hint)
        self.plan = plan
        self._mover = Mover((plan,), group_info(group), check, Workspace())

    _instead = "pickle its plan, and make a Resharder of it where it is read"

    def __deepcopy__(self, memo: dict[int, Any]) -> Resharder:
        return Resharder(self.plan, self._mover.members.group, check=self._mover.check)

    @outside_of_graphs
    def __call__(self, tensor: Shards = None, *, out: Shards = None, async_op: bool = False) -> Any:
        """Move ``tensor``; arguments and result as in `reshard`."""
        return move(self._mover, tensor, out, async_op)


_BACKWARD = "a reshard is differentiated by torch.autograd's backward; call it outside of this"


def move(mover: Mover, tensor: Shards, out: Shards, async_op: bool) -> Any:
    """Run one call: replayed while guards hold, else checked, compared and prepared."""
    tensors: list[torch.Tensor] = [tensor] if type(tensor) in PLAIN_TYPES else []  # type: ignore[list-item]  # a tensor
    outs: list[torch.Tensor] | None = [out] if type(out) in PLAIN_TYPES else None  # type: ignore[list-item]  # the same
    simple = (tensors or tensor is None) and (outs is not None or out is None)
    match = Match.NONE
    if simple and mover.guards is not None and len(tensors) == len(mover.exchange.program.src_shapes):
        match = mover.guards.match(tensors if outs is None else tensors + outs)
        # In other memory a destination may overlap a source; sources may have lost their memory.
        if match is Match.METADATA and (outs or not all(map(has_memory, tensors))):
            match = Match.NONE
    if match is not Match.NONE:
        results, finish = mover.start(
            tensors, outs, async_op, unchanged=mover.guards if match is Match.MEMORY else None
        )
    elif is_transforming():  # raised locally: not even an error header can be sent
        raise refusal("not-differentiable", "tensor", found="a transformation of torch.func", hint=_BACKWARD)
    else:
        tensors, grad = [], False
        sources, outs = tensors, None
        try:
            tensors = as_list(tensor)
            outs = None if out is None else as_list(out)
            if has_tangent(tensors):
                raise refusal("not-differentiable", "tensor", found="a forward-mode tangent", hint=_BACKWARD)
            # An empty tensor stands for "none": it keeps a rank without source in the graph, `differentiable_start`.
            sources = (
                []
                if not mover.exchange.program.src_shapes and len(tensors) == 1 and tensors[0].numel() == 0
                else tensors
            )
            problems = mover.problems(sources, outs)
            grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            if grad:
                op, hint = mover.plans[0].reduce_op, "detach() the tensor; gradients flow through sums and averages"
                if op in ("min", "max", "product"):
                    problems.append(Problem("not-differentiable", "src", found=f"a reduction by {op}", hint=hint))
            if grad and outs is not None:
                problems.append(
                    Problem(
                        "invalid-out",
                        "out",
                        found="a source that requires grad",
                        hint="leave out= away, or call under torch.no_grad()",
                    )
                )
        except Exception as error:
            problems = list(problems_of(error))  # this rank still joins the comparison below
        first = next((each[0] for each in (tensors, outs) if each), None)
        device = data_device(mover.members.group) if first is None else first.device
        mover.assert_consistent(problems, device, " with gradients" if grad else "")
        if grad:
            results, finish = differentiable_start(mover, tensors, async_op)
        else:
            # Where ranks compare in every call, all of them have to.
            guarded = record_guards(sources if outs is None else sources + outs)
            mover.guards = guarded if (device.type, "") in mover.agreed else None
            results, finish = mover.start(sources, outs, async_op)
    result = results[0] if len(results) == 1 else as_result(mover.exchange.program.dst_shapes, results)
    if not async_op:
        return result
    (plan,) = mover.plans
    return ReshardWork(result, finish, f"a tensor of {plan.shape} by plan {plan.digest[:12]}")


# ---- from arguments to movers ---------------------------------------------------------------------------------


def find_mover(
    members: GroupInfo,
    given: list[torch.Tensor],
    src: LayoutLike | None,
    dst: LayoutLike,
    shape: Sequence[int] | None,
    *,
    dtype: torch.dtype | None,
    out: Sequence[torch.Tensor] = (),
    max_workspace_bytes: int | None = None,
    check: str = "first",
) -> tuple[Mover, bool]:
    """Return the mover of a call, and True if this rank's arguments alone determined it.

    A collective if some rank has no tensor with the dtype, or a problem: all ranks raise it.
    """
    size = None if shape is None else tuple(shape)
    try:
        if src is None:
            raise refusal(
                "missing-argument", "src", found="src=None", hint="pass src: only a DTensor carries its layout"
            )
        try:
            alone = len(resolve_layout(src, size, members.to_group).ranks) == members.size
        except PlanError:
            alone = True  # raised later, with both layouts
        names = [dtype_name(tensors[0].dtype) if tensors else "-" for tensors in (given, out)]
    except Exception as error:
        raise_on_all_ranks(members, error)
    rows: list[list[str]] = []
    if not alone:
        call = [f"a tensor {'' if size is None else f'of {size} '}from {src}"]
        gathered = all_gather_row(members, _DTYPES, " ".join(names).encode(), call)
        rows = [row.decode().rstrip("\0").split(" ") for row in gathered]
    try:
        # Of sources this rank's own dtype counts first, of destinations that of the first rank with an `out`.
        sources = [name for name in (names[0], *(row[0] for row in rows)) if name != "-"]
        outs = [name for name in (*(row[1] for row in rows), names[1]) if name != "-"]
        if rows and not sources:
            raise refusal(
                "missing-source",
                "tensor",
                found="no rank has a tensor",
                hint="the ranks of the source layout pass their local tensors",
            )
        wanted = dtype_name(dtype) if dtype is not None else outs[0] if outs else None
        source = (sources or [wanted or "float32"])[0]
        if dtype is None and wanted is not None and loses_values(source, wanted):
            raise refusal(
                "dtype-mismatch",
                "out",
                found=f"{source} to {wanted}, which loses most values",
                hint=f"pass dtype=torch.{wanted} to cast the numbers as they are",
            )
        layouts = resolve_layouts(size, src, dst, members.to_group)
        mover = shared_mover(members, (cached_plan(*layouts, source, wanted, max_workspace_bytes),), check)
    except Exception as error:
        raise_on_all_ranks(members, error)
    return mover, alone


_DTYPES = 2  # topic of the gathered row of dtypes


# ---- gradients: they move by the transposed plan, and may be differentiated again ------------------------------


def differentiable_start(
    mover: Mover, tensors: list[torch.Tensor], async_op: bool
) -> tuple[list[torch.Tensor], Finish | None]:
    """Like ``mover.start``, for tensors that require grad.

    A rank without source tensors passes one empty tensor, and a rank without destination gets one: they keep the rank
    in the graph, so that it joins the exchange of gradients.
    """
    finishing: list[Finish | None] = []
    outs = _Move.apply(mover, async_op, finishing, *tensors)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return list(outs), finishing[0]


class _Move(torch.autograd.Function):
    """A linear map of all ranks' tensors. Its derivative is the transposed plan, by the same class."""

    @staticmethod
    def forward(ctx: Any, mover: Mover, async_op: bool, finishing: list[Any], *tensors: torch.Tensor) -> Any:
        num_sources = len(mover.exchange.program.src_shapes)
        outs, finish = mover.start(list(tensors[:num_sources]), None, async_op)
        finishing.append(finish)  # apply() returns tensors only
        ctx.mover, ctx.token = mover, (None if num_sources else tensors[0])
        if not outs:
            outs = [tensors[0].new_empty(0)]  # an output that requires grad: backward runs here too
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients, finish = differentiable_start(ctx.mover.transposed, list(grads), False)
        if finish is not None:
            finish()  # gradients are read right after
        if ctx.token is not None:
            gradients = [gradients[0].reshape(ctx.token.shape)]  # empty, but it keeps this rank in the graph
        return None, None, None, *gradients
