"""Metadata of a rank's tensors, and the consensus of ranks on plan and values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from shard_spec.specs import EnumerableShardingSpec, from_torch

from shard_reshard._shared.consensus import problems_of, tensor_hash
from shard_reshard._shared.problems import PlanError, Problem, raise_problems, refusal
from shard_reshard._torch_compat import (
    PLAIN_TYPES,
    dtensor_local,
    flattened,
    is_fake,
    local_of_sharded,
    mesh_groups,
    plain_locals,
    real_tensors,
    storage_key,
    waited_for,
)
from shard_reshard.execution.checks import memory_of
from shard_reshard.execution.mover import schedules
from shard_reshard.group import GroupInfo, all_gather_row, assert_consistent, check_mode, data_device
from shard_reshard.layout.parse import LayoutLike, layout_mismatches, own_layout, resolve_layout
from shard_reshard.layout.shard_map import ShardMap, dtype_name
from shard_reshard.plan import group_problems
from shard_reshard.state_dict.pairs import Pair, axes_by_dims, scale_layout
from shard_reshard.state_dict.plan import DstLayouts, KeyRule, RankMeta, StateDictPlan, TensorMeta, plan_state_dict

P = TypeVar("P")


def tensors_of(given: torch.nn.Module | Mapping[str, Any] | None, *, out: bool = False) -> dict[str, Any]:
    """Return the tensors of a module or mapping; parameters of a module keep their ``_sharding_info``.

    Of a module these are all entries of its ``state_dict``, under the names there: activation checkpointing takes its
    own prefix off the names in a state dict, and quantised layers add scales that are no buffers. In an ``out``, an
    entry that ``state_dict`` makes anew gives way to the module's tensor of its name if both are the same memory, such
    as the leaf of a bridged module; any other, such as a scale or a transposed weight, is refused.
    """
    if given is None:
        return {}
    if isinstance(given, torch.nn.Module):
        # The state dict comes first: FSDP2 shards a module again there that a forward has gathered.
        tensors = dict(given.state_dict(keep_vars=True))
        if not out:
            return tensors
        own: dict[str, Any] = dict(given.named_buffers(remove_duplicate=False))
        own.update(given.named_parameters(remove_duplicate=False))
        own_ids = set(map(id, own.values()))  # under activation checkpointing their names are others
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor) or id(value) in own_ids:
                continue
            if name not in own or memory_of(local_tensor(value)) != memory_of(local_tensor(own[name])):
                raise refusal(
                    "invalid-out",
                    name,
                    found="a tensor that the module's state_dict() makes: what is written to it is lost",
                    hint="pass a mapping of the module's own tensors, and load_state_dict() the rest of the result",
                )
            tensors[name] = own[name]
        return tensors
    unusual = [kind for kind in set(map(type, given.values())) - PLAIN_TYPES if not hasattr(kind, "device_mesh")]
    return unusual_tensors(given) if unusual else dict(given)  # most are plain tensors and DTensors


class NestedTensors(dict[str, Any]):
    """Tensors of a nested state dict by DCP's names.

    Attributes:
        beside: What is no tensor in it, by name.
        paths: Keys of each name, from the outermost mapping on.
    """

    beside: Mapping[str, Any]
    paths: Mapping[str, tuple[Any, ...]]


def unusual_tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a nested mapping, as an optimizer's, and the local shards of ShardedTensors.

    In a flat mapping what is no tensor is refused later.
    """
    if not any(isinstance(value, Mapping) for value in given.values()):
        return {name: plain_shard(name, value) for name, value in given.items()}
    leaves, paths = flattened(given)
    tensors = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor)}
    nested = NestedTensors({name: plain_shard(name, value) for name, value in tensors.items()})
    nested.beside = {name: value for name, value in leaves.items() if name not in tensors}
    nested.paths = paths
    return nested


def plain_shard(name: str, value: Any) -> Any:
    """Return the local shard of torch's ShardedTensor, as a tensor that declares its layout; other values pass."""
    if (sharded := local_of_sharded(value)) is None:
        return value
    tensors, metadata = sharded
    if len(tensors) > 1:
        raise refusal(
            "unsupported-tensor",
            name,
            found=f"a ShardedTensor of {len(tensors)} shards on this rank",
            hint="use reshard_sharded_tensor for it",
        )
    local = tensors[0].detach() if tensors else torch.empty(0, dtype=metadata.tensor_properties.dtype)
    spec = EnumerableShardingSpec([from_torch(shard) for shard in metadata.shards_metadata])
    local._sharding_info = spec  # type: ignore[attr-defined]  # on this view alone
    return local


