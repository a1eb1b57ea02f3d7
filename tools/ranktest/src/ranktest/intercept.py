"""Kernels between `ProcessGroup` and its backend, through which every collective passes.

Every collective of every group, whoever issues it (Python, DDP's C++ reducer, functional collectives, custom
operators, DCP), goes through one operator of torch's `c10d` namespace. `install` registers a kernel before each of
them: it describes the call, lets the listeners see it, and goes on to torch's own kernel. Groups stay torch's own, so
`dist.get_backend`, subgroups, `split_group` and DeviceMesh are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ranktest import _torch_compat as compat


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        op: name in logs.
        reads: argument that the backend reads ("" if none).
        writes: argument that the backend writes ("" if none).
        rooted: which side only the root (`root_rank`) has: "reads" for broadcast and scatter, "writes" for reduce and
            gather, "" if all ranks do the same.
    """

    op: str
    reads: str
    writes: str
    rooted: str = ""


OPERATORS = {
    "allreduce_": Operator("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": Operator("all_reduce", "tensors", "tensors"),
    "allgather_": Operator("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": Operator("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": Operator("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": Operator("all_gather", "inputs", "outputs"),
    "reduce_scatter_": Operator("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": Operator("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", "inputs", "outputs"),
    "alltoall_": Operator("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": Operator("all_to_all", "input", "output"),
    "broadcast_": Operator("broadcast", "tensors", "tensors", rooted="either"),
    "reduce_": Operator("reduce", "tensors", "tensors", rooted="writes"),
    "gather_": Operator("gather", "input_tensors", "output_tensors", rooted="writes"),
    "gather_into_tensor_": Operator("gather", "input_tensor", "output_tensor", rooted="writes"),  # from torch 2.15 on
    "scatter_": Operator("scatter", "input_tensors", "output_tensors", rooted="reads"),
    "send": Operator("send", "tensors", ""),
    "recv_": Operator("recv", "", "tensors"),
    "recv_any_source_": Operator("recv", "", "tensors"),
    "barrier": Operator("barrier", "", ""),
    "monitored_barrier_": Operator("barrier", "", ""),
}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def num_bytes(value: Any) -> int:
    """Bytes of all tensors of an argument."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


@dataclass
class Call:
    """One call of a collective on this rank: the operator and its arguments by name."""

    name: str
    arguments: dict[str, Any]
    group: Any
    device: torch.device

    def __post_init__(self) -> None:
        self.operator: Operator = OPERATORS[self.name]
        self.op = self.operator.op
        self.rank, self.size = int(self.group.rank()), int(self.group.size())  # in the group
        self.is_root = bool(self.arguments.get("root_rank") == self.rank)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The group's ranks as numbered in the default group."""
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except (KeyError, ValueError, RuntimeError):
            return tuple(range(self.size))

    def reads(self) -> list[torch.Tensor]:
        """Tensors that the backend reads on this rank: none on the receivers of a broadcast."""
        skipped = self.operator.rooted in ("either", "reads") and not self.is_root
        return [] if skipped else list(tensors_in(self.arguments.get(self.operator.reads)))

    def writes(self) -> list[torch.Tensor]:
        """Tensors that the backend writes on this rank: none on the root of a broadcast."""
        skipped = self.is_root if self.operator.rooted == "either" else not self.is_root
        skipped = skipped and self.operator.rooted in ("either", "writes")
        return [] if skipped else list(tensors_in(self.arguments.get(self.operator.writes)))


Execute = Callable[[dict[str, Any]], Any]


class Listener(Protocol):
    """Sees every call; may replace how it is executed."""

    def around(self, call: Call, execute: Execute) -> Any:
        """Run `execute(call.arguments)` (or with other arguments) and return what a kernel returns."""


_listeners: list[Listener] = []
_registrations: list[Any] = []


def add(listener: Listener) -> None:
    """Put a listener around the ones already there."""
    _listeners.append(listener)


def remove(listener: Listener) -> None:
    """Take a listener away."""
    _listeners[:] = [other for other in _listeners if other is not listener]


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep the calls inside the block from all listeners."""
    saved = list(_listeners)
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = saved


def unseen(name: str, arguments: dict[str, Any], device: torch.device) -> Any:
    """Call an operator's own kernel past all listeners, with arguments by name."""
    return _executor(name, compat.collective_schemas()[name], compat.keyset_of(device))(arguments)


def install() -> None:
    """Register our kernels, once per process.

    Raises:
        RuntimeError: this torch has a collective that the table does not know, so it would go unseen.
    """
    if _registrations:
        return
    schemas = compat.collective_schemas()
    unknown = sorted(set(schemas) - set(OPERATORS))
    if unknown:
        raise RuntimeError(f"torch {torch.__version__} has collectives that ranktest does not know: {unknown}")
    for name, argument_names in schemas.items():
        _registrations.append(compat.put_before_backends(name, _kernel(name, argument_names)))


def _kernel(name: str, argument_names: list[str]) -> Callable[..., Any]:
    def intercepted(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**compat.schema_defaults(name), **dict(zip(argument_names, args, strict=False)), **kwargs}
        execute = _executor(name, argument_names, keyset)
        device = next((tensor.device for value in arguments.values() for tensor in tensors_in(value)), None)
        if not _listeners or device is None or device.type == "meta":
            return execute(arguments)
        call = Call(name, arguments, compat.unbox_group(arguments["process_group"]), device)
        run: Execute = execute
        for listener in _listeners:
            run = _around(listener, call, run)
        return run(arguments)

    return intercepted


def _executor(name: str, argument_names: list[str], keyset: Any) -> Execute:
    defaults = compat.schema_defaults(name)

    def execute(arguments: dict[str, Any]) -> Any:
        filled = {**defaults, **arguments}
        return compat.go_on(name, keyset, *(filled[argument] for argument in argument_names))

    return execute


def _around(listener: Listener, call: Call, execute: Execute) -> Execute:
    def run(arguments: dict[str, Any]) -> Any:
        call.arguments = arguments
        return listener.around(call, execute)

    return run
