"""Build every package twice, from the tree and with its wheel made from the sdist: both are equal byte for byte.

    python tools/check_build.py --out dist        (nox -s build -- --out dist)

The files are fit to publish, too: they hold the package's own sources, linked ones as plain files, and its licence, and
their README renders (`twine check --strict`). `--out` keeps them.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import repo


def build(source: Path, into: Path, *options: str) -> dict[str, str]:
    """Build with uv; returns file name -> SHA-256."""
    command = ["uv", "build", "--no-create-gitignore", "--python", sys.executable, "--out-dir", str(into), *options]
    completed = subprocess.run([*command, str(source)], check=False, capture_output=True, text=True)
    if completed.returncode != 0:
        raise SystemExit(f"{source}: {' '.join(command)}\n{completed.stdout}{completed.stderr}")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(into.iterdir())}


def check(package: repo.Package, folder: Path) -> list[str]:
    """Build a package into `folder` / "built"; returns what is wrong with its files."""
    first = build(package.path, folder / "built", "--sdist", "--wheel")  # both from the tree
    second = build(package.path, folder / "again")  # the sdist from the tree, the wheel from that sdist
    wrong = [f"{name}: two builds differ" for name in {*first, *second} if first.get(name) != second.get(name)]
    (wheel,), (sdist,) = (folder / "built").glob("*.whl"), (folder / "built").glob("*.tar.gz")
    wrong += source_problems(package, wheel, sdist)
    twine = [sys.executable, "-W", "error", "-m", "twine", "--no-color", "check", "--strict", str(wheel), str(sdist)]
    completed = subprocess.run(twine, check=False, capture_output=True, text=True)  # metadata and the rendered README
    wrong += [f"twine check: {completed.stdout}{completed.stderr}"] * (completed.returncode != 0)
    for name, digest in first.items():
        print(f"{digest[:16]}  {(folder / 'built' / name).stat().st_size:>8}  {name}")
    return wrong


def source_problems(package: repo.Package, wheel: Path, sdist: Path) -> list[str]:
    """Each source, linked ones too, is one plain file of sdist and wheel."""
    source = package.path / "src"
    expected = {str(file.relative_to(source)): file.read_bytes() for file in repo.source_files(source)}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        endings = ("/py.typed", ".dist-info/licenses/LICENSE")
        missing = [end for end in endings if not any(name.endswith(end) for name in archive.namelist())]
    in_sdist, links = dict[str, bytes](), []
    with tarfile.open(sdist) as tar:
        for member in tar:
            name = member.name.partition("/src/")[2]
            if name and not member.isfile():
                links.append(f"{sdist.name}: {name} is a link")
            elif name and (file := tar.extractfile(member)) is not None:
                in_sdist[name] = file.read()
    wrong = links + [f"{package.dist} has no shared source"] * (not any("/_shared/" in name for name in expected))
    wrong += [f"{wheel.name} has no {end}" for end in missing]
    for built, contents in ((wheel, in_wheel), (sdist, in_sdist)):
        differing = [name for name in {*expected, *contents} if expected.get(name) != contents.get(name)]
        wrong += [f"{built.name}: {name} is not the tree's" for name in sorted(differing)]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the built files here")
    out: Path | None = parser.parse_args().out
    wrong = []
    for package in repo.packages().values():
        with tempfile.TemporaryDirectory() as folder:
            wrong += check(package, Path(folder))
            if out is not None:
                shutil.copytree(Path(folder) / "built", out, dirs_exist_ok=True)
    print(
        "\n".join(wrong)
        or f"build: {len(repo.packages())} packages, equal byte for byte in two builds, all sources in them"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
