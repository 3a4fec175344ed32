"""Trainer and keeper are killed in every order, several times, while slots have no names. The tests check
which snapshot each attempt resumes from, and that the end equals that of an uninterrupted run. tests/crash
does so with named slots.

Real processes and signals. A process is stopped (SIGSTOP) before another is killed where the order of what
they would do must be certain.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import flashckpt
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder
from tests import zygote
from tests.descriptors import readable
from tests.events import ledger
from tests.keeper.driver import eventually, kill_keeper, runtime_of
from tests.keeper.fake import keeper_pid
from tests.processes import end, keepers_of
from tests.resume.test_resume_exact import References, references
from tests.resume.training import Trainer, last_of_each

__all__ = ["references"]

RECIPE = "plain"
HOLDS = (8, 14)
# So that what a death leaves behind is never what would have been persisted without it.
PERSIST_EVERY = 5


@dataclass
class Job:
    """A recipe's run, held still in a step, with the runtime folder that its keeper serves."""

    trainer: Trainer
    base: Path
    process: zygote.Program | None = None
    said: list[str] = field(default_factory=list)

    @property
    def folder(self) -> RuntimeFolder:
        return runtime_of(self.trainer.run, self.base)

    def hold(self, step: int) -> None:
        """Start it, and wait until it stands still in a step with something committed behind it."""
        self.process = self.trainer.start(hold_at=step)
        assert self.process.stdout is not None
        assert readable(self.process.stdout), "the trainer never came to the step"
        assert self.process.stdout.readline() == f"held {step}\n"
        self.trainer.wait_committed()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill_trainer(self) -> None:
        assert self.process is not None
        self.said.append(self.trainer.kill(self.process))

    def wait_rescued(self, step: int) -> None:
        """Until the keeper has committed the newest snapshot that the dead trainer had sealed."""
        eventually(lambda: max(flashckpt.steps(self.trainer.run)) >= step)


def only_the_trainer(job: Job, step: int) -> None:
    job.kill_trainer()


def both_at_once(job: Job, step: int) -> None:
    """The keeper cannot rescue anything: it is stopped before the trainer dies, and killed."""
    pid = keeper_pid(job.folder)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    job.kill_trainer()
    kill_keeper(job.folder)


def the_keeper_then_the_trainer(job: Job, step: int) -> None:
    """The trainer has no time to start another keeper."""
    job.signal(signal.SIGSTOP)
    kill_keeper(job.folder)
    job.kill_trainer()


def the_trainer_then_the_keeper(job: Job, step: int) -> None:
    """The keeper has done what it is there for."""
    job.kill_trainer()
    job.wait_rescued(step - 2)
    kill_keeper(job.folder)


def a_keeper_that_was_replaced_then_the_trainer(job: Job, step: int) -> None:
    adopted = len(adoptions(job))
    kill_keeper(job.folder)
    # Until the next one has taken up the slots: by their names, or from the trainer's hands.
    eventually(lambda: len(adoptions(job)) > adopted)
    assert keeper_pid(job.folder) is not None
    job.kill_trainer()


def adoptions(job: Job) -> list[dict[str, object]]:
    return [line for line in ledger(job.trainer.run) if line["event"] == "adopt"]


Death = Callable[[Job, int], None]
# Where slots without a name are still held by somebody, and where by nobody.
HELD: tuple[Death, ...] = (only_the_trainer, a_keeper_that_was_replaced_then_the_trainer)
ORDERS: list[tuple[Death, Death]] = [
    (both_at_once, a_keeper_that_was_replaced_then_the_trainer),
    (only_the_trainer, the_trainer_then_the_keeper),
    (the_keeper_then_the_trainer, only_the_trainer),
    (a_keeper_that_was_replaced_then_the_trainer, the_keeper_then_the_trainer),
    (the_trainer_then_the_keeper, both_at_once),
]


@pytest.fixture
def job(tmp_path: Path, runtime: Path) -> Iterator[Job]:
    """In a folder on a disk no region has a name."""
    base = tmp_path / "runtime"
    base.mkdir()
    made = Job(Trainer(tmp_path, base, RECIPE, persist_every=PERSIST_EVERY), base)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.kill_trainer()
    end(keepers_of(base))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: " | ".join(each.__name__ for each in order))
def test_every_order_of_deaths_goes_on_and_ends_as_if_there_were_none(
    job: Job, order: tuple[Death, Death], references: References
) -> None:
    expected = []
    for step, death in zip(HOLDS, order, strict=True):
        job.hold(step)
        assert not any(map(is_region_name, job.folder.names()))
        death(job, step)
        assert "survive the death of trainer or keeper, not of both" in job.said[-1]
        if death in HELD:
            # At most the step in flight and those that were not begun while one was being copied.
            expected.append(("memory", range(step - 2, step + 1)))
        else:
            newest = max(flashckpt.steps(job.trainer.run))
            # Of a newer one all files but the record may be there: then the next start creates it.
            expected.append(("local", range(newest, step + 1)))
            assert death is not the_trainer_then_the_keeper or newest >= step - 2
    job.trainer.finish()

    resumed = [(str(line["tier"]), int(str(line["step"]))) for line in job.trainer.events("resume")]
    assert len(resumed) == len(expected)
    for (tier, step), (expected_tier, allowed) in zip(resumed, expected, strict=True):
        assert tier == expected_tier
        assert step in allowed
    assert last_of_each(job.trainer.records()) == references(RECIPE)
    assert flashckpt.verify(job.trainer.run).ok
