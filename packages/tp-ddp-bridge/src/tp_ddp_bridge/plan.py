"""The plan of a bridge: the leaves that it makes, decided without touching the module."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from tp_ddp_bridge._shared.patterns import Pattern
from tp_ddp_bridge._shared.problems import Problem

FORMAT = 1


@dataclass(frozen=True)
class ViewEntry:
    """One leaf, the DTensor it is read as, and all its names.

    Attributes:
        names: FQNs; more than one for tied parameters.
        kind: ``"parameter"``, ``"buffer"``, or ``"local"`` for a parameter that was a local shard already and stays
            one.
        shape: Global shape.
        local_shape: Shape on this rank. Not part of the digest.
        placements: One text per mesh axis, as torch prints them.
        axes: Names of the mesh axes.
        mesh_shape: Ranks along each axis.
        dtype: Torch dtype as text.
        requires_grad: Whether it trains.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("a view entry needs at least one name")
        if not len(self.placements) == len(self.axes) == len(self.mesh_shape):
            raise ValueError(f"{self.names[0]}: one placement, one axis name and one size per mesh axis")

    def __str__(self) -> str:
        places = ", ".join(
            f"{axis}[{size}]={placement}"
            for axis, size, placement in zip(self.axes, self.mesh_shape, self.placements, strict=True)
        )
        tied = f"  (tied: {', '.join(self.names[1:])})" if len(self.names) > 1 else ""
        frozen = "" if self.requires_grad or self.kind == "buffer" else "  frozen"
        head = f"{self.names[0]}  {self.kind}  {self.dtype}"
        return f"{head}  global {self.shape} -> local {self.local_shape}  {places}{frozen}{tied}"


@dataclass(frozen=True)
class BridgePlan:
    """The leaves of a bridged module.

    Attributes:
        entries: One per DTensor parameter or buffer, in the module's order.
        plain: Names of the other parameters. The bridge takes them to be replicated on every tensor-parallel rank (see
            ``check_replicas``).
        problems: Everything that prevents the plan from being carried out.
    """

    entries: tuple[ViewEntry, ...]
    plain: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that is read as a DTensor."""
        return tuple(name for entry in self.entries if entry.kind != "local" for name in entry.names)

    @property
    def digest(self) -> str:
        """A hash that is equal on all ranks with the same plan."""
        content = [{**asdict(entry), "local_shape": None} for entry in self.entries]
        text = json.dumps([FORMAT, content, self.plain, [asdict(problem) for problem in self.problems]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self, name: str | None = None) -> str:
        """Return the plan as text, one leaf a line.

        Args:
            name: A FQN or a pattern (``"layers.*.weight"``, ``"**.bias"``); only the leaves with such a name.

        Raises:
            KeyError: No leaf has such a name.
        """
        if name is None:
            lines = [str(entry) for entry in self.entries]
            lines += [f"{plain}  parameter  plain: replicated on every tensor-parallel rank" for plain in self.plain]
            return "\n".join([*lines, *(str(problem) for problem in self.problems)])
        pattern = Pattern(name)
        lines = [str(entry) for entry in self.entries if any(map(pattern.matches, entry.names))]
        lines += [f"{plain}  plain" for plain in self.plain if pattern.matches(plain)]
        if not lines:
            known = ", ".join(self.names + self.plain) or "none"
            raise KeyError(f"{name!r} names no parameter of this plan; it has {known}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as JSON text with a format number."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        return self.explain()
