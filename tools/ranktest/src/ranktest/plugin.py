"""The hooks of the pytest plugin: options, markers, tests that cannot run here, and jobs for the ranks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import socket
from typing import TYPE_CHECKING, Any

import pytest

from ranktest import report, supervise
from ranktest.job import Job, Placement

if TYPE_CHECKING:
    from ranktest.pool import Pool

_POOL = pytest.StashKey["Pool"]()
_NOT_RUN = pytest.StashKey[list[tuple[str, str]]]()

#: A test is ended when its ranks have rested for so many seconds. `timeout=` asks for fewer.
REST_S = 60.0


# ---- options and markers
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this plugin's options."""
    group = parser.getgroup("ranktest", "test bodies on many ranks")
    group.addoption(
        "--without-extras", action="store_true", help="leave out tests marked extra(...), and list them at the end"
    )
    group.addoption(
        "--ranks-device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where ranks live; auto is cpu, under torchrun cuda if there are GPUs",
    )
    group.addoption(
        "--ranks-backend", default="auto", help="backend of the default group; auto is gloo on cpu and nccl on cuda"
    )
    group.addoption(
        "--ranks-per-gpu", type=int, default=1, metavar="N", help="how many ranks share a GPU (default: %(default)s)"
    )
    group.addoption(
        "--ranks-debugger",
        type=int,
        metavar="RANK",
        help="this rank waits for a debugger (debugpy) on a port that is printed; ranks may rest until the limit",
    )


def _torchrun_sizes() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Under torchrun, the process of rank 0 forks all ranks of a test; the others end at once with status 0."""
    sizes = _torchrun_sizes()
    if sizes is None:
        return None
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise pytest.UsageError("ranks are forked on one host: run torchrun with --standalone")
    return 0 if sizes[0] else None


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        f"ranks(*world_sizes, timeout={REST_S:.0f}): run the body on so many ranks; several sizes make several tests; "
        "ranks that rest for timeout seconds hang",
    )
    config.addinivalue_line(
        "markers", "extra(*distributions): the test needs distributions beyond the package's own closure"
    )
    config.addinivalue_line(
        "markers", "gpu: runs only with --ranks-device (cuda; or cpu, where sizes are small and waits go unchecked)"
    )
    config.stash[_NOT_RUN] = []
    if config.getoption("ranks_per_gpu") < 1:
        raise pytest.UsageError("--ranks-per-gpu takes a positive number")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server that ranks are forked from."""
    if _POOL in config.stash:
        config.stash[_POOL].close()


