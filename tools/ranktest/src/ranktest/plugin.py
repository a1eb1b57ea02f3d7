"""The pytest plugin: markers, options, and the choice of the engine."""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from ranktest import report
from ranktest.job import Job

if TYPE_CHECKING:
    from ranktest.pool import Pool

_POOL = pytest.StashKey["Pool"]()

#: imported by the server before the first fork, because most bodies would import them
PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, timeout=60): run the body on so many ranks; several sizes make several tests",
    )
    config.addinivalue_line(
        "markers", "extra(*distributions): the test needs distributions beyond the package's own closure"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@ranks(2, 4)` makes one test per world size."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and len(marker.args) > 1:
        if "ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("ranks")
        metafunc.parametrize("ranks", marker.args, indirect=True, ids=[f"ranks{n}" for n in marker.args])


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Any:
    """The rank a body runs on (a `ranktest.Ranks`); made anew on each rank."""
    if request.node.get_closest_marker("ranks") is None:
        raise pytest.UsageError("the `ranks` fixture needs @pytest.mark.ranks(n) on the test")
    return None


def world_size_of(item: pytest.Item) -> int:
    """The number of ranks a marked test asks for."""
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    sizes = marker.args
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"@pytest.mark.ranks takes positive whole numbers, not {sizes!r}")
    callspec = getattr(item, "callspec", None)
    return int(callspec.params["ranks"]) if len(sizes) > 1 and callspec is not None else int(sizes[0])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the server while other tests still run, if any test will need it."""
    if not config.getoption("collectonly") and any(item.get_closest_marker("ranks") for item in items):
        _pool(config).start()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test's body on ranks instead of here."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    pool = _pool(pyfuncitem.config)
    report.judge(pool.run(_job(pyfuncitem, str(pool.job_folder()))))
    return True


def _pool(config: pytest.Config) -> Pool:
    from ranktest.pool import Pool

    if _POOL not in config.stash:
        config.stash[_POOL] = Pool(_server_args(config), PRELOAD)
    return config.stash[_POOL]


def _server_args(config: pytest.Config) -> list[str]:
    args = ["--rootdir", str(config.rootpath), "--import-mode", str(config.getoption("importmode"))]
    args += ["-p", "no:cacheprovider", "-p", "ranktest.plugin"]
    if config.inipath is not None:
        args += ["-c", str(config.inipath)]
    for override in config.getoption("override_ini") or ():
        args += ["-o", override]
    for option in config.getoption("pythonwarnings") or ():
        args += ["-W", option]
    return args


def _job(item: pytest.Function, folder: str) -> Job:
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    names = item._fixtureinfo.argnames
    funcargs = {name: item.funcargs[name] for name in names if name != "ranks"}
    return Job(
        nodeid=item.nodeid,
        path=str(item.path),
        qualname=(*(n.name for n in item.listchain() if isinstance(n, pytest.Class)), item.originalname),
        funcargs=_pickled(funcargs),
        ranks_argument="ranks" in names,
        world_size=world_size_of(item),
        seed=seed_of(item.nodeid),
        timeout_s=float(marker.kwargs.get("timeout", 60)),
        group_timeout_s=30.0,
        filterwarnings=tuple(arg for mark in item.iter_markers("filterwarnings") for arg in reversed(mark.args)),
        folder=folder,
        tbstyle=str(item.config.getoption("tbstyle")),
    )


def seed_of(nodeid: str) -> int:
    """The seed of a test: a hash of its id, the same on every rank and every machine."""
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "big")


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
