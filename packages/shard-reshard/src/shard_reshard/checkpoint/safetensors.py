"""Safetensors files: a header that is checked before it is believed, and byte ranges read without touching the rest.

A file may come from anywhere. Nothing of it is executed, no size in it is allocated before it was compared with the
size of the file, and every range is inside of the file before it is read.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from shard_reshard._shared.problems import PlanError, Problem
from shard_reshard.layout.dtypes import ITEMSIZES, torch_dtype

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_DIMS = 64
_CHANGED_HINT = "load again when nobody writes to it"


class Entry(NamedTuple):
    """A tensor of a file. ``dtype`` is the file's own word for it, ``begin`` and ``end`` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class FileState(NamedTuple):
    """A file as a host sees it, told from another one in its place; plain data that travels between ranks."""

    num_bytes: int
    inode: int
    modified_ns: int
    host: str = platform.node()

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        return cls(found.st_size, found.st_ino, found.st_mtime_ns)


class FileTable(NamedTuple):
    """Table of a file's tensors; plain data that travels between ranks."""

    path: str
    state: FileState
    entries: dict[str, Entry]

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return self.state.num_bytes


def read_safetensors_header(path: str | Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape and data_offsets; reads nothing else.

    Raises:
        PlanError: ``invalid-file`` when the file is none, or its header contradicts itself or the file.
    """
    header, _, _ = _header(str(path))
    return header


def indexed_files(index: str | Path) -> dict[str, list[str]]:
    """The files that a ``*.safetensors.index.json`` names, beside it, and the tensors that each is to hold.

    Raises:
        PlanError: ``invalid-file`` for a file that is none, or that names a file outside of its own folder.
    """
    path = Path(index)
    try:
        text = path.read_bytes()
    except OSError as error:
        hint = "give an index that this rank can read"
        raise PlanError(Problem("invalid-file", str(path), found=str(error), hint=hint)) from None
    try:
        named = json.loads(text)["weight_map"]
        pairs = [(name, file) for name, file in named.items()]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        _refuse_index(path, f"no weight_map: {type(error).__name__}: {str(error)[:200]}")
    found: dict[str, list[str]] = {}
    for name, file in pairs:
        # A plain name and nothing else: no folder, drive or parent, in the manner of any system.
        if not _is_text(file) or not file.endswith(".safetensors") or set(file) & {"/", "\\", ":", "\0"}:
            _refuse_index(path, f"{name[:100]!r} in {ascii(file)[:200]}, which is no .safetensors file beside it")
        found.setdefault(str(path.parent / file), []).append(name)
    return dict(sorted(found.items()))


def _refuse_index(path: Path, found: str) -> NoReturn:
    hint = "an index names files of its own folder; pass files as a list to read others"
    raise PlanError(Problem("invalid-file", str(path), found=found, hint=hint))


def file_table(path: str | Path) -> FileTable:
    """The checked table of a file; errors as in `read_safetensors_header`."""
    header, data_start, state = _header(str(path))
    entries = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            entries[name] = Entry(about["dtype"], tuple(about["shape"]), data_start + begin, data_start + end)
    return FileTable(str(path), state, entries)


def _header(path: str) -> tuple[dict[str, Any], int, FileState]:
    try:
        with Path(path).open("rb") as file:
            state = FileState.of(os.fstat(file.fileno()))
            num_bytes = state.num_bytes
            size = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or size > min(_MOST_HEADER_BYTES, num_bytes - 8):
                _refuse(path, f"a header of {size} bytes in a file of {num_bytes}")
            text = file.read(size)
    except OSError as error:
        hint = "give a file that this rank can read"
        raise PlanError(Problem("invalid-file", path, found=str(error), hint=hint)) from None
    header = _parsed(path, text)
    check_header(path, header, num_bytes - 8 - size)
    return header, 8 + size, state


def _parsed(path: str, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name that comes twice")
        return found

    if not text.startswith(b"{"):
        _refuse(path, "a header that does not begin with {")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"no header: {str(error)[:200]}")
    assert isinstance(header, dict)
    return header


def check_header(path: str, header: dict[str, Any], data_bytes: int | None) -> None:
    """Raise ``invalid-file`` for a header that contradicts itself, or the number of bytes that follow it."""
    ranges = []
    for name, about in header.items():
        if not _is_text(name):
            _refuse(path, f"a name that is no text, {ascii(name)[:200]}")
        if name == "__metadata__":
            if not isinstance(about, dict) or not all(_is_text(text) for pair in about.items() for text in pair):
                _refuse(path, "metadata that is no table of texts")
            continue
        if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
            _refuse(path, f"an entry {name!r} that is not dtype, shape and data_offsets")
        shape, offsets = about["shape"], about["data_offsets"]
        if not _counts(shape) or len(shape) > _MOST_DIMS:
            _refuse(path, f"{name!r} of shape {str(shape)[:200]}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            _refuse(path, f"{name!r} at bytes {str(offsets)[:200]}")
        if not isinstance(about["dtype"], str):
            _refuse(path, f"{name!r} of dtype {str(about['dtype'])[:200]}")
        known = DTYPES.get(about["dtype"])
        if known is not None and prod(shape) * ITEMSIZES[known] != offsets[1] - offsets[0]:
            _refuse(path, f"{name!r} of shape {tuple(shape)} {about['dtype']} in {offsets[1] - offsets[0]} bytes")
        ranges.append((offsets[0], offsets[1], name))
    end = 0
    for low, high, name in sorted(ranges):
        if low != end:
            _refuse(path, f"{name!r} from byte {low} on, where the tensor before it ends at {end}")
        end = high
    if data_bytes is not None and end != data_bytes:
        _refuse(path, f"tensors of {end} bytes in {data_bytes} bytes of data")


def _is_text(value: object) -> bool:
    """Return True for text that can be encoded: JSON can contain half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in values
    )


