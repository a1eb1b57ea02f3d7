"""A bill of materials of a built wheel, as CycloneDX 1.6: what is in it, under which licence, and what it asks for.

Read from the wheel itself. These wheels hold their own Python and nothing of anybody else's, so that the list of
components is what `Requires-Dist` names.
"""

from __future__ import annotations

import hashlib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import repo

LICENSE = "BSD-3-Clause"
PLAIN = (".py", "py.typed")


def metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def problems(wheel: Path) -> list[str]:
    """Why the bill would not be clean: another licence, files that are no Python source, unnamed requirements."""
    about = metadata(wheel)
    wrong = []
    if about["License-Expression"] != LICENSE or about.get_all("License-File") != ["LICENSE"]:
        wrong.append(f"{wheel.name}: licence {about['License-Expression']} in {about.get_all('License-File')}")
    with zipfile.ZipFile(wheel) as archive:
        code = [name for name in archive.namelist() if ".dist-info/" not in name]
    wrong += [f"{wheel.name}: {name} is no Python source" for name in code if not name.endswith(PLAIN)]
    declared = repo.packages()[about["Name"]]
    said = {repo.requirement_name(r) for r in about.get_all("Requires-Dist") or []}
    known = {repo.requirement_name(r) for r in (*declared.requirements, *(r for _, e in declared.extras for r in e))}
    return wrong + [f"{wheel.name}: requirements {sorted(said ^ known)} differ from pyproject.toml"] * (said != known)


def bill(wheel: Path) -> dict[str, Any]:
    """The document; equal wheels give equal documents."""
    about = metadata(wheel)
    name, version = about["Name"], about["Version"]
    reference = f"pkg:pypi/{name}@{version}"
    needed = sorted({(repo.requirement_name(r), r) for r in about.get_all("Requires-Dist") or []})
    components = [
        {
            "type": "library",
            "name": other,
            "bom-ref": f"pkg:pypi/{other}",
            "purl": f"pkg:pypi/{other}",
            "scope": "optional" if "extra ==" in text else "required",
            "properties": [{"name": "requirement", "value": text}],
        }
        for other, text in needed
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": name,
                "version": version,
                "bom-ref": reference,
                "purl": reference,
                "licenses": [{"expression": about["License-Expression"]}],
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}],
            }
        },
        "components": components,
        "dependencies": [{"ref": reference, "dependsOn": [c["bom-ref"] for c in components]}],
    }
