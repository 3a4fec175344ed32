"""Every order of the requests of some processes, each killed at any request, with every fault of a store.

A process is a generator that yields requests and is sent the answers. A state is the files, what has happened
so far (`history`), how many kills and faults are left, and where each process stands. That is read off its
suspended frames: code position, local variables and evaluation stack decide all that a process can do, so two
processes that are equal in these are one state, however they came there. Each state is expanded once, breadth
first, so the first fault that is found has the shortest schedule.

A kill has no effect of its own, so a kill after a read equals one after the write before it: kills are tried
at the start and after each request that can change files. A deletion of several files can be killed halfway.
"""

import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

from flashckpt.catalogue.requests import Create, Delete, Files, Folders, Has, Put, Read, Steps
from flashckpt.errors import FlashckptError
from flashckpt.format.catalogue import Catalogue
from tests.catalogue.model import Page, Report, Store, World, listing_key, listings_of


@dataclass(frozen=True)
class Process:
    """nonce: of the writer that it is, or becomes.

    may_remove: it is `flashckpt prune`, which may drop what retention keeps.

    is_coarse: its reads under data/ take no turn of their own. They follow the request before at once.
    """

    name: str
    act: Callable[[], Steps[object]]
    nonce: str = ""
    may_die: bool = True
    is_coarse: bool = False
    may_remove: bool = False


# ---- where a process stands


