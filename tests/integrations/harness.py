"""The acceptance tests of all integrations: a case runs plain, with flashckpt, and with flashckpt and killed;
all three give the same.

    IMPORTED = ("tests.integrations.hf.cases", "transformers.trainer")

    def test_map_style(cases: Cases) -> None:
        cases.check("map_style")

A case is a function of its `Job` (job.py), in the first of the modules that the zygote has imported (see
conftest.py). Each attempt is a process forked from the zygote, in a session of its own. The kills are planned
from the moments that the unkilled run has reported (`plan`): each name at least once, the rest by a seeded
draw, in the order in which they occur.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tests import zygote
from tests.integrations.job import AFTER, IN_WORKER, KILLED, PLAIN, START, STEP, WHOLE, Kill, Task
from tests.waiting import until
from tests.zygote import DEVNULL, Forked, Zygote

HOST, LIMIT_S = "127.0.0.1", 200.0
_OWN_MODULES = ("tests.integrations.job", "tests.integrations.data", "tests.waiting")


def framework(*modules: str, environment: Mapping[str, str] | None = None) -> Iterator[Zygote]:
    """For a fixture of a test module: a process that has imported these modules, ended after the last test.
    environment: variables that these modules read when they are imported."""
    made = Zygote((*zygote.PRELOADED, *_OWN_MODULES, *modules), environment)
    try:
        yield made
    finally:
        made.close()


def check_older(
    releases: Sequence[str], names: str, case: str, folder: Path, runtime: Path, *imported: str
) -> None:
    """`Cases.check` with older releases of a framework ("lightning==2.6.5"), which pip installs into a folder
    of their own, before those of this environment. names: a case that asserts that they are used and tested,
    and that flashckpt's tables of names fit them; its option `release` is the first one's. Both cases with
    their modules. imported: more modules."""
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    subprocess.run([*install, *releases], check=True, timeout=300)
    (names_module, _, names), (module, _, case) = names.partition(":"), case.partition(":")
    modules = {*imported, names_module, module}
    for older in framework(*modules, environment={"PYTHONPATH": str(packages)}):
        release = releases[0].partition("==")[2].removesuffix(".*")
        Cases(names_module, older, folder / "names", runtime).finished(names, release=release)
        Cases(module, older, folder, runtime).check(case)


@dataclass
class Outcome:
    """How a run of a case ended. ends: of each attempt, the status of each rank. records: of each rank.
    logged: of each rank, the value by place. moments: of each rank, of each attempt. hits: the kills that
    were sent, each with the name of the moment, the attempt and the rank."""

    ends: list[list[int]] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)
    moments: list[list[list[tuple[str, int]]]] = field(default_factory=list)
    hits: list[tuple[str, int, int]] = field(default_factory=list)

    def iterations(self, attempt: int, rank: int = 0) -> list[int]:
        """The numbers of the iterations that an attempt has begun, in their order."""
        return [counter for name, counter in self.moments[rank][attempt] if name == STEP]

    def repeated(self, rank: int = 0) -> list[int]:
        """The iterations that more than one attempt has begun."""
        begun = [number for each in range(len(self.ends)) for number in self.iterations(each, rank)]
        return sorted({number for number in begun if begun.count(number) > 1})


class Run:
    """One run of a case in one folder, started as often as it takes. kind: PLAIN, WHOLE or KILLED."""

    def __init__(
        self, case: str, framework: Zygote, folder: Path, runtime: Path, kind: str, **options: object
    ) -> None:
        self.case, self.framework, self.runtime, self.kind = case, framework, runtime, kind
        self.folder, self.files, self.options = folder / kind, folder / f"{kind}-files", options
        for each in (self.folder, self.files):
            each.mkdir(parents=True, exist_ok=True)
        self.outcome = Outcome()
        self.ranks = 1

    def attempt(
        self, kill: Kill | None = None, *, ranks: int = 1, victims: Sequence[int] | None = None
    ) -> list[int]:
        """Start the case, send the planned signal, wait for the end. Returns the status of each rank.

        ranks: how many processes, with the environment that torchrun gives. victims: the ranks that the plan
        kills (all unless given); once one has died, the others are killed, as a launcher does.
        """
        number, self.ranks = len(self.outcome.ends), ranks
        hit = range(ranks) if victims is None else victims
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        started = [
            self._start(number, kill if rank in hit else None, rank, ranks, store) for rank in range(ranks)
        ]
        try:
            self._wait(started, kill, number, hit)
        finally:
            for each in started:
                each.kill()
                each.wait(LIMIT_S)
                with contextlib.suppress(ProcessLookupError):  # a loader's workers
                    os.killpg(each.pid, signal.SIGKILL)
            del store
        ends = [each.wait() for each in started]
        self.outcome.ends.append(ends)
        self._read(number, ranks)
        return ends

    def finish(self, **how: Any) -> Outcome:
        """An attempt that must reach the end."""
        ends = self.attempt(**how)
        assert not any(ends), f"{self.case} ({self.kind}) ended by {ends}\n{self.said()}"
        return self.outcome

    def finish_killed(self, kills: Sequence[Kill], **how: Any) -> Outcome:
        """An attempt for each kill, then one that must reach the end. An attempt whose kill was not sent must
        reach the end, too; those after it find a finished run."""
        for kill in kills:
            ends, number = self.attempt(kill, **how), len(self.outcome.ends) - 1
            if any(attempt == number for _, attempt, _ in self.outcome.hits):
                # From outside, the signal may come after the end.
                good = kill.outside or kill.number != signal.SIGKILL or -signal.SIGKILL in ends
            else:
                good = not any(ends)
            assert good, f"{self.case}: {kill} ended by {ends}\n{self.said()}"
        return self.finish(**{name: value for name, value in how.items() if name != "victims"})

    def said(self) -> str:
        """The end of what the attempts have written, for a test that fails."""
        files = sorted(self.files.glob("said-*"), key=os.path.getmtime)[-max(2, self.ranks) :]
        return "\n".join(f"==== {each.name}\n{each.read_text(errors='replace')[-6000:]}" for each in files)

    def _start(self, number: int, kill: Kill | None, rank: int, ranks: int, store: TCPStore | None) -> Forked:
        task = Task(self.case, self.kind, str(self.folder), str(self.files), number, dict(self.options), kill)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "FLASHCKPT_RUNTIME": str(self.runtime),
            # A scheduler says that this is a restart: no attempt waits to see whether the last one lives.
            "SLURM_JOB_ID": self.folder.name,
            "SLURM_RESTART_COUNT": str(number),
        }
        if store is not None:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo",
                "TORCHELASTIC_USE_AGENT_STORE": str(True), "TORCHELASTIC_RESTART_COUNT": str(number),
                "TORCHELASTIC_RUN_ID": self.folder.name,
            }  # fmt: skip
        with open(self.files / f"said-{number:03d}-{rank}", "wb") as said:
            return self.framework.start(
                ["tests.integrations.attempt", task.encode()],
                stdin=DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True,
            )  # fmt: skip

    def _wait(
        self, started: Sequence[Forked], kill: Kill | None, number: int, victims: Sequence[int]
    ) -> None:
        """Until all ranks have ended, or one has ended in another way than by returning."""
        signalled = kill is None or not kill.outside

        def was_asked(rank: int) -> bool:
            return any(name == "kill" for name, _ in self._lines(f"moments-{rank}-{number}"))

        def is_over() -> bool:
            nonlocal signalled
            if not signalled and any(map(was_asked, victims)):
                signalled = True
                assert kill is not None
                for rank in victims:
                    started[rank].send_signal(kill.number)
            ends = [each.poll() for each in started]
            return all(end is not None for end in ends) or any(ends)

        if signalled and len(started) == 1:
            started[0].wait(LIMIT_S)
        else:
            until(is_over, f"the end of {self.case}", LIMIT_S)
        if kill is not None and kill.number != signal.SIGKILL:
            for each in started:
                each.wait(LIMIT_S)  # each ends by its own handling of the signal

    def _read(self, number: int, ranks: int) -> None:
        found = self.outcome
        for rank in range(ranks):
            if len(found.moments) <= rank:
                found.moments.append([])
            lines = self._lines(f"moments-{rank}-{number}")
            found.hits += [(str(place), number, rank) for name, place in lines if name == "kill"]
            found.moments[rank] += [[] for _ in range(number + 1 - len(found.moments[rank]))]
            found.moments[rank][number] = [(name, place) for name, place in lines if name != "kill"]
        if not any(found.ends[-1]):
            found.records = [
                torch.load(self.files / f"record-{rank}", weights_only=True) for rank in range(ranks)
            ]
            found.logged = [self._logged(rank) for rank in range(ranks)]

    def _logged(self, rank: int) -> dict[str, Any]:
        """The value of each place. A value that was logged again after a kill must be the same."""
        found: dict[str, tuple[int, Any]] = {}
        for attempt, place, text in self._lines(f"logged-{rank}"):
            before = found.setdefault(place, (attempt, text))
            assert before[1] == text, (
                f"{self.case}, rank {rank}: {place!r} is {before[1]} in attempt {before[0]} and {text} in "
                f"attempt {attempt}; the kills: {self.outcome.hits}"
            )
        return {place: json.loads(text) for place, (_, text) in found.items()}

    def _lines(self, name: str) -> list[Any]:
        try:
            text = (self.files / name).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def plan(moments: Sequence[tuple[str, int]], kills: int, number: int = signal.SIGKILL) -> list[Kill]:
    """Kills that cover each name of the unkilled run's moments: the first in its first second, one in its
    last iteration, one after its end; the rest drawn by a seed, at most one in an iteration if possible."""
    drawn, last = random.Random(1), max(counter for _, counter in moments)
    names = sorted({name for name, _ in moments} - {START, AFTER})
    places = {name: sorted({counter for each, counter in moments if each == name}) for name in names}
    for name, counters in places.items():
        if counters[0] == IN_WORKER:  # after any kill of the first half, workers are still to draw
            places[name] = list(range(1, last // 2 + 1))
    workers = {name for name, counter in moments if counter == IN_WORKER}
    chosen, used = [Kill(STEP, last)], {last}
    for turn in range(kills):
        for name in names if turn else [each for each in names if each != STEP]:
            free = [each for each in places[name] if each not in used] or (places[name] if not turn else [])
            if free and len(chosen) < max(kills - 2, len(names)):
                counter, in_worker = drawn.choice(free), name in workers
                count = 3 if in_worker else sum(1 for each in moments if each == (name, counter))
                nth = drawn.randint(1, min(count, 3))
                chosen.append(Kill(name, counter, nth=nth, in_worker=in_worker))
                used.add(counter)
    order = {place: index for index, place in reversed(list(enumerate(moments)))}
    chosen.sort(key=lambda each: (each.counter, order.get((each.name, each.counter), 0)))
    planned = []
    for each, following in zip(chosen, [*chosen[1:], None], strict=True):
        until = following.counter if following is not None and following.counter > each.counter else None
        if each.in_worker:
            planned.append(each)
            continue
        # From outside, the signal hits wherever the process is by then: one of each name comes from inside.
        is_covered = any(one.name == each.name and not one.outside for one in planned)
        outside = is_covered and until is not None and drawn.random() < 0.25
        planned.append(replace(each, until=until, outside=outside))
    ends = [Kill(START, outside=True), *planned, Kill(AFTER)]
    return [replace(each, number=number) for each in ends]


class Cases:
    """The cases of one module, run in the folder of one test."""

    def __init__(self, module: str, framework: Zygote, folder: Path, runtime: Path) -> None:
        self.module, self.framework, self.folder, self.runtime = module, framework, folder, runtime

    def run(self, case: str, kind: str = WHOLE, *, within: str = "", **options: object) -> Run:
        """A run of a case, not started yet. within: a folder for it beside the others of this test. options:
        the case's (`job.options`)."""
        name, folder = f"{self.module}:{case}", self.folder / within
        return Run(name, self.framework, folder, self.runtime, kind, **options)

    def finished(self, case: str, kind: str = WHOLE, **options: object) -> Outcome:
        """A run of a case by one process that reaches its end."""
        return self.run(case, kind, **options).finish()

    def said(self) -> str:
        """What all runs have written."""
        found = self.folder.glob("*-files/said-*")
        return "\n".join(each.read_text(errors="replace") for each in found)

    def check(
        self,
        case: str,
        *,
        kills: int = 5,
        ranks: int = 1,
        victims: Sequence[int] | None = None,
        plain: bool = True,
        again: bool = True,
        **options: object,
    ) -> tuple[Outcome, Outcome]:
        """Run the case plain, with flashckpt, and with flashckpt and killed; compare. Returns the outcomes of
        the unkilled and of the killed run.

        kills: at least as many. ranks, victims: as `Run.attempt`. plain=False leaves the run without
        flashckpt out. again: start the finished run once more; it must begin no iteration and give the same
        record.
        """
        runs = {kind: self.run(case, kind, **options) for kind in (PLAIN, WHOLE, KILLED)}
        whole = runs[WHOLE].finish(ranks=ranks)
        if plain:
            assert_same(runs[PLAIN].finish(ranks=ranks), whole, PLAIN, "with flashckpt")
        planned = plan(whole.moments[0][0], kills)
        killed = runs[KILLED].finish_killed(planned, ranks=ranks, victims=victims)
        hits = len({attempt for _, attempt, _ in killed.hits})
        assert hits >= kills, f"{hits} of {len(planned)} kills were sent, at {killed.hits}"
        missing = {name for name, _ in whole.moments[0][0]} - {name for name, *_ in killed.hits}
        assert not missing, f"no kill hit {missing}: {killed.hits}"
        assert_same(whole, killed, "with flashckpt", f"killed at {[name for name, *_ in killed.hits]}")
        if again:
            before = replace(whole, ends=[*whole.ends])
            runs[WHOLE].finish(ranks=ranks)
            assert not whole.iterations(1), f"a finished run has trained again: {whole.iterations(1)}"
            assert_same(before, whole, "finished", "started again")
        return whole, killed

    def check_terminated(self, case: str, **options: object) -> Outcome:
        """The same with SIGTERM: no iteration is repeated. Returns the outcome of the stopped run, whose
        `ends` say how each attempt ended."""
        whole = self.finished(case, **options)
        # Before the first iteration no handler is installed, after the last none is: nothing is saved there.
        inside = [place for place in whole.moments[0][0] if place[0] not in (START, AFTER) and place[1] != 0]
        planned = [replace(each, outside=False) for each in plan(inside, 6, signal.SIGTERM)[1:-1]]
        stopped = self.run(case, KILLED, **options).finish_killed(planned)
        assert len(stopped.hits) >= 4, f"{len(stopped.hits)} signals were sent, at {stopped.hits}"
        assert not stopped.repeated(), f"iterations {stopped.repeated()} were repeated after {stopped.hits}"
        assert_same(whole, stopped, "with flashckpt", f"stopped at {[name for name, *_ in stopped.hits]}")
        return stopped


