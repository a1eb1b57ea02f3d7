"""The bill of materials of a wheel, and what makes it unclean."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
import repo
import sbom

METADATA = """Metadata-Version: 2.4
Name: shard-reshard
Version: 0.1.0
License-Expression: BSD-3-Clause
License-File: LICENSE
Requires-Dist: shard-spec<0.2,>=0.1
Requires-Dist: torch>=2.11
Requires-Dist: matplotlib>=3.8; extra == 'report'
Requires-Dist: rich>=13; extra == 'report'

Text.
"""


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares what the metadata above asks for, whatever the real one's extras are."""
    real = repo.packages()["shard-reshard"]
    wanted, extras = ("torch>=2.11", "shard-spec>=0.1,<0.2"), (("report", ("matplotlib>=3.8", "rich>=13")),)
    package = dataclasses.replace(real, requirements=wanted, extras=extras)
    monkeypatch.setattr(repo, "packages", lambda: {"shard-reshard": package})


def wheel(folder: Path, metadata: str = METADATA, extra: str = "") -> Path:
    file = folder / "shard_reshard-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("shard_reshard/__init__.py", "shard_reshard/py.typed", *filter(None, [extra])):
            archive.writestr(zipfile.ZipInfo(name), "")
        archive.writestr(zipfile.ZipInfo("shard_reshard-0.1.0.dist-info/METADATA"), metadata)
    return file


def test_a_bill_names_the_package_its_licence_and_what_it_asks_for(tmp_path: Path) -> None:
    good = wheel(tmp_path)
    assert sbom.problems(good) == []
    bill = sbom.bill(good)
    component = bill["metadata"]["component"]
    assert (component["purl"], component["licenses"]) == (
        "pkg:pypi/shard-reshard@0.1.0",
        [{"expression": "BSD-3-Clause"}],
    )
    assert [(c["name"], c["scope"]) for c in bill["components"]] == [
        ("matplotlib", "optional"),
        ("rich", "optional"),
        ("shard-spec", "required"),
        ("torch", "required"),
    ]
    assert json.dumps(bill) == json.dumps(sbom.bill(wheel(tmp_path)))


@pytest.mark.parametrize(
    ("metadata", "extra", "said"),
    [
        (METADATA, "shard_reshard/fast.so", "no Python source"),
        (METADATA, "shard_reshard/vendored.js", "no Python source"),
        (METADATA.replace("BSD-3-Clause", "GPL-3.0-only"), "", "licence GPL"),
        (METADATA.replace("License-File: LICENSE\n", ""), "", "licence"),
        (METADATA.replace("torch>=2.11", "torch>=2.11\nRequires-Dist: requests"), "", "requests"),
        (METADATA.replace("Requires-Dist: torch>=2.11\n", ""), "", "torch"),
    ],
)
def test_what_is_unclean_is_said(tmp_path: Path, metadata: str, extra: str, said: str) -> None:
    (problem,) = sbom.problems(wheel(tmp_path, metadata, extra))
    assert said in problem
