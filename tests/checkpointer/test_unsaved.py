"""What only the memory of dead ranks has, and who waits until it is in storage. The keeper's words are a
test's; what is made of them is the resume's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt.checkpointer import resume
from flashckpt.errors import RunError
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.keeper.protocol import Status
from flashckpt.options import Environment
from tests.commit.runs import attempt_at, commit, new_run


class Saying:
    """A session whose keeper says these, one after the other, and the last one from then on."""

    def __init__(self, *said: Status, world: int = 2) -> None:
        self.keeper, self.environment, self.has_memory = self, Environment(world=world), True
        self._said, self.asked = list(said), 0

    def status(self, *, awaited: bool = False) -> Status:
        self.asked += 1
        return self._said.pop(0) if len(self._said) > 1 else self._said[0]


def shorten(monkeypatch: pytest.MonkeyPatch, **timeouts_s: float) -> None:
    monkeypatch.setattr(resume, "_TIMEOUTS", replace(resume._TIMEOUTS, **timeouts_s))


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_keeper_is_to_save_for_ranks_that_are_elsewhere_now_is_offered(world: int) -> None:
    name = CommitName(7, AttemptName(1, "aaaaaaaa"), 9)
    said = Status.from_dict(json.loads(json.dumps(Status(waiting=(7,), unsaved=(name,)).to_dict())))
    session: Any = Saying(said, world=world)
    assert resume._unsaved(session) == ((name,) if world > 1 else ()), "a rank alone has no others"


def test_the_parts_of_other_nodes_are_waited_for() -> None:
    """The last of them may be written a moment later, or by a keeper of a node without trainers."""
    session: Any = Saying(Status(persisting=7, waiting=(7,)), Status(waiting=(7,), for_others=(7,)), Status())
    resume._saved_by_keeper(session)
    assert session.asked == 3


def test_a_part_that_never_comes_is_waited_for_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, others_s=0.1)
    session: Any = Saying(Status(waiting=(7,), for_others=(7,)))
    resume._saved_by_keeper(session)
    assert session.asked > 1


class Rewriting(Saying):
    """Each try of the keeper writes bytes, and fails."""

    def status(self, *, awaited: bool = False) -> Status:
        assert self.asked < 400, "it is waited for without end"
        said = super().status(awaited=awaited)
        return replace(said, progress_bytes=self.asked, counts={"failed": self.asked // 2})


@pytest.mark.parametrize("persisting", [None, 7])
def test_bytes_that_are_written_in_vain_again_and_again_are_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persisting: int | None
) -> None:
    shorten(monkeypatch, failing_s=0.1, idle_s=0.1, writing_s=0.1)
    failing = Status(waiting=(7,), failing=(7,), persisting=persisting)
    session: Any = Rewriting(failing)
    session.store = new_run(tmp_path / "run")
    with pytest.raises(RunError, match="step 7 is whole in this node's memory"):
        resume._saved_by_keeper(session)
    commit(session.store, 9, attempt_at(session.store))
    session.asked = 0
    resume._saved_by_keeper(session)
    assert session.asked > 1
