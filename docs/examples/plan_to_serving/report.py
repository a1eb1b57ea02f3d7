"""The job's report: one self-contained HTML page with plots."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-top: 1px solid #d0d7de; padding-top: 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid #eaeef2 }
td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f8fa; padding: 1rem; overflow-x: auto; font-size: 13px; line-height: 1.35 }
td:first-child { min-width: 13rem }
svg { max-width: 100%; height: auto; background: #fff } p.note { color: #57606a }
.scroll { overflow-x: auto } .verdict { font-size: 1.15rem }
@media (prefers-color-scheme: dark) { body { background: #14181f; color: #dfe5ee } pre { background: #1b212b }
  h2, td, th { border-color: #333c4a } p.note { color: #98a3b5 } }
"""
PIECES = ("#9cc7f7", "#f7c59c", "#b4dfb5", "#dcb8ec")


@dataclass
class Report:
    """Sections of the page, in the order in which they were added."""

    title: str
    subtitle: str
    verdict: str  # the first sentence: whether all that was compared holds
    sections: list[str] = field(default_factory=list)

    def text(self, heading: str, body: str, note: str = "") -> None:
        self._section(heading, f"<pre>{html.escape(body)}</pre>", note)

    def table(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> None:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
        body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
        self._section(heading, f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>', note)

    def picture(self, heading: str, figure: Any, note: str = "") -> None:
        """A matplotlib figure, inlined as SVG."""
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight")
        self._section(heading, buffer.getvalue()[buffer.getvalue().index("<svg") :], note)

    def markup(self, heading: str, fragment: str, note: str = "") -> None:
        """A fragment of HTML or SVG made by one of the packages."""
        self._section(heading, fragment, note)

    def _section(self, heading: str, body: str, note: str) -> None:
        remark = f'<p class="note">{html.escape(note)}</p>' if note else ""
        self.sections.append(f"<h2>{html.escape(heading)}</h2>{remark}{body}")

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "index.html"
        view = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        head = f"<meta charset='utf-8'>{view}<title>{html.escape(self.title)}</title><style>{STYLE}</style>"
        body = (
            f"<h1>{html.escape(self.title)}</h1><p class='note'>{html.escape(self.subtitle)}</p>"
            f"<p class='verdict'>{html.escape(self.verdict)}</p>" + "".join(self.sections)
        )
        page.write_text(f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>")
        return page


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td class="n">{value:,}</td>' if isinstance(value, int) else f'<td class="n">{value:.4g}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def loss_curves(curves: dict[str, Sequence[float]]) -> Any:
    """Loss over steps, all runs in one picture; markers make curves that lie on each other visible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    for number, (name, losses) in enumerate(curves.items()):
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            label=name,
            marker="o^sDv"[number % 5],
            markevery=(number, 5),
            markersize=5,
            linewidth=1.2,
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def memory_bars(measured: dict[str, dict[str, int]], predicted: dict[str, dict[str, int]]) -> Any:
    """Static memory per rank, measured beside predicted, stacked by what holds it; both: label -> kind -> bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5))
    axes = figure.subplots()
    kinds = ["parameters", "gradients", "optimizer"]
    for position, (label, sizes) in enumerate(predicted.items()):
        for shift, values, alpha in ((-0.2, sizes, 0.5), (0.2, measured[label], 1.0)):
            bottom = 0.0
            for kind, colour in zip(kinds, ("#0969da", "#bf8700", "#1a7f37"), strict=True):
                height = values[kind] / 2**20
                axes.bar(position + shift, height, 0.36, bottom, color=colour, alpha=alpha)
                bottom += height
    axes.set_xticks(range(len(predicted)), list(predicted))
    axes.set_ylabel("MiB: left predicted, right measured")
    axes.legend(kinds, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def traffic_bars(lines: Sequence[Any]) -> Any:
    """KiB that a rank sends for each run, stacked by collective and axis; `lines` are `traffic.Line`s."""
    from matplotlib.figure import Figure

    runs = list(dict.fromkeys(line.run for line in lines))
    kinds = list(dict.fromkeys(f"{line.op}, {line.what}" for line in lines))
    figure = Figure(figsize=(9, 0.5 * len(runs) + 1.5))
    axes = figure.subplots()
    left = dict.fromkeys(runs, 0.0)
    for number, kind in enumerate(kinds):
        for line in lines:
            if f"{line.op}, {line.what}" == kind:
                size = line.sent_bytes / 2**10
                axes.barh(runs.index(line.run), size, 0.6, left[line.run], color=f"C{number}")
                left[line.run] += size
    for number, kind in enumerate(kinds):
        axes.barh(0, 0, color=f"C{number}", label=kind)
    axes.set_yticks(range(len(runs)), runs)
    axes.set_xlabel("KiB")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def coverage_bars(claims: Sequence[Any]) -> Any:
    """Compared values of each claim, its greatest difference and its limit; `claims` are `compare.Comparison`s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.35 * len(claims) + 1))
    counts, differences = figure.subplots(1, 2, sharey=True)
    counts.barh(range(len(claims)), [claim.num_values for claim in claims], color="#0969da")
    counts.set_xscale("log")
    counts.set_xlabel("compared values")
    counts.set_yticks(range(len(claims)), [claim.what for claim in claims], fontsize=8)
    counts.invert_yaxis()
    for row, claim in enumerate(claims):
        # Equal bits have no place on a logarithmic axis: they are drawn at its left end, with their word.
        if claim.greatest > 0:
            differences.plot([claim.greatest, claim.limit], [row, row], color="#57606a", linewidth=1)
            differences.plot(claim.greatest, row, "o", color="#1a7f37")
            differences.plot(claim.limit, row, "|", color="#cf222e", markersize=12)
        else:
            differences.annotate("equal", (0.02, row), xycoords=("axes fraction", "data"), fontsize=8, va="center")
    differences.set_xscale("log")
    differences.set_xlabel("greatest difference (dot) and its limit (bar)")
    for axes in (counts, differences):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def step_times(seconds: dict[str, Sequence[float]]) -> Any:
    """Distribution of step times per run, the first three steps (tracing, buckets, allocation) left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3))
    axes = figure.subplots()
    axes.boxplot(
        [[1e3 * s for s in times[3:]] for times in seconds.values()], orientation="horizontal", showfliers=False
    )
    axes.set_yticks(range(1, len(seconds) + 1), list(seconds))
    axes.set_xlabel("ms per step on this machine")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plan_picture(layouts: dict[str, tuple[Any, tuple[int, ...]]], num_ranks: int) -> Any:
    """Parameters x ranks: each cell says which rows and columns lie there; equal cells of a row have one colour.

    Repeated blocks are one row. `layouts`: FQN -> (shard_spec.Layout, global shape).
    """
    from matplotlib.figure import Figure

    rows: dict[str, list[str]] = {}
    for name, (layout, shape) in layouts.items():
        cells = [_box(layout.boxes(rank, shape), shape) for rank in range(num_ranks)]
        rows[re.sub(r"\.\d+\.", ".*.", name)] = cells
    figure = Figure(figsize=(9, 0.28 * len(rows) + 0.6))
    axes = figure.subplots()
    for row, cells in enumerate(rows.values()):
        kinds = list(dict.fromkeys(cells))
        for rank, cell in enumerate(cells):
            colour = (
                "#eaeef2" if len(kinds) == 1 else ("#9cc7f7", "#f7c59c", "#b4dfb5", "#dcb8ec")[kinds.index(cell) % 4]
            )
            axes.barh(row, 0.98, 0.9, rank - 0.49, color=colour)
            axes.text(rank, row, cell, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_xticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, num_ranks - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _box(boxes: Sequence[Any], shape: tuple[int, ...]) -> str:
    """`[0:64, :]` for each box that a rank holds."""
    texts = []
    for box in boxes:
        parts = [
            ":" if (s.start, s.stop) == (0, size) else f"{s.start}:{s.stop}"
            for s, size in zip(box.slices(), shape, strict=True)
        ]
        texts.append("full" if set(parts) == {":"} else f"[{', '.join(parts)}]")
    return " + ".join(texts) or "nothing"
