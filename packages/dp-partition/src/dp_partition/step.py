"""A train step that runs data-parallel, as its caller sees it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import fx

from dp_partition.link import Link, Machine
from dp_partition.messages import explain_messages, messages_of
from dp_partition.plain import unsharded
from dp_partition.plan import PartitionPlan
from dp_partition.runner import Runner
from dp_partition.shown import show_listing
from dp_partition.survey import survey


class Step:
    """A train step that runs data-parallel. Made by `compile`; call it like the function it was made from."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this rank's batch."""
        return self._runner.call(args, kwargs)

    @property
    def name(self) -> str:
        """Name of the function the step was made from."""
        return self._runner.name

    @property
    def num_traces(self) -> int:
        """How many times the function was traced: once for every new shape, mode or constant."""
        return self._runner.num_traces

    @property
    def num_compiled(self) -> int:
        """How many pieces of graphs inductor has compiled; 0 for the eager backend."""
        return self._runner.num_compiled

    @property
    def plan(self) -> PartitionPlan:
        """Where parameters, gradients and state lie; there after the first call."""
        return replace(self._runner.bound().plan, checks=self._runner.checks())

    @property
    def graph(self) -> fx.GraphModule:
        """The partitioned graph of the last call; ``print`` shows it with local shapes and node types."""
        if self._runner.latest is None:
            raise self._runner.not_started()
        module = self._runner.latest.with_local_values()
        module.recompile()
        return show_listing(module)

    def explain(self, name: str | None = None) -> str:
        """Text about one parameter, by its full name, or about all."""
        text = self.plan.explain(name)
        if name is None:
            program = self._runner.latest
            lowered = None if program is None else program.lowered
            return text if lowered is None else f"{text}\n{lowered.explain()}"
        messages = messages_of(self.graph.graph, self.plan.world)
        return "\n".join([text, *explain_messages(messages, self.plan[name].info.name)])

    def report(self, path: str | os.PathLike[str], link: Link | None = None, machine: Machine | None = None) -> None:
        """Write a page that loads nothing: messages over time, memory over nodes, placement of every parameter.

        Args:
            path: The file to write.
            link: The network that times are modelled for; default ``Link()``.
            machine: The device that times are modelled for; default ``Machine()``.
        """
        from dp_partition.report.page import write_page

        plan, chosen = self.plan, (link or Link(), machine or Machine())
        rank = self._runner.bound().rank
        write_page(path, self.name, plan, rank, survey(self.graph.graph, plan, rank, *chosen), *chosen)

    def unsharded(self, writeback: bool = True) -> AbstractContextManager[None]:
        """Within the block the model holds whole plain parameters, for eager code on every rank alike.

        The parameters are those of the block: optimizers and lists that are made of them are of no use afterwards, and
        say so. A step that shares another's parameters unshards the same ones.

        Args:
            writeback: Keep what the block writes into the parameters. A block within a block leaves that to the outer.
        """
        self._runner.bound()  # not before the first call
        return unsharded(self._runner.owner.bound(), writeback)

    def release(self) -> None:
        """Give model and optimizer back: plain whole parameters and state, for good. Not for a step that shares."""
        self._runner.release()


def runner_of(step: Step) -> Runner:
    """What stands behind a step, for the package's own tools."""
    return step._runner


__all__ = ["Step", "runner_of"]
