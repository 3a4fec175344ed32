"""Every interleaving of the store calls of some actors, each killed at each of its calls.

An actor is a callable that takes its stores and returns what it reports. It is run anew from its start for
each new sequence of answers, and stopped at its first request beyond them: so its next request is a
function of the answers that it was given, and nothing else has to be saved or restored. Actors take turns
at requests.

A state is the files, and the answers that each actor has had. States that are alike are expanded once: all
that can follow is a function of the state, so this loses nothing. The search is breadth first: of the
schedules that it goes through, the first that violates an invariant has the fewest turns.

Beyond that (`reduced`), a read is taken before everything else where no living other actor can still write
what it reads: it commutes with all that can come before it, and invariants depend on files and reports
alone. What an actor can still write is learned: the search is repeated until no write was made that an
earlier decision did not count with. (Shortest schedule to such a write: every decision on the way was
right, so its turns are explored in another order, and the write is seen.) A kill has no effect of its own,
so one after a read is the same as one after the actor's last write before it: kills are explored at the
start, and after each write.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flashckpt.errors import FlashckptError
from flashckpt.store import objects
from flashckpt.store.base import Store
from tests.protocol.memory_store import READS, Files, LiveServer, Request, Server, apply, cut_short

OpenStore = Callable[[Server, str], Store]
MOST_STATES = 20_000_000


@dataclass(frozen=True)
class Actor:
    """`act` is given the stores at `places`, and returns what it reports, which can be hashed."""

    name: str
    act: Callable[..., object]
    places: tuple[str, ...] = ("home",)
    may_die: bool = True


class _Asks(BaseException):
    """The next request of an actor. No code catches it."""

    def __init__(self, request: Request) -> None:
        self.request = request


class _Replay:
    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers, self._next = answers, 0
        self._asked: _Asks | None = None

    def ask(self, request: Request) -> Any:
        if self._asked is not None:
            raise self._asked  # a clean-up on the way out
        if self._next == len(self._answers):
            self._asked = _Asks(request)
            raise self._asked
        self._next += 1
        return self._answers[self._next - 1]


class _Serial:
    """A pool of threads whose threads are the caller: the order of requests must not depend on chance."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Serial:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Any:
        value = call(*arguments)
        return SimpleNamespace(result=lambda: value)


def _stopped() -> float:
    return 1e9


