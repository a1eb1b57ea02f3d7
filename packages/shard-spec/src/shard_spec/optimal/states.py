"""Layouts of activations along one mesh axis, what operations read and write, and the cost of moving.

An activation of ``[batch, sequence, channels]`` is, along each axis of the mesh, in one *state*:

- ``b``: cut along the batch; ``s``: cut along the sequence; ``h``: cut along channels (heads, hidden units,
vocabulary); - ``r``: the same on every rank; - ``p``: partial sums, still to be added.

An operation takes one *way* along each axis: which state it reads and writes, and how it keeps its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shard_spec.estimate.cost import CostModel
from shard_spec.estimate.topology import Link

CUT = "bsh"


@dataclass(frozen=True)
class Strategy:
    """Strategy of one operation along one axis.

    Attributes:
        name: as in `OptimalityBound.choices`.
        reads: state of its input.
        writes: state of its output.
        weight: ``"-"`` none or whole, ``"fsdp"`` rows stored cut and gathered when needed, ``"column"`` or ``"row"``.
        reads_grad: state in which backward produces the input's gradient (``p`` for a column).
        writes_grad: state in which backward needs the output's gradient (``r`` for a row).
    """

    name: str
    reads: str
    writes: str
    weight: str = "-"
    reads_grad: str = ""
    writes_grad: str = ""

    @property
    def gradient_in(self) -> str:
        """State of the input's gradient."""
        return self.reads_grad or self.reads

    @property
    def gradient_out(self) -> str:
        """State of the output's gradient."""
        return self.writes_grad or self.writes

    @property
    def divides_work(self) -> bool:
        """True if each rank does only its share of the operations."""
        return self.reads in CUT or self.writes in CUT or self.weight in ("column", "row")

    @property
    def sums_weight_gradient(self) -> bool:
        """True if ranks see different tokens with one weight, so that its gradient has to be summed over them."""
        return self.reads in "bs"


_TOKENS = (
    Strategy("batch", "b", "b"),
    Strategy("batch+fsdp", "b", "b", "fsdp"),
    Strategy("sequence", "s", "s"),
    Strategy("sequence+fsdp", "s", "s", "fsdp"),
)
_WHOLE = Strategy("whole", "r", "r")

STREAM = (Strategy("batch", "b", "b"), Strategy("sequence", "s", "s"), _WHOLE)
COLUMN = (*_TOKENS, Strategy("column", "r", "h", "column", reads_grad="p"), _WHOLE)
ATTENTION = (Strategy("batch", "b", "b"), Strategy("heads", "h", "h"), _WHOLE)
ROW = (*_TOKENS, Strategy("row", "h", "p", "row", writes_grad="r"), _WHOLE)
TABLE = (*_TOKENS, Strategy("vocabulary", "r", "p", "row", writes_grad="r"), _WHOLE)
APART = (
    Strategy("batch", "b", "b"),
    Strategy("batch+fsdp", "b", "b", "fsdp"),
    Strategy("fsdp", "r", "r", "fsdp"),
    _WHOLE,
)


def cuts(states: Sequence[str], sizes: Sequence[int]) -> int:
    """Into how many pieces an activation with `states` is cut."""
    return math.prod(size for state, size in zip(states, sizes, strict=True) if state in CUT)


def moving(
    before: Sequence[str], after: Sequence[str], num_bytes: float, links: Sequence[Link], model: CostModel
) -> float:
    """Seconds to bring an activation of `num_bytes` (all of it) from one layout to another, axis after axis."""
    sizes = [link.size for link in links]
    seconds = 0.0
    now = list(before)
    for axis, (old, new, link) in enumerate(zip(before, after, links, strict=True)):
        others = cuts(now[:axis] + now[axis + 1 :], sizes[:axis] + sizes[axis + 1 :])
        seconds += _moving_along(old, new, num_bytes / others, link, model)
        now[axis] = new
    return seconds


def _moving_along(old: str, new: str, num_bytes: float, link: Link, model: CostModel) -> float:
    """Along one axis; `num_bytes` is what the group holds altogether."""
    if old == new or (old == "r" and new in CUT):
        return 0.0  # nothing, or each rank keeps its piece of what it has
    if old == "p":
        return model.all_reduce(num_bytes, link) if new == "r" else model.reduce_scatter(num_bytes, link)
    if new == "r":
        return model.all_gather(num_bytes, link)
    assert old in CUT, (old, new)
    assert new in CUT, (old, new)
    return model.all_to_all(num_bytes / link.size, link)
