"""Put linked files into a package's sdist as plain files: hatchling would keep the links, which lead out of it."""

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
            root, include = Path(self.root), build_data["force_include"]
            include.pop(str(root / "hatch_build.py"), None)  # hatchling includes this script itself, as a link
            for file in (root / "hatch_build.py", *(root / "src").rglob("*")):
                if file.is_symlink() or file.name == "hatch_build.py":  # an unpacked sdist has no links
                    include[str(file.resolve())] = str(file.relative_to(root))
