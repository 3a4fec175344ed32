"""A process's place in its job, as `attach` and the loop see it: `Alone`, or one of several
(`joint_group.Ranks`).

One process is a world of one: nothing above this asks how many there are. Owns what ranks agree on while they
attach; what decides beside the loop (which boundaries are taken) is a `Pacing`. A process alone imports
nothing of what ranks need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.options import Environment
from flashckpt.ranks.job import Decide, meet, placed
from flashckpt.ranks.pacing import Cadence, OwnPace, Pacing
from flashckpt.restore.step_choice import AloneVoter, Voter

if TYPE_CHECKING:
    from flashckpt.ranks.replicas import Tables

T = TypeVar("T")


class Group(Protocol):
    """The ranks of a job. The methods that agree are called by all ranks, in one order, while they attach; an
    error of one is raised on all, with its rank named. `node` are the ranks of this node, ascending."""

    environment: Environment
    node: tuple[int, ...]
    leads: bool

    def together(self, what: str, deed: Callable[[], T], *, loads: bool = False) -> T:
        """Do something on each rank; returns when all could. `loads`: it may take as long as storage does."""

    def led(self, what: str, deed: Callable[[], T]) -> T:
        """What rank 0 gets from a deed, in plain JSON, on all ranks."""

    def agree(self, what: str, deed: Callable[[], Any], decide: Decide) -> Any:
        """What rank 0 decides of what each rank gets from a deed, in plain JSON. None for a rank alone, which
        has nobody to agree with: nothing is done."""

    def check_alike(self, mine: Mapping[str, str]) -> None:
        """Raises OptionError, on all ranks, where one gives another value for a name than most do."""

    def check_replicas(self, tables: Callable[[], Tables]) -> None:
        """Raises StateError, on all ranks, where two that are declared replicas hold different leaves."""

    def voter(self) -> Voter:
        """Who has a say in which step is gone on from."""

    def begin(self, runtime: RuntimeFolder, attempt: AttemptName, cadence: Cadence) -> Pacing:
        """Begin what goes on beside the loop, of an attempt with its runtime folder on this node."""

    def attached(self) -> None:
        """All ranks have attached: they agree on nothing more."""

    def close(self) -> None:
        """The run is let go, or attaching has failed. A second call does nothing."""


class Alone:
    """A process that trains by itself."""

    leads = True

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.node: tuple[int, ...] = (environment.rank,)

    def together(self, what: str, deed: Callable[[], T], *, loads: bool = False) -> T:
        return deed()

    def led(self, what: str, deed: Callable[[], T]) -> T:
        return deed()

    def agree(self, what: str, deed: Callable[[], Any], decide: Decide) -> Any:
        return None

    def check_alike(self, mine: Mapping[str, str]) -> None:
        pass

    def check_replicas(self, tables: Callable[[], Tables]) -> None:
        pass

    def voter(self) -> Voter:
        return AloneVoter()

    def begin(self, runtime: RuntimeFolder, attempt: AttemptName, cadence: Cadence) -> Pacing:
        return OwnPace(cadence)

    def attached(self) -> None:
        pass

    def close(self) -> None:
        pass


def join(environment: Environment) -> Group:
    """Meet the other ranks of this job, if there are any. Collective over the default process group, once.

    Raises OptionError where several processes were started and no process group is there to meet in."""
    job = meet(environment)
    if job is None:
        return Alone(environment)
    from flashckpt.ranks.joint_group import Ranks

    return Ranks(placed(environment, job), job)
