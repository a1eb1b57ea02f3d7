"""A step as one self-contained page: messages over time, memory over nodes, placement of every parameter."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from dp_partition.link import Link, Machine
from dp_partition.plan import PartitionPlan
from dp_partition.report.over_time import memory_picture, timeline_picture
from dp_partition.report.placed import placement_picture, placement_table
from dp_partition.report.svg import html_table
from dp_partition.survey import Survey
from dp_partition.text import human_bytes, human_seconds, shortened

_MAX_MESSAGES = 400

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#1d2430;background:#fff}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem;border-bottom:1px solid #d8dde6}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top}
th{color:#5a6475;font-weight:600;white-space:nowrap}.n{text-align:right;font-variant-numeric:tabular-nums}
td.n,.w{white-space:nowrap}code{font-size:12px}
.facts{display:flex;flex-wrap:wrap;gap:.4rem 2.2rem;margin:1rem 0}.facts b{display:block;font-size:1.15rem}
.facts span{color:#5a6475;font-size:12px}
.key span{display:inline-block;width:12px;height:12px;margin:0 5px 0 16px;vertical-align:-1px;border-radius:2px}
.key span:first-child{margin-left:0}.note{color:#5a6475}.scroll{overflow-x:auto}
svg text{font:11px system-ui,sans-serif;fill:#1d2430}svg text.small{font-size:10px;fill:#5a6475}
svg text.on{fill:#fff;font-size:10px;pointer-events:none}
.axis{stroke:#9aa3b2;stroke-width:.5;stroke-opacity:.6}.mark{stroke:#a3212d;stroke-width:1;stroke-dasharray:3 2}
.idle{stroke:#8a93a3;stroke-width:.7;stroke-dasharray:3 2;pointer-events:all}.own{stroke:#111;stroke-width:1}
@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}svg text{fill:#dfe5ee}
th,.note,.facts span,svg text.small{color:#98a3b5;fill:#98a3b5}h2{border-color:#333c4a}.own{stroke:#fff}}
"""


def html_page(title: str, plan: PartitionPlan, rank: int, found: Survey, link: Link, machine: Machine) -> str:
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
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(_summary(plan, rank))}</p>',
        _facts(found),
        "<h2>A step over time</h2>",
        timeline_picture(found),
        f'<p class="note">{escape(_assumed(link, machine))}</p>',
        "<h2>Live memory over the nodes of the graph</h2>",
        memory_picture(found),
        "<h2>Who holds what</h2>",
        placement_picture(plan, rank),
        "<h2>Parameters</h2>",
        placement_table(plan, rank, found.messages),
        "<h2>Collectives</h2>",
        _messages(found),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang=en><head>{head}{view}</head>\n<body>\n{body}\n</body></html>\n"


def write_page(
    path: str | os.PathLike[str],
    title: str,
    plan: PartitionPlan,
    rank: int,
    found: Survey,
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


def _facts(found: Survey) -> str:
    held, times = found.held, found.timeline
    sent = sum(message.sent_bytes for message in found.messages)
    facts = [
        (human_bytes(held.param_bytes), "parameters held"),
        (human_bytes(held.grad_bytes), "gradients, once reduced"),
        (human_bytes(held.state_bytes), "optimizer state held"),
        (human_bytes(found.memory.peak_bytes), "peak of live memory"),
        (f"{len(found.messages)}", "collectives"),
        (human_bytes(sent), "sent by the rank"),
        (human_seconds(times.seconds), "a step, as modelled"),
        (f"{times.overlap:.0%}", "of messages behind compute"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in facts)
    return f'<div class="facts">{cells}</div>'


def _assumed(link: Link, machine: Machine) -> str:
    return (
        f"Times are a model: the link sends {link.gbps:g} Gbit/s and needs {link.us:g} us for a round of messages; the "
        f"device reaches {machine.tflops:g} TFLOP/s and {machine.memory_gbs:g} GB/s of memory and needs "
        f"{machine.launch_us:g} us for an operator. Bytes and order are those of the graph."
    )


def _messages(found: Survey) -> str:
    if not found.messages:
        return '<p class="note">Nothing is sent.</p>'
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
    head = ["", "kind", "in", "dtype", "whole tensor", "sent bytes", "time", "nodes", "carries"]
    more = len(found.messages) - len(rows)
    note = f'<p class="note">{more} more are not shown.</p>' if more else ""
    return html_table(head, rows, (0, 4, 5, 6, 7)) + note


__all__ = ["html_page", "write_page"]
