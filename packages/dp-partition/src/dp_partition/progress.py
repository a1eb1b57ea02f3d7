"""Progress of tracing and compiling, on one line of a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from dp_partition._torch_compat import TorchDispatchMode


class Progress:
    """A line that says which stage is running, how far it is and since when.

    Args:
        stream: Where to write; None: nowhere. What is no terminal gets one line for each stage that is done.
        every: Seconds between two updates of the line.
    """

    def __init__(self, stream: TextIO | None = None, every: float = 0.1) -> None:
        self.stream, self.every = stream, every
        self.live = stream is not None and stream.isatty()
        self.began = self.shown = time.perf_counter()
        self.name = ""

    def begin(self, name: str) -> None:
        """The stage before is done, and this one begins."""
        self.end()
        self.name, self.began = name, time.perf_counter()
        if self.live:
            self._write(f"{name} ...")

    def end(self) -> None:
        """The stage is done: its line says how long it took."""
        if self.name:
            self._write(f"{self.name}: {time.perf_counter() - self.began:.1f} s\n")
        self.name = ""

    def tell(self, done: int, total: int | None, what: str) -> None:
        """Show how far the stage is, at most every ``every`` seconds."""
        now = time.perf_counter()
        if not self.live or now - self.shown < self.every:
            return
        self.shown = now
        bar = ""
        if total:
            filled = 24 * done // total
            bar = f"[{'#' * filled}{'.' * (24 - filled)}] "
        of = f" of {total:,}" if total else ""
        self._write(f"{self.name} {bar}{done:,}{of} {what}, {now - self.began:.0f} s")

    def _write(self, text: str) -> None:
        if self.stream is not None:
            self.stream.write(f"\r\033[2K{text}" if self.live else text)
            self.stream.flush()


class _Counter(TorchDispatchMode):
    """Counts operators while a step is traced, so that there is something to show."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.progress, self.count = progress, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        self.progress.tell(self.count, None, "operators")
        return func(*args, **(kwargs or {}))


def counted(function: Callable[..., Any], progress: Progress) -> Callable[..., Any]:
    """The train step, telling how many operators it has run."""
    if progress.stream is None:
        return function

    def counting(*args: Any, **kwargs: Any) -> Any:
        with _Counter(progress):
            result = function(*args, **kwargs)
        progress.begin("partitioning")
        return result

    counting.__name__ = getattr(function, "__name__", "train_step")
    counting.__wrapped__ = function  # type: ignore[attr-defined]  # what inspect.signature follows
    return counting