def key_of(value: Any) -> Any:
    """Return a hashable key of all that a value can do from now on."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "ended"
        of = value if sys.version_info >= (3, 11) else frame
        names = tuple(sorted(inspect.getgeneratorlocals(value)))
        ignored = (types.FunctionType, types.CodeType, types.FrameType)
        held = tuple(
            key_of(each)
            for each in gc.get_referents(of)
            if not isinstance(each, ignored) and each is not frame.f_locals
        )
        return value.gi_code, frame.f_lasti, names, held
    if isinstance(value, partial):
        return value.func, key_of(value.args), key_of(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(key_of, value))
    if isinstance(value, dict):
        return dict, tuple((key_of(name), key_of(each)) for name, each in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(map(key_of, value))
    if isinstance(value, BaseException):
        return type(value), key_of(value.args)
    if is_dataclass(value) and not isinstance(value, type):
        return _numbers.setdefault(value, len(_numbers))
    if isinstance(value, types.CellType):
        return "cell", *map(key_of, gc.get_referents(value))
    if isinstance(value, types.MethodType):
        return value.__func__, key_of(value.__self__)
    if hasattr(value, "__next__") and not isinstance(value, type):
        return key_of(value.__reduce__())
    return value


_numbers: dict[Any, int] = {}
"""A number for each record, so that it is compared and hashed once."""


@dataclass
class _Place:
    """A process after some answers, the first of them None.

    `request` is its next one, None at its end; `reports` are those just before. `steps` is the suspended
    process itself, until it is sent an answer.
    """

    answers: tuple[Any, ...]
    request: Any
    reports: tuple[Report, ...]
    has_written: bool
    steps: Steps[Any] | None
    following: dict[Any, int] = field(default_factory=dict)


# ---- the search


@dataclass
class Found:
    states: int = 0
    fault: str = ""


State = tuple[int, ...]
"""The world (files, late requests, older listings); history; kills left; faults left; the place of each."""
Turn = tuple[Any, ...]


class Search:
    """All that some processes can do to `files`, in any order.

    rules: Invariants. `changed` is called after a request that took effect, `reported` after a report: both
    return the history, with a `fault` if an invariant is violated. In each state `standing` returns "" or
    what is wrong; so does `final`, once all processes have ended or died.

    by_answers: two places are equal only after the same answers. It tests that `key_of` misses nothing.
    """

    def __init__(
        self,
        store: Store,
        files: World,
        processes: tuple[Process, ...],
        rules: Any,
        kills: int,
        most_states: int,
        by_answers: bool,
    ) -> None:
        self._store, self._processes, self._rules = store, processes, rules
        self._by_answers = by_answers
        self._ends: set[State] = set()
        self._most_states = most_states
        self._places: list[_Place] = [_Place((None,), None, (), True, None)]  # 0 is a dead process
        self._place_keys: dict[Any, int] = {}
        self._worlds: list[tuple[World, tuple[Any, ...], Mapping[str, Any]]] = []
        self._world_keys: dict[Any, int] = {}
        self._histories: list[Any] = []
        self._history_keys: dict[Any, int] = {}
        self._moves_memo: dict[Any, list[tuple[Turn, int, int, int, int]]] = {}
        self._judge_memo: dict[Any, str] = {}
        first = rules.history()
        begun = []
        for index, process in enumerate(processes):
            steps = store.adapt(process.name, process.act())
            begun.append(self._place(index, steps, (None,), True))
            for report in self._places[begun[-1]].reports:
                first = rules.reported(first, process, report)
        budget = 1 if store.has_faults else 0
        self._start: State = (self._world(files, (), {}), self._history(first), kills, budget, *begun)

    def run(self) -> Found:
        found = Found()
        came: dict[State, tuple[State, Turn] | None] = {self._start: None}
        following: dict[State, list[State]] = {}
        queue = deque([self._start])
        while queue and not found.fault:
            state = queue.popleft()
            turns = following[state] = []
            found.fault = self._judge(state)
            for turn, after in self._turns(state):
                turns.append(after)
                if after not in came:
                    came[after] = state, turn
                    queue.append(after)
            if not turns:
                self._ends.add(state[:2])
            if len(came) > self._most_states:
                found.fault = f"I7: more than {self._most_states} states: a process does not end"
            if found.fault:
                found.fault += "\n" + _schedule(came, state)
        found.states = len(following)
        stuck = None if found.fault else _on_a_circle(following)
        if stuck is not None:
            found.fault = "I7: a process repeats itself for ever\n" + _schedule(came, stuck)
        return found

    def ends(self) -> set[Any]:
        """Return the files, late requests and history of each end that was found."""
        worlds = ((self._worlds[world], self._histories[history]) for world, history in self._ends)
        return {(frozenset(files.items()), late, history) for (files, late, _), history in worlds}

    # ---- turns

    def _turns(self, state: State) -> Iterator[tuple[Turn, State]]:
        world, history, kills, faults, *places = state
        for index, number in enumerate(places):
            place, process = self._places[number], self._processes[index]
            if place.request is None:
                continue
            before, behind = places[:index], places[index + 1 :]
            for turn, to_world, then, cost, to in self._moves(world, history, index, number, faults):
                yield turn, (to_world, then, kills, faults - cost, *before, to, *behind)
            if kills and process.may_die:
                if place.has_written:
                    yield (process.name, "killed"), (world, history, kills - 1, faults, *before, 0, *behind)
                if isinstance(place.request, Delete) and len(place.request.names) > 1:
                    names = place.request.names
                    half = replace(place.request, names=names[: len(names) // 2])
                    to_world, then = self._effect(world, history, process, half)
                    yield (
                        (process.name, "killed in", half),
                        (to_world, then, kills - 1, faults, *before, 0, *behind),
                    )
        for late, (name, request) in enumerate(self._worlds[world][1]):
            process = next(each for each in self._processes if each.name == name)
            to_world, then = self._effect(world, history, process, request, late)
            yield (name, "late", request), (to_world, then, kills, faults, *places)

    def _moves(
        self, world: int, history: int, index: int, number: int, faults: int
    ) -> list[tuple[Turn, int, int, int, int]]:
        """Return (turn, world, history, faults used, place) of each outcome of a process's next request."""
        memo = world, history, number, faults > 0
        found = self._moves_memo.get(memo)
        if found is not None:
            return found
        found = self._moves_memo[memo] = []
        process, place = self._processes[index], self._places[number]
        files, late, before = self._worlds[world]
        request = place.request
        for fault, after, answer, effect in self._store.outcomes(
            files, before, process.name, request, faults
        ):
            then, to_world = history, world
            if effect == "now":
                then = self._changed(history, process, request, files, after)
                to_world = self._world(after, late, self._shown_before(before, files, after, process.name))
            elif effect == "late":
                to_world = self._world(files, (*late, (process.name, request)), before)
            to = self._answered(index, number, answer)
            reports: tuple[Report, ...] = ()
            while True:
                reports += self._places[to].reports
                read = self._places[to].request
                if not process.is_coarse or not _is_data_read(read):
                    break
                to = self._answered(index, to, self._store.apply(after, read)[1])
            for report in reports:
                if not self._histories[then].fault:
                    then = self._history(self._rules.reported(self._histories[then], process, report))
            turn = process.name, "", request, fault, answer, reports
            found.append((turn, to_world, then, int(fault not in ("", "an old listing")), to))
        return found

    def _effect(
        self, world: int, history: int, process: Process, request: Any, late: int = -1
    ) -> tuple[int, int]:
        """Apply a request whose process gets no answer: the request is late, or its process was killed."""
        files, requests, before = self._worlds[world]
        rest = requests if late < 0 else (*requests[:late], *requests[late + 1 :])
        after, _ = self._store.apply(files, request)
        then = history if after is files else self._changed(history, process, request, files, after)
        return self._world(after, rest, self._shown_before(before, files, after, "")), then

    def _shown_before(
        self, before: Mapping[str, Any], files: World, after: World, process: str
    ) -> Mapping[str, Any]:
        """Return older listings by folder, as (who changed it, listing before), for a stale store."""
        if not self._store.is_stale or after is files:
            return before
        changed, seen = (
            dict(before),
            dict(each for path in files.keys() ^ after.keys() for each in listings_of(path)),
        )
        for listing, depth in seen.items():
            shown, key = self._store.apply(files, listing)[1], listing_key(listing)
            if shown != self._store.apply(after, listing)[1]:
                changed[key] = (*before.get(key, ()), (process, shown))[-depth:]
        return changed

    def _changed(self, history: int, process: Process, request: Any, files: World, after: World) -> int:
        known = self._histories[history]
        return (
            history
            if known.fault
            else self._history(self._rules.changed(known, process, request, files, after))
        )

    def _answered(self, index: int, number: int, answer: Any) -> int:
        place = self._places[number]
        key = key_of(answer)
        if key not in place.following:
            steps, place.steps = place.steps, None
            if steps is None:
                process = self._processes[index]
                steps = self._store.adapt(process.name, process.act())
                for each in place.answers:
                    _next_request(steps, each)
            answers = (*place.answers, answer)
            place.following[key] = self._place(index, steps, answers, _is_write(place.request))
        return place.following[key]

    def _place(self, index: int, steps: Steps[Any], answers: tuple[Any, ...], has_written: bool) -> int:
        """Send the last answer to a process, and return where it stands then."""
        request, reports = _next_request(steps, answers[-1])
        stands = key_of(answers if self._by_answers else steps)
        key = index, stands, request is None, has_written, reports
        number = self._place_keys.setdefault(key, len(self._places))
        if number == len(self._places):
            self._places.append(_Place(answers, request, reports, has_written, steps))
        return number

    # ---- numbers for what is alike

    def _world(self, files: World, late: tuple[Any, ...], before: Mapping[str, Any]) -> int:
        contents = frozenset((path, key_of(each)) for path, each in files.items())
        key = contents, key_of(late), key_of(before)
        number = self._world_keys.setdefault(key, len(self._worlds))
        if number == len(self._worlds):
            self._worlds.append((files, late, before))
        return number

    def _history(self, history: Any) -> int:
        number = self._history_keys.setdefault(history, len(self._histories))
        if number == len(self._histories):
            self._histories.append(history)
        return number

    def _judge(self, state: State) -> str:
        world, number, _, _, *places = state
        is_final = all(self._places[each].request is None for each in places)
        memo = world, number, is_final
        if memo not in self._judge_memo:
            history, files = self._histories[number], self._worlds[world][0]
            fault = history.fault or self._rules.standing(history, files)
            self._judge_memo[memo] = fault or (self._rules.final(history, files) if is_final else "")
        return self._judge_memo[memo]


