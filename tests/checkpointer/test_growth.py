"""State that grows in every step: it is snapshotted all the same, in ample and in little memory.

Real trainers, killed by SIGKILL and started again. They train on once the request for slots is answered and
what the next boundary may release is persisted: so with `every=1` at most `_LOST` steps are lost. Boundaries
are skipped while the newest snapshot is persisted, other slots are released and a larger one is made; one
snapshot may still be on its way to its seal.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt.crashpoints import POINTS
from tests import zygote
from tests.events import whole_lines
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.waiting import until

MIB = 1 << 20
_LOST = 6
_STEPS, _KILLED_AT = 34, 22
_CGROUP = Path("/sys/fs/cgroup/memory")
# Of the room in a cgroup the keeper leaves this untouched; see `available_bytes`.
_MARGIN_BYTES = 64 * MIB


class Growing:
    """A trainer in one run folder, started as often as it takes."""

    def __init__(self, folder: Path, runtime: Path, every: int, cgroup: Path | None = None) -> None:
        folder.mkdir()
        self.run, self.log, self._err = folder / "run", folder / "log", folder / "err"
        self._every, self.cgroup = every, cgroup
        self._environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime)}

    def goes(self, steps: int, hold_at: int = -1) -> dict[str, float]:
        """Train until the end, or be killed once `hold_at` steps are completed. What `report` said then."""
        process = self._started(steps, hold_at)
        with process.stdout:
            line = process.stdout.readline()
            assert line, self.said()
            if hold_at >= 0:
                process.kill()
        status = process.wait(240)
        assert hold_at >= 0 or status == 0, self.said()
        found: dict[str, float] = json.loads(line)
        return found

    def dies(self, steps: int, point: str) -> None:
        """Train until it kills itself at a point."""
        process = self._started(steps, -1, FLASHCKPT_CRASH_AT=point)
        with process.stdout:
            assert not process.stdout.readline(), f"{point} was never reached: {self.said()}"
        assert process.wait(240) == -signal.SIGKILL

    def _started(self, steps: int, hold_at: int, **environment: str) -> zygote.Program:
        self._before = len(self.lines()) if self.log.exists() else 0
        words = [self.run, self.log, self._every, steps, hold_at, *([self.cgroup] if self.cgroup else [])]
        with open(self._err, "ab") as err:
            return zygote.start(
                ["tests.checkpointer.growing", *map(str, words)],
                stdout=zygote.PIPE, stderr=err, env={**self._environment, **environment},
            )  # fmt: skip

    def said(self) -> str:
        return self._err.read_text()

    def lines(self) -> list[list[Any]]:
        return [json.loads(line) for line in whole_lines(self.log)]

    def resumed_after(self) -> int:
        """The step that the last start went on from: its first line is of the step after."""
        step: int = self.lines()[self._before][0]
        return step - 1


def _is_exact(growing: Growing, reference: list[list[Any]]) -> None:
    """Each line, of a step that was done again too, is that of a run that was never killed."""
    expected = {line[0]: line for line in reference}
    assert all(line == expected[line[0]] for line in growing.lines())
    assert growing.lines()[-1] == reference[-1]


def _is_counted(report: dict[str, float], boundaries: int) -> None:
    """Each boundary is a snapshot or was skipped; the last may be on its way to its seal."""
    assert boundaries - report["snapshots"] - report["snapshots_skipped"] in (0, 1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What a run says that is never killed and takes no snapshot but its last."""
    folder = tmp_path_factory.mktemp("reference")
    growing = Growing(folder / "straight", folder, 10 * _STEPS)
    growing.goes(_STEPS)
    end(keepers_of(folder))
    return growing.lines()


@pytest.mark.parametrize("num_bytes", [100 * MIB, 48 * MIB])
@pytest.mark.process
def test_in_small_shared_memory(num_bytes: int, tmp_path: Path, reference: list[list[Any]]) -> None:
    """Where named slots do not fit, they are memfds: also in the middle of a run."""
    with small_tmpfs(num_bytes) as runtime:
        growing = Growing(tmp_path / "replay", runtime, 1)
        report = growing.goes(_STEPS, _KILLED_AT)
        assert report["newest_sealed_step"] >= _KILLED_AT - _LOST
        growing.goes(_STEPS)
        assert growing.resumed_after() >= report["newest_sealed_step"]
        _is_exact(growing, reference)
        until(lambda: not keepers_of(runtime), "the keeper to leave")