# ---- collection
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@ranks(2, 4)` makes one test per world size."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and len(marker.args) > 1:
        if "ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("ranks")
        metafunc.parametrize("ranks", marker.args, indirect=True, ids=[f"ranks{n}" for n in marker.args])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out tests that cannot run here, of 4 ranks on 2 GPUs for example, and keep the reasons for the summary."""
    selected = []
    for item in items:
        why = _why_not(config, item)
        if why:
            config.stash[_NOT_RUN].append((item.nodeid, why))
        else:
            selected.append(item)
    if len(selected) < len(items):
        kept_ids = {id(item) for item in selected}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept_ids])
        items[:] = selected


def _why_not(config: pytest.Config, item: pytest.Item) -> str:
    extras = [name for marker in item.iter_markers("extra") for name in marker.args]
    if extras and config.getoption("without_extras"):
        return f"needs {', '.join(extras)} (--without-extras)"
    unasked = config.getoption("ranks_device") == "auto" and _placement(config).device == "cpu"
    if unasked and item.get_closest_marker("gpu"):
        return "is for GPUs (--ranks-device cuda)"
    marker = item.get_closest_marker("ranks")
    if marker is not None:
        wanted, room = world_size_of(item), _room(config)
        if room is not None and wanted > room:
            return f"needs {wanted} ranks, there are {room}"
        most = max((n for n in marker.args if room is None or n <= room), default=wanted)
        if _torchrun_sizes() and wanted < most:  # they run under torchrun with fewer processes
            return f"{wanted} of {room} ranks: runs on {most} of them"
    return ""


def _room(config: pytest.Config) -> int | None:
    """The most ranks there can be; None if there is no limit."""
    sizes = _torchrun_sizes()
    if sizes is not None:
        return sizes[1]
    if _placement(config).device == "cuda":
        import torch

        num_gpus = torch.cuda.device_count()
        if not num_gpus:
            raise pytest.UsageError("--ranks-device cuda: this machine has no GPU that torch can use")
        return num_gpus * int(config.getoption("ranks_per_gpu"))
    return None


# ---- running
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test marked `extra("transformers")` where transformers is not installed."""
    for marker in item.iter_markers("extra"):
        for name in marker.args:
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                pytest.fail(
                    f"this test is marked extra({name!r}), and {name!r} is not installed; "
                    "install it, or leave such tests out with --without-extras",
                    pytrace=False,
                )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Any:
    """The rank a body runs on (a `ranktest.Ranks`); made anew on each rank."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("the `ranks` fixture needs @pytest.mark.ranks(n) on the test", pytrace=False)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test's body on ranks instead of here."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    pool = _pool(pyfuncitem.config)
    report.judge(pool.run(_job(pyfuncitem, pool.job_folder())))
    return True


def _pool(config: pytest.Config) -> Pool:
    from ranktest.pool import Pool

    if _POOL not in config.stash:
        config.stash[_POOL] = Pool(_server_args(config))
    return config.stash[_POOL]


def _server_args(config: pytest.Config) -> list[str]:
    args = ["--rootdir", str(config.rootpath), "--import-mode", str(config.getoption("importmode"))]
    args += ["-p", "no:cacheprovider", "-p", "ranktest.plugin"]
    args += ["-v"] * max(0, config.getoption("verbose"))
    if config.inipath is not None:
        args += ["-c", str(config.inipath)]
    for override in config.getoption("override_ini") or ():
        args += ["-o", override]
    for option in config.getoption("pythonwarnings") or ():
        args += ["-W", option]
    return args


# ---- jobs
def world_size_of(item: pytest.Item) -> int:
    """The number of ranks a marked test asks for."""
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    sizes = marker.args
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ranks takes positive whole numbers, not {sizes!r}")
    unknown = set(marker.kwargs) - {"timeout"}
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ranks takes timeout=, not {sorted(unknown)}")
    callspec = getattr(item, "callspec", None)
    return int(callspec.params["ranks"]) if len(sizes) > 1 and callspec is not None else int(sizes[0])


def seed_of(nodeid: str) -> int:
    """The seed of a test: a hash of its id, the same on every rank and every machine."""
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")


def _placement(config: pytest.Config) -> Placement:
    device, backend = config.getoption("ranks_device"), config.getoption("ranks_backend")
    if device == "auto":
        device = "cpu"
        if _torchrun_sizes():
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    return Placement(str(device), str(backend), int(config.getoption("ranks_per_gpu")))


def _job(item: pytest.Function, folder: str) -> Job:
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    names = item._fixtureinfo.argnames
    debugger = _debugger(item.config, world_size_of(item))
    return Job(
        nodeid=item.nodeid,
        path=str(item.path),
        qualname=(*(node.name for node in item.listchain() if isinstance(node, pytest.Class)), item.originalname),
        funcargs=_pickled({name: item.funcargs[name] for name in names if name != "ranks"}),
        ranks_argument="ranks" in names,
        world_size=world_size_of(item),
        seed=seed_of(item.nodeid),
        # Ranks at a breakpoint rest: with a debugger the limit of the whole test alone ends them.
        rest_s=supervise.LIMIT_S if debugger else min(float(marker.kwargs.get("timeout", REST_S)), REST_S),
        filterwarnings=tuple(arg for mark in item.iter_markers("filterwarnings") for arg in reversed(mark.args)),
        folder=folder,
        tbstyle=str(item.config.getoption("tbstyle")),
        placement=_placement(item.config),
        debugger=debugger,
    )


def _debugger(config: pytest.Config, world_size: int) -> tuple[int, int] | None:
    """The rank that `--ranks-debugger` names and a free port for it, which stands on the terminal."""
    rank = config.getoption("ranks_debugger")
    if rank is None:
        return None
    if not 0 <= rank < world_size:
        raise pytest.UsageError(f"--ranks-debugger {rank}: the test runs on ranks 0 to {world_size - 1}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    terminal, capture = map(config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager"))
    assert terminal is not None, "--ranks-debugger prints a port: run without pytest-xdist (-n 0)"
    assert capture is not None
    with capture.global_and_fixture_disabled():
        terminal.write(f"\nrank {rank} of {world_size} waits for a debugger: attach to 127.0.0.1:{port}\n", flush=True)
    return rank, port


def _pickled(funcargs: dict[str, Any]) -> bytes:
    for name, value in funcargs.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"fixture {name!r} cannot be sent to the ranks: its value ({type(value).__name__}) does not pickle "
                f"({error}). Make it inside the body, or let the fixture return plain values.",
                pytrace=False,
            )
    return pickle.dumps(funcargs)


# ---- the end
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist sends its list of tests not run to the process that prints the summary."""
    reported: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if reported is not None:
        reported["ranktest_not_run"] = session.config.stash[_NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Take over a worker's list of tests not run; the lists are alike, since every worker collects every test."""
    listed = node.config.stash[_NOT_RUN]
    reported = getattr(node, "workeroutput", {}).get("ranktest_not_run", ())  # a worker that died sends nothing
    listed += [entry for entry in map(tuple, reported) if entry not in listed]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List every test that was not run, and why."""
    not_run: list[tuple[str, str]] = [*config.stash[_NOT_RUN]]
    for skipped in terminalreporter.stats.get("skipped", []):
        why = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else str(skipped.longrepr)
        not_run.append((skipped.nodeid, why.removeprefix("Skipped: ")))
    if not_run:
        terminalreporter.section(f"not run: {len(not_run)}")
        for nodeid, why in not_run:
            terminalreporter.line(f"{nodeid}: {why}")
