"""A package links the shared files that it uses, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import repo
import shared_links

OWN = {"shard-reshard": {"problems.py"}}  # it raises shard-spec's classes


@pytest.mark.parametrize("package", repo.packages().values(), ids=repo.packages())
def test_a_package_links_exactly_what_it_uses(package: repo.Package) -> None:
    assert shared_links.differences(package) == (set(), set()), "python tools/shared_links.py --write"
    folder, compared = shared_links.folder_of(package), 0
    for name in shared_links.used(package) - OWN.get(package.dist, set()):
        assert (folder / name).resolve() == repo.ROOT / "tools" / "shared" / name
        assert not (folder / name).readlink().is_absolute()
        compared += 1
    assert 5 <= compared < len(list(shared_links.SHARED.glob("*.*")))
    assert {file.name for file in folder.glob("*.*") if not file.is_symlink()} == OWN.get(package.dist, set())


def test_links_follow_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, source = tmp_path / "tools" / "shared", tmp_path / "packages" / "p" / "src" / "p"
    monkeypatch.setattr(shared_links, "SHARED", shared)
    shutil.copytree(repo.ROOT / "tools" / "shared", shared)
    (source / "_shared").mkdir(parents=True)
    package = repo.Package("p", source.parent.parent, (), (), ())
    for text, names in {
        "from p._shared.page import page_parts": {"page.py", "page.html.j2"},
        "from p._shared import consensus": {"consensus.py", "problems.py"},
        'EXPORTS = {"_shared.problems": "PlanError"}': {"problems.py"},
    }.items():
        (source / "x.py").write_text(text)
        shared_links.write(package)
        assert shared_links.differences(package) == (set(), set())
        assert {file.name for file in (source / "_shared").iterdir()} == names | {"__init__.py"}
    (source / "_shared" / "problems.py").unlink()
    (source / "_shared" / "problems.py").symlink_to("nowhere")
    assert shared_links.differences(package) == ({"problems.py"}, {"problems.py"})
    (source / "_shared" / "problems.py").unlink()
    (source / "_shared" / "problems.py").touch()  # the package's own
    assert shared_links.differences(package) == (set(), set())