def _refuse(path: str, found: str) -> NoReturn:
    hint = "write it again, or give a complete .safetensors file"
    raise PlanError(Problem("invalid-file", path, found=found, hint=hint))


def file_changed(path: str) -> Problem:
    """The problem of a file that is another one now, of whatever length."""
    found = "replaced or written to since its header was read"
    return Problem("file-changed", path, found=found, hint=_CHANGED_HINT)


def file_state(path: str) -> FileState | None:
    """Return what tells a file from another one in its place; None where this rank cannot see it."""
    try:
        return FileState.of(os.stat(path))
    except OSError:
        return None


def read_rows(
    path: str, num_bytes: int, offset: int, shape: tuple[int, ...], dtype: str, state: FileState | None = None
) -> torch.Tensor:
    """The bytes from ``offset`` on as a tensor of ``shape``, in fresh memory on the CPU.

    Raises:
        PlanError: ``invalid-file``, or ``file-changed`` where it has other than ``num_bytes`` now, or is no longer in
            the ``state`` in which this rank saw it when headers were read.
    """
    assert sys.byteorder == "little", "safetensors files are little-endian"
    wanted = prod(shape) * ITEMSIZES[dtype]
    if not wanted:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    data = bytearray(wanted)
    try:
        with open(path, "rb", buffering=0) as file:  # Path.open takes no buffering by position
            now = FileState.of(os.fstat(file.fileno()))
            if now.num_bytes != num_bytes:
                found = f"{now.num_bytes} bytes, {num_bytes} when its header was read"
                raise PlanError(Problem("file-changed", path, found=found, hint=_CHANGED_HINT))
            if state is not None and now != state:
                raise PlanError(file_changed(path))
            file.seek(offset)
            done, place = 0, memoryview(data)
            while done < wanted:
                count = file.readinto(place[done:])
                if not count:
                    found = f"an end after {offset + done} bytes"
                    raise PlanError(Problem("file-changed", path, found=found, hint=_CHANGED_HINT))
                done += count
    except OSError as error:
        hint = "give a file that this rank can read"
        raise PlanError(Problem("invalid-file", path, found=str(error), hint=hint)) from None
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(dtype)).view(shape)
