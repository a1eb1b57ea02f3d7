"""Collectives whose results do not arrive before `wait()`.

Inside `ranks.delayed()` a collective runs on copies. The caller's outputs are poisoned at issue (NaN, else 0xFF bytes)
and get the result at `wait()`, so whoever reads early reads poison; inputs are compared with what they were at issue,
and outputs with the poison, so whoever reuses or writes a buffer in flight is told; a handle that nobody waits for is
reported at the end of the block.
"""

from __future__ import annotations

import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ranktest import _torch_compat as compat
from ranktest.intercept import Call, Execute

#: How long after `get_future()` a result arrives, when nobody calls `wait()`.
FUTURE_DELAY_S = 0.005

_NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

# Works that the caller dropped: without a Python reference, C++ would keep the C++ half of a Work alone.
_alive: list[Work] = []


class Delayed:
    """The listener of one `ranks.delayed()` block."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.works: list[Work] = []
        self.problems: list[str] = []

    def around(self, call: Call, execute: Execute) -> Any:
        """Run on copies and hand out a handle that delivers at `wait()`."""
        if call.name == "monitored_barrier_":
            return execute(call.arguments)
        with torch.no_grad():
            transfer = Transfer(call)
            result = execute({**call.arguments, **transfer.arguments})
            real = compat.unbox_work(result[1] if isinstance(result, tuple) else result)
            transfer.poison()
        work = Work(call, real, transfer, self)
        self.works.append(work)
        _alive.append(work)
        boxed = compat.box_work(work)
        return (call.arguments[call.operator.writes], boxed) if isinstance(result, tuple) else boxed

    def finish(self) -> None:
        """End the block.

        Raises:
            AssertionError: a handle was not waited for, or a buffer was touched in flight and the error was swallowed.
        """
        for work in self.works:
            if not work.delivered and not work.promised:
                self.problems.append(f"{work.what} was never waited for")
        for work in self.works:
            if not work.delivered:
                work.deliver()
        if self.problems:
            raise AssertionError(f"rank {self.rank}, delayed group:\n  " + "\n  ".join(dict.fromkeys(self.problems)))


class Transfer:
    """The tensors of one call: copies that the backend works on, and checks that the caller leaves its own alone."""

    def __init__(self, call: Call) -> None:
        reads, writes = call.reads(), call.writes()
        self.copies: dict[int, torch.Tensor] = {}
        self.versions: list[int] = []
        self.arguments = {
            name: self._copied(call.arguments[name])
            for name in {call.operator.reads, call.operator.writes} - {""}
            if name in call.arguments
        }
        self.writes = [(tensor, self.copies[id(tensor)]) for tensor in writes]
        apart = [tensor for tensor in reads if not any(_overlap(tensor, written) for written in writes)]
        self.reads = [(tensor, tensor.clone()) for tensor in apart]
        if call.device.type == "cuda" and "async_op" in call.arguments:
            self.arguments["async_op"] = True  # NCCL gives no handle for a call that is not async

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.copies:
                self.copies[id(value)] = value.detach().clone(memory_format=torch.preserve_format)
            return self.copies[id(value)]
        return [self._copied(part) for part in value]

    def poison(self) -> None:
        """Fill the outputs with NaN or 0xFF, so that an early read shows."""
        for tensor, _ in self.writes:
            _poison(tensor)
        self.versions = [_version(tensor) for tensor, _ in self.writes]

    def touched(self) -> list[str]:
        """Return a line for each buffer that the caller changed in flight: an input, or a poisoned output."""
        tensors = []
        for tensor, before in self.reads:
            if not _same_bytes(tensor, before):
                tensors.append(f"its input {_shape(tensor)} was changed between issue and wait()")
        for (tensor, _), version in zip(self.writes, self.versions, strict=True):
            if _version(tensor) != version or not _same_bytes(tensor, _poison(tensor.detach().clone())):
                tensors.append(f"its output {_shape(tensor)} was written between issue and wait()")
        return tensors

    def deliver(self) -> None:
        """Copy the results to where the caller expects them."""
        for tensor, copy in self.writes:
            tensor.data.copy_(copy)
            if copy.is_cuda:
                copy.record_stream(torch.cuda.current_stream(copy.device))  # made on the stream of the issuer
        self.reads, self.writes, self.versions, self.copies, self.arguments = [], [], [], {}, {}


class Work(compat.Work):
    """A handle that delivers at `wait()`, or some milliseconds after `get_future()`."""

    def __init__(self, call: Call, real: Any, transfer: Transfer, block: Delayed) -> None:
        super().__init__()
        self.real, self.transfer, self.block = real, transfer, block
        self.outputs = call.writes()
        self.what = f"{call.op} on group {compat.group_label(call.group)}, issued at {_issuer()}"
        self.delivered = False
        self.promised = False
        self.polled = 0
        self.future: Any = None
        self.lock = threading.RLock()

    def deliver(self) -> list[str]:
        """Wait for the backend, check the buffers and hand over the result; a second call does nothing."""
        with self.lock, torch.no_grad():
            if self.delivered:
                return []
            self.real.wait()
            touched = [f"{self.what}: {what}" for what in self.transfer.touched()]
            self.block.problems += touched
            self.transfer.deliver()
            self.delivered = True
            return touched

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Deliver the result.

        Raises:
            AssertionError: an input was changed, or an output written, while the operation was in flight.
        """
        touched = self.deliver()
        if touched:
            raise AssertionError("\n".join(touched))
        return True

    def get_future(self) -> Any:
        """A future that completes, with the result delivered, some milliseconds later."""
        with self.lock:
            if self.future is None:
                devices: list[int | str | torch.device] = [*{t.device for t in self.outputs if t.is_cuda}]
                self.future = torch.futures.Future(devices=devices or None)
                self.promised = True
                timer = threading.Timer(FUTURE_DELAY_S, self._complete, [self.future])
                timer.daemon = True
                timer.start()
            return self.future

    def _complete(self, future: Any) -> None:
        try:
            self.deliver()
            future.set_result(self.outputs)
        except Exception as error:
            future.set_exception(error)

    def is_completed(self) -> bool:
        """Return False at the first call, as on a slow link; a later call delivers."""
        self.polled += 1
        if self.polled > 1 and self.real.is_completed():
            self.deliver()
        return self.delivered

    def synchronize(self) -> None:
        """Deliver the result, as `wait` does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self.outputs

    def source_rank(self) -> int:
        """The rank that a receive came from."""
        return int(self.real.source_rank())

    _source_rank = source_rank


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.data  # shares memory, not the version counter: for autograd a collective is no in-place change
    if data.is_complex():
        data.fill_(complex(float("nan"), float("nan")))
    elif data.is_floating_point() and data.element_size() > 1:
        data.fill_(float("nan"))
    elif data.dtype == torch.bool:
        data.fill_(True)
    elif data.element_size() == 1:
        data.view(torch.uint8).fill_(0xFF)
    else:
        data.fill_(torch.iinfo(data.dtype).max if torch.iinfo(data.dtype).min == 0 else -1)
    return tensor


def _version(tensor: torch.Tensor) -> int:
    """Return the count of in-place changes, as NaN + 1 keeps NaN's bytes; 0 for a view, which shares a count."""
    is_full_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor._version if is_full_storage and not tensor.is_inference() else 0


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.numel() == 0 or torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.numel() == 0 or right.numel() == 0:
        return False
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    (a, b), (c, d) = _span(left), _span(right)
    return a < d and c < b


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _issuer() -> str:
    """The line of the caller's code that issued a call: the last frame that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_CALLER):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "an unknown place"
