"""Load safetensors files into any layout: ranks read planned byte ranges and exchange the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shard_reshard._shared.consensus import problems_of, tensor_hash
from shard_reshard._shared.dtensor import as_dtensor
from shard_reshard._shared.problems import Problem, refusal
from shard_reshard._shared.progress import each_shown
from shard_reshard._torch_compat import storage_key
from shard_reshard.checkpoint.plan import LoadPlan, Read, plan_load, stored_tensors
from shard_reshard.checkpoint.safetensors import (
    FileState,
    FileTable,
    file_changed,
    file_state,
    file_table,
    indexed_files,
    read_rows,
)
from shard_reshard.execution.checks import has_memory
from shard_reshard.group import (
    BEFORE_MOVING,
    BEFORE_WRITING,
    WHILE_WRITING,
    GroupInfo,
    assert_consistent,
    group_info,
    raise_on_all_ranks,
)
from shard_reshard.layout.parse import LayoutLike
from shard_reshard.layout.shard_map import by_key
from shard_reshard.state_dict.agreement import (
    collect_metadata,
    device_of,
    differing,
    local_tensor,
    local_tensors,
    plan_of_all,
    tensors_of,
)
from shard_reshard.state_dict.outputs import LocalTargets, Progress, ReceiveBuffers, move_buckets, staged, write_outputs
from shard_reshard.state_dict.pairs import Pair, as_pairs
from shard_reshard.state_dict.plan import DstLayouts, KeyRule, kept_layouts

PathLike = str | Path
Files = PathLike | Sequence[PathLike]


class LoadedStateDict(dict[str, Any]):
    """Name -> tensor on this rank, in its layout. A DTensor for layouts of a DeviceMesh.

    Attributes:
        plan: Reads of every rank, and the moves.
        read_bytes: Bytes of tensors read by this rank.
        materialized: Names of tensors of ``out`` on the meta device that got memory.
    """

    plan: LoadPlan
    read_bytes: int
    materialized: tuple[str, ...]


def load_safetensors(
    files: Files,
    dst_layouts: DstLayouts = None,
    *,
    stored_as: Mapping[str, LayoutLike] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    out: torch.nn.Module | Mapping[str, Any] | None = None,
    key_map: KeyRule | None = None,
    bucket_bytes: int = 64 * 2**20,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[Progress], None] | None = None,
    atomic: bool = True,
    strict: bool = True,
    casts: str = "exact",
    pairs: Pair | Sequence[Pair] = (),
    unexpected: str | Sequence[str] = (),
) -> LoadedStateDict:
    """Load the tensors of safetensors files into the ranks' layouts.

    Every needed byte is read once, by one rank: the only rank that needs it, else shared among those that do. The
    rest comes from peers in a few fused exchanges. Headers are validated before use; nothing in a file is executed.
    Every rank of ``group`` calls it.

    Args:
        files: A file, a folder of them, or a list, readable by every rank. Of a folder with a
            ``*.safetensors.index.json``, which may be given itself, the files of the index.
        dst_layouts: Layout by name, one for all, or a function of name and global shape. Names left out get the layout
            of the tensor of ``out``.
        stored_as: Layouts at writing time of tensors split over files. Rank ``i`` of such a layout is the ``i``-th file
            of the list. All other tensors are full in one file.
        shapes: Global shapes of tensors in ``stored_as``, if the layout has none.
        out: A module or mapping of tensors to fill in place; values are cast to its dtypes. Meta tensors of a module
            get memory (``.materialized`` of the result names them), as new parameters: build optimizers afterwards.
        key_map: Stored name -> name here, `Part` of one, several parts, or None to leave it unread. Or a function of
            all stored shapes by name that returns such a mapping; `hf_key_map` makes one.
        bucket_bytes: Approximate bytes of one rank's read and exchange.
        group: The loading ranks; None is the default group.
        progress: Called on each rank after each tensor. Its errors are raised at the end.
        atomic: Fill ``out`` only after everything has arrived; see `reshard_state_dict`. With False a file that changes
            between two exchanges leaves a mixture.
        strict: Report tensors of ``out`` that no file fills, and uninitialised buffers outside of files, as problems;
            False leaves both unchanged.
        casts: As in `reshard_state_dict`; "exact" reads no scaled float8 weight whose scale ``unexpected`` leaves out.
        pairs: Quantised weights and their scales, see `Pair`; with ``dequantize=True`` into plain weights of ``out``.
        unexpected: Globs of stored tensors that may lack a destination, and are not read then; "ignore" is ``"*"``.

    Returns:
        The tensors of this rank by name, with ``.plan`` and ``.read_bytes``.

    Raises:
        PlanError: On every rank alike: ``invalid-file``, ``file-changed``, ``duplicate-name``,
            ``missing-tensor``, ``shape-mismatch``, ``unsupported-dtype``, ``uninitialized-buffer``, and the
            problems of `reshard_state_dict`.
        RuntimeError: If an exchange fails because a rank died.
    """
    members, dst_layouts = group_info(group), kept_layouts(dst_layouts)
    # What this rank has, and the headers that it reads; the problems of all ranks come before any plan.
    try:
        targets = tensors_of(out, out=True)
        facts = collect_metadata({}, targets, {}, {}, members)
        uninitialized, sums = uninitialized_buffers(out) if strict else ([], {})
        listed, states, tables, unreadable = _own_headers(files, members)
        asked = [f"file {path}" for path in listed]
        globs = (unexpected,) if isinstance(unexpected, str) else tuple(unexpected)
        globs, pairs = ("*",) if globs == ("ignore",) else globs, as_pairs(pairs) if pairs else ()
        keys = "a function" if callable(key_map) else sorted((key_map or {}).items())
        rules: dict[str, Any] = {"strict": strict, "casts": casts, "pairs": pairs, "unexpected": globs}
        asked += [f"{sorted((shapes or {}).items())} {keys} {bucket_bytes} {rules}"]
    except Exception as error:
        raise_on_all_ranks(members, error)
    assert_consistent(members, "a load", asked, [*facts.problems, *uninitialized, *unreadable])
    rules |= {"key_map": key_map, "bucket_bytes": bucket_bytes}
    make = partial(_make_plan, members, listed, states, dst_layouts, stored_as or {}, shapes or {}, rules)
    plan = plan_of_all(members, "a load", (tables, facts, sums), make)
    here, device = LocalTargets(members, plan.moves, dst_layouts), device_of({}, targets, members)
    with torch.no_grad():
        try:
            # New tensors are not visible until a module gets them at the end: they need no second copy.
            module = out if isinstance(out, torch.nn.Module) else None
            fresh = {} if module is None else materialized(targets, plan.moves.outputs, device)
            names = tuple(name for name, value in targets.items() if id(value) in fresh)
            targets = {name: fresh.get(id(value), (value, value))[1] for name, value in targets.items()}
            # Meta tensors of a module without values in the files are left out; a mapping's tensors get no memory.
            outs = {n: t for n, t in local_tensors(targets).items() if module is None or not t.is_meta}
            problems = here.out_problems(targets, outs, {}, atomic, strict, casts)
            in_place = None if atomic and len(names) < len(targets) else outs
        except Exception as error:  # memory may be short on one rank
            raise_on_all_ranks(members, error)
        assert_consistent(members, "a load", [f"outs of {plan.digest}"], problems)
        arriving = ReceiveBuffers(here, in_place, device)
        if plan.moves.fills:
            arriving.fill(plan.moves.fills, outs)
        own_reads, later = plan.reads[members.rank], WHILE_WRITING if arriving.in_place else BEFORE_WRITING
        needs = attrgetter("source"), lambda name: _read_boxes(own_reads.get(name, ()), device, states)
        buckets = (
            (
                [move.view(tensor) for move in moves for tensor in held[move.source]],
                [t.unsqueeze(0) if move.unstacked else t for move in moves for t in arriving.tensors[move.target]],
            )
            for moves, held in staged(here, "a load", plan.digest, *needs, (BEFORE_MOVING, later))
        )
        shown = buckets if len(plan.moves.buckets) < 2 else each_shown("load", buckets, len(plan.moves.buckets))
        late = move_buckets(here, shown, True, progress=progress)
        result = LoadedStateDict(write_outputs(here, arriving, targets, outs))
    if fresh and module is not None:  # last: a failed load leaves the module unchanged
        _install(module, fresh)
    result.plan, result.read_bytes, result.materialized = plan, plan.read_bytes(members.rank), names
    if late is not None:
        raise late
    return result


def _make_plan(
    members: GroupInfo,
    listed: Sequence[str],
    states: Mapping[str, FileState | None],
    dst_layouts: DstLayouts,
    stored_as: Mapping[str, LayoutLike],
    shapes: Mapping[str, Sequence[int]],
    rules: dict[str, Any],
    everyone: list[Any],
    problems: list[Problem],
) -> tuple[LoadPlan, list[str]]:
    """Plan a load from all ranks' headers, destinations and checksums of buffers; add to the problems."""
    if any(sums for *_, sums in everyone):
        problems += differing(
            [sums for *_, sums in everyone],
            "uninitialized-buffer",
            "other values on other ranks, and it is in no file",
            _HINT,
        )
    readable: list[FileTable] = [everyone[at % members.size][0][at] for at in range(len(listed))]
    for table in readable:
        seen = states.get(table.path)  # the header may be older or newer than this state
        if seen is not None and seen.host == table.state.host and seen != table.state:
            problems.append(file_changed(table.path))
    stored, outs = stored_tensors(readable, stored_as, shapes), [held for _, held, _ in everyone]
    plan = plan_load(stored, dst_layouts, members.size, outs=outs, to_group=members.to_group, **rules)
    return plan, [*plan.moves.lines, plan.digest]


