"""A step as one self-contained page: messages over time, memory over nodes, placement of every parameter."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from dp_partition._shared.page import cards, human_bytes, note, page, table
from dp_partition.analysis.analyze import StepAnalysis
from dp_partition.analysis.formatting import human_seconds, shortened
from dp_partition.analysis.pictures import memory_picture, placement_picture, placement_table, timeline_picture
from dp_partition.analysis.timeline import Link, Machine
from dp_partition.plan.plan import PartitionPlan

_MAX_MESSAGES = 400

_STYLE = """
.cards{display:flex;flex-wrap:wrap;gap:.4rem 2.2rem}.cards li{border:0;padding:0}.w{white-space:nowrap}
svg text{font:11px system-ui,sans-serif}svg text.small{font-size:10px;fill:#5a6475}
svg text.on{fill:#fff;font-size:10px;pointer-events:none}
.idle{stroke:#8a93a3;stroke-width:.7;stroke-dasharray:3 2;pointer-events:all}.own{stroke:#111;stroke-width:1}
@media(prefers-color-scheme:dark){svg text.small{fill:#98a3b5}.own{stroke:#fff}}
"""


def html_page(title: str, plan: PartitionPlan, rank: int, found: StepAnalysis, link: Link, machine: Machine) -> str:
    """The page as text; it loads nothing from anywhere.

    Args:
        title: Heading of the page.
        plan: Where everything lies.
        rank: The rank that numbers are of.
        found: What was read off its graph.
        link: The network that times are of.
        machine: The device that times are of.
    """
    parts = [
        note(_summary(plan, rank)),
        cards(_totals(found)),
        "<h2>A step over time</h2>",
        timeline_picture(found),
        note(_assumed(link, machine)),
        "<h2>Live memory over the nodes of the graph</h2>",
        memory_picture(found),
        "<h2>Placement of every parameter</h2>",
        placement_picture(plan, rank),
        "<h2>Parameters</h2>",
        placement_table(plan, rank, found.messages),
        "<h2>Collectives</h2>",
        _messages(found),
    ]
    return page(title, parts, _STYLE)


def write_page(
    path: str | os.PathLike[str],
    title: str,
    plan: PartitionPlan,
    rank: int,
    found: StepAnalysis,
    link: Link,
    machine: Machine,
) -> None:
    """Write the page to a file."""
    Path(path).write_text(html_page(title, plan, rank, found, link, machine), encoding="utf-8")


def _summary(plan: PartitionPlan, rank: int) -> str:
    numel = sum(param.info.num_bytes // param.info.dtype.itemsize for param in plan.params)
    return (
        f"{len(plan.params)} parameters, {numel:,} elements; {plan.style.name.lower()} over {plan.world} ranks, "
        f"{plan.semantics} semantics; numbers are of rank {rank}; plan {plan.digest[:12]}"
        + (f"; {plan.checks}" if plan.checks else "")
    )


def _totals(found: StepAnalysis) -> list[tuple[str, str]]:
    held, times = found.held, found.timeline
    sent = sum(message.sent_bytes for message in found.messages)
    return [
        (human_bytes(held.param_bytes), "parameters held"),
        (human_bytes(held.grad_bytes), "gradients, once reduced"),
        (human_bytes(held.state_bytes), "optimizer state held"),
        (human_bytes(found.memory.peak_bytes), "peak of live memory"),
        (f"{len(found.messages)}", "collectives"),
        (human_bytes(sent), "sent by the rank"),
        (human_seconds(times.seconds), "a step, as modelled"),
        (f"{times.overlap:.0%}", "of messages behind compute"),
    ]


def _assumed(link: Link, machine: Machine) -> str:
    return (
        f"Times are a model: the link does {link}; the device reaches {machine.tflops:g} TFLOP/s and "
        f"{machine.memory_gbs:g} GB/s of memory and needs {machine.launch_us:g} us for an operator. Bytes and order "
        "are those of the graph."
    )


def _messages(found: StepAnalysis) -> str:
    if not found.messages:
        return note("Nothing is sent.")
    rows = []
    for number, (message, span) in enumerate(zip(found.messages, found.timeline.messages, strict=True)):
        if number == _MAX_MESSAGES:
            break
        carried = f"{len(message.carries)}: {shortened(message.carries, 3)}" if message.carries else "–"
        rows.append(
            [
                str(number), escape(message.kind), escape(message.phase), escape(message.dtype),
                f"{message.whole_bytes:,}", f"{message.sent_bytes:,}", human_seconds(span.seconds),
                f"{message.issued} – {message.awaited}", f"<code>{escape(carried)}</code>",
            ]
        )  # fmt: skip
    head = ["", "kind", "in", "dtype", "full tensor", "sent bytes", "time", "nodes", "carries"]
    more = len(found.messages) - len(rows)
    return table(head, rows, (0, 4, 5, 6, 7)) + (note(f"{more} more are not shown.") if more else "")
