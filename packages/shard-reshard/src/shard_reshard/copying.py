"""What becomes of an object that belongs to a process group when it is copied or pickled."""

from __future__ import annotations

from typing import Any, NoReturn


class StaysHere:
    """An object that is neither copied nor pickled, and says what to do instead."""

    _instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a copy would share the collectives of this object, or have none.

        Raises:
            TypeError: Always.
        """
        kind = type(self).__name__
        raise TypeError(f"a {kind} belongs to a process group of this process and is not copied: {self._instead}")