def _at_once(_: float) -> None: ...


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Random names that follow from `seed`; a clock that stands still, so that what may be seconds old is."""
    count = iter(range(1 << 30))

    def token_hex(num_bytes: int) -> str:
        return f"{seed + 1:02x}{next(count):06x}".rjust(2 * num_bytes, "a")[-2 * num_bytes :]

    with (
        mock.patch.object(secrets, "token_hex", token_hex),
        mock.patch.object(time, "time", _stopped),
        mock.patch.object(time, "monotonic", _stopped),
        mock.patch.object(time, "sleep", _at_once),
        mock.patch.object(objects, "ThreadPoolExecutor", _Serial),
    ):
        yield


@dataclass(eq=False)
class _Progress:
    """An actor after some answers: its next request, or, with none, what it reports."""

    before: _Progress | None
    answer: Any
    request: Request | None = None
    report: Any = None
    may_die: bool = True
    following: dict[Any, _Progress] = field(default_factory=dict)
    writes: set[str] = field(default_factory=set)

    def answers(self) -> list[Any]:
        found, each = [], self
        while each.before is not None:
            found.append(each.answer)
            each = each.before
        return found[::-1]


@dataclass(frozen=True)
class World:
    """What an invariant sees. `reports` of actors that have ended, by their names; `dead` are those that were
    killed. `is_final`: all actors have ended."""

    files: Files
    reports: dict[str, Any]
    dead: frozenset[str]
    is_final: bool
    open_store: OpenStore

    def store(self, place: str = "home") -> Store:
        return self.open_store(LiveServer(self.files), place)

    def after(self, seed: int, act: Callable[[Store], object]) -> World:
        """The world once one more actor has run alone to its end."""
        server = LiveServer(self.files)
        with repeatable(seed):
            act(self.open_store(server, "home"))
        return World(server.files, self.reports, self.dead, True, self.open_store)


# What is wrong, or nothing.
Invariant = Callable[[World], str]


@dataclass
class Found:
    """`schedules`: how many orders of turns the states stand for. `fault`: the shortest that violates
    an invariant,
    and which."""

    states: int = 0
    schedules: int = 0
    runs: int = 0
    seconds: float = 0.0
    finals: set[Any] = field(default_factory=set)
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.states} states, {self.schedules:.3g} schedules, {self.runs} runs, {self.seconds:.1f} s"


_Where = tuple["_Progress | None", ...]


class _FileSets:
    """All files that a state may have, by number, for all passes."""

    def __init__(self) -> None:
        self.files: list[Files] = []
        self.keys: list[frozenset[Any]] = []
        self._numbers: dict[frozenset[Any], int] = {}

    def number(self, files: Files) -> int:
        key = frozenset(files.items())
        found = self._numbers.setdefault(key, len(self.files))
        if found == len(self.files):
            self.files.append(files)
            self.keys.append(key)
        return found


class _States:
    """States by number, in the order in which they were found. A state is a set of files, by its number, and
    how far each actor is: of those that have ended with the same report one stands for all. `came`: the
    state before it, and which of its turns leads to it."""

    def __init__(self, sets: _FileSets, files: Files, begun: Sequence[_Progress]) -> None:
        self.came: list[tuple[int, int] | None] = []
        self._sets = sets
        self._numbers: dict[tuple[int, _Where], int] = {}
        self._states: list[tuple[int, _Where]] = []
        self._ended: dict[tuple[int, str], _Progress] = {}
        self.number({}, -1, files, tuple(begun), came=None)

    def __len__(self) -> int:
        return len(self._states)

    def of(self, number: int) -> tuple[int, _Where]:
        return self._states[number]

    def number(
        self, before: Files, before_id: int, files: Files, where: _Where, *, came: tuple[int, int] | None
    ) -> int:
        """The number of a state, which follows one with the files `before`."""
        files_id = before_id if files is before else self._sets.number(files)
        state = files_id, tuple(self._alike(index, each) for index, each in enumerate(where))
        found = self._numbers.setdefault(state, len(self._states))
        if found == len(self._states):
            self._states.append(state)
            self.came.append(came)
        return found

    def _alike(self, index: int, each: _Progress | None) -> _Progress | None:
        if each is None or each.request is not None:
            return each
        return self._ended.setdefault((index, repr(each.report)), each)


class Search:
    """All that some actors can do to `files`, in any order. `most_deaths` of them are killed at most."""

    def __init__(
        self,
        files: Files,
        actors: Sequence[Actor],
        open_store: OpenStore,
        invariants: Sequence[Invariant] = (),
        *,
        reduced: bool = True,
        most_deaths: int | None = None,
    ) -> None:
        self._files, self._actors, self._open_store = files, actors, open_store
        self._invariants, self._reduced = invariants, reduced
        self._most_deaths = len(actors) if most_deaths is None else most_deaths
        self._runs, self._has_learned = 0, False
        self._judged: dict[Any, str] = {}
        self._sets = _FileSets()
        self._begun = [self._run(index, None, None) for index in range(len(actors))]

    def run(self) -> Found:
        began = time.monotonic()
        while True:
            self._has_learned = False
            found = self._pass()
            if found.fault or not (self._reduced and self._has_learned):
                break
        found.runs, found.seconds = self._runs, time.monotonic() - began
        return found

    # ---- actors

    def _run(self, index: int, before: _Progress | None, answer: Any) -> _Progress:
        made, actor = _Progress(before, answer), self._actors[index]
        self._runs += 1
        server = _Replay(made.answers())
        with repeatable(index):
            try:
                made.report = actor.act(*(self._open_store(server, place) for place in actor.places))
            except _Asks as found:
                made.request = found.request
            except (FlashckptError, OSError) as error:
                made.report = f"{type(error).__name__}: {error}"
        return made

    def _next(self, index: int, progress: _Progress, answer: Any) -> _Progress:
        found = progress.following.get(answer)
        if found is None:
            found = progress.following[answer] = self._run(index, progress, answer)
            request = progress.request
            assert request is not None
            found.may_die = not request.is_read
            if not request.is_read:
                self._learn(progress, request)
        return found

    def _learn(self, progress: _Progress | None, request: Request) -> None:
        paths = {request.path, *([request.other] if request.kind == "link" else [])}
        # Folders come with the files in them.
        paths |= {path.rpartition("/")[0] for path in paths}
        while progress is not None and not paths <= progress.writes:
            progress.writes |= paths
            self._has_learned = True
            progress = progress.before

    # ---- the search

    def _pass(self) -> Found:
        found, states = Found(), _States(self._sets, self._files, self._begun)
        following: list[tuple[int, ...]] = []
        for number in itertools.count():
            if number == len(states):
                break
            files_id, where = states.of(number)
            files = self._sets.files[files_id]
            assert number < MOST_STATES, "too many states: make the scenario smaller"
            if fault := self._judge(files_id, files, where):
                found.fault = f"{fault}\n{self._schedule(states, number)}"
                found.states = number + 1
                return found
            turns = tuple(
                states.number(files, files_id, after, moved, came=(number, turn))
                for turn, (_, after, moved) in enumerate(self._turns(files, where))
            )
            following.append(turns)
            if not turns:
                found.finals.add((self._sets.keys[files_id], self._reports(where)))
        found.states, found.schedules = len(states), _count(following)
        return found

    def _schedule(self, states: _States, number: int) -> str:
        """One line a turn of the way to a state. Of reads of one actor that follow one another the last is
        shown: numbers count them all."""
        turns = []
        while (came := states.came[number]) is not None:
            number, turn = came
            files_id, where = states.of(number)
            name, _, _ = next(itertools.islice(self._turns(self._sets.files[files_id], where), turn, None))
            turns.append(name)
        return _shown_turns(turns[::-1])

    def _turns(
        self, files: Files, where: tuple[_Progress | None, ...]
    ) -> Iterator[tuple[str, Files, tuple[_Progress | None, ...]]]:
        live = [index for index, each in enumerate(where) if each is not None and each.request is not None]
        if self._reduced:
            first = next((index for index in live if self._is_free(index, where, live)), None)
            live = live if first is None else [first]
        has_deaths = sum(each is None for each in where) < self._most_deaths
        for index in live:
            progress, name = where[index], self._actors[index].name
            assert progress is not None
            assert progress.request is not None
            request = progress.request

            def moved(to: _Progress | None, index: int = index) -> tuple[_Progress | None, ...]:
                return (*where[:index], to, *where[index + 1 :])

            may_die = has_deaths and self._actors[index].may_die
            if may_die and progress.may_die:
                yield f"{name} is killed", files, moved(None)
            after, answer = apply(files, request)
            yield f"{name}: {request} -> {_shown(answer)}", after, moved(self._next(index, progress, answer))
            if may_die and (cut := cut_short(files, request)) is not None:
                yield f"{name} is killed in: {request}", cut, moved(None)

    def _is_free(self, index: int, where: tuple[_Progress | None, ...], live: list[int]) -> bool:
        progress = where[index]
        assert progress is not None
        request = progress.request
        assert request is not None
        if not request.is_read:
            return False
        for other in live:
            if other == index or (its := where[other]) is None:
                continue
            if request.is_listing:
                if any(path.startswith(request.path) for path in its.writes):
                    return False
            elif request.path in its.writes:
                return False
        return True

    def _reports(self, where: tuple[_Progress | None, ...]) -> tuple[Any, ...]:
        """Of each actor that has ended; (None, ) for the dead."""
        return tuple(
            ("dead",) if each is None else ("ended", each.report) if each.request is None else ()
            for each in where
        )

    def _judge(self, files_id: int, files: Files, where: tuple[_Progress | None, ...]) -> str:
        reports = self._reports(where)
        is_final = all(reports)
        place = files_id, reports
        if place not in self._judged:
            names = [each.name for each in self._actors]
            ended = {
                name: each[1] for name, each in zip(names, reports, strict=True) if each[:1] == ("ended",)
            }
            dead = frozenset(name for name, each in zip(names, reports, strict=True) if each == ("dead",))
            world = World(files, ended, dead, is_final, self._open_store)
            faults = ((each, _wrong(each, world)) for each in self._invariants)
            self._judged[place] = next((f"{each.__name__}: {why}" for each, why in faults if why), "")
        return self._judged[place]


def _wrong(invariant: Invariant, world: World) -> str:
    try:
        return invariant(world)
    except (FlashckptError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def _shown(answer: Any) -> str:
    data = getattr(answer, "data", None)
    return f"{len(data)} bytes" if data is not None else str(answer)[:160]


def _shown_turns(turns: Sequence[str]) -> str:
    lines: list[str] = []
    reads = 0
    for number, turn in enumerate(turns, 1):
        actor, _, request = turn.partition(": ")
        is_read = request.partition(" ")[0] in READS
        if is_read and reads and lines[-1].split("  ")[1] == actor:
            lines.pop()
        reads = reads + 1 if is_read else 0
        lines.append(f"{number:3d}  {actor}  {request}")
    return "\n".join(lines)


def _count(following: Sequence[tuple[int, ...]]) -> int:
    """How many paths lead from the first state to an end: states are a graph without circles."""
    counts: dict[int, int] = {}
    stack = [0]
    while stack:
        state = stack[-1]
        open_ones = [each for each in following[state] if each not in counts]
        if open_ones:
            stack += open_ones
            continue
        stack.pop()
        counts[state] = sum(counts[each] for each in following[state]) or 1
    return counts[0]
