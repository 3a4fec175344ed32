"""Runs of `.epochs` that are killed, told to end, or saved at every kind of place of an epoch, in its own code
too: what comes after equals, bit for bit, a run that was never stopped, and steps are iterations.

| what happens | where | what the next start goes on from |
| --- | --- | --- |
| SIGKILL | in an iteration | the boundary before it: the iteration is repeated |
| SIGKILL | in the code after the batches, or in the draw that finds no batch | the boundary before the last batch, which is repeated, and the code |
| SIGKILL | before the batches of an epoch | the end of the epoch before: nothing is repeated |
| stop(), SIGTERM | in an iteration | the boundary after it; after an epoch's last batch, its code comes first, and the epoch's end is saved |
| stop(), SIGTERM | in the code after the batches | the end of this epoch, under the step of its last batch |
| stop(), SIGTERM | before the batches of an epoch | there: the whole epoch is still to come |
| save() | in the code after the batches | the end of this epoch |
| save(), then wait() | in the code after the batches | that very place, and the epoch's end is a step of its own |
"""  # noqa: E501

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashckpt
from tests import zygote
from tests.events import whole_lines
from tests.folders import records
from tests.processes import end, keepers_of
from tests.resume.epoch_program import EPOCHS
from tests.waiting import until

Lines = list[list[object]]
# Iterations of an epoch: an epoch without batches is one itself.
ITERATIONS = {"length": 4, "stream": 4, "none": 1}


class Runs:
    """One run folder and its starts."""

    def __init__(self, folder: Path, runtime: Path, kind: str, operation: tuple[int, str, str]) -> None:
        self.run, self.log, self.kind, self.operation = folder / "run", folder / "log", kind, operation
        self.runtime, self.err = runtime, folder / "err"

    def start(self) -> int:
        words = [str(self.run), str(self.log), self.kind, *map(str, self.operation)]
        environment = {**os.environ, "FLASHCKPT_RUNTIME": str(self.runtime)}
        with open(self.err, "ab") as err:
            process = zygote.start(
                ["tests.resume.epoch_program", *words], stdout=zygote.DEVNULL, stderr=err, env=environment
            )
        return int(process.wait(timeout=120))

    def lines(self) -> Lines:
        return [json.loads(line) for line in whole_lines(self.log)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Lines]]:
    """What a run of each kind writes that nothing happens to."""
    with tempfile.TemporaryDirectory(prefix="flashckpt-test-", dir="/dev/shm") as runtime:

        @functools.cache
        def lines(kind: str) -> str:
            runs = Runs(tmp_path_factory.mktemp(kind), Path(runtime), kind, (-1, "", ""))
            assert runs.start() == 0, runs.err.read_text()
            [*_, (what, step, _)] = runs.lines()
            assert (what, step) == ("end", EPOCHS * ITERATIONS[kind]), "steps are iterations"
            return runs.log.read_text()

        yield lambda kind: [json.loads(line) for line in lines(kind).splitlines()]
        end(keepers_of(Path(runtime)))


def last_of_each(lines: Lines) -> dict[str, object]:
    """By what was done: a thing done twice must have given the same both times."""
    found: dict[str, object] = {}
    for what, step, value in lines:
        key = f"{what} {value[0] if what == 'code' else step}"  # type: ignore[index]
        assert found.setdefault(key, value) == value, f"{key} went differently the second time"
    return found


Straight = Callable[[str], Lines]
STOPS, LAST = ("kill", "term", "stop"), EPOCHS - 1
BOTH = ("length", "stream")
CASES = [
    *itertools.product(BOTH, ("top", "before_last", "last", "code"), STOPS, [1]),
    *itertools.product(["stream"], ["exhausted"], STOPS, [1]),
    *itertools.product(BOTH, ("last", "after_step"), STOPS, [LAST]),
    *itertools.product(["length"], ["end"], STOPS, [LAST]),
    *itertools.product(BOTH, ("last", "code", "end"), ["save"], [LAST]),
    *itertools.product(BOTH, ["end"], ["save and kill"], (1, LAST)),
    *itertools.product(["none"], ("top", "code", "end"), ("kill", "stop", "save"), [1]),
]


