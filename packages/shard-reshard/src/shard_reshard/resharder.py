"""Reshard one tensor: the one-shot function, and the object for repeated use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from shard_spec import Layout

from shard_reshard._torch_compat import PLAIN_TYPES, assume_constant_result, has_tangent, is_transforming
from shard_reshard.agreement import problems_of, raise_together, tell
from shard_reshard.bind import LayoutLike, OnRank, bind
from shard_reshard.bound import BoundLayout
from shard_reshard.compiled import Operator, exchange, misfit, operator_of
from shard_reshard.copying import StaysHere
from shard_reshard.differentiable import differentiable_start, gradient_problems
from shard_reshard.dtypes import ITEMSIZES, dtype_name
from shard_reshard.local_tensors import Shards, as_list, as_result
from shard_reshard.members import Members, members_of
from shard_reshard.mover import Mover, ReshardWork
from shard_reshard.plan import ReshardPlan
from shard_reshard.planner import bind_both, cached_plan
from shard_reshard.problems import PlanError, Problem
from shard_reshard.rows import Topic, exchange_rows
from shard_reshard.state_dict_told import told_problems


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

    Every rank of ``group`` calls it with the same layouts. Backward is an exchange too: a rank whose result does not
    reach its loss adds ``0 * result.sum()`` to it, or the others wait for it.

    Args:
        tensor: This rank's local tensor (a list for several boxes, None where it has none), or a DTensor.
        src: Where the tensor is, see `LayoutLike`. None for a DTensor, which knows.
        dst: Where it is to be.
        shape: Global shape. May be left out where a DTensor or boxes give it.
        group: The union of the ranks of both layouts; None is the default group.
        out: Tensors to fill instead of fresh ones.
        async_op: Return a handle; its ``wait()`` returns the result.
        dtype: The destination's dtype, where it is another than the source's. The same on every rank.
        max_workspace_bytes: See `plan_reshard`.
        check: "first" compares plans between ranks at their first use in a group, "always" at every call.

    Returns:
        The local tensor in the destination layout (a list for several boxes, None for none), or a `ReshardWork`.

    Raises:
        PlanError: On every rank alike, before any data moves.
        RuntimeError: When the collective fails.
    """
    if torch.compiler.is_compiling():
        given = as_list(tensor)
        size = None if shape is None else tuple(shape)
        operator = _operator_for(
            given[0].dtype if given else None, src, dst, size, group, dtype, max_workspace_bytes, check
        )
        return _compiled_move(operator, tensor, out, async_op)
    members = members_of(group)
    try:
        tensor, src, shape = _unwrapped(tensor, src, shape, members)
        tensor, out = as_list(tensor), None if out is None else as_list(out)  # once: they may be iterators
        mover = _mover_for(members, tensor, src, dst, shape, out or [], dtype, max_workspace_bytes, check)
    except Exception as error:
        tell(members, error)
    return _move(mover, tensor, out, async_op)