@contextmanager
def _limited(num_bytes: int) -> Iterator[Path]:
    """A memory cgroup whose processes may take so much. Skipped, with the reason, where none can be made."""
    made = _CGROUP / f"flashckpt-growth-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(num_bytes + _MARGIN_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield made
    finally:
        end([int(pid) for pid in (made / "cgroup.procs").read_text().split()])
        until(lambda: not (made / "cgroup.procs").read_text(), "the cgroup to be empty")
        made.rmdir()


# When the run is killed its state has 44 MiB and at its end 68: three slots fit nowhere.
_TWO_SLOTS, _ONE_BESIDE = 172 * MIB, 104 * MIB


@pytest.mark.long
@pytest.mark.parametrize("room", [_TWO_SLOTS, _ONE_BESIDE])
def test_in_little_memory(room: int, tmp_path: Path, runtime: Path, reference: list[list[Any]]) -> None:
    """For two slots of what the state has come to, and only for one beside that of the newest snapshot."""
    with _limited(room) as cgroup:
        growing = Growing(tmp_path / "replay", runtime, 1, cgroup)
        report = growing.goes(_STEPS, _KILLED_AT)
        # How many boundaries are skipped between two requests that are refused depends on the machine.
        assert report["newest_sealed_step"] > 0
        _is_counted(report, _KILLED_AT)
        end(keepers_of(runtime))  # it may be of another cgroup from here on: named slots outlive it
    growing.cgroup = None
    growing.goes(_STEPS)
    assert growing.resumed_after() >= report["newest_sealed_step"]
    _is_exact(growing, reference)


@pytest.mark.long
@pytest.mark.parametrize("point", [each for each in POINTS if each.startswith("growth.")])
def test_killed_while_memory_changes_hands(
    point: str, tmp_path: Path, runtime: Path, reference: list[list[Any]]
) -> None:
    """Where only one larger slot fits beside the newest: at each edge the newest sealed snapshot is there."""
    with _limited(_ONE_BESIDE) as cgroup:
        growing = Growing(tmp_path / "replay", runtime, 1, cgroup)
        growing.dies(_STEPS, point)
        completed = growing.lines()[-1][0]
        end(keepers_of(runtime))
    growing.cgroup = None
    growing.goes(_STEPS)
    # What was skipped or on its way, and the step in flight, which has no line if it was not begun.
    assert growing.resumed_after() >= completed - _LOST - 1
    _is_exact(growing, reference)


def test_without_memory_for_more_it_trains_on_and_says_so(tmp_path: Path, runtime: Path) -> None:
    """The newest snapshot that there was memory for stays, is persisted, and is what a resume begins with."""
    with _limited(64 * MIB) as cgroup:
        growing = Growing(tmp_path / "replay", runtime, 1, cgroup)
        report = growing.goes(_STEPS, _STEPS)
        assert "boundaries are not captured, and training continues" in growing.said()
        assert 0 < report["newest_sealed_step"] < _STEPS - _LOST
        _is_counted(report, _STEPS)
        until(lambda: flashckpt.steps(tmp_path / "replay/run"), "a commit")
        end(keepers_of(runtime))


def test_a_state_that_outgrew_its_slots_before_a_snapshot_was_due_ends_no_run(
    tmp_path: Path, runtime: Path
) -> None:
    """Its first slots were there, and a long time was trained: a shortage is no reason to lose that."""
    steps = 50
    with _limited(24 * MIB) as cgroup:
        growing = Growing(tmp_path / "replay", runtime, 40, cgroup)
        report = growing.goes(steps, steps)
        assert "boundaries are not captured, and training continues" in growing.said()
        assert report["newest_sealed_step"] == -1
        assert len(growing.lines()) == steps
        end(keepers_of(runtime))
