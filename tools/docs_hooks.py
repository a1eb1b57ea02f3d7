"""Hooks of the site: a page for each notebook, and no marks that only a repository needs, such as Sphinx roles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROLE = re.compile(r":(?:meth|class|func|attr|mod|data|exc|obj):(?=<code>|<a )")
MORE = re.compile(r"<p>Where next: <code>docs/.*?repository\.</p>", re.DOTALL)  # a README's link to its own page


def notebook_page(notebook: str) -> str:
    """Return a notebook as Markdown: texts, code and printed output."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(out.get("text", "")) for out in cell["outputs"] if out.get("name") == "stdout")
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, *, config: Any) -> Any:
    """Called by mkdocs: add a page for each notebook, and links to edit a page where `REPO` is set."""
    config.edit_uri = "edit/main/docs/" if config.repo_url else None
    from mkdocs.structure.files import File  # type: ignore[import-not-found]  # the docs session has it

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = Path(file.src_uri).name
        text = notebook_page(Path(file.abs_src_path).read_text()) + f"\nAs a notebook: [{name}]({name}).\n"
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs: links to a notebook lead to its page."""
    return markdown if page.file.src_uri.startswith("notebooks/") else markdown.replace(".ipynb)", ".md)")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs: Sphinx roles go, and links of a package's page to itself."""
    return MORE.sub("", ROLE.sub("", html))
