"""Reshard a whole state dict: trainer to server, checkpoint to model, in a few fused exchanges."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shard_reshard.agreement import agree, check_mode
from shard_reshard.bind import LayoutLike, bind
from shard_reshard.dtypes import dtype_name, torch_dtype
from shard_reshard.members import Members, members_of, message_device
from shard_reshard.mover import Mover
from shard_reshard.problems import PlanError, Problem
from shard_reshard.state_dict_plan import DstLayouts, Facts, KeyMap, Known, StateDictPlan, given_layout, plan_state_dict

_VERSION = "_shard_reshard_version"
_MAX_PLANS = 16


class Progress(NamedTuple):
    """Told to ``progress`` after each tensor's arrival."""

    name: str
    done: int
    total: int
    done_bytes: int
    total_bytes: int


class MovedStateDict(dict[str, Any]):
    """Name -> tensor on this rank, in the destination layout: a DTensor where the layout was a DeviceMesh's.

    Attributes:
        plan: What was moved how.
        version: The stamp that the senders gave, None without one.
    """

    plan: StateDictPlan
    version: int | None

    def explain(self, name: str | None = None) -> str:
        """What was moved, see `StateDictPlan.explain`."""
        return self.plan.explain(name)


def reshard_state_dict(
    state_dict: Mapping[str, Any] | torch.nn.Module,
    dst_layouts: DstLayouts = None,
    *,
    src_layouts: Mapping[str, LayoutLike] | None = None,
    shapes: Mapping[str, Any] | None = None,
    out: torch.nn.Module | Mapping[str, Any] | None = None,
    key_map: KeyMap | None = None,
    bucket_bytes: int = 64 * 2**20,
    group: dist.ProcessGroup | None = None,
    version: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    atomic: bool = True,
    strict: bool = True,
    check: str = "first",
) -> MovedStateDict:
    """Move all tensors of a state dict to other layouts, ranks, names or dtypes.

    Every rank of ``group`` calls it. A rank that has no part of the source passes an empty mapping.

    Args:
        state_dict: A module, or FQN -> DTensor or local tensor. A local tensor's layout is in ``src_layouts``, or
            else in its ``_sharding_info``. One that has neither has to be whole and equal on every rank that passes
            it, which is checked. DTensors on separate sub-meshes of one make (the tensor-parallel groups of data
            parallelism) are replicas.
        dst_layouts: Layout by destination name, one for all, or a function of name and global shape. Names that it
            leaves out go where the tensor of ``out`` lies (a plain one is whole).
        src_layouts: Layouts of local tensors.
        shapes: Global shapes of local tensors, where their layout does not tell.
        out: A module or mapping whose tensors are filled in place; its dtypes are cast to.
        key_map: Source name -> destination name, `Part` of one, several parts, or None to leave it out.
        bucket_bytes: About how many buffer bytes a rank may use for one exchange.
        group: The union of all ranks; None is the default group.
        version: A number that says which state this is; ranks with sources give the same, receivers read it.
        progress: Called on each rank after each tensor.
        atomic: Fill ``out`` only when everything has arrived: it costs memory for one more copy, and if a sender
            dies ``out`` keeps its old values and version. False fills ``out`` as tensors arrive.
        strict: A tensor of ``out`` that no source fills is a problem; False leaves it as it is.
        check: "first" or "always", see `reshard`.

    Returns:
        The tensors of this rank by destination name, with ``.plan`` and ``.version``.

    Raises:
        PlanError: With the problems of all tensors of all ranks, on every rank, before any data moves.
        RuntimeError: When an exchange fails because a rank died.
    """
    resharder = StateDictResharder(
        state_dict,
        dst_layouts,
        src_layouts=src_layouts,
        shapes=shapes,
        out=out,
        key_map=key_map,
        bucket_bytes=bucket_bytes,
        group=group,
        version=version,
        strict=strict,
        check=check,
        keep_workspace=False,
    )
    return resharder._run(state_dict, out, progress, atomic, resharder._first_version)


