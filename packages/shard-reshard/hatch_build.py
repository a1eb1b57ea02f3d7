"""Put linked sources into the sdist as plain files: hatchling follows links to folders, and keeps those to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlainFiles(BuildHookInterface[Any]):
    """Includes what each link of the package leads to in the place of the link; an unpacked sdist has none."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files are collected."""
        if self.target_name == "sdist":
            root = Path(self.root)
            links = (file for file in (root / "src").rglob("*.py") if file.is_symlink())
            build_data["force_include"] |= {str(link.resolve()): str(link.relative_to(root)) for link in links}
