"""A package's metadata has the links of the repository where `REPO` is its address."""

from __future__ import annotations

import pytest
import repo
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager


@pytest.mark.parametrize("package", repo.packages())
def test_links_follow_the_address(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def links(address: str) -> dict[str, str]:
        monkeypatch.setenv("REPO", address)
        urls: dict[str, str] = ProjectMetadata(str(repo.packages()[package].path), PluginManager()).core.urls
        return urls

    published = links("https://host.example/team/shardworks.git")
    assert published == links("https://host.example/team/shardworks/")
    assert list(published) == ["Repository", "Documentation", "Changelog", "Issues"]
    assert published["Repository"] == "https://host.example/team/shardworks"
    for name in ("Documentation", "Changelog"):  # each leads to a file of this tree
        _, _, path = published[name].partition("/blob/main/")
        assert (repo.ROOT / path).is_file()
    assert links("") == links("file:///home/me/shardworks") == {}
