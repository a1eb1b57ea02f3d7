"""ModuleTracker: modules and parameters of a sharded module, scanned at each forward of the root.

What was added after the call was not compared: its values may differ between the ranks, and its gradients are not
summed. It is adopted once all ranks have the same: ``all_gather_input_metadata`` compares ``ModuleScan.checksum``.

`ForwardContext` is what the sharded modules of one ``shard_module`` call share while the model runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shard_spec import _torch_compat
from shard_spec._shared.problems import PlanError, Problem
from shard_spec.apply.gradients import SumGradient, summed_over, sums_over
from shard_spec.apply.tensors import is_sharded, replica_problems
from shard_spec.distributed.exchange import fingerprint
from shard_spec.distributed.mesh_cache import GroupRef, RankState


@dataclass
class TrackedModule:
    """One module, as it was when the ranks last agreed.

    Attributes:
        module: The module itself.
        kinds: For each of its own parameters: ``"shard"``, ``"whole"`` (its gradient is summed) or ``"other"``.
        buffers: Names of its own buffers.
    """

    module: nn.Module
    kinds: dict[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleScan:
    """Result of one scan of the module.

    Attributes:
        checksum: A number that is equal on ranks whose modules are alike.
        lines: The same as text.
        untracked: What the ranks have not agreed on yet: the module, the name, and ``"whole"`` or ``"buffer"``.
        problems: What cannot be right on any rank.
    """

    checksum: int
    lines: tuple[str, ...]
    untracked: tuple[tuple[nn.Module, str, str], ...]
    problems: tuple[Problem, ...]

    @property
    def open(self) -> bool:
        """True if the ranks have something to agree on."""
        return bool(self.untracked or self.problems)

    @property
    def outcome(self) -> RankState:
        """Header that the ranks compare where their checksums differ."""
        return RankState(self.lines, self.problems)


class ModuleTracker:
    """The members of one sharded module, and the gradient hooks on those that are whole.

    Copies of a module and parameters that start to need a gradient later get their hooks at the next look. So do
    parameters that were swapped with others, as ``module.to()`` does under
    ``torch.__future__.set_swap_module_params_on_conversion``: their hooks are listed still and run no more.
    """

    def __init__(self, group: GroupRef, root: nn.Module, names: tuple[str, ...], *, everything: bool) -> None:
        """Take in ``root`` as it is.

        Args:
            group: The ranks.
            root: The module.
            names: FQNs of the parameters that are whole.
            everything: Whether the call decided about all of ``root``; else only about its shards and ``names``.
        """
        self.group = group
        self.everything = everything
        replicas = dict(root.named_parameters(remove_duplicate=False))
        summed = {id(replicas[name]) for name in names}
        self._members = [
            TrackedModule(each, {name: _kind(p, summed) for name, p in _own(each)}, tuple(each._buffers))
            for _, each in _walk(root)
        ]
        self._by_id: dict[int, TrackedModule] = {}
        self._seen: dict[tuple[int, str], int] = {}
        self._handles: list[Any] = []
        self._hooked: dict[int, int] = {}  # by the parameter's id, the address of what was hooked
        self._summed = 0  # checksum of the gradients summed since the last scan, in their order

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_id": {}, "_seen": {}, "_handles": [], "_hooked": {}, "_summed": 0}

    def scan(self, root: nn.Module) -> ModuleScan:
        """Look through ``root``; members that need their gradient hook get it. Sends nothing."""
        first = not self._by_id  # a new tracker, or a copy
        if first:
            self._by_id = {id(member.module): member for member in self._members}
        # Sums of gradients that are not of one parameter, where ranks took other branches, mix them without an error.
        lines = [f"gradients summed since the last forward: {self._summed:08x}"]
        self._summed = 0
        untracked: list[tuple[nn.Module, str, str]] = []
        problems: list[Problem] = []
        for path, module in _walk(root):
            member = self._by_id.get(id(module))
            for name, parameter in _own(module):
                kind = member.kinds.get(name, "") if member else ""
                fqn, plain = path + name, not is_sharded(parameter)
                line = f"{fqn}: {str(parameter.dtype).removeprefix('torch.')}, {_state(parameter, plain)}"
                if kind == "shard" and plain:
                    hint = "undo() first, or put the sharded parameter back"
                    problems.append(Problem("not-sharded", fqn, found="it was sharded, and is full now", hint=hint))
                elif plain and self._is_new(module, name, kind, parameter, first):
                    untracked.append((module, name, "whole"))
                    problems += replica_problems([module], fqn)
                    line += f", new, with values {fingerprint(parameter)}"
                elif plain and kind == "whole":
                    self._hook(parameter, fqn)
                if self.everything or kind in ("shard", "whole"):
                    lines.append(line)
            if self.everything and tuple(module._buffers) != (member.buffers if member else ()):
                known = member.buffers if member else ()
                for name, buffer in module._buffers.items():
                    saved = name not in module._non_persistent_buffers_set  # others are what a forward keeps for itself
                    if buffer is not None and name not in known and saved and not is_sharded(buffer):
                        untracked.append((module, name, "buffer"))
                        lines.append(f"{path}{name}: new, with values {fingerprint(buffer)}")
        checksum = 1 << 32 | zlib.crc32("\n".join(lines).encode())
        return ModuleScan(checksum, tuple(lines), tuple(untracked), tuple(problems))

    def adopt(self, scan: ModuleScan) -> None:
        """All ranks have the same: untracked are members, and their gradients are summed from now on."""
        for module, name, kind in scan.untracked:
            member = self._by_id.get(id(module))
            if member is None:
                member = self._by_id[id(module)] = TrackedModule(module)
                self._members.append(member)
            if kind == "buffer":
                member.buffers = tuple(module._buffers)
                continue
            parameter = module._parameters[name]
            assert parameter is not None
            member.kinds[name] = kind
            self._seen[id(module), name] = id(parameter)
            self._hook(parameter, name)

    def remove(self) -> None:
        """Take the hooks away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_new(self, module: nn.Module, name: str, kind: str, parameter: nn.Parameter, first: bool) -> bool:
        """Return whether the ranks never compared this parameter."""
        if not kind:
            return self.everything and not _managed_elsewhere(parameter, self.group)
        if kind != "whole":
            return False
        if first:
            self._seen[id(module), name] = id(parameter)
        return self.everything and self._seen.get((id(module), name)) != id(parameter)

    def _note(self, name: str) -> None:
        self._summed = zlib.crc32(name.encode(), self._summed)

    def _hook(self, parameter: nn.Parameter, name: str) -> None:
        if not parameter.requires_grad:
            return
        if not sums_over(parameter, self.group.group):
            hook = SumGradient(self.group, partial(self._note, name))
            self._handles.append(parameter.register_hook(hook))
        elif self._hooked.get(id(parameter)) != parameter._cdata:
            _torch_compat.revive_hooks(parameter)
        self._hooked[id(parameter)] = parameter._cdata


