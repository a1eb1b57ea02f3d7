"""Refused: a wheel or sdist without a linked source, or with a changed one."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import check_build
import pytest
import repo

FILES = {"x/__init__.py": b"1\n", "x/py.typed": b"", "x/_shared/problems.py": b"2\n"}
INFO = {"x-1.dist-info/licenses/LICENSE": b""}


def built(
    folder: Path, wheel: dict[str, bytes], sdist: dict[str, bytes], link: str = ""
) -> tuple[repo.Package, Path, Path]:
    """A package of two files, one behind a link, with its wheel and sdist."""
    (folder / "shared").mkdir()
    (folder / "shared" / "problems.py").write_bytes(FILES["x/_shared/problems.py"])
    (folder / "src" / "x").mkdir(parents=True)
    (folder / "src" / "x" / "__init__.py").write_bytes(FILES["x/__init__.py"])
    (folder / "src" / "x" / "py.typed").touch()
    (folder / "src" / "x" / "_shared").mkdir()
    (folder / "src" / "x" / "_shared" / "problems.py").symlink_to("../../../shared/problems.py")
    with zipfile.ZipFile(folder / "x.whl", "w") as archive:
        for name, data in wheel.items():
            archive.writestr(name, data)
    with tarfile.open(folder / "x.tar.gz", "w:gz") as tar:
        for name, data in sdist.items():
            member = tarfile.TarInfo(f"x-1/src/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        if link:
            member = tarfile.TarInfo(f"x-1/src/{link}")
            member.type, member.linkname = tarfile.SYMTYPE, "../../shared/problems.py"
            tar.addfile(member)
    return repo.Package("x", folder, (), (), ()), folder / "x.whl", folder / "x.tar.gz"


def test_complete_files_pass(tmp_path: Path) -> None:
    assert check_build.source_problems(*built(tmp_path, FILES | INFO, FILES)) == []


@pytest.mark.parametrize(
    ("wheel", "sdist", "link", "expected"),
    [
        ({"x/__init__.py": b"1\n"}, FILES, "", "x.whl: x/_shared/problems.py is not the tree's"),
        (FILES, {"x/__init__.py": b"1\n"}, "", "x.tar.gz: x/_shared/problems.py is not the tree's"),
        (FILES | {"x/_shared/problems.py": b"3\n"}, FILES, "", "x.whl: x/_shared/problems.py is not the tree's"),
        (FILES, FILES, "", "x.whl has no .dist-info/licenses/LICENSE"),
        (FILES | {"x/stray.py": b""}, FILES, "", "x.whl: x/stray.py is not the tree's"),
        (FILES, {"x/__init__.py": b"1\n"}, "x/_shared/problems.py", "x.tar.gz: x/_shared/problems.py is a link"),
    ],
)
def test_each_fault_is_named(
    tmp_path: Path, wheel: dict[str, bytes], sdist: dict[str, bytes], link: str, expected: str
) -> None:
    assert expected in check_build.source_problems(*built(tmp_path, wheel, sdist, link))
