"""Report of a handle, as JSON or as one HTML page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from shard_spec._shared.page import note, page, table


def write_report(handle: Any, path: Path) -> Path:
    """Write the tensors and actions of ``handle`` to ``path``, and return it."""
    rows = [_row(placed) for placed in handle._placed]
    metadata = {
        "module": type(handle.module).__name__,
        "digest": handle.actions.digest,
        "actions": handle.actions.lines,
    }
    if path.suffix == ".json":
        path.write_text(json.dumps({**metadata, "tensors": rows}, indent=1) + "\n", encoding="utf-8")
    else:
        path.write_text(_page(metadata, rows), encoding="utf-8")
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


def _page(metadata: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            f"<code>{escape(' = '.join(row['names']))}</code>", escape(row["layout"]),
            str(row["global_shape"]), str(row["local_shape"]), f"{row['local_bytes']:,}",
        ]
        for row in rows
    ]  # fmt: skip
    lines = "".join(f"<li>{escape(line)}</li>" for line in metadata["actions"])
    parts = [
        note(f"Digest {metadata['digest']}"),
        "<h2>Sharded tensors</h2>",
        table(["tensor", "layout", "global shape", "local shape", "local bytes"], cells, numbers=[4]),
        f"<h2>Actions</h2><ol>{lines}</ol>",
    ]
    return page(f"Sharded {metadata['module']}", parts)