def _own_headers(
    files: Files, members: GroupInfo
) -> tuple[list[str], dict[str, FileState | None], dict[int, FileTable], list[Problem]]:
    """Return all files with their states, tables of those that this rank reads, by position, and problems."""
    states: dict[str, FileState | None] = {}
    tables: dict[int, FileTable] = {}
    problems: list[Problem] = []
    try:
        listed, indexed = _listed(files)
        states = {path: file_state(path) for path in listed}
    except Exception as error:
        return [], {}, {}, list(problems_of(error))
    meant = {name: path for path, names in indexed.items() for name in names}
    for at, path in enumerate(listed):
        if at % members.size == members.rank:  # each header is read once
            try:
                table = file_table(path)
            except Exception as error:
                problems += problems_of(error)
                continue
            # A name in two files is read from the file of the index.
            entries = {name: entry for name, entry in table.entries.items() if meant.get(name, path) == path}
            tables[at] = table._replace(entries=entries)
            reason, hint = f"not in {path}, which the index names for it", "get the files again: the index is of others"
            lost = [name for name in indexed.get(path, ()) if name not in entries]
            problems += [Problem("missing-tensor", name, found=reason, hint=hint) for name in lost]
    return listed, states, tables, problems


def _listed(files: Files) -> tuple[list[str], dict[str, list[str]]]:
    """Return the files, by rank of a written layout, and the index's tensors."""
    if isinstance(files, Mapping):
        hint = "pass a list, in the order of the ranks that wrote the files"  # type: ignore[unreachable]  # untyped callers
        raise refusal("wrong-type", "files", found=f"a {type(files).__qualname__}", hint=hint)
    if not isinstance(files, str | Path):
        return list(map(str, files)), {}
    folder = Path(files)
    if folder.name.endswith(".index.json"):
        return _indexed(folder)
    if not folder.is_dir():
        return [str(files)], {}
    variants = sorted(folder.glob("*.safetensors.index.json"))
    if len(variants) == 1:  # a model in one file may have been saved over a model in several
        single = variants[0].with_name(variants[0].name.removesuffix(".index.json"))
        variants += [single] if str(single) not in _indexed(variants[0])[0] and single.exists() else []
    if len(variants) > 1:
        listed = ", ".join(path.name for path in variants)
        raise refusal(
            "invalid-argument",
            str(files),
            found=f"{len(variants)} variants of the weights: {listed}",
            hint=f"pass one of them, for example {variants[0]}",
        )
    if variants:
        return _indexed(variants[0])
    if paths := sorted(map(str, folder.glob("*.safetensors")), key=_by_numbers):
        numbers = [(m[1], int(m[3]), int(m[2])) for path in paths if (m := _NUMBERED.fullmatch(path))]
        for (title, total), held in by_key(((title, total), at) for title, total, at in numbers).items():
            if len(held) < total:
                reason = f"{len(held)} of {total} files {Path(title).name}-...-of-{total:05}, and no index"
                hint = "get the others too, or pass these in a list"
                raise refusal("invalid-file", str(files), found=reason, hint=hint)
        return paths, {path: [] for path in paths}
    hint = "give a folder with .safetensors files"
    others = sorted(path.name for ending in ("bin", "pt", "pth") for path in folder.glob(f"*.{ending}"))
    reason = f"a folder without any; it has {', '.join(others[:3])}" if others else "a folder without any"
    if others:
        hint = "convert it once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    raise refusal("invalid-file", str(files), found=reason, hint=hint)


