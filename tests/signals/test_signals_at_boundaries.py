"""A signal in an iteration: it is finished, persisted, the run closed; then the process ends as it would
have, and the next attempt goes on from that very boundary. Real processes, real signals."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashckpt
from tests.processes import end, keepers_of
from tests.signals.processes import Job, control_status
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


# recipe, where it stands still, and the step that is persisted then
PLACES = [
    ("plain", 10, 11),  # in the backward pass
    ("plain", 0, 1),  # before there is a single snapshot
    ("plain", 5, 6),  # in the last iteration of an epoch
    ("workers", 9, 10),
    ("epochs", 2, 3),
    ("epochs", 4, 4),  # between epochs
    ("marked", 8, 9),  # boundaries marked by hand
]


@pytest.mark.parametrize(
    ("recipe", "hold_at", "reached", "name"),
    [*((*place, "SIGTERM") for place in PLACES), *((*place, "SIGINT") for place in PLACES[::3])],
)
def test_the_boundary_is_persisted_and_the_status_is_as_without(
    recipe: str, hold_at: int, reached: int, name: str, tmp_path: Path, runtime: Path, references: References
) -> None:
    # Everywhere else what is forked stands for a program that was started: here it is one.
    job = Job(tmp_path / "job", recipe, fresh=hold_at == 10)
    process = job.held(hold_at)
    process.send(name)
    until(lambda: process.has_logged(f"{name}: the loop ends"), "the signal to be noted")
    job.go.touch()
    ended = process.ended()

    assert ended.status == control_status(name)
    assert ("KeyboardInterrupt" in ended.err) == (name == "SIGINT")
    assert not any(line.startswith("after") for line in ended.out)
    assert job.steps()[-1] == reached
    until(lambda: job.endings() == ["closed"], "the attempt to be closed")
    job.finish()
    assert job.records() == references(recipe)
    assert set(job.times().values()) == {1}, "nothing was done twice"
    assert flashckpt.verify(job.run).ok


@pytest.mark.parametrize(
    ("recipe", "name"), [("workers", "SIGTERM"), ("workers", "SIGINT"), ("epochs", "SIGTERM")]
)
def test_a_signal_to_every_process_of_the_job(
    recipe: str, name: str, tmp_path: Path, runtime: Path, references: References
) -> None:
    """Schedulers, and Ctrl-C, signal the loader's workers as well: they end, the iteration does not."""
    job = Job(tmp_path / "job", recipe)
    process = job.held(2)
    process.send(name, group=True)
    until(lambda: process.has_logged(f"{name}: the loop ends"), "the signal to be noted")
    job.go.touch()

    assert process.ended().status == control_status(name)
    assert job.steps()[-1] == 3
    job.finish()
    assert job.records() == references(recipe)
    assert set(job.times().values()) == {1}


@pytest.mark.parametrize("where", ["before", "in"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_handler_of_the_users_own_that_ends_the_process(
    name: str, where: str, tmp_path: Path, runtime: Path
) -> None:
    """Installed before the loop it waits for the boundary; installed later it has the signal to itself."""
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, handler="leave", where=where)
    process.send(name)
    if where == "before":
        until(lambda: process.has_logged(f"{name}: the loop ends"), "the signal to be noted")
        assert not process.has_said("leave")
        job.go.touch()
    ended = process.ended()
    assert ended.status == 7 == control_status(name, "leave")
    assert ended.out.count("leave") == 1
    if where == "before":
        assert job.steps()[-1] == 7
        until(lambda: job.endings() == ["closed"], "the attempt to be closed")
    else:
        until(lambda: job.run.exists() and job.steps() == [6], "the keeper to save what was sealed")
        until(lambda: job.endings() == ["dead"], "the attempt to be over")


def test_a_handler_that_returns_lets_the_program_go_on(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, handler="flag", where="before")
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0 == control_status("SIGTERM", "flag")
    assert [line for line in ended.out if not line.startswith("handlers")] == [
        "held 6", "flag SIGTERM", "after 7 SIGTERM",
    ]  # fmt: skip
    assert "flag at" in ended.out[-1], "the user's handlers stand where they stood"
    assert job.steps()[-1] == 7


def test_a_later_handler_that_calls_the_one_before_it_ends_the_loop(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, handler="chain", where="in")
    process.send("SIGTERM")
    until(lambda: process.has_logged("SIGTERM: the loop ends"), "the signal to be noted")
    assert process.has_said("chain")
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0
    assert ended.out.count("chain") == 1
    assert "after 7 SIGTERM" in ended.out
    assert "chain at" in ended.out[-1], "a later handler is never taken off"
    assert job.steps()[-1] == 7


def test_a_later_handler_is_told_of_and_may_call_stop(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, handler="stop", where="in")
    until(lambda: process.has_logged("SIGTERM has another handler"), "the warning")
    process.send("SIGTERM")
    until(lambda: process.has_said("stop"), "the user's handler")
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0
    assert "after 7 stop" in ended.out
    assert job.steps()[-1] == 7


def test_what_is_ignored_stays_ignored(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, handler="ignore", where="before")
    for name in ("SIGTERM", "SIGINT"):
        process.send(name)
    job.go.touch()
    ended = process.ended()
    assert ended.status == 0
    assert "after 18 None" in ended.out


def test_none_are_watched_where_none_are_named(tmp_path: Path, runtime: Path) -> None:
    job = Job(tmp_path / "job", "plain")
    process = job.held(6, signals={"signals": []})
    process.send("SIGTERM")
    assert process.ended().status == -15
    until(lambda: job.steps() == [6], "the keeper to save what was sealed")
