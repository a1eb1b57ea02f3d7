"""Build every package twice with hatch and once more from its sdist: equal byte for byte.

What is built has to be fit to publish, too: nothing but the package's own sources, its licence, a README that renders
(`twine check --strict`). `--out` keeps the files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import repo

HATCH_DATA = repo.ROOT / ".nox" / "hatch"


def hatch_build(source: Path, into: Path, *options: str) -> dict[str, str]:
    """Build and return file name -> SHA-256."""
    variables = os.environ | {"HATCH_DATA_DIR": str(HATCH_DATA)}  # no build environment of another checkout is used
    variables.pop("UV_PYTHON", None)  # nox sets it, and hatch would then install into nox's environment, not its own
    command = ["hatch", "build", *options, str(into)]
    completed = subprocess.run(command, cwd=source, check=False, env=variables, capture_output=True, text=True)
    if completed.returncode != 0:
        raise SystemExit(f"{source}: {' '.join(command)}\n{completed.stdout}{completed.stderr}")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(into.iterdir())}


def check(package: repo.Package, folder: Path) -> tuple[Path, list[str]]:
    """Build one package in `folder`. Returns the folder of its files and what is wrong with them."""
    first = hatch_build(package.path, folder / "first")
    second = hatch_build(package.path, folder / "second")
    wrong = [f"{name}: two builds differ" for name in first if first[name] != second.get(name)]
    sdist = next((folder / "first").glob("*.tar.gz"))
    with tarfile.open(sdist) as tar:
        tar.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    rebuilt = hatch_build(unpacked, folder / "from-sdist", "-t", "wheel")
    wrong += [f"{name}: the wheel from the sdist differs" for name, digest in rebuilt.items() if digest != first[name]]
    wheel = next((folder / "first").glob("*.whl"))
    wrong += source_problems(package, wheel, sdist)
    twine = [sys.executable, "-W", "error", "-m", "twine", "--no-color", "check", "--strict", str(wheel), str(sdist)]
    completed = subprocess.run(twine, check=False, capture_output=True, text=True)  # metadata and the rendered README
    wrong += [f"twine check: {completed.stdout}{completed.stderr}"] * (completed.returncode != 0)
    return folder / "first", wrong


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
            built, problems = check(package, Path(folder))
            wrong += problems
            for file in sorted(built.iterdir()):
                print(f"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}  {file.stat().st_size:>8}  {file.name}")
                if out is not None:
                    out.mkdir(parents=True, exist_ok=True)
                    (out / file.name).write_bytes(file.read_bytes())
    print(
        "\n".join(wrong)
        or f"build: {len(repo.packages())} packages, each built three times, equal byte for byte, all sources in them"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
