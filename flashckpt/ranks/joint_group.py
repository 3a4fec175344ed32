"""One rank of several, as `attach` and the loop see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flashckpt.errors import OptionError
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.options import Environment
from flashckpt.ranks import joint_pace, replicas
from flashckpt.ranks.candidates import RanksVoter
from flashckpt.ranks.job import LOADING_PATIENCE_S, Decide, Job, KeyValues
from flashckpt.ranks.joint_pace import JobPlace
from flashckpt.ranks.pacing import Cadence, Pacing
from flashckpt.ranks.replicas import Tables
from flashckpt.restore.step_choice import Voter

T = TypeVar("T")
_MOST_NAMED = 8


class Ranks:
    """One of several. `store` is the job's, kept by the leaders of nodes for as long as they have the run;
    that of rank 0 serves the others."""

    def __init__(self, environment: Environment, job: Job) -> None:
        self.environment, self.node, self.leads = environment, job.node, job.rank == 0
        self._job: Job | None = job
        self.store: KeyValues | None = job.store if job.rank == job.node[0] else None

    @property
    def job(self) -> Job:
        assert self._job is not None, "the ranks agree on nothing after attach"
        return self._job

    def together(self, what: str, deed: Callable[[], T], *, loads: bool = False) -> T:
        return self.job.together(what, deed, patience_s=LOADING_PATIENCE_S if loads else None)

    def led(self, what: str, deed: Callable[[], T]) -> T:
        return self.job.led(what, deed)

    def agree(self, what: str, deed: Callable[[], Any], decide: Decide) -> Any:
        return self.job.agree(what, self.job.together(what, deed), decide)

    def check_alike(self, mine: Mapping[str, str]) -> None:
        self.job.agree("whether all ranks call alike", dict(mine), _check_alike)

    def check_replicas(self, tables: Callable[[], Tables]) -> None:
        replicas.check(self.job, self.together("the leaves of replicas", tables))

    def voter(self) -> Voter:
        return RanksVoter(self.job)

    def begin(self, runtime: RuntimeFolder, attempt: AttemptName, cadence: Cadence) -> Pacing:
        return joint_pace.begin(
            JobPlace(
                rank=self.environment.rank,
                world=self.environment.world,
                node=self.node,
                nodes=self.job.nodes,
                store=self.store,
                runtime=runtime,
                attempt=attempt,
                cadence=cadence,
                together=self.together,
                led=self.led,
            )
        )

    def attached(self) -> None:
        self.job.attached()
        self._job = None

    def close(self) -> None:
        if self._job is not None:
            self._job.leave()
        self._job = self.store = None


def _check_alike(rows: list[Any]) -> None:
    """Raises OptionError where ranks differ, with the names that they differ in. A rank that does not know
    something says nothing of it."""
    found: list[str] = []
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            if name in row:
                ranks.setdefault(row[name], []).append(rank)
        if len(ranks) > 1:
            said = [f"{value} on {_of(those)}" for value, those in ranks.items()]
            found.append(f"{name}: {', '.join(said[:_MOST_NAMED])}{', …' * (len(said) > _MOST_NAMED)}")
    if found:
        raise OptionError(
            "The ranks of this job do not call alike:\n"
            + "\n".join(f"  {each}" for each in found)
            + "\nNothing was started. Give all ranks the same path, options and names of state, and "
            "loaders of as many batches (a DistributedSampler does)."
        )


def _of(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {shown}{more}" if len(ranks) == 1 else f"ranks {shown}{more}"
