"""The report of a handle: what was done, as JSON or as one HTML page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.35rem .6rem;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:90%}"
)


def write_report(handle: Any, path: Path) -> Path:
    """Write what ``handle`` did to ``path`` and return it."""
    rows = [_row(placed) for placed in handle._placed]
    facts = {"module": type(handle.module).__name__, "digest": handle.actions.digest, "actions": handle.actions.lines}
    if path.suffix == ".json":
        path.write_text(json.dumps({**facts, "tensors": rows}, indent=1) + "\n", encoding="utf-8")
    else:
        path.write_text(_page(facts, rows), encoding="utf-8")
    return path


def _row(placed: Any) -> dict[str, Any]:
    local = placed.value.to_local() if hasattr(placed.value, "to_local") else placed.value
    return {
        "names": [fqn for _, _, fqn in placed.places],
        "layout": str(placed.layout),
        "ranks": list(placed.layout.mesh.ranks),
        "global_shape": list(placed.shape),
        "local_shape": list(local.shape),
        "local_bytes": local.numel() * local.element_size(),
    }


def _page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    title = html.escape(f"Sharded {facts['module']}")
    head = "".join(f"<th>{text}</th>" for text in ("tensor", "layout", "global shape", "local shape", "local bytes"))
    body = "".join(
        f"<tr><td><code>{html.escape(' = '.join(row['names']))}</code></td><td>{html.escape(row['layout'])}</td>"
        f"<td>{row['global_shape']}</td><td>{row['local_shape']}</td><td class=n>{row['local_bytes']:,}</td></tr>"
        for row in rows
    )
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in facts["actions"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Digest <code>{facts['digest']}</code></p>"
        f"<h2>Sharded tensors</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<h2>What was done</h2><ol>{lines}</ol></html>\n"
    )
