"""What a failure in the middle of a step leaves behind: nothing changed, or an error that says what was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepInterrupted(RuntimeError):
    """A step failed after it had begun to write parameters or optimizer state.

    Attributes:
        written: Names of the tensors that were written.
    """

    def __init__(self, written: list[str]) -> None:
        self.written = written
        shown = ", ".join(written[:4]) + (", ..." if len(written) > 4 else "")
        super().__init__(
            f"the step failed after it had begun the update: {len(written)} tensors are written ({shown}); "
            "parameters and optimizer state are of no step any more, load a checkpoint"
        )

    def __reduce__(self) -> tuple[type[StepInterrupted], tuple[list[str]]]:
        return type(self), (self.written,)


@contextmanager
def guarded(kept: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> Iterator[None]:
    """Run a step; if it fails, put buffers back and say whether anything else was written.

    Args:
        kept: Parameters and optimizer state by name; they are written at the end of a step, and not copied.
        restored: Buffers by name; they are small, and copied before the step.
    """
    versions = {name: tensor._version for name, tensor in kept.items()}
    copies = {name: tensor.clone() for name, tensor in restored.items()}
    try:
        yield
    except Exception as error:
        for name, tensor in restored.items():
            tensor.copy_(copies[name])
        written = [name for name, tensor in kept.items() if tensor._version != versions[name]]
        if written:
            raise StepInterrupted(written) from error
        error.add_note("parameters, buffers and optimizer state are as they were before the step")
        raise