def collect_metadata(
    state_dict: Mapping[str, Any],
    outs: Mapping[str, Any],
    src_layouts: Mapping[str, LayoutLike],
    shapes: Mapping[str, Any],
    members: GroupInfo,
    pairs: Sequence[Pair] = (),
) -> RankMeta:
    """Collect the metadata of source and destination tensors, and their problems.

    A scale of ``pairs`` without a layout in ``src_layouts`` has the one that follows from its weight's.
    """
    tensors: list[Any] = [*state_dict, *outs]
    strange = [name for name in tensors if not isinstance(name, str)]
    if strange:
        raise refusal("invalid-argument", "state_dict", found=repr(strange[0]), hint="names of tensors are text")
    if not hasattr(src_layouts, "items"):
        raise refusal(
            "invalid-argument",
            "src_layouts",
            found=repr(src_layouts),
            hint="give a layout for each name: src_layouts=dict.fromkeys(names, layout)",
        )
    problems: list[Problem] = []
    if pairs:
        src_layouts = {**src_layouts, **_scale_layouts(state_dict, src_layouts, shapes, members, pairs, problems)}
    sources: dict[str, TensorMeta] = {}
    known_outs: dict[str, TensorMeta] = {}
    alike: dict[ShardMap | None, ShardMap | None] = {}  # equal layouts as one object, pickled once
    others = {name: value for name, value in outs.items() if isinstance(value, torch.Tensor)}
    for table, tensors_here in ((sources, state_dict), (known_outs, others)):
        for name, value in tensors_here.items():
            wanted, shape = (src_layouts.get(name), shapes.get(name)) if table is sources else (None, None)
            try:
                if not isinstance(value, torch.Tensor):
                    raise refusal(
                        "wrong-type",
                        name,
                        found=f"a {type(value).__qualname__}",
                        hint="leave it out of the state dict: pass a mapping of the tensors alone",
                    )
                if value.is_nested or value.layout is not torch.strided:
                    reason = "a nested tensor" if value.is_nested else f"a {value.layout} tensor"
                    raise refusal("unsupported-tensor", name, found=reason, hint="only dense tensors can be moved")
                if wanted is None:  # declared by the tensor, or plain: None for a full tensor
                    layout = own_layout(name, value, members.to_group)
                    full = tuple(value.shape) if layout is None else layout.shape
                    if shape is not None and tuple(shape) != full:
                        raise refusal(
                            "shape-mismatch",
                            name,
                            found=f"shapes={tuple(shape)}, the tensor is of {full}",
                            hint="say how it is sharded in src_layouts",
                        )
                else:
                    layout = resolve_layout(wanted, shape, members.to_group)
                    full = layout.shape
                    raise_problems(layout_mismatches(name, value, layout, members))
                layout = alike.setdefault(layout, layout)
                table[name] = TensorMeta(full, dtype_name(value.dtype), layout, name, value.is_meta)
            except Exception as error:
                problems += [p.named(name) for p in problems_of(error)]
    elsewhere = tuple(name for name in src_layouts if name not in state_dict)
    beside = (state_dict.beside, state_dict.paths) if isinstance(state_dict, NestedTensors) else ()
    return RankMeta(_tied(sources, state_dict), _tied(known_outs, outs), tuple(problems), elsewhere, *beside)


def _scale_layouts(
    state_dict: Mapping[str, Any],
    src_layouts: Mapping[str, LayoutLike],
    shapes: Mapping[str, Any],
    members: GroupInfo,
    pairs: Sequence[Pair],
    problems: list[Problem],
) -> dict[str, ShardMap]:
    """Return layouts of local scales by the layouts of their weights in ``src_layouts``."""
    layouts: dict[str, ShardMap] = {}
    for name in src_layouts:
        for pair in pairs:
            scale = pair.scale_of(name)
            value = None if scale is None or scale in src_layouts else state_dict.get(scale)
            if scale is None or not isinstance(value, torch.Tensor) or hasattr(value, "device_mesh"):
                continue
            try:
                layout = resolve_layout(src_layouts[name], shapes.get(name), members.to_group)
                block = pair.block_of(layout.shape)
                axes = axes_by_dims(scale, layout.shape, block, value.ndim)
                layouts[scale] = scale_layout(name, layout, block, axes)
            except PlanError as error:
                problems += [p.named(name) for p in error.problems]
    return layouts


def _tied(known: dict[str, TensorMeta], tensors: Mapping[str, Any]) -> dict[str, TensorMeta]:
    """Mark tensors that are one memory and one shard."""
    first: dict[object, str] = {}
    tied_to: dict[str, str] = {}
    for name in sorted(known):
        local = local_tensor(tensors[name])
        if local.numel() and not is_fake((local,)):
            # On meta every tensor has address 0.
            place = (storage_key(local), local.storage_offset()) if local.is_meta else ()
            tied_to[name] = first.setdefault((place, *memory_of(local), *known[name][:3]), name)
    return {name: meta._replace(tied_to=tied_to.get(name, name)) for name, meta in known.items()}


