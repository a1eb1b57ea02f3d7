"""RemoteDevice: where a shard lies, ``"rank:3/cuda:0"``, as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from shard_spec._shared.problems import PlanError, Problem

_RANK = re.compile(r"rank:(\d+)\Z")


@dataclass(frozen=True, init=False, repr=False)
class RemoteDevice:
    """A device of one rank, in the words of torch's sharding specs.

    Written ``"rank:<global rank>/<device>"``, ``"<worker>/<device>"`` or ``"<device>"``; the device may be left out
    after a rank or a worker and is then ``cpu``. Ranks are ranks of the default group, as in torch.

    Args:
        remote_device: The text, a ``torch.device``, another ``RemoteDevice``, or torch's own remote device.

    Raises:
        PlanError: ``invalid-layout`` when it is none of these.
    """

    text: str

    def __init__(self, remote_device: DeviceLike) -> None:
        object.__setattr__(self, "text", _normal_text(remote_device))

    def __repr__(self) -> str:
        return f"RemoteDevice({self.text!r})"

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text,)

    def rank(self) -> int | None:
        """The global rank, or None where the text names a worker or only a device."""
        match = _RANK.match(self._owner)
        return int(match[1]) if match else None

    def worker_name(self) -> str | None:
        """The worker, or None where the text names a rank or only a device."""
        return None if not self._owner or _RANK.match(self._owner) else self._owner

    def device(self) -> torch.device:
        """The device on its rank or worker."""
        return torch.device(self.text.rpartition("/")[2])

    @property
    def _owner(self) -> str:
        return self.text.rpartition("/")[0]


# What stands for torch's remote device here: anything with its three methods, so that its class is not imported.
DeviceLike: TypeAlias = "str | torch.device | RemoteDevice | Any"


def _normal_text(given: object) -> str:
    if isinstance(given, RemoteDevice):
        return given.text
    if isinstance(given, torch.device):
        return str(given)
    if all(callable(getattr(given, name, None)) for name in ("rank", "worker_name", "device")):
        return _normal_text(str(given))
    if not isinstance(given, str):
        raise PlanError(_bad(given))
    owner, slash, device = given.rpartition("/")
    if not slash:
        return given if _is_device(given) else _with_owner(given, "cpu", given)
    return _with_owner(owner, device, given)


def _with_owner(owner: str, device: str, given: str) -> str:
    named_rank = _RANK.match(owner)
    if not owner or not _is_device(device) or "/" in owner or (":" in owner and not named_rank):
        raise PlanError(_bad(given))
    if named_rank:
        owner = f"rank:{int(named_rank[1])}"
    return f"{owner}/{torch.device(device)}"


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _bad(given: object) -> Problem:
    return Problem(
        "invalid-layout",
        found=repr(given),
        hint="write 'rank:0/cuda:0', 'rank:0', 'worker/cpu' or 'cuda:0', or give a torch.device",
    )
