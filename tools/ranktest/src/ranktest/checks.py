"""Refusing what gloo takes without an error and then does wrongly.

gloo's `all_to_all_single` accepts split sizes that disagree between ranks and a dim 0 that does not divide (rows stay
stale or come from elsewhere), and fills a non-contiguous output wrongly. Here each is a ValueError: the local ones at
issue, disagreement at `wait()` of every rank, after an exchange of the sizes that travels beside the data.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from ranktest import _torch_compat as compat
from ranktest import intercept
from ranktest.intercept import Call, Execute

_alive: list[Any] = []


class GlooChecks:
    """The listener that every rank runs with."""

    def around(self, call: Call, execute: Execute) -> Any:
        """Check an all_to_all_single on CPU tensors; let everything else through."""
        if call.name != "alltoall_base_" or call.device.type != "cpu":
            return execute(call.arguments)
        sent, received = check_locally(call)
        told, gathering = _exchange(call, sent + received)
        result = execute(call.arguments)
        work = CheckedWork(call, compat.unbox_work(result), gathering, told)
        _alive.append(work)
        return compat.box_work(work)


def check_locally(call: Call) -> tuple[list[int], list[int]]:
    """Bytes that this rank sends to and expects from each rank.

    Raises:
        ValueError: non-contiguous tensors, or split sizes that do not fit them.
    """
    found = []
    for side in ("input", "output"):
        tensor, splits = call.arguments[side], list(call.arguments[f"{side}_split_sizes"])
        what = f"all_to_all_single: {side} {list(tensor.shape)}"
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what} with strides {list(tensor.stride())} is not contiguous; gloo would read or fill it as if it "
                "were, and overwrite memory beside it. Pass a contiguous tensor."
            )
        rows = tensor.shape[0] if tensor.dim() else 1
        if splits:
            if len(splits) != call.size or sum(splits) != rows or min(splits) < 0:
                raise ValueError(f"{what}: {side}_split_sizes {splits} do not fit dim 0 and {call.size} ranks")
        elif rows % call.size:
            raise ValueError(
                f"{what}: dim 0 does not divide by {call.size} ranks, and no {side}_split_sizes were given; gloo "
                "would leave rows out. Pass split sizes."
            )
        row_bytes = tensor.numel() * tensor.element_size() // rows if rows else 0
        found.append([size * row_bytes for size in splits or [rows // call.size] * call.size])
    return found[0], found[1]


def _exchange(call: Call, own: list[int]) -> tuple[torch.Tensor, Any]:
    row = torch.tensor(own, dtype=torch.int64)
    told = torch.empty(call.size, len(own), dtype=torch.int64)
    _, boxed = intercept.unseen(
        "_allgather_base_",
        {"output_tensor": told, "input_tensor": row.unsqueeze(0), "process_group": call.arguments["process_group"]},
        row.device,
    )
    return told, compat.unbox_work(boxed)


class CheckedWork(compat.Work):
    """The handle of an all_to_all_single; compares all ranks' sizes at `wait()`."""

    def __init__(self, call: Call, real: Any, gathering: Any, told: torch.Tensor) -> None:
        super().__init__()
        self.real, self.gathering, self.told = real, gathering, told
        self.size, self.ranks = call.size, call.global_ranks
        self.buffers = (call.arguments["input"], call.arguments["output"])
        self.done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the data.

        Raises:
            ValueError: two ranks disagree about what goes from one to the other; all ranks raise.
        """
        if not self.done:
            self.gathering.wait()
            problems = disagreements(self.told, self.ranks)
            if problems:
                raise ValueError("all_to_all_single: split sizes disagree between ranks:\n  " + "\n  ".join(problems))
            self.real.wait()
            self.done = True
            del self.buffers
        return True

    def get_future(self) -> Any:
        """The backend's future, after the sizes were compared."""
        self.wait()
        return self.real.get_future()

    def is_completed(self) -> bool:
        """Whether the data has arrived."""
        return self.done or bool(self.gathering.is_completed() and self.real.is_completed())

    def is_success(self) -> bool:
        """Whether the data has arrived without error."""
        return bool(self.real.is_success())

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def result(self) -> Any:
        """The output tensors."""
        return self.real.result()


def disagreements(told: torch.Tensor, ranks: tuple[int, ...]) -> list[str]:
    """Pairs whose sender and receiver have different sizes; `told[r]` is rank r's bytes to each, then from each."""
    size = len(ranks)
    rows = told.tolist()
    return [
        f"rank {ranks[a]} sends {rows[a][b]} bytes to rank {ranks[b]}, which expects {rows[b][size + a]}"
        for a in range(size)
        for b in range(size)
        if rows[a][b] != rows[b][size + a]
    ]