_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors", re.DOTALL)


def _by_numbers(path: str) -> list[object]:
    """Return a key that sorts by numbers: the file of writer 2 comes before that of writer 10."""
    return [int(text) if at % 2 else text for at, text in enumerate(re.split(r"(\d+)", path))]


def _indexed(index: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the files of an index, all of which are there."""
    indexed = indexed_files(index)
    if not indexed:
        raise refusal(
            "invalid-file",
            str(index),
            found="an index without any file",
            hint="give an index that names .safetensors files",
        )
    missing = [Path(path).name for path in indexed if not Path(path).exists()]
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        hint = "get these files too"
        others = sorted(path.name for path in index.parent.glob("*.safetensors") if str(path) not in indexed)
        if others:
            hint += f"; or the index is stale: pass the files that it does not name, as {others[0]}, in a list"
        raise refusal(
            "invalid-file",
            str(index),
            found=f"names {len(missing)} of {len(indexed)} files that are not there: {named}",
            hint=hint,
        )
    return list(indexed), indexed


# ---- reads and moves ------------------------------------------------------------------------------------------


def _read_boxes(
    reads: Sequence[Read], device: torch.device, states: Mapping[str, FileState | None] = MappingProxyType({})
) -> list[torch.Tensor]:
    """Return this rank's boxes of a tensor, as views of its rows."""
    boxes = []
    for read in reads:
        state = states.get(read.path)
        rows = read_rows(read.path, read.file_bytes, read.offset, read.shape, read.dtype, state).to(device)
        for start, sizes in read.boxes:
            view = rows
            for dim, (low, size) in enumerate(zip(start, sizes, strict=True)):
                view = view.narrow(dim, low, size)
            boxes.append(view)
    return boxes


# ---- modules on the meta device --------------------------------------------------------------------------------


def materialized(
    targets: Mapping[str, Any], filled: Collection[str], device: torch.device
) -> dict[int, tuple[Any, Any]]:
    """Return a module's meta tensors that get memory, and new tensors for them, by the id of the old one."""
    fresh: dict[int, tuple[Any, Any]] = {}
    on_meta = {name: local_tensor(value) for name, value in targets.items() if _is_meta(value)}
    # Shared memory stays shared: tied names, filled or not, get it, and so do filled views of it.
    memory = {storage_key(local): local.untyped_storage() for name, local in on_meta.items() if name in filled}
    for key, storage in memory.items():
        memory[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    places = {_place(local) for name, local in on_meta.items() if name in filled}
    for name, local in on_meta.items():
        value = targets[name]
        if _place(local) in places and id(value) not in fresh:
            new = torch.empty(0, dtype=local.dtype, device=device)
            new.set_(memory[storage_key(local)], local.storage_offset(), local.shape, local.stride())
            fresh[id(value)] = value, _like(value, new)
    return fresh


def _install(module: nn.Module, fresh: Mapping[int, tuple[Any, Any]]) -> None:
    """Put new tensors in place of a module's tensors on meta."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            table.update({name: fresh[id(value)][1] for name, value in table.items() if id(value) in fresh})


def _place(local: torch.Tensor) -> object:
    return storage_key(local), local.storage_offset(), local.shape, local.stride(), local.dtype


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and local_tensor(value).is_meta


def _like(value: Any, fresh: torch.Tensor) -> torch.Tensor:
    """Return ``fresh`` as a tensor of the same kind. DTensor, parameter subclass and attributes are preserved."""
    if hasattr(value, "device_mesh"):
        dtensor: torch.Tensor = as_dtensor(fresh, value.device_mesh, value.placements, value.shape)
        return nn.Parameter(dtensor, value.requires_grad) if isinstance(value, nn.Parameter) else dtensor
    if isinstance(value, nn.Parameter):
        # A subclass holds its sharding, which a plain Parameter around the same memory would lose.
        fresh = torch.Tensor._make_subclass(type(value), fresh, value.requires_grad)
    fresh.__dict__.update(value.__dict__)
    return fresh


# ---- buffers outside of files ---------------------------------------------------------------------------------


_HINT = (
    "build its module again on a device that has memory, for example model.rotary_emb = "
    "type(model.rotary_emb)(config), or pass strict=False"
)


def uninitialized_buffers(module: Any) -> tuple[list[Problem], dict[str, bytes]]:
    """Return this rank's buffers without values, and checksums of the others to compare between ranks.

    After ``to_empty()`` a buffer holds the allocator's old data: often NaNs, or different bits on each rank.
    """
    problems, sums = [], {}
    saved = module.state_dict(keep_vars=True) if isinstance(module, nn.Module) else {}
    for name, buffer in module.named_buffers() if isinstance(module, nn.Module) else ():
        if name in saved or buffer.layout is not torch.strided:
            continue
        reason = ""
        if _is_meta(buffer):
            reason = "a buffer on the meta device, which is in no file"
        elif not has_memory(local := local_tensor(buffer)):
            reason = "a buffer whose storage was freed, which is in no file"
        elif buffer.is_floating_point() and not hasattr(buffer, "device_mesh") and buffer.dtype.itemsize > 1:
            if bool(local.isnan().any()):
                reason = "a buffer of NaNs, which is in no file"
            else:
                sums[name] = bytes(tensor_hash(local).view(torch.uint8).tolist())
        if reason:
            # A scale beside weights, as Gemma 3's, is assigned: its module has weights.
            assign = f"assign it: model.{name} = torch.tensor(config.hidden_size ** 0.5), or pass strict=False"
            hint = assign if name.endswith("embed_scale") else _HINT
            problems.append(Problem("uninitialized-buffer", name, found=reason, hint=hint))
    return problems, sums