# The rows of the table. Where a boundary counted without a batch after it, the next start would have no batch
# in the epoch's code.
FEW = {
    ("length", "last", "term", 1),
    ("length", "code", "kill", 1),
    ("stream", "last", "stop", 1),
    ("stream", "exhausted", "kill", 1),
    ("none", "top", "kill", 1),
}


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("kind", "place", "operation", "epoch"),
    [each if each in FEW else pytest.param(*each, marks=pytest.mark.long) for each in CASES],
)
def test_what_comes_after_is_as_if_nothing_had_happened(
    kind: str, place: str, operation: str, epoch: int, tmp_path: Path, runtime: Path, straight: Straight
) -> None:
    runs = Runs(tmp_path, runtime, kind, (epoch, place, operation))
    first = runs.start()
    assert Path(f"{runs.log}.done").exists(), "the operation was done"
    assert first == {"kill": -9, "save and kill": -9, "term": -15}.get(operation, 0), runs.err.read_text()
    assert operation == "save" or runs.start() == 0, runs.err.read_text()

    lines, expected = runs.lines(), straight(kind)
    assert last_of_each(lines) == last_of_each(expected)
    assert flashckpt.steps(runs.run)[-1] == expected[-1][1], "steps are iterations"
    assert flashckpt.verify(runs.run).ok
    if operation in ("term", "stop", "save"):
        assert len(lines) == len(expected), "nothing is done twice"


WITHIN = [
    *itertools.product(["length"], [1], ["last"], ["on"], (1, 40, 160)),  # in a boundary, and in the drawing
    *itertools.product(["stream"], [1], ["end"], ["on"], (20,)),  # in the end of an epoch
    *itertools.product(["length"], [1, LAST], ["code"], ["save"], (5, 40)),  # in save(), and after it
    *itertools.product(["length"], [LAST], ["end"], ["on"], (60, 400)),  # in the end of the run
]


@pytest.mark.parametrize(("kind", "epoch", "place", "operation", "calls"), WITHIN)
def test_sigterm_within_the_library(
    kind: str, epoch: int, place: str, operation: str, calls: int, tmp_path: Path, runtime: Path,
    straight: Straight,
) -> None:  # fmt: skip
    """At some call of one of its functions, in `__next__`, `save()` or `close()`."""
    runs = Runs(tmp_path, runtime, kind, (epoch, place, f"{operation} after {calls}"))
    assert runs.start() == -15, runs.err.read_text()
    while runs.lines()[-1][0] != "end":
        assert runs.start() == 0, runs.err.read_text()
    assert runs.lines() == straight(kind), "each thing is done once, and to the bit"
    # After the loop it is what it is without us, and the keeper saves what is last.
    until(lambda: flashckpt.steps(runs.run)[-1:] == [straight(kind)[-1][1]], "the last step")
    assert flashckpt.verify(runs.run).ok


@pytest.mark.parametrize("kind", ["length", "stream"])
@pytest.mark.parametrize("epoch", [1, EPOCHS - 1], ids=["midst", "last"])
def test_a_save_that_is_waited_for_in_an_epochs_code(
    kind: str, epoch: int, tmp_path: Path, runtime: Path, straight: Straight
) -> None:
    """What was saved is on disk when wait() returns. The end of the epoch has the same step number, and is
    saved besides."""
    runs = Runs(tmp_path, runtime, kind, (epoch, "code", "save and wait"))
    assert runs.start() == 0, runs.err.read_text()
    expected = straight(kind)
    losses = [value for what, _, value in expected if what == "loss"]
    assert [value for what, _, value in runs.lines() if what == "loss"] == losses
    assert runs.lines()[-1] == expected[-1]
    assert runs.start() == 0, runs.err.read_text()
    assert runs.lines()[-1] == expected[-1]
    saved = [name for name in records(runs.run) if name.step == expected[-1][1]]
    assert len(saved) == (2 if epoch == EPOCHS - 1 else 1)
