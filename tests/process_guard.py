"""A test that starts a process has the mark `process`, by name or by a fixture that starts one; any other
that does so fails, and what it wanted to start is not started. A plugin of pytest.

Owns that rule. Seen are fork, posix_spawn, subprocess and multiprocessing, in all threads of the tests' own
process, and what a test asks the process that forks trainers for.
"""

import multiprocessing.util
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Fixtures with which a test has processes of its own; `small_disk` runs `mount`.
PROCESS_FIXTURES = {"kill_keepers", "launcher", "runtime", "small_disk", "zygote"}
_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen"}
_refused: list[str] | None = None


def starting(what: str) -> None:
    """A process is about to be started. Raises where the test may not."""
    if _refused is not None:
        _refused.append(what)
        pytest.fail(f"a process is started ({what}) by a test without the mark `process`")


@contextmanager
def _watched(item: pytest.Item) -> Iterator[None]:
    global _refused
    _refused = None if item.get_closest_marker("process") else []
    try:
        yield
        # What was raised may have been heard by nobody: in a thread, or by code that catches everything.
        assert not _refused, f"not marked `process`, and it would have started one: {_refused}"
    finally:
        _refused = None


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        starting(f"{event} {str(arguments[:2])[:200]}")


def pytest_configure() -> None:
    spawn = multiprocessing.util.spawnv_passfds

    def asked(path: bytes, arguments: Any, descriptors: Any) -> int:
        starting(f"multiprocessing {path!r}")
        return int(spawn(path, arguments, descriptors))

    # Unlike the others, it raises no audit event.
    multiprocessing.util.spawnv_passfds = asked
    sys.addaudithook(_look)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.process)
        elif item.get_closest_marker("process") is None:
            item.add_marker(pytest.mark.fast)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with _watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with _watched(item):
        return (yield)
