"""Safetensors files: headers validated by the format's own library, and reads of byte ranges.

Files are untrusted. Nothing of them is executed, and every range is checked against the file size before it is read.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shard_reshard._shared.problems import PlanError, Problem, refusal
from shard_reshard.layout.shard_map import human, torch_dtype


class Entry(NamedTuple):
    """A tensor of a file. ``dtype`` is the file's word for it, ``begin`` and ``end`` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class FileState(NamedTuple):
    """Identity of a file's version on a host; plain data, sent between ranks."""

    num_bytes: int
    inode: int
    modified_ns: int
    host: str = platform.node()

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        return cls(found.st_size, found.st_ino, found.st_mtime_ns)


class FileTable(NamedTuple):
    """Table of a file's tensors; plain data, sent between ranks."""

    path: str
    state: FileState
    entries: dict[str, Entry]


def file_table(path: str | Path) -> FileTable:
    """Return the validated table of a file, without reading more of it.

    Raises:
        PlanError: ``invalid-file`` if the file is none, or its header contradicts itself or the file;
            ``missing-dependency`` without the library ``safetensors``.
    """
    path = str(path)
    try:
        import safetensors  # an extra, needed for files only
    except ImportError:
        raise refusal(
            "missing-dependency",
            path,
            found="safetensors is not installed",
            hint="pip install 'shard-reshard[safetensors]'",
        ) from None
    try:
        with open(path, "rb") as file:
            state = FileState.of(os.fstat(file.fileno()))
            with safetensors.safe_open(path, framework="pt"):  # refuses invalid headers
                size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size), object_pairs_hook=_unique)
            if FileState.of(os.stat(path)) != state:  # written to meanwhile
                raise PlanError(file_changed(path))
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        if isinstance(error, PlanError):
            raise
        raise refusal(
            "invalid-file",
            path,
            found=str(error)[:300],
            hint="give a complete .safetensors file that this rank can read",
        ) from None
    header.pop("__metadata__", None)
    return FileTable(
        path,
        state,
        {
            name: Entry(about["dtype"], tuple(about["shape"]), *(8 + size + at for at in about["data_offsets"]))
            for name, about in header.items()
        },
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate names: the library would take one of two tensors."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a header with a name that comes twice")
    return dict(pairs)


def indexed_files(index: str | Path) -> dict[str, list[str]]:
    """Return the files of a ``*.safetensors.index.json``, all in its folder, with their expected tensors."""
    path, files = Path(index), dict[str, list[str]]()
    try:
        for name, file in json.loads(path.read_bytes())["weight_map"].items():
            # Plain names only: no folder, drive or parent, on any system.
            if not file.endswith(".safetensors") or set(file) & {"/", "\\", ":", "\0"} or not file.isprintable():
                raise ValueError(f"{name[:100]!r} in {ascii(file)[:200]}, which is no .safetensors file beside it")
            files.setdefault(str(path.parent / file), []).append(name)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise refusal(
            "invalid-file",
            str(path),
            found=f"{type(error).__name__}: {str(error)[:300]}",
            hint="an index has a weight_map with files of its own folder; pass files as a list to read others",
        ) from None
    return dict(sorted(files.items()))


def file_changed(path: str, reason: str = "replaced or written to since its header was read") -> Problem:
    """Return the problem of a file that is not what its header said."""
    return Problem("file-changed", path, found=reason, hint="load again when no process writes to it")


def file_state(path: str) -> FileState | None:
    """Return the identity of a file's version; None if this rank cannot see the file."""
    try:
        return FileState.of(os.stat(path))
    except OSError:
        return None


def read_rows(
    path: str, num_bytes: int, offset: int, shape: tuple[int, ...], dtype: str, state: FileState | None = None
) -> torch.Tensor:
    """Read a tensor of ``shape`` from ``offset`` on, in fresh memory on the CPU.

    The file has ``num_bytes`` and the ``state`` that this rank saw when headers were read; else it has changed.
    """
    assert sys.byteorder == "little", "safetensors files are little-endian"
    rows = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    wanted, done, place = rows.nbytes, 0, memory_bytes(rows)
    try:
        with open(path, "rb", buffering=0) as file:  # unbuffered: reads go to the tensor
            now = FileState.of(os.fstat(file.fileno()))
            if now.num_bytes != num_bytes:
                sizes = f"{now.num_bytes:,} bytes now, {num_bytes:,} when its header was read"
                raise PlanError(
                    file_changed(path, f"{human(now.num_bytes)}, {human(num_bytes)} when its header was read ({sizes})")
                )
            if state is not None and now != state:
                raise PlanError(file_changed(path))
            file.seek(offset)
            while done < wanted:
                count = file.readinto(place[done:])  # may be short: at most 2 GiB a call
                if not count:
                    raise PlanError(
                        file_changed(
                            path, f"it ends after {human(offset + done)}, its header needs {human(offset + wanted)}"
                        )
                    )
                done += count
    except OSError as error:
        raise refusal("invalid-file", path, found=str(error), hint="give a file that this rank can read") from None
    return rows


def memory_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, valid while the tensor lives."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