def assert_same(a: Outcome, b: Outcome, a_name: str = "the first", b_name: str = "the second") -> None:
    """Fails with the places at which records or logged values differ."""
    found = [*differences(a.records, b.records, "record"), *differences(a.logged, b.logged, "logged")]
    if found:
        more = f"\n... and {len(found) - 20} more" if len(found) > 20 else ""
        raise AssertionError(f"{a_name} != {b_name}:\n" + "\n".join(found[:20]) + more)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values differ, bit for bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensor_differences(a, b, path)
    if isinstance(a, dict) and isinstance(b, dict):
        one_sided = [
            f"{path}.{key}: only in the {'first' if key in a else 'second'}" for key in a.keys() ^ b.keys()
        ]
        shared = [each for key in a if key in b for each in differences(a[key], b[key], f"{path}.{key}")]
        return sorted(one_sided) + shared
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return [f"{path}: {len(a)} entries, {len(b)} entries"]
        return [
            each
            for n, pair in enumerate(zip(a, b, strict=True))
            for each in differences(*pair, f"{path}[{n}]")
        ]
    # By their text: 0.0 is not -0.0, 1 is not 1.0, and NaN is itself.
    return [] if type(a) is type(b) and repr(a) == repr(b) else [f"{path}: {a!r} != {b!r}"]


def _tensor_differences(a: torch.Tensor, b: torch.Tensor, path: str) -> list[str]:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return [f"{path}: {a.dtype}{tuple(a.shape)} != {b.dtype}{tuple(b.shape)}"]
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    if torch.equal(one, other):
        return []
    most = (a.double() - b.double()).abs().max().item()
    return [f"{path}: {int((a != b).sum())} of {a.numel()} values differ, by at most {most}"]
