"""A rank whose vote on each step is a test's to give."""

from collections.abc import Callable
from pathlib import Path

from flashckpt.options import Call, Environment
from flashckpt.ranks.coordination import Group
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_choice import Agreement

Vote = Callable[[str, Snapshot | None], bool]


class _Asking(Agreement):
    def __init__(self, vote: Vote) -> None:
        self._vote = vote

    def vote(self, reason: str, snapshot: Snapshot | None = None) -> bool:
        return self._vote(reason, snapshot)


class Voting(Group):
    """Goes on from what `vote` agrees to."""

    def __init__(self, vote: Vote) -> None:
        super().__init__(Environment.read())
        self._vote = vote

    def agreement(self) -> Agreement:
        return _Asking(self._vote)


def saving_by_hand(run: Path) -> Call:
    return Call(path=run, every=None, persist_every=None)
