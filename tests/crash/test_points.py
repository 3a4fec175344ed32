"""Trainer, keeper and both are killed at every named point; what comes after must be as if nothing had.

Whoever comes to the point stops itself there, so that the other can be killed just as exactly.
"""

import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from flashckpt import crashpoints
from flashckpt.crashpoints import POINTS
from flashckpt.errors import OptionError
from tests.crash.job import LIMIT_S, Job, none
from tests.waiting import until
from tests.zygote import Zygote

PACKAGE = Path(__file__).parents[2] / "flashckpt"
# Memory must be empty for these: a step is read from disk, slots are made, and a region of constants.
FROM_DISK = {"resume.read", "memory.reserved", "slots.taken", "memory.made"}
# Nothing may have gone before: what never changes is copied once, later attempts have it.
FIRST = {"share.filled", "share.sealed"}
# The trainer must stand still for these: an idle keeper looks, or is to see the trainer killed.
HELD = {"audit.begun", "rescue.asked"}
# Which process comes to a point, where the other one does not live any more.
ALONE = {"attempt.reserved", "leave.begun", "leave.emptied", "leave.closed"}
# The state of this run does not grow, its trainer neither copies steps nor imports a checkpoint, and has no
# cache: tests/checkpointer, tests/replication, tests/importing and tests/keeper kill at these.
ELSEWHERE = ("growth.", "copy.", "import.", "cache.")
HOLD_AT = 16
VICTIMS = ("who is there", "the other", "both")
CASES = [
    (point, who)
    for point in POINTS
    for who in VICTIMS
    if not point.startswith(ELSEWHERE) and (who != "the other" or point not in ALONE)
]


def test_every_point_stands_in_the_code_and_in_the_table() -> None:
    used = Counter(
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'crashpoints\.point\("([^"]+)"\)', path.read_text())
    )
    assert set(used) == set(POINTS)
    assert max(used.values()) == 1, "a point's name says where it is"


def test_a_point_is_nothing_until_one_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crashpoints.point is crashpoints._unarmed
    for text in ("part.linke", "part.linked:x", "part.linked:1:burn", "part.linked:1:kill:1"):
        with pytest.raises(OptionError, match="FLASHCKPT_CRASH_AT"):
            crashpoints.arm(text)
    monkeypatch.setattr(crashpoints, "point", crashpoints._unarmed)
    killed: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: killed.append(number))
    crashpoints.arm("part.linked:2:stop")
    for name in ("part.linked", "write.begun", "part.linked", "part.linked"):
        crashpoints.point(name)
    assert killed == [signal.SIGSTOP]


@pytest.mark.parametrize(("point", "victim"), CASES)
def test_killed_at_a_point(
    point: str, victim: str, tmp_path: Path, runtime: Path, zygote: Zygote, reference: list[int]
) -> None:
    job = Job(zygote, tmp_path, runtime, reference)
    faults = faults_of_a_kill(job, point, victim, tmp_path / "release")
    assert not faults, "\n".join(faults)


def faults_of_a_kill(job: Job, point: str, victim: str, release: Path) -> list[str]:
    """What is wrong after a kill at a point, and once the job has ended. `release`: a file that is not there
    yet."""
    if point not in FIRST:
        _first_lives(job, from_disk=point in FROM_DISK)
    held = {"hold": (HOLD_AT, str(release)), "persist_every": 1000} if point in HELD else {}
    job.start(armed=f"{point}:1:stop", **held)
    if point == "rescue.asked":
        assert job.await_(lambda: job.stands_at(HOLD_AT)), job.said
        job.kill_trainer()
    there = _reached(job)
    assert there is not None, f"{point} was never reached: {job.said}"

    _strike(job, there, victim)
    release.touch()
    faults = job.faults()
    _let_go_on(job)
    return faults + job.finish()


def _first_lives(job: Job, *, from_disk: bool) -> None:
    """An attempt with commits, and one that died of its claim; both processes are dead."""
    job.start(hold=(8, "/until/it/is/killed"))
    assert job.await_(lambda: job.stands_at(8) and job.visible()), job.said
    job.kill_trainer()
    job.expect(memory=True)
    if from_disk:
        job.settle()
    job.kill_keepers()
    if from_disk:
        job.forget_memory()
        job.expect(memory=False)
    job.start(armed="attempt.reserved")
    assert job.ended(LIMIT_S)
    assert job.status() == -signal.SIGKILL
    none(job.faults())
    job.expect(memory=not from_disk)


def _reached(job: Job) -> int | None:
    """The pid of the process that stopped at the point; None where all have ended without."""
    found: list[int | None] = []

    def decided() -> bool:
        found[:] = [job.stopped()]
        return found[0] is not None or (not job.lives_on() and not job.keepers())

    until(decided, "a process at the point", LIMIT_S)
    return found[0]


def _strike(job: Job, there: int, victim: str) -> None:
    """Kill who stands at the point, or the other, or both."""
    is_trainer = there == job.trainer
    if victim != "the other":
        (job.kill_trainer if is_trainer else job.kill_keepers)()
    if victim != "who is there":
        (job.kill_keepers if is_trainer else job.kill_trainer_if_alive)()


def _let_go_on(job: Job) -> None:
    """Whoever lives goes on; of a dead trainer it is remembered what the next one must find."""
    if job.trainer < 0:
        job.let_go_on()
        job.expect(memory=True)
    elif not job.lives_on():
        assert job.status() == 0, job.said