def local_tensor(value: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, else the tensor itself; detached."""
    local = dtensor_local(value)
    if local is None:
        local = value if type(value) in PLAIN_TYPES or not hasattr(value, "to_local") else value.to_local()
    if not isinstance(local, torch.Tensor):
        raise refusal("wrong-type", found=f"a {type(value).__qualname__}", hint="leave it out of the state dict")
    if type(local) not in PLAIN_TYPES:
        if getattr(local, "_sharding_info", None) is not None:
            local = local.as_subclass(torch.Tensor)  # such a class may report the global shape
        local = waited_for(local)
    return local.detach() if local.requires_grad else local


def local_tensors(outs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the local tensors of all tensors; other values of a mapping are left out."""
    locals_ = plain_locals(list(outs.values()), detach=True)  # fast path of most state dicts
    if locals_ is not None:
        return dict(zip(outs, locals_, strict=True))
    return {name: local_tensor(value) for name, value in outs.items() if isinstance(value, torch.Tensor)}


def device_of(state_dict: Mapping[str, Any], outs: Mapping[str, Any], members: GroupInfo) -> torch.device:
    """Return the device of the tensors; the group's if none has memory."""
    for value in (*state_dict.values(), *outs.values()):
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return local_tensor(value).device
    return data_device(members.group)


def declared_mismatches(
    tensors: Mapping[str, Any], wanted: Callable[[str], ShardMap | None], members: GroupInfo
) -> list[Problem]:
    """Report tensors that declare another layout than the planned one, even of equal local shape."""
    problems: list[Problem] = []
    for name, value in tensors.items():
        if hasattr(value, "device_mesh") or getattr(value, "_sharding_info", None) is not None:
            layout = wanted(name)
            problems += [] if layout is None else layout_mismatches(name, value, layout, members)
    return problems


# ---- consensus -------------------------------------------------------------------------------------------------


# Numbers of calls among the rows that ranks gather: ranks in different calls raise.
ONE_SHOT, KEPT_CALL, NEW_RESHARDER = 3, 4, 5


class Question(NamedTuple):
    """Arguments of a call beside its tensors, equal on every rank."""

    dst_layouts: DstLayouts
    key_map: KeyRule | None
    bucket_bytes: int
    strict: bool
    check: str
    changed_only: bool = False
    serial: int = 0  # of a question that is not to equal another one, though its text does
    casts: str = "exact"
    pairs: tuple[Pair, ...] = ()

    def digest(self, facts: RankMeta) -> bytes:
        """Return a digest of it and a rank's metadata. The serial number stands for layouts that are a function."""
        check_mode(self.check)
        texts, layouts = [], self.dst_layouts
        if not isinstance(layouts, Mapping):
            layouts = {"": "a function" if callable(layouts) else layouts}
        for name, layout in layouts.items():
            if hasattr(layout, "device_mesh") and hasattr(layout, "placements"):
                layout = layout.device_mesh, tuple(layout.placements)
            text = repr(layout)
            if isinstance(layout, tuple) and len(layout) == 2 and hasattr(layout[0], "mesh"):
                with real_tensors():  # ranks and groups, which the repr of a mesh lacks
                    text += f" of ranks {layout[0].mesh.tolist()} in {mesh_groups(layout[0])}"
            texts.append((name, text))
        options = (self.bucket_bytes, self.strict, self.check, self.changed_only, self.serial, self.casts, self.pairs)
        keys = "a function" if callable(self.key_map) else sorted((self.key_map or {}).items())
        return hashlib.sha256(repr((facts, keys, options, sorted(texts))).encode()).digest()[:24]


class Row(NamedTuple):
    """Message of a rank in every call, of parts with fixed lengths: digests, and the token of the previous call."""

    facts: bytes  # 24 bytes: the arguments of the call and this rank's metadata
    values: bytes  # 8 bytes: the values of plain tensors; zeros for none
    plan: bytes  # 8 bytes: the plan that this rank has prepared; zeros for none
    token: bytes  # the rest


@dataclass(eq=False)
class PlanConsensus:
    """The plan of all ranks for this rank's metadata, compared with theirs in every call.

    Attributes:
        members: The group.
        question: The arguments of all calls.
        facts: Metadata of this rank's tensors.
        digest: The question's digest for it.
        plan: The plan of the last call.
    """

    members: GroupInfo
    question: Question
    facts: RankMeta
    digest: bytes
    plan: StateDictPlan | None = None
    _key: tuple[bytes, ...] = ()  # digests of all ranks, for which `plan` was made

    def agree(
        self, tensors: Mapping[str, Any], call: int, problems: Sequence[Problem] = (), token: bytes = b""
    ) -> tuple[StateDictPlan, bool, tuple[bytes, ...]]:
        """Return the plan of all ranks, True if all have prepared their tensors for it, and their tokens; a collective.

        Metadata travels only when a rank's changed: else 64 bytes of each rank do, with ``token`` among them. Plain
        ``tensors`` have to be equal on all ranks that have them. Problems of a rank are raised on all.
        """
        members, question, facts, digest, prepared = self.members, self.question, self.facts, self.digest, self.plan
        problems, sums = list(problems), dict[str, bytes]()
        try:
            sums = {} if problems or is_fake(()) else plain_checksums(facts, tensors)
        except Exception as error:  # whatever keeps this rank from comparing keeps all from going on
            problems += problems_of(error)
        if problems:  # as facts that no other call has: all ranks see them
            facts, prepared = replace(facts, problems=(*facts.problems, *problems)), None
            digest = question.digest(facts)
        values = hashlib.sha256(repr(list(sums.items())).encode()).digest()[:8] if sums else bytes(8)
        own = Row(digest, values, bytes(8) if prepared is None else _short(prepared), token)
        rows = [own] * members.size  # fake tensors have no other ranks
        if not is_fake(()):
            lines = [f"call {call} for a state dict of {sorted(facts.sources)}"]
            gathered = all_gather_row(members, call, b"".join(own), lines)
            rows = [Row(row[:24], row[24:32], row[32:40], row[40:]) for row in gathered]
        key, tokens = tuple(row.facts for row in rows), tuple(row.token for row in rows)
        # With the layouts that the plan was made for: what has an identity alone must not be freed before the plan.
        plan, _ = schedules.of(members.group, "state dict plan").get(key, (None, None))
        if prepared is not None and self._key == key:
            plan = prepared
        everyone: list[Any] = [None] * members.size
        is_prepared = plan is not None and {row.plan for row in rows} == {_short(plan)}
        if plan is None:
            plan = plan_of_all(members, "a state dict", (facts, sums), self._make)
            if not question.serial:
                layouts = question.dst_layouts
                held = plan, dict(layouts) if isinstance(layouts, Mapping) else layouts
                schedules.put(members.group, "state dict plan", key, held)
        elif len({row.values for row in rows if any(row.values)}) > 1:  # other values, or other names
            dist.all_gather_object(everyone, sums, group=members.group)
            raise_problems(differing(everyone, *PLAIN))
        self.plan, self._key = plan, key
        return plan, is_prepared, tokens

    def _make(self, everyone: list[Any], problems: list[Problem]) -> tuple[StateDictPlan, list[str]]:
        members, question = self.members, self.question
        problems += differing([sums for _, sums in everyone], *PLAIN)
        options: Any = {"strict": question.strict, "casts": question.casts, "pairs": question.pairs}
        plan = plan_state_dict([facts for facts, _ in everyone], *question[:3], members.to_group, **options)
        problems += group_problems((move.plan for move in plan.moves), members.size)
        return plan, [
            *plan.lines,
            f"check={question.check} changed_only={question.changed_only}",
            f"plan {plan.digest}",
        ]


def _short(plan: StateDictPlan) -> bytes:
    return bytes.fromhex(plan.digest[:16])


def plan_of_all(
    members: GroupInfo, subject: str, mine: Any, make: Callable[[list[Any], list[Problem]], tuple[P, list[str]]]
) -> P:
    """Gather what every rank has (``mine``), plan on each rank, and compare the plans; a collective.

    ``make`` returns the plan for what all ranks have, with its text; it adds to the problems, or raises more.
    """
    everyone: list[Any] = [mine] * members.size
    if not is_fake(()):  # a fake group's other ranks are as this one
        dist.all_gather_object(everyone, mine, group=members.group)
    plan, lines, problems = None, list[str](), list[Problem]()
    try:
        plan, lines = make(everyone, problems)
    except Exception as error:  # layouts may be the caller's function
        problems += problems_of(error)
    assert_consistent(members, subject, lines, problems)
    assert plan is not None
    return plan


def plain_checksums(facts: RankMeta, tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a checksum of each of this rank's tensors without a declared layout."""
    plain = [name for name, metadata in facts.sources.items() if metadata.layout is None and name in tensors]
    return {name: bytes(tensor_hash(local_tensor(tensors[name])).view(torch.uint8).tolist()) for name in plain}


# Code, reason and remedy for plain tensors with different values: they are shards, and would get lost.
PLAIN = (
    "missing-argument",
    "plain tensors that differ between ranks",
    "if they are shards, declare them in src_layouts (and shapes)",
)


def differing(by_rank: Sequence[Mapping[str, bytes]], code: str, reason: str, hint: str) -> list[Problem]:
    """Report names with different checksums on their ranks."""
    names = sorted({name for sums in by_rank for name in sums})
    values = {name: {sums[name] for sums in by_rank if name in sums} for name in names}
    return [Problem(code, name, found=reason, hint=hint) for name in names if len(values[name]) > 1]
