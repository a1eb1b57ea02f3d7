"""Inputs by argument name, and outputs in the structure that they came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tp_styles.problems import Problem, StyleInputError


def move_inputs(
    moves: dict[str, Any], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply each move to its argument, wherever the caller put it; the others are kept."""
    moved = list(args)
    kwargs = dict(kwargs)
    for name, move in moves.items():
        index = names.index(name) if name in names else -1
        if 0 <= index < len(moved):
            moved[index] = _moved(move, moved[index], name)
        elif name in kwargs:
            kwargs[name] = _moved(move, kwargs[name], name)
    return tuple(moved), kwargs


def _moved(move: Callable[[torch.Tensor], torch.Tensor], value: Any, name: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise StyleInputError(
            Problem("not-a-tensor", name, found=str(type(value)), hint="the style lays out a tensor here"),
            f"Tensor parallel module expects torch.Tensor or DTensor input but received {type(value)}!",
        )
    return move(value)


def move_outputs(leaves: list[Any], output: Any, name: str, known: dict[int, int] | None = None) -> Any:
    """Apply each output's move, keeping the structure: a bare tensor, a tuple, a list, a dict in its order."""
    if isinstance(output, torch.Tensor):
        _check_count(leaves, 1, name)
        return output if leaves[0] is None else leaves[0](output, known)
    if isinstance(output, dict):
        _check_count(leaves, len(output), name)
        values = [_leave(leave, value, known) for leave, value in zip(leaves, output.values(), strict=True)]
        moved = dict(zip(output, values, strict=True))
        return moved if type(output) is dict else type(output)(moved)
    if isinstance(output, tuple | list):
        _check_count(leaves, len(output), name)
        values = [_leave(leave, value, known) for leave, value in zip(leaves, output, strict=True)]
        if hasattr(output, "_fields"):
            return type(output)(*values)
        return type(output)(values)
    raise StyleInputError(
        Problem("not-a-tensor", f"{name} ->", found=str(type(output)), hint="an output has to be a tensor")
    )


def _leave(leave: Any, value: Any, known: dict[int, int] | None) -> Any:
    return value if leave is None or value is None else leave(value, known)


def _check_count(leaves: list[Any], count: int, name: str) -> None:
    if len(leaves) != count:
        raise StyleInputError(
            Problem(
                "output-count",
                f"{name} ->",
                found=f"{count} outputs",
                hint=f"the style lays out {len(leaves)}; give None for an output to leave alone",
            ),
            "module outputs and output_layouts should have same length!",
        )
