"""Fixtures of every test: no settings from the environment, and no process or file that outlives the session."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import covering, forked_ranks, groups
from support.deadlines import DEADLINE_S
from support.own_processes import children

from unisono.algorithms.catalogue.flat import REGISTERED
from unisono.bench import wide_area
from unisono.launchers import process

SHARED_MEMORY = Path("/dev/shm")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# Killed ranks of MPI libraries, of UCX and of the GPU's driver leave files with these prefixes there. Unisono puts no
# file there.
LIBRARY_PREFIXES = ("mpich_shm_", "sm_segment.", "ucx_shm_", "cuda.shm.")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--product", action="store_true", help="run products of parameters, not only pairs of values")


def pytest_configure(config: pytest.Config) -> None:
    covering.is_product_wanted = config.getoption("--product")


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups.mark(items)


@pytest.hookimpl(tryfirst=True)  # before fixtures start ranks
def pytest_runtest_setup(item: pytest.Item) -> None:
    forked_ranks.prepare_for(item.path)


@pytest.fixture(autouse=True, scope="session")
def signals_are_as_usual() -> None:
    """Reset ignored signals, because ranks inherit them: a shell starts background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def nothing_from_outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the settings of the user's environment and hide calibrations, also for ranks that serve several tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("UNISONO_", "OMPI_COMM_", "PMI_", "SLURM_")) or name in LAUNCHER_VARIABLES:
                patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "no-cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def forked_ranks_of_pools(nothing_left_behind: None, nothing_from_outside: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", lambda *words: forked_ranks.server().start(*words))
        yield
    for server in forked_ranks.SERVERS:
        server.close()


@pytest.fixture(scope="module")
def started_ranks_of_pools() -> Iterator[None]:
    """Let pools start ranks as real processes instead of forking them, for tests of how ranks start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", forked_ranks.start_process)
        yield


@pytest.fixture
def wide_area_of() -> Iterator[Callable[[wide_area.Area], wide_area.WideAreaNetwork]]:
    """A function that creates the hosts of an area; they are removed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda area: stack.enter_context(wide_area.wide_area(area))


@pytest.fixture(autouse=True)
def no_algorithm_stays_registered() -> Iterator[None]:
    before = {collective: dict(of_collective) for collective, of_collective in REGISTERED.items()}
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.fixture(autouse=True, scope="session")
def nothing_left_behind() -> Iterator[None]:
    before = _shared_memory()
    yield
    deadline = time.monotonic() + DEADLINE_S
    while (leaks := _leaks(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not leaks, f"the tests have left behind: {', '.join(leaks)}"


def _leaks(before: set[Path]) -> list[str]:
    return [*_children(), *(str(path) for path in sorted(_shared_memory() - before) if not _is_in_use(path))]


def _children() -> list[str]:
    return [f"process {pid} ({_command(pid)})" for pid in children() if not _is_helper_of_python(pid)]


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            or "it has ended, and its parent has not waited for it"
        )
    except OSError:
        return "gone"


def _is_helper_of_python(pid: int) -> bool:
    return "multiprocessing.resource_tracker" in _command(pid)


def _shared_memory() -> set[Path]:
    paths = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    return {path for path in paths if not path.name.startswith(LIBRARY_PREFIXES) and _is_ours(path)}


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _is_in_use(path: Path) -> bool:
    """Return whether a living process maps the file. Then it belongs to another job, because the tests have ended."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return False
