"""A signal in an iteration: it is finished, persisted, the run closed; then the process ends as it would
have, and the next attempt goes on from that very boundary. Real processes, real signals."""

import functools
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashckpt
from tests.processes import end, keepers_of
from tests.signals.processes import Job
from tests.waiting import until

References = Callable[[str], dict[object, object]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """The records of each recipe's run that was never stopped."""
    with (
        tempfile.TemporaryDirectory(prefix="flashckpt-test-", dir="/dev/shm") as runtime,
        pytest.MonkeyPatch.context() as patch,
    ):

        @functools.cache
        def reference(recipe: str) -> dict[int, object]:
            with patch.context() as here:
                here.setenv("FLASHCKPT_RUNTIME", runtime)
                job = Job(tmp_path_factory.mktemp(recipe), recipe)
                job.finish()
            return job.records()

        yield reference
        end(keepers_of(Path(runtime)))


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("recipe", "hold_at", "reached", "name", "group"),
    [
        ("plain", 10, 11, "SIGTERM", False),  # in the backward pass
        ("workers", 2, 3, "SIGINT", True),
        pytest.param("plain", 0, 1, "SIGINT", False, marks=pytest.mark.long),  # before the first snapshot
        pytest.param("plain", 5, 6, "SIGTERM", False, marks=pytest.mark.long),  # an epoch's last iteration
        pytest.param("epochs", 4, 4, "SIGINT", True, marks=pytest.mark.long),  # between epochs
        pytest.param("marked", 8, 9, "SIGTERM", False, marks=pytest.mark.long),  # boundaries marked by hand
    ],
)
def test_the_boundary_is_persisted_and_the_status_is_as_without(
    recipe: str,
    hold_at: int,
    reached: int,
    name: str,
    group: bool,
    tmp_path: Path,
    runtime: Path,
    references: References,
) -> None:
    """group: schedulers and Ctrl-C signal the loader's workers as well: they end, the iteration does not."""
    # Everywhere else what is forked stands for a program that was started: here it is one.
    job = Job(tmp_path / "job", recipe, fresh=hold_at == 10)
    process = job.held(hold_at)
    process.send(name, group=group)
    process.until_noted(name)
    job.go.touch()
    ended = process.ended()

    assert ended.status == -signal.Signals[name]
    assert ("KeyboardInterrupt" in ended.err) == (name == "SIGINT")
    assert not any(line.startswith("after") for line in ended.out)
    assert job.steps()[-1] == reached
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")
    job.finish()
    assert job.records() == references(recipe)
    assert set(job.times().values()) == {1}, "nothing was done twice"
    assert flashckpt.verify(job.run).ok


@pytest.mark.parametrize(("name", "where"), [("SIGTERM", "before"), ("SIGINT", "in")])
def test_a_handler_of_the_users_own_that_ends_the_process(
    name: str, where: str, tmp_path: Path, runtime: Path
) -> None:
    """Installed before the loop it waits for the boundary; installed later it has the signal to itself."""
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, leaves=where)
    process.send(name)
    if where == "before":
        process.until_noted(name)
        assert not process.has_said("leave")
        job.go.touch()
    ended = process.ended()
    assert ended.status == 7
    assert ended.out.count("leave") == 1
    if where == "before":
        assert job.steps()[-1] == 7
        until(lambda: job.endings() == ["closed"], "the attempt to be closed")
    else:
        until(lambda: job.run.exists() and job.steps() == [6], "the keeper to save what was sealed")
        until(lambda: job.endings() == ["dead"], "the attempt to be over")
