"""Standing between `ProcessGroup` and its backend.

Every collective of every group, whoever issues it (Python, DDP's C++ reducer, functional collectives, custom
operators, DCP), goes through one operator of torch's `c10d` namespace. `install` registers a kernel before each of
them: it describes the call, lets the listeners see it, and goes on to torch's own kernel. Groups stay torch's own, so
`dist.get_backend`, subgroups, `split_group` and DeviceMesh are untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ranktest import _torch_compat as compat

#: c10d operator -> the name used in logs
CANONICAL = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
    "gather_": "gather",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}


@dataclass
class Call:
    """One call of a collective on this rank: the operator and its arguments by name."""

    operator: str
    arguments: dict[str, Any]
    group: Any
    device_key: str

    @property
    def op(self) -> str:
        """Canonical name."""
        return CANONICAL[self.operator]

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return int(self.group.size())

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The group's ranks in the default group."""
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except (KeyError, ValueError, RuntimeError):
            return tuple(range(self.size))

    @property
    def async_op(self) -> bool:
        """Whether the caller asked for a handle. Point-to-point calls always return one."""
        return bool(self.arguments.get("async_op", self.op in ("send", "recv")))


Execute = Callable[[dict[str, Any]], Any]


class Listener(Protocol):
    """Sees every call; may replace how it is executed."""

    def around(self, call: Call, execute: Execute) -> Any:
        """Run `execute(call.arguments)` (or with other arguments) and return what a kernel returns."""


_listeners: list[Listener] = []
_installed: Any = None


def add(listener: Listener) -> None:
    """Put a listener in front of the ones already there."""
    _listeners.append(listener)


def remove(listener: Listener) -> None:
    """Take a listener away."""
    _listeners[:] = [other for other in _listeners if other is not listener]


def install() -> None:
    """Register our kernels, once per process."""
    global _installed
    if _installed is not None:
        return
    schemas = compat.collective_schemas()
    unknown = sorted(set(schemas) - set(CANONICAL))
    if unknown:
        raise RuntimeError(
            f"torch {torch.__version__} has collectives ranktest does not know, and would miss: {unknown}"
        )
    library = torch.library.Library(compat.NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that kernels are overridden: that is the point
        for name, argument_names in schemas.items():
            for key in ("CPU", "CUDA"):
                if compat.has_kernel(name, key):
                    library.impl(name, _kernel(name, argument_names, key), key)
    _installed = library


def _kernel(name: str, argument_names: list[str], key: str) -> Callable[..., Any]:
    original = compat.kernel_of(name, key)
    defaults = compat.schema_defaults(name)

    def execute(arguments: dict[str, Any]) -> Any:
        return original(*(arguments[argument] for argument in argument_names))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(argument_names, args, strict=False)), **kwargs}
        call = Call(name, arguments, compat.unbox_group(arguments["process_group"]), key)
        run = execute
        for listener in _listeners:
            run = _bind(listener, call, run)
        return run(arguments)

    return kernel


def _bind(listener: Listener, call: Call, execute: Execute) -> Execute:
    def run(arguments: dict[str, Any]) -> Any:
        call.arguments = arguments
        return listener.around(call, execute)

    return run


@contextmanager
def unobserved() -> Iterator[None]:
    """Calls inside the block reach no listener."""
    saved = list(_listeners)
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = saved