def _next_request(steps: Steps[Any], answer: Any) -> tuple[Any, tuple[Report, ...]]:
    """The next request of a process, None at its end, and the reports on the way."""
    reports: list[Report] = []
    try:
        is_error = isinstance(answer, BaseException)
        request: Any = steps.throw(answer.with_traceback(None)) if is_error else steps.send(answer)
        while isinstance(request, Report):
            reports.append(request)
            request = steps.send(None)
    except StopIteration:
        request = None
    except (FlashckptError, OSError) as error:
        reports.append(Report("error", type(error).__name__))
        request = None
    return request, tuple(reports)


def _is_write(request: Any) -> bool:
    return not isinstance(request, (Read, Files, Folders, Has, Page))


def _is_data_read(request: Any) -> bool:
    if isinstance(request, Page):
        request = request.listing
    if isinstance(request, (Files, Folders)):
        return request.folder.startswith("data")
    return isinstance(request, (Read, Has)) and request.path.startswith("data")


def _on_a_circle(following: dict[State, list[State]]) -> State | None:
    """Return a state on a circle if there is one."""
    entering = dict.fromkeys(following, 0)
    for states in following.values():
        for state in states:
            entering[state] += 1
    ready = [state for state, number in entering.items() if not number]
    while ready:
        for after in following[ready.pop()]:
            entering[after] -= 1
            if not entering[after]:
                ready.append(after)
    rest = {state for state, number in entering.items() if number}
    before = {after: state for state in rest for after in following[state] if after in rest}
    # What is left lies on a circle or behind one: go back until a state comes again.
    stuck, passed = next(iter(rest), None), set()
    while stuck is not None and stuck not in passed:
        passed.add(stuck)
        stuck = before[stuck]
    return stuck


# ---- what a schedule looks like


def _schedule(came: dict[State, tuple[State, Turn] | None], state: State) -> str:
    turns: list[Turn] = []
    while (step := came[state]) is not None:
        state, turn = step
        turns.append(turn)
    return "\n".join(f"{number:5d}  {_line(turn)}" for number, turn in enumerate(reversed(turns), 1))


def _line(turn: Turn) -> str:
    name, kind, *rest = turn
    if kind == "killed":
        return f"{name} is killed"
    if kind == "killed in":
        return f"{name} is killed in: {_short(rest[0])}"
    if kind == "late":
        return f"the late request of {name} takes effect: {_short(rest[0])}"
    request, fault, answer, reports = rest
    said = "".join(f"; reports {each.kind} {_short(each.value)}" for each in reports)
    return f"{name}: {_short(request)} -> {fault + ': ' if fault else ''}{_short(answer)}{said}"


def _short(value: Any) -> str:
    """A request without the record that it writes, or an answer."""
    if isinstance(value, (Create, Put, Read)):
        return f"{type(value).__name__}({value.store}/{value.path})"
    if isinstance(value, (tuple, dict)):
        return f"[{', '.join(map(_short, value))}]"
    return f"Catalogue({value.version})" if isinstance(value, Catalogue) else str(value)[:160]
