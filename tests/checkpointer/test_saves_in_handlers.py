"""A signal handler that calls `save()`: wherever it interrupts the program, the call returns, and the
snapshot is that of a boundary of a run without signals. Real signals, in this process."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flashckpt
from flashckpt import BoundaryError, Checkpointer, Keep
from tests.waiting import abandon, until_room, until_slots

pytestmark = pytest.mark.usefixtures("runtime")

_BATCHES, _EPOCHS = 3, 4


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * _BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 10)


class Reading:
    """State of the program's own. `on_read` is called in the midst of a boundary."""

    def __init__(self) -> None:
        self.on_read: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, object]:
        self.on_read()
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class Program:
    """A run of epochs that draws random numbers. `on_signal` is what its handler of SIGUSR1 does."""

    def __init__(self, run: Path, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.reading = Reading()
        self.loader = DataLoader(Data(), batch_size=2, shuffle=True)
        self.weights: dict[int, torch.Tensor] = {}
        self.checkpointer = flashckpt.attach(
            run, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, reading=self.reading,
            **{"every": None, "persist_every": None, "keep": Keep(last=100), **options},
        )  # fmt: skip

    def train(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch * torch.rand(())).square().mean().backward()
        self.optimizer.step()

    def epochs(self, in_body: Callable[[], None], in_code: Callable[[], None]) -> None:
        checkpointer = self.checkpointer
        for _ in checkpointer.epochs(_EPOCHS):
            for batch in checkpointer.batches(self.loader):
                until_slots(checkpointer)
                until_room(checkpointer)
                self.train(batch)
                self.weights[checkpointer.completed + 1] = self.model.weight.detach().clone()
                in_body()
            in_code()
            self.scheduler.step()
            with torch.no_grad():
                self.model.weight += 1
            self.weights[checkpointer.completed] = self.model.weight.detach().clone()


@pytest.fixture(autouse=True)
def handler() -> Iterator[list[Checkpointer]]:
    """Checkpointers that the handler of SIGUSR1 saves."""
    saved: list[Checkpointer] = []

    def save(number: int, frame: object) -> None:
        for each in saved:
            each.save()

    before = signal.signal(signal.SIGUSR1, save)
    yield saved
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


def once_at(checkpointer: Checkpointer, step: int) -> Callable[[], None]:
    """Interrupts when it is called for the first time at that step."""
    left = [step]

    def call() -> None:
        if left == [checkpointer.completed]:
            left.clear()
            interrupt()

    return call


@pytest.mark.parametrize(
    ("place", "saved"),
    [
        ("wait in code", [3, 6]),  # the end of the first epoch is captured, and waited for
        ("wait", [3, 5]),
        ("boundary", [5]),
    ],
)
def test_it_is_of_the_next_boundary(
    place: str, saved: list[int], tmp_path: Path, handler: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    program = Program(run, every=1 if place == "boundary" else None)
    checkpointer = program.checkpointer
    handler.append(checkpointer)
    in_body, in_code = lambda: None, lambda: None
    if place == "boundary":
        program.reading.on_read = once_at(checkpointer, 4)
    else:
        at = 4 if place == "wait" else 6
        committed, now = checkpointer._keeper_link.wait_committed, once_at(checkpointer, at)

        def interrupted(**how: bool) -> None:
            now()
            committed(**how)

        monkeypatch.setattr(checkpointer._keeper_link, "wait_committed", interrupted)

        def wait() -> None:
            if checkpointer.completed == at:
                checkpointer.wait()

        in_body, in_code = (wait, in_code) if place == "wait" else (in_body, wait)
    program.epochs(in_body, in_code)
    handler.clear()
    checkpointer.close()
    assert flashckpt.steps(run) == [*saved, _EPOCHS * _BATCHES]


@pytest.mark.parametrize("place", ["program", "wait"])
def test_outside_of_a_loop_it_is_taken_at_once(
    place: str, tmp_path: Path, handler: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(tmp_path / "run")
    checkpointer = program.checkpointer
    handler.append(checkpointer)
    with checkpointer:
        for batch in checkpointer.batches(program.loader):
            program.train(batch)
        if place == "wait":
            committed = checkpointer._keeper_link.wait_committed
            monkeypatch.setattr(
                checkpointer._keeper_link, "wait_committed", lambda **how: (interrupt(), committed(**how))
            )
            checkpointer.wait()
            monkeypatch.undo()
        else:
            interrupt()
        assert checkpointer.report()["newest_sealed_step"] == _BATCHES
        checkpointer.wait()
        assert flashckpt.steps(tmp_path / "run") == [_BATCHES]


def test_in_a_loop_of_step_it_is_of_the_next_step(tmp_path: Path, handler: list[Checkpointer]) -> None:
    program = Program(tmp_path / "run", every=1)
    checkpointer = program.checkpointer
    handler.append(checkpointer)
    program.reading.on_read = once_at(checkpointer, 4)
    for batch in [torch.ones(2, 4)] * 8:
        program.train(batch)
        until_slots(checkpointer)
        until_room(checkpointer)
        checkpointer.step()
    handler.clear()
    checkpointer.close()
    assert flashckpt.steps(tmp_path / "run") == [5, 8]


@pytest.mark.parametrize("call", [Checkpointer.wait, Checkpointer.close])
def test_a_handler_that_waits_or_closes_in_a_capture_is_refused(
    call: Callable[[Checkpointer], None], tmp_path: Path
) -> None:
    """Nothing is saved there yet, and the capture goes on in its slots. The order stands."""
    program = Program(tmp_path / "run", every=1)
    checkpointer, steps = program.checkpointer, list[int | None]()

    def save_and_more(number: int, frame: object) -> None:
        checkpointer.save()
        with pytest.raises(BoundaryError, match=f"{call.__name__}.*has interrupted another call") as raised:
            call(checkpointer)
        steps.append(raised.value.step)

    signal.signal(signal.SIGUSR1, save_and_more)
    program.reading.on_read = once_at(checkpointer, 1)
    for batch in checkpointer.batches(program.loader):
        program.train(batch)
        until_slots(checkpointer)
        until_room(checkpointer)
    checkpointer.close()
    assert steps == [1]
    assert flashckpt.steps(tmp_path / "run") == [2, _BATCHES]


@pytest.mark.parametrize("closed", [True, False])
def test_while_the_run_is_let_go_it_raises_nothing(
    closed: bool, tmp_path: Path, handler: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(tmp_path / "run")
    checkpointer = program.checkpointer
    handler.append(checkpointer)
    for batch in checkpointer.batches(program.loader):
        program.train(batch)
    closing = checkpointer._progress.close
    monkeypatch.setattr(checkpointer._progress, "close", lambda: (interrupt(), closing()))
    if closed:
        checkpointer.close()
    else:
        abandon(checkpointer)
    again = Program(tmp_path / "run").checkpointer
    assert again.completed == _BATCHES, "the run was let go"
    again.close()


def test_at_every_function_of_ours(tmp_path: Path, handler: list[Checkpointer]) -> None:
    """The handler interrupts each function of the package where it begins and where it returns, each once."""
    straight = Program(tmp_path / "straight")
    straight.epochs(lambda: None, lambda: None)
    straight.checkpointer.close()

    program, seen = Program(tmp_path / "run", every=1), set[tuple[CodeType, str]]()
    handler.append(program.checkpointer)
    package = os.path.dirname(flashckpt.__file__)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(package):
            return None
        if event in ("call", "return") and (code, event) not in seen:
            seen.add((code, event))
            interrupt()
        return trace

    try:
        program.epochs(lambda: sys.settrace(trace), lambda: None)
    finally:
        sys.settrace(None)
    handler.clear()
    program.checkpointer.close()
    assert len(seen) > 100
    steps = flashckpt.steps(tmp_path / "run")
    assert len(steps) > _EPOCHS
    assert program.weights.keys() == straight.weights.keys()
    for step in steps:
        saved = flashckpt.load(tmp_path / "run", step=step)["model.weight"]
        assert torch.equal(saved, straight.weights[step]), f"step {step} is not that of a straight run"
    assert torch.equal(program.model.weight, straight.model.weight)
