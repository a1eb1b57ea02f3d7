"""An end of a sync between jobs. It leaves the group after a failed exchange, so that its peers fail as well."""

from __future__ import annotations

import gc
from typing import Any

from shard_reshard._torch_compat import unregister_group
from shard_reshard.execution.mover import memo
from shard_reshard.state_dict.resharder import StateDictResharder


class SyncEnd:
    """An engine with a resharder, which it drops with its group after an error."""

    resharder: StateDictResharder | None = None

    def exchange(self, *given: Any, **options: Any) -> None:
        """Call the resharder.

        Raises:
            RuntimeError: A peer died. gloo tells the neighbours of a dead rank alone; the others would wait for these
                until the timeout, but fail once the last reference to the group is gone, and its connections with it.
        """
        assert self.resharder is not None
        failure = ""  # the text alone: an error's traceback holds the group
        try:
            self.resharder(*given, **options)
        except RuntimeError as error:
            failure = str(error)
        if failure:
            memo.pop(self.resharder._members.group, None)
            unregister_group(self.resharder._members.group)
            self.resharder = None
            gc.collect()  # movers and their transposed ones hold each other, and the group
            raise RuntimeError(f"{failure}; this end has left the group, initialize it again")