def _managed_elsewhere(parameter: nn.Parameter, group: GroupRef) -> bool:
    """Return whether another call of ``shard_module``, over other ranks, sums the gradient of this parameter."""
    return any(each.group is not group.group for each in summed_over(parameter))


def _kind(parameter: nn.Parameter, summed: set[int]) -> str:
    if isinstance(parameter, DTensor):
        return "shard"
    return "whole" if id(parameter) in summed else "other"


def _state(parameter: nn.Parameter, plain: bool) -> str:
    return ("whole" if plain else "a shard") + ("" if parameter.requires_grad else ", frozen")


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in module._parameters.items() if each is not None)


def _walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with the beginning of its tensors' FQNs, in the order of the module."""
    stack, seen = [("", root)], {id(root)}
    while stack:
        path, module = stack.pop()
        yield path, module
        for name, child in reversed(module._modules.items()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append((f"{path}{name}.", child))


class ForwardContext:
    """Rows that each rank passed, to find this rank's rows again in a sharded output.

    A DTensor knows its total number of rows, not who passed how many. The root module opens a frame for each of its
    forwards; what is noted inside is kept until the next one opens, for recomputation in backward. A submodule that is
    called on its own (no frame) keeps the last split of a total only.
    """

    def __init__(self, group: GroupRef) -> None:
        self.group = group
        self._splits: dict[int, list[tuple[int, ...]]] = {}
        self._depth = 0
        self.scan: ModuleScan | None = None
        self._tracker: ModuleTracker | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "_splits": {}, "_depth": 0, "scan": None, "_tracker": None}

    def open(self, tracker: ModuleTracker, scan: ModuleScan) -> None:
        """Begin a forward of the root module, of which ``scan`` was found."""
        if self._depth == 0:
            self._splits = {}
            self.scan, self._tracker = scan, tracker
        self._depth += 1

    def agreed(self) -> None:
        """All ranks found the same: see ``ModuleScan``."""
        if self.scan is not None and self.scan.open:
            assert self._tracker is not None
            self._tracker.adopt(self.scan)
            self.scan = replace(self.scan, untracked=())

    def close(self) -> None:
        """End a forward of the root module."""
        self._depth = max(0, self._depth - 1)

    def note(self, rows: tuple[int, ...]) -> None:
        """Remember that the ranks passed ``rows``; every rank notes the same."""
        splits = self._splits.setdefault(sum(rows), [])
        if not self._depth:
            splits.clear()
        if rows not in splits:
            splits.append(rows)

    def rows(self, total: int, name: str) -> tuple[int, ...]:
        """Return each rank's share of ``total`` rows that entered the sharded modules before ``name``.

        Raises:
            PlanError: On every rank: ``invalid-layout`` when no sharded module saw a batch of so many rows,
                ``invalid-layout`` when several did and the ranks' shares differ.
        """
        splits = self._splits.get(total, [])
        if len(splits) == 1:
            return splits[0]
        if splits:
            hint = "pass local batches that split alike to all sharded modules, or of different total size"
            found = f"{total} rows came as {list(splits[0])} and, in the same forward, as {list(splits[1])}"
            raise PlanError(Problem("invalid-layout", name, found=found, hint=hint))
        found = f"an output of {total} rows; the sharded modules saw batches of {sorted(self._splits)} rows"
        hint = "return_local_tensor needs an output with one row for each row of the concatenated batch"
        raise PlanError(Problem("invalid-layout", name, found=found, hint=hint))
