"""ForwardContext: what the sharded modules of one ``shard_module`` call know together while the model runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shard_spec._shared.problems import PlanError, Problem
from shard_spec.distributed.mesh_cache import GroupRef

if TYPE_CHECKING:
    from shard_spec.legacy.module_tracker import ModuleScan, ModuleTracker


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
        self._roster: ModuleTracker | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "_splits": {}, "_depth": 0, "scan": None, "_roster": None}

    def open(self, tracker: ModuleTracker, scan: ModuleScan) -> None:
        """Begin a forward of the root module, of which ``scan`` was found."""
        if self._depth == 0:
            self._splits = {}
            self.scan, self._roster = scan, tracker
        self._depth += 1

    def agreed(self) -> None:
        """All ranks found the same: see ``ModuleScan``."""
        if self.scan is not None and self.scan.open:
            assert self._roster is not None
            self._roster.adopt(self.scan)
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