class StateDictResharder:
    """Moves the tensors of state dicts that are alike again and again: what ranks agree on, they agree on once.

    Args and errors as in `reshard_state_dict`; ``keep_workspace`` keeps buffers and views between calls. The
    constructor communicates, and so does every call; every rank of the group makes them in the same order.

    Attributes:
        plan: What is moved how.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        dst_layouts: DstLayouts = None,
        *,
        src_layouts: Mapping[str, LayoutLike] | None = None,
        shapes: Mapping[str, Any] | None = None,
        out: torch.nn.Module | Mapping[str, Any] | None = None,
        key_map: KeyMap | None = None,
        bucket_bytes: int = 64 * 2**20,
        group: dist.ProcessGroup | None = None,
        version: int | None = None,
        strict: bool = True,
        check: str = "first",
        keep_workspace: bool = True,
    ) -> None:
        self._members = members_of(group)
        self._dst_layouts = dst_layouts
        tensors, targets = _tensors_of(state_dict), _tensors_of(out)
        facts = _facts(tensors, targets, src_layouts or {}, shapes or {}, self._members)
        self.plan, self._first_version = _agreed_plan(
            self._members, facts, tensors, dst_layouts, key_map, bucket_bytes, version, strict
        )
        self._check = check_mode(check)
        self._movers = [_mover(self._members, self.plan, bucket, check, keep_workspace) for bucket in self.plan.buckets]

    def __call__(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        *,
        out: torch.nn.Module | Mapping[str, Any] | None = None,
        version: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        atomic: bool = True,
    ) -> MovedStateDict:
        """Move tensors of the names, shapes, dtypes and layouts that the resharder was made for."""
        stamp = _agreed_version(_gather_rows(self._members, _version_row(version)))
        return self._run(state_dict, out, progress, atomic, stamp)

    def _run(
        self,
        state_dict: Mapping[str, Any] | torch.nn.Module,
        out: torch.nn.Module | Mapping[str, Any] | None,
        progress: Callable[[Progress], None] | None,
        atomic: bool,
        stamp: int | None,
    ) -> MovedStateDict:
        plan, members = self.plan, self._members
        tensors, targets = _tensors_of(state_dict), _tensors_of(out)
        device = _device(tensors, targets, members)
        if out is not None and not atomic:
            _stamp(out, None)  # neither the old state nor the new one, until everything has arrived
        with torch.no_grad():
            sources = {name: _local(value) for name, value in tensors.items()}
            arriving = _Arriving(plan, members.rank, None if atomic else targets, device)
            _move_buckets(plan, members, self._movers, sources, arriving, progress, self._check)
            result = _deliver(plan, arriving, targets, self._dst_layouts)
        result.plan, result.version = plan, stamp
        if out is not None and stamp is not None:
            _stamp(out, stamp)
        return result


def state_version(out: torch.nn.Module | Mapping[str, Any]) -> int | None:
    """The version of the state that `reshard_state_dict` last brought into ``out`` completely; None without one."""
    found = out.get(_VERSION) if isinstance(out, Mapping) else getattr(out, _VERSION, None)
    return None if found is None else int(found)


def _stamp(out: torch.nn.Module | Mapping[str, Any], version: int | None) -> None:
    if isinstance(out, torch.nn.Module):
        setattr(out, _VERSION, version)
    elif isinstance(out, dict):
        out[_VERSION] = version


# ---- what this rank knows -------------------------------------------------------------------------------------


def _tensors_of(given: torch.nn.Module | Mapping[str, Any] | None) -> dict[str, Any]:
    """The tensors of a module or mapping; parameters of a module keep their ``_sharding_info``."""
    if given is None:
        return {}
    if isinstance(given, torch.nn.Module):
        everything: dict[str, Any] = dict(given.named_buffers(remove_duplicate=False))
        everything.update(given.named_parameters(remove_duplicate=False))
        kept = given.state_dict(keep_vars=True)
        return {name: value for name, value in everything.items() if name in kept}
    return {name: value for name, value in given.items() if name != _VERSION}


def _facts(
    state_dict: Mapping[str, Any],
    outs: Mapping[str, Any],
    src_layouts: Mapping[str, LayoutLike],
    shapes: Mapping[str, Any],
    members: Members,
) -> Facts:
    problems: list[Problem] = []
    for name in src_layouts:
        if name not in state_dict and state_dict:
            hint = "src_layouts names tensors of state_dict"
            problems.append(Problem("unknown-key", "src_layouts", found=repr(name), hint=hint))
    sources: dict[str, Known] = {}
    for name, value in state_dict.items():
        try:
            sources[name] = _known(name, value, src_layouts.get(name), shapes.get(name), members)
        except PlanError as error:
            problems += [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    known_outs: dict[str, Known] = {}
    for name, value in outs.items():
        if not isinstance(value, torch.Tensor):
            continue
        try:
            known_outs[name] = _known(name, value, None, None, members)
        except PlanError as error:
            problems += [Problem(p.code, p.name or name, p.dim, p.axis, p.found, p.hint) for p in error.problems]
    return Facts(_with_ties(sources, state_dict), _with_ties(known_outs, outs), tuple(problems))


def _known(name: str, value: Any, layout: LayoutLike | None, shape: Any, members: Members) -> Known:
    if not isinstance(value, torch.Tensor):
        found = f"a {type(value).__qualname__}"
        raise PlanError(Problem("not-a-tensor", name, found=found, hint="leave it out of the state dict"))
    if layout is None:
        layout, shape = own_layout(name, value)
    if layout is None:
        return Known(tuple(value.shape), dtype_name(value.dtype), "", name)
    bound = bind(layout, shape, members.to_group)
    return Known(bound.shape, dtype_name(value.dtype), json.dumps(bound.to_json()), name)


def own_layout(name: str, value: Any) -> tuple[LayoutLike | None, tuple[int, ...]]:
    """Layout and global shape that a tensor tells of itself: a DTensor, or a shard with ``_sharding_info``."""
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        return (value.device_mesh, tuple(value.placements)), tuple(value.shape)
    info = getattr(value, "_sharding_info", None)
    if info is None:
        return None, tuple(value.shape)
    mesh, placements, shape = info[0], tuple(info[1]), tuple(info[2])
    if len(info) > 4 and info[4]:
        placements = _with_sections(name, placements, tuple(info[4]))
    return (mesh, placements), shape


def _with_sections(name: str, placements: tuple[Any, ...], sections: tuple[int, ...]) -> tuple[Any, ...]:
    from shard_spec import InterleavedShard, Shard

    sharded = [at for at, placement in enumerate(placements) if isinstance(placement, Shard)]
    if len(sharded) != 1:
        found = f"sections {sections} with placements {placements}"
        hint = "give its layout in src_layouts: sections are cut by one axis"
        raise PlanError(Problem("ambiguous-sections", name, found=found, hint=hint))
    return tuple(
        InterleavedShard(placement.dim, sections) if at in sharded else placement
        for at, placement in enumerate(placements)
    )


def _with_ties(known: dict[str, Known], tensors: Mapping[str, Any]) -> dict[str, Known]:
    """Marks tensors that are one memory."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, Known] = {}
    for name in sorted(known):
        local = _local(tensors[name])
        if local.numel():
            key = (local.data_ptr(), local.device, local.stride(), *known[name][:3])
            tied[name] = known[name]._replace(tied_to=first.setdefault(key, name))
        else:
            tied[name] = known[name]._replace(tied_to="")  # says nothing either way, resolved below
    return {name: entry if entry.tied_to else entry._replace(tied_to=name) for name, entry in tied.items()}


