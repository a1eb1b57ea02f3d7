"""Checkpoint files as layouts: what lies in which file is where each tensor is, on the rank that reads the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shard_spec import Box

from shard_reshard.box_bound import BoxBound
from shard_reshard.dtypes import dtype_name
from shard_reshard.problems import PlanError, Problem
from shard_reshard.safetensors_files import DTYPES, check_header, read_safetensors_header

_WRITER = re.compile(r"__(\d+)_\d+\.distcp\Z")


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    layout: BoxBound


def layouts_from_safetensors(files: Mapping[int, Any]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, each whole on the rank that reads its file.

    Args:
        files: For each rank of the group that reads, a path, a header from `read_safetensors_header`, or a list of
            these.

    Raises:
        PlanError: ``stored-twice`` when two files hold one name, ``unknown-dtype``, ``bad-safetensors``.
    """
    found: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    for rank, given in sorted(files.items()):
        for entry in given if isinstance(given, list | tuple) else [given]:
            header = entry if isinstance(entry, Mapping) else read_safetensors_header(entry)
            check_header(f"header of rank {rank}", dict(header), None)
            for name, about in header.items():
                if name == "__metadata__":
                    continue
                if name in found:
                    hint = "a tensor that is cut over files needs its boxes: pass {rank: Box} as its layout"
                    problems.append(Problem("stored-twice", name, found="two files with this name", hint=hint))
                    continue
                dtype = DTYPES.get(about["dtype"])
                if dtype is None:
                    hint = f"one of {', '.join(DTYPES)}"
                    problems.append(Problem("unknown-dtype", name, found=about["dtype"], hint=hint))
                    continue
                shape = tuple(about["shape"])
                found[name] = StoredTensor(shape, dtype, BoxBound.whole(shape, rank))
    if problems:
        raise PlanError(problems)
    return found


def layouts_from_dcp(metadata: Any, reader: Callable[[int], int] | None = None) -> dict[str, StoredTensor]:
    """The tensors of a distributed checkpoint, each chunk on the rank that reads the file it is in.

    Args:
        metadata: From ``torch.distributed.checkpoint``: what ``FileSystemReader(path).read_metadata()`` returns.
        reader: Which rank of the group reads what rank ``i`` wrote; None: rank ``i``.

    Raises:
        PlanError: ``unknown-writer`` where the name of a file does not tell who wrote it.
    """
    held: dict[str, dict[int, list[Box]]] = {}
    problems: list[Problem] = []
    for index, stored in metadata.storage_data.items():
        if index.offset is None:
            continue  # bytes that are no tensor
        match = _WRITER.search(stored.relative_path)
        if match is None:
            found = f"file {stored.relative_path}"
            problems.append(
                Problem("unknown-writer", index.fqn, found=found, hint="files are called __<rank>_<n>.distcp")
            )
            continue
        written_by = int(match[1])
        rank = written_by if reader is None else reader(written_by)
        chunk = next(
            c for c in metadata.state_dict_metadata[index.fqn].chunks if tuple(c.offsets) == tuple(index.offset)
        )
        held.setdefault(index.fqn, {}).setdefault(rank, []).append(Box(tuple(chunk.offsets), tuple(chunk.sizes)))
    if problems:
        raise PlanError(problems)
    tensors: dict[str, StoredTensor] = {}
    for name, boxes in sorted(held.items()):
        about = metadata.state_dict_metadata[name]
        shape = tuple(about.size)
        tensors[name] = StoredTensor(shape, dtype_name(about.properties.dtype), BoxBound(shape, boxes))
    return tensors
