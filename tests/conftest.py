"""What every test gets: a runtime folder of its own, whose keepers are ended and whose regions go."""

import gc
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import parameter_sets, process_guard, run_view, slow_first
from tests.descriptor_guard import nothing_stays_open
from tests.folders import let_folders_go
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.zygote import Zygote, close_shared, shared
from tests.zygote.keepers import Keepers, fork_keepers

__all__ = ["nothing_stays_open"]

let_folders_go()
_keepers: list[Keepers] = []


def pytest_configure(config: pytest.Config) -> None:
    # The last one's hooks are called first: parameter_sets reads the marks that process_guard sets.
    for plugin in (slow_first, parameter_sets, process_guard):
        config.pluginmanager.register(plugin)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which servers of object storage the tests ran on: without one, most of those tests are skipped."""
    reports = (one for kind in ("passed", "failed", "skipped") for one in terminalreporter.getreports(kind))
    if any(one.nodeid.startswith("tests/stores/") for one in reports):
        # Imported here: only the tests of stores need the clients.
        from tests.stores.conftest import servers_used

        terminalreporter.write_line(f"object storage: {servers_used()}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Each full collection of garbage would go through torch and all tests, a million objects."""
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("process") for item in session.items):
        _keepers.append(Keepers())
        fork_keepers()


def pytest_sessionfinish() -> None:
    while _keepers:
        _keepers.pop().close()


@pytest.fixture(scope="session", autouse=True)
def _no_zygote_stays() -> Iterator[None]:
    """The process that forks trainers, if any test has asked for it, goes with the last test."""
    yield
    close_shared()


@pytest.fixture
def zygote() -> Zygote:
    """Torch is imported once, for all trainers that this process's tests want to kill."""
    return shared()


@pytest.fixture(autouse=True)
def _short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a minute to see that an attempt on another node is dead."""
    run_view.watch_for(5.0, monkeypatch.setattr)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in shared memory, of this test alone."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(folder))
    yield folder
    end(keepers_of(folder))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def other_node() -> Iterator[Path]:
    """The runtime folder of another node."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield folder
    end(keepers_of(folder))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cache() -> Iterator[Path]:
    """A folder in shared memory: never the device of a run in `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-test-cache-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Any]:
    """Starts several ranks, whose processes and memory go with the test."""
    # Imported here: only tests of ranks need torch's stores.
    from tests.ranks.launch import Launcher

    folder = tmp_path / "output"
    folder.mkdir()
    made = Launcher(folder)
    yield made
    made.close()


@pytest.fixture
def kill_keepers(runtime: Path) -> Callable[..., None]:
    """Kill the keepers of this test; with remove_regions, what they held in memory goes too."""

    def kill(*, remove_regions: bool = False) -> None:
        end(keepers_of(runtime))
        if remove_regions:
            # Not the folders: who finds another one than the last attempt's watches for a job elsewhere, 5 s.
            for entry in runtime.rglob("*"):
                if not entry.is_dir():
                    entry.unlink(missing_ok=True)

    return kill


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing, ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A real file system of 8 MiB. Skipped where mounting is not allowed."""
    with small_tmpfs(8 << 20) as folder:
        yield folder


@pytest.fixture
def scratch() -> Iterator[str]:
    """A folder in memory where there is one, for what is done a hundred times: each fsync of a disk takes
    milliseconds, and what lasts is modelled by such tests, or no concern of theirs."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="flashckpt-test-", dir=memory) as folder:
        yield folder