def _local(value: Any) -> torch.Tensor:
    local = value.to_local() if hasattr(value, "to_local") else value
    assert isinstance(local, torch.Tensor)
    return local.detach() if local.requires_grad else local


def _device(state_dict: Mapping[str, Any], outs: Mapping[str, Any], members: Members) -> torch.device:
    for value in (*state_dict.values(), *outs.values()):
        return _local(value).device
    from shard_reshard.members import data_device

    return data_device(members.group)


# ---- what all ranks agree on ----------------------------------------------------------------------------------

_plans: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[bytes, ...], StateDictPlan]] = WeakKeyDictionary()


def _agreed_plan(
    members: Members,
    facts: Facts,
    tensors: Mapping[str, Any],
    dst_layouts: DstLayouts,
    key_map: KeyMap | None,
    bucket_bytes: int,
    version: int | None,
    strict: bool,
) -> tuple[StateDictPlan, int | None]:
    """The plan for what all ranks know. Facts travel only when a rank's have changed; a digest of them always."""
    asked = repr(sorted((key_map or {}).items())) + repr((bucket_bytes, strict)) + _layouts_text(dst_layouts)
    digest = hashlib.sha256(pickle.dumps((facts, asked), protocol=4)).digest()
    rows = _gather_rows(members, digest + _version_row(version))
    stamp = _agreed_version([row[32:] for row in rows])
    key = tuple(row[:32] for row in rows)
    plans = _plans.setdefault(members.group, {})
    plan = plans.get(key)
    if plan is None:
        everyone: list[Any] = [None] * members.size
        dist.all_gather_object(everyone, facts, group=members.group)
        problems = _plain_problems(members, facts, tensors)
        try:
            plan = plan_state_dict(everyone, dst_layouts, key_map, bucket_bytes, members.to_group, strict)
        except PlanError as error:
            problems += error.problems
        agree(members, plan.digest if plan is not None else "", problems, "always")
        assert plan is not None
        plans[key] = plan
        while len(plans) > _MAX_PLANS:
            plans.pop(next(iter(plans)))
    return plan, stamp


