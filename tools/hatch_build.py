"""What the packages' builds share: the project's links, and sdists without links of the file system.

hatchling would keep symbolic links in an sdist; they lead out of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):
    """Writes links to the repository into a package's metadata: `REPO` says where it is published, as for the site."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called with the table `project` of a package's pyproject.toml."""
        repository = os.environ.get("REPO", "").rstrip("/").removesuffix(".git")
        if repository.startswith("https://"):  # a clone on this machine is no address for others
            folder = f"{repository}/blob/main/packages/{metadata['name']}"
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/blob/main/docs/packages/{metadata['name']}.md",
                "Changelog": f"{folder}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


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
