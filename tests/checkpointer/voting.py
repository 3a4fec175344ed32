"""A rank whose vote on each step is a test's to give."""

from __future__ import annotations

from collections.abc import Callable

from flashckpt.options import Environment
from flashckpt.ranks.group import Alone
from flashckpt.restore.step_choice import AloneVoter, Ballot, Voter

Vote = Callable[[Ballot], bool]


class _Asking(AloneVoter):
    def __init__(self, vote: Vote) -> None:
        self._vote = vote

    def vote(self, ballot: Ballot) -> bool:
        return self._vote(ballot)


class Voting(Alone):
    """Goes on from what `vote` agrees to."""

    def __init__(self, vote: Vote) -> None:
        super().__init__(Environment.read())
        self._vote = vote

    def voter(self) -> Voter:
        return _Asking(self._vote)