def _version_row(version: int | None) -> bytes:
    return struct.pack("<?q", version is not None, version or 0)


def _agreed_version(rows: list[bytes]) -> int | None:
    """The version that those who give one give; on all ranks the same."""
    stamps = sorted({number for given, number in (struct.unpack("<?q", row) for row in rows) if given})
    if len(stamps) > 1:
        hint = "every rank that sends gives the same version"
        raise PlanError(Problem("ranks-disagree", "version", found=f"versions {stamps}", hint=hint))
    return stamps[0] if stamps else None


def _plain_problems(members: Members, facts: Facts, tensors: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Plain tensors that ranks pass under one name have to be one value: else they are shards, and would get lost."""
    plain = [name for name, known in facts.sources.items() if known.layout == ""]
    sums = {name: _checksum(tensors[name]) for name in plain}
    everyone: list[Any] = [None] * members.size
    dist.all_gather_object(everyone, sums, group=members.group)
    problems = []
    for name in sorted({name for found in everyone for name in found}):
        values = [found[name] for found in everyone if name in found]
        if len(set(values)) > 1:
            found = "plain tensors that differ between ranks"
            hint = "if they are shards, say so in src_layouts (and shapes)"
            problems.append(Problem("layout-needed", name, found=found, hint=hint))
    return tuple(problems)


def _checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bytes, one of them weighted by position: equal tensors have equal ones."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, data.numel() + 1, device=data.device).remainder_(65521)
    return int(data.sum()), int((data * weights).sum())


def _layouts_text(dst_layouts: DstLayouts) -> str:
    if isinstance(dst_layouts, Mapping):
        return repr(sorted((name, repr(layout)) for name, layout in dst_layouts.items()))
    # A function is asked again when it is another object; one that changes its mind has to be another object.
    return f"function {id(dst_layouts)}" if callable(dst_layouts) else repr(dst_layouts)


def _gather_rows(members: Members, row: bytes) -> list[bytes]:
    mine = torch.tensor(list(row), dtype=torch.uint8, device=message_device(members.group))
    everyone = [torch.empty_like(mine) for _ in range(members.size)]
    dist.all_gather(everyone, mine, group=members.group)
    return [bytes(row.tolist()) for row in everyone]


# ---- moving ---------------------------------------------------------------------------------------------------


class _Arriving:
    """The destination tensors of this rank: those of ``outs`` where they are filled directly, else fresh ones."""

    def __init__(self, plan: StateDictPlan, rank: int, outs: Mapping[str, Any] | None, device: torch.device) -> None:
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.fresh = not outs
        for name, (layout, dtype) in plan.targets.items():
            if name in plan.aliases:
                continue
            shapes = layout.local_shapes(rank)
            if outs and name in outs and len(shapes) == 1:
                self.tensors[name] = [_local(outs[name])]
            else:
                self.tensors[name] = [torch.empty(s, dtype=torch_dtype(dtype), device=device) for s in shapes]


def _move_buckets(
    plan: StateDictPlan,
    members: Members,
    movers: list[Mover],
    sources: Mapping[str, torch.Tensor],
    arriving: _Arriving,
    progress: Callable[[Progress], None] | None,
    check: str,
) -> None:
    calls: list[tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]] = []
    problems: list[Problem] = []
    for mover, bucket in zip(movers, plan.buckets, strict=True):
        moves = [plan.moves[at] for at in bucket]
        given = [
            [sources[m.source]] if m.source in sources and m.plan.src.local_shapes(members.rank) else [] for m in moves
        ]
        outs = [arriving.tensors[m.target] for m in moves]
        calls.append((given, outs))
        wrong = mover.problems(given, None if arriving.fresh else outs)
        named = _named_problems(mover, given, outs, [m.source for m in moves]) if wrong else ()
        for problem, name in named:
            problems.append(Problem(problem.code, f"{name}: {problem.name}", found=problem.found, hint=problem.hint))
    agree(members, f"tensors of state dict plan {plan.digest}", problems, check)
    done_bytes = done = 0
    total_bytes = 0 if progress is None else sum(_size(move.plan) for move in plan.moves)
    for mover, bucket, (given, outs) in zip(movers, plan.buckets, calls, strict=True):
        flat_given, flat_outs = [t for ts in given for t in ts], [t for ts in outs for t in ts]
        mover.start(flat_given, flat_outs, async_op=False)
        for at in bucket if progress is not None else ():
            done += 1
            done_bytes += _size(plan.moves[at].plan)
            if progress is not None:
                progress(Progress(plan.moves[at].source, done, len(plan.moves), done_bytes, total_bytes))


def _named_problems(
    mover: Mover, given: list[list[torch.Tensor]], outs: list[list[torch.Tensor]], names: list[str]
) -> Iterator[tuple[Problem, str]]:
    """The problems of a bucket's tensors, each with its tensor's name."""
    from shard_reshard.local_tensors import local_problems

    rank = mover.members.rank
    for plan, sources, targets, name in zip(mover.plans, given, outs, names, strict=True):
        for problem in (*local_problems(plan, rank, sources), *local_problems(plan, rank, targets, "dst")):
            yield problem, name


def _size(plan: Any) -> int:
    size = plan.itemsize
    for length in plan.shape:
        size *= length
    return int(size)


_movers: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Mover]] = WeakKeyDictionary()


def _mover(members: Members, plan: StateDictPlan, bucket: tuple[int, ...], check: str, keep: bool) -> Mover:
    key = (tuple(plan.moves[at].plan for at in bucket), check, keep)
    movers = _movers.setdefault(members.group, {})
    if key not in movers:
        movers[key] = Mover(key[0], members, keep_workspace=keep, check=check)
        while len(movers) > 1024:
            movers.pop(next(iter(movers)))
    return movers[key]


def _deliver(
    plan: StateDictPlan, arriving: _Arriving, outs: Mapping[str, Any], dst_layouts: DstLayouts
) -> MovedStateDict:
    """The answer of this rank; fills ``outs`` where tensors arrived beside them."""
    result = MovedStateDict()
    for name, (layout, _) in sorted(plan.targets.items()):
        tensors = arriving.tensors[plan.aliases.get(name, name)]
        if not tensors:
            continue
        if name in outs:
            target = _local(outs[name])
            if target.data_ptr() != tensors[0].data_ptr() or target.shape != tensors[0].shape:
                target.copy_(tensors[0])
            result[name] = outs[name]
        else:
            result[name] = _as_asked(tensors, given_layout(name, layout.shape, dst_layouts), layout.shape)
    return result


def _as_asked(tensors: list[torch.Tensor], layout: LayoutLike, shape: tuple[int, ...]) -> Any:
    """A DTensor where a DeviceMesh was given, else the local tensor or tensors."""
    if isinstance(layout, tuple) and len(layout) == 2:
        from torch.distributed.tensor import Placement

        if all(isinstance(placement, Placement) for placement in layout[1]):
            from shard_reshard.dtensors import as_dtensor

            return as_dtensor(tensors[0], layout[0], tuple(layout[1]), shape)
    return tensors[0] if len(tensors) == 1 else tensors