class Resharder(StaysHere):
    """Reshards tensors by one plan again and again: keeps views, buffers and the check between ranks.

    ``copy.deepcopy`` (of a module that has one) makes another for the same plan and group, with buffers of its own;
    it is not pickled, its ``plan`` is.

    Args:
        plan: From `plan_reshard`.
        group: The union of the ranks of both layouts; None is the default group.
        keep_workspace: Keep the buffers; a second call while a handle is in flight is then refused. Tensors that come
            in the same memory again (and an ``out`` that does) are held on to as well, until a call with other memory.
        check: "first" or "always", see `reshard`.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        group: dist.ProcessGroup | None = None,
        *,
        keep_workspace: bool = True,
        check: str = "first",
    ) -> None:
        self.plan = plan
        self._options = group, keep_workspace, check
        self._mover = Mover((plan,), members_of(group), keep_workspace, check)
        self._operator = operator_of(self._mover)

    _instead = "pickle its plan, and make a Resharder of it where it is read"

    def __deepcopy__(self, memo: dict[int, Any]) -> Resharder:
        group, keep_workspace, check = self._options
        return Resharder(self.plan, group, keep_workspace=keep_workspace, check=check)

    def __copy__(self) -> Resharder:
        return self.__deepcopy__({})

    def __call__(self, tensor: Shards = None, *, out: Shards = None, async_op: bool = False) -> Any:
        """Move ``tensor``; arguments and result as in `reshard`. Under torch.compile ``out`` is copied to."""
        if torch.compiler.is_compiling():
            return _compiled_move(self._operator, tensor, out, async_op)
        return _move(self._mover, tensor, out, async_op)


_BACKWARD = "a reshard is differentiated by torch.autograd's backward; call it outside of this"


def _move(mover: Mover, tensor: Shards, out: Shards, async_op: bool) -> Any:
    """One checked call."""
    if is_transforming():  # not even the row that tells the other ranks can be sent
        found = "a transformation of torch.func"
        raise PlanError(Problem("not-transformable", "tensor", found=found, hint=_BACKWARD))
    if not async_op and type(tensor) in PLAIN_TYPES and (out is None or type(out) in PLAIN_TYPES):
        moved = mover.once_more([cast(torch.Tensor, tensor)], None if out is None else [cast(torch.Tensor, out)])
        if moved is not None:
            return as_result(moved, moved)
    src_shapes, dst_shapes = mover.local_shapes
    given: list[torch.Tensor] = []
    sources, outs, grad = given, None, False
    try:
        given = as_list(tensor)
        outs = None if out is None else as_list(out)
        if has_tangent(given):
            raise PlanError(Problem("not-transformable", "tensor", found="a forward-mode tangent", hint=_BACKWARD))
        # An empty tensor stands for "none": the end of the graph of a rank without source, see `differentiable_start`.
        sources = [] if not src_shapes and len(given) == 1 and given[0].numel() == 0 else given
        problems = mover.problems([sources], None if outs is None else [outs])
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if grad:
            problems += gradient_problems(mover, outs is not None)
    except Exception as error:
        problems = list(problems_of(error))
    mover.agree(problems, mover.device(given, outs or ()), " with gradients" if grad else "")
    if grad:
        results, finish = differentiable_start(mover, given, async_op)
    else:
        results, finish = mover.start(sources, outs, async_op)
    result = as_result(dst_shapes, results)
    if not dst_shapes and grad:
        result = results[0]
    if async_op:
        (plan,) = mover.plans
        return ReshardWork(result, finish, f"a tensor of {plan.shape} by plan {plan.digest[:12]}")
    return result


def _compiled_move(operator: Operator, tensor: Shards, out: Shards, async_op: bool) -> Any:
    """One call while torch.compile traces: an operator with effects, and nothing that the tracer cannot follow."""
    if async_op:
        raise RuntimeError("async_op=True has no meaning under torch.compile: leave it out")
    given = as_list(tensor) or [torch.empty(0, device=operator.device)]
    wrong = "" if out is None else misfit(as_list(out), operator)
    outs = exchange(given, operator.key, False, wrong)
    if out is not None:
        for target, value in zip(as_list(out), outs, strict=False) if not wrong and operator.shapes else ():
            target.copy_(value)
        return out
    if len(operator.shapes) == 1:
        return outs[0]
    return outs if operator.shapes else None


@assume_constant_result
def _operator_for(
    tensor_dtype: torch.dtype | None,
    src: LayoutLike,
    dst: LayoutLike,
    shape: tuple[int, ...] | None,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
    max_workspace_bytes: int | None,
    check: str,
) -> Operator:
    """The operator of a call, worked out while it is compiled.

    Raises:
        PlanError: ``resharder-needed``, on all ranks, where some have no tensor that tells its dtype: while a call is
            traced ranks cannot ask each other.
    """
    members = members_of(group)
    if tensor_dtype is None or src is None or not _everyone_holds(members, src, shape):
        found = "a source that not every rank has" if src is not None else "a DTensor"
        hint = "under torch.compile call a Resharder, whose plan knows layouts and dtype, or redistribute for a DTensor"
        raise PlanError(Problem("resharder-needed", "tensor", found=found, hint=hint))
    plan = cached_plan(
        *bind_both(shape, src, dst, members.to_group),
        dtype_name(tensor_dtype),
        None if dtype is None else dtype_name(dtype),
        max_workspace_bytes,
    )
    return operator_of(Mover((plan,), members, False, check))


# ---- from arguments to movers ---------------------------------------------------------------------------------


def _unwrapped(
    tensor: Any, src: LayoutLike | None, shape: Sequence[int] | None, members: Members
) -> tuple[Shards, Any, Any]:
    """A DTensor as its local tensor, its layout and its shape.

    Raises:
        PlanError: ``layout-differs`` where ``src`` says of a DTensor what it does not say itself.
    """
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local"):
        size = tuple(tensor.shape) if shape is None else shape
        differs = [] if src is None else told_problems("src", tensor, bind(src, size, members.to_group), members)
        if differs:
            raise PlanError(differs)
        src = (tensor.device_mesh, tuple(tensor.placements)) if src is None else src
        shape = tuple(tensor.shape) if shape is None else shape
        tensor = tensor.to_local()
    return tensor, src, shape


def _mover_for(
    members: Members,
    given: list[torch.Tensor],
    src: LayoutLike | None,
    dst: LayoutLike,
    shape: Sequence[int] | None,
    out: list[torch.Tensor],
    dtype: torch.dtype | None,
    max_workspace_bytes: int | None,
    check: str,
) -> Mover:
    if src is None:
        hint = "only a DTensor knows where it is"
        raise PlanError(Problem("layout-needed", "src", found="src=None", hint=hint))
    size = None if shape is None else tuple(shape)
    movers = _movers.setdefault(members.group, {})
    names = _dtypes(members, given, src, size, out, dtype, movers)
    key: tuple[Any, ...] = (_value(src), _value(dst), size, *names, max_workspace_bytes, check)
    mover = None if None in key[:2] else movers.get(key)
    if mover is None:
        plan = cached_plan(*bind_both(size, src, dst, members.to_group), *names, max_workspace_bytes)
        mover = movers.get((plan, check))
        if mover is None:
            mover = movers[(plan, check)] = Mover((plan,), members, False, check)
        if None not in key[:2]:
            movers[key] = mover
        while len(movers) > 8192:
            movers.pop(next(iter(movers)))
    return mover


def _dtypes(
    members: Members,
    given: list[torch.Tensor],
    src: LayoutLike,
    shape: tuple[int, ...] | None,
    out: list[torch.Tensor],
    dtype: torch.dtype | None,
    known: dict[Any, Any],
) -> tuple[str, str | None]:
    """Dtype of the source, and of the destination where it is another."""
    if dtype is not None:
        return dtype_name(given[0].dtype if given else dtype), dtype_name(dtype)
    key = ("everyone holds", _value(src), shape)
    everyone = known.get(key)
    if everyone is None:
        everyone = _everyone_holds(members, src, shape)
        if key[1] is not None:
            known[key] = everyone
    if everyone:
        found = given or out
        return dtype_name(found[0].dtype if found else torch.float32), (dtype_name(out[0].dtype) if out else None)
    # Some rank has nothing to tell the dtype from: those that have tell it.
    names = sorted(ITEMSIZES)
    mine = [names.index(dtype_name(found[0].dtype)) if found else 255 for found in (given, out)]
    rows = exchange_rows(members, Topic.DTYPES, bytes(mine))()
    if rows is None:
        raise_together(members, f"a tensor {'of unknown' if shape is None else f'of {shape} from'} {src}", ())
    told = [[row[at] for row in rows if row[at] != 255] for at in range(2)]
    own = mine[0] if mine[0] != 255 else told[0][0] if told[0] else None
    if own is None:
        hint = "the ranks of the source layout pass their local tensors"
        raise PlanError(Problem("no-source", "tensor", found="no rank has a tensor", hint=hint))
    return names[own], names[told[1][0]] if told[1] else None


def _everyone_holds(members: Members, src: LayoutLike, shape: tuple[int, ...] | None) -> bool:
    """Whether every rank of the group is one of the source layout's."""
    try:
        ranks = bind(src, shape, members.to_group).rank_set
    except PlanError:
        return True  # told later, when both layouts are bound
    return len(ranks) == members.size


_movers: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = WeakKeyDictionary()


def _value(layout: Any) -> Any:
    """The layout as a value that can be remembered; None for what has no hash or holds on to tensors."""
    if isinstance(layout, tuple) and len(layout) == 2:
        return layout[0], tuple(layout[1])
    return layout if isinstance(layout, str | Layout | OnRank | BoundLayout) else None
