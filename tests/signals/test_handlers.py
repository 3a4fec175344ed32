"""Whose handler stands where, and that none of ours is left behind. In this process, with real signals."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import OptionError, Options
from tests.processes import keepers_of
from tests.waiting import until, until_slots

pytestmark = pytest.mark.usefixtures("runtime")

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
OPTIONS = Options(warning_signals=("SIGUSR2",))


class Handlers(dict[int, Any]):
    """The handlers that the program has installed, which must stand when the test has ended."""

    def install(self, handler: Any, number: int = signal.SIGTERM) -> Any:
        self[number] = handler
        return signal.signal(number, handler)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[Handlers]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in (*WATCHED, signal.SIGCHLD)}
    expected = Handlers(before)
    yield expected
    try:
        assert {number: signal.getsignal(number) for number in expected} == expected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def model() -> dict[str, Any]:
    net = nn.Linear(2, 2)
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def train(named: dict[str, Any]) -> None:
    named["optimizer"].zero_grad()
    named["model"](torch.ones(1, 2)).sum().backward()
    named["optimizer"].step()


def ours() -> list[int]:
    place = "flashckpt.checkpointer.signals"
    return [number for number in WATCHED if getattr(signal.getsignal(number), "__module__", "") == place]


def test_they_stand_only_while_a_loop_runs(tmp_path: Path) -> None:
    named, in_attach = model(), []

    class Held:
        def state_dict(self) -> dict[str, object]:
            in_attach.append(ours())
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with flashckpt.attach(tmp_path / "run", options=OPTIONS, held=Held(), **named) as checkpointer:
        assert in_attach[0] == ours() == []
        for epoch in checkpointer.epochs(2):
            assert ours() == list(WATCHED), epoch
            for _ in checkpointer.batches([1, 2, 3]):
                assert ours() == list(WATCHED)
                train(named)
            assert ours() == list(WATCHED), "the epoch's own boundary is to come"
        assert ours() == []
        for _ in checkpointer.epochs(3):
            break
        assert ours() == []
        checkpointer.step()
        assert ours() == list(WATCHED)
    assert ours() == []


@pytest.mark.every_set
@pytest.mark.parametrize("way", ["before", "chain", "stop"])
def test_a_handler_that_returns_lets_the_program_go_on(
    way: str, tmp_path: Path, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """One that came before the loop is called once, at its end, though launchers pass on what all have got. A
    later one is never taken off, and ends the loop if it calls the one before it, or stop()."""
    named, heard = model(), []
    replaced: Any = None

    def own(number: int, frame: object) -> None:
        heard.append(looped.completed)
        if way == "chain":
            replaced(number, frame)
        if way == "stop":
            looped.checkpointer.stop()

    is_later = way != "before"
    if not is_later:
        handlers.install(own)
    looped = flashckpt.loop([1, 2, 3], tmp_path / "run", **named)
    for batch in looped:
        train(named)
        if batch == 2 and is_later:
            replaced = handlers.install(own)
            until(lambda: "SIGTERM has another handler" in caplog.text, "the word about it")
        if batch == 2:
            for _ in range(1 if is_later else 3):
                signal.raise_signal(signal.SIGTERM)
            assert heard == ([1] if is_later else [])
    assert (heard, looped.completed) == ([1 if is_later else 2], 2)
    assert looped.checkpointer.stop_reason == ("stop" if way == "stop" else "SIGTERM")
    assert flashckpt.steps(tmp_path / "run") == [2]


@pytest.mark.every_set
@pytest.mark.parametrize("way", ["break", "raise"])
def test_a_loop_that_is_left_gives_the_signal_back(way: str, tmp_path: Path, handlers: Handlers) -> None:
    named, heard = model(), []
    handlers.install(lambda number, frame: heard.append(number))
    with (
        pytest.raises(ZeroDivisionError) if way == "raise" else contextlib.nullcontext(),
        flashckpt.attach(tmp_path / "run", options=OPTIONS, **named) as checkpointer,
    ):
        for batch in checkpointer.batches([1, 2, 3]):
            train(named)
            if batch == 2:
                signal.raise_signal(signal.SIGTERM)
                assert heard == []
                if way == "raise":
                    raise ZeroDivisionError
                break
        until(lambda: heard, "the handler, before the run ends")
        assert ours() == []
    until(lambda: heard == [signal.SIGTERM], "the handler")
    assert ours() == []


@pytest.mark.every_set
@pytest.mark.parametrize("place", ["in the body", "at the end"])
def test_a_signal_while_storage_is_waited_for_is_obeyed_after_that(
    place: str, tmp_path: Path, runtime: Path, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    """After a wait() in its body the iteration continues, and the loop ends at its boundary."""
    named, heard = model(), []
    handlers.install(lambda number, frame: heard.append(looped.completed))
    looped = flashckpt.loop([1, 2, 3], tmp_path / "run", every=1, **named)
    checkpointer = looped.checkpointer
    waits = checkpointer._keeper_link.wait_committed

    def signal_in_it() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "SIGTERM: the loop ends" in caplog.text, "the signal to be noted")
        assert heard == []
        os.kill(keeper, signal.SIGCONT)

    def wait_committed(**named: Any) -> Any:
        thread = threading.Thread(target=signal_in_it)
        thread.start()
        checkpointer._keeper_link.wait_committed = waits  # type: ignore[method-assign]
        try:
            return waits(**named)
        finally:
            thread.join()

    checkpointer._keeper_link.wait_committed = wait_committed  # type: ignore[method-assign]
    for batch in looped:
        train(named)
        until_slots(checkpointer)
        if batch == (2 if place == "in the body" else 3):
            [keeper] = keepers_of(runtime)
            os.kill(keeper, signal.SIGSTOP)
            if place == "in the body":
                checkpointer.wait()
                assert heard == []
    assert heard == [looped.completed] == [2 if place == "in the body" else 3]
    assert flashckpt.steps(tmp_path / "run")[-1] == looped.completed


def test_a_handler_is_called_at_the_end_of_the_grace_period(
    tmp_path: Path, runtime: Path, handlers: Handlers
) -> None:
    """The keeper does not answer. The loop does not wait for what has not ended: the handler comes at the end
    of the period, whether the loop has given up its own wait by then or is about to."""
    named, heard = model(), []

    def own(number: int, frame: object) -> None:
        heard.append(flashckpt.steps(tmp_path / "run"))
        os.kill(keeper, signal.SIGCONT)
        # A run that is released while its keeper does not answer keeps its slots mapped.
        until(lambda: flashckpt.steps(tmp_path / "run") == [2], "the commit of the boundary")

    handlers.install(own)
    looped = flashckpt.loop([1, 2, 3], tmp_path / "run", every=1, options=Options(grace="1s"), **named)
    for batch in looped:
        train(named)
        until_slots(looped.checkpointer)
        if batch == 2:
            [keeper] = keepers_of(runtime)
            os.kill(keeper, signal.SIGSTOP)
            signal.raise_signal(signal.SIGTERM)
    assert (heard, looped.completed) == ([[]], 2)
    # A run that was released before its link had ended keeps what it has open until the process ends.
    link = looped.checkpointer._keeper_link
    until(lambda: not link._thread.is_alive(), "the end of the keeper link")
    link.slots.close()
    looped.checkpointer._session.keeper.close()


def test_a_warning_is_told_at_once_and_a_signal_after_it_takes_its_course(
    tmp_path: Path, handlers: Handlers
) -> None:
    named, heard = model(), []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        handlers.install(lambda number, frame: heard.append(number), number)
    looped = flashckpt.loop([1, 2, 3], tmp_path / "run", options=OPTIONS, **named)
    for batch in looped:
        train(named)
        if batch == 2:
            signal.raise_signal(signal.SIGUSR2)
            assert heard == [signal.SIGUSR2]
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGUSR2]
    assert (heard, looped.completed) == ([signal.SIGUSR2, signal.SIGTERM], 2)
    assert looped.checkpointer.stop_reason == "SIGUSR2"
    assert flashckpt.steps(tmp_path / "run") == [2]


def test_what_is_ignored_and_what_is_not_named_is_left_alone(tmp_path: Path, handlers: Handlers) -> None:
    handlers.install(signal.SIG_IGN)
    for number, options in enumerate((Options(), Options(signals=()))):
        named = model()
        for _ in flashckpt.loop([1, 2, 3], tmp_path / str(number), options=options, **named):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            is_left = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert is_left == (options.signals == ())
            train(named)


def test_one_that_somebody_has_kept_passes_on_for_ever(tmp_path: Path, handlers: Handlers) -> None:
    named, heard = model(), []
    handlers.install(lambda number, frame: heard.append("earlier"), signal.SIGUSR2)
    for batch in flashckpt.loop([1, 2, 3], tmp_path / "run", options=OPTIONS, **named):
        train(named)
        if batch == 1:
            kept = signal.getsignal(signal.SIGUSR2)
            assert callable(kept)

            def later(number: int, frame: Any, kept: Any = kept) -> None:
                heard.append("later")
                kept(number, frame)

            handlers.install(later, signal.SIGUSR2)
    # A second loop puts a handler of its own over this one, and takes only that off.
    for batch in flashckpt.loop([1, 2, 3], tmp_path / "other", options=OPTIONS, **named):
        train(named)
        if batch == 1:
            signal.raise_signal(signal.SIGUSR2)
    assert heard == ["later", "earlier"]
    signal.raise_signal(signal.SIGUSR2)
    assert heard == ["later", "earlier"] * 2


def test_two_loops_in_one_another_end_from_within(tmp_path: Path, handlers: Handlers) -> None:
    """The inner one's signal takes its course into the handler of the outer one, which ends at its own."""
    outer_state, inner_state, heard = model(), model(), []
    handlers.install(lambda number, frame: heard.append(number))
    outer = flashckpt.loop([1, 2, 3], tmp_path / "outer", **outer_state)
    for _ in outer:
        inner = flashckpt.loop([1, 2, 3], tmp_path / "inner", **inner_state)
        for _ in inner:
            train(inner_state)
            if inner.completed == 1:
                signal.raise_signal(signal.SIGTERM)
        assert inner.completed == 2
        assert heard == []
        train(outer_state)
    assert outer.completed == 1
    assert heard == [signal.SIGTERM]
    assert flashckpt.steps(tmp_path / "outer") == [1]
    assert flashckpt.steps(tmp_path / "inner") == [2]


def test_another_thread_says_that_none_are_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done: list[list[int]] = []

    def loop() -> None:
        named = model()
        for _ in flashckpt.loop([1, 2, 3], tmp_path / "run", options=OPTIONS, **named):
            train(named)
            done.append(ours())

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert done == [[], [], []]
    assert caplog.text.count("signals are not watched, because the loop does not run in the main") == 1


def test_a_wakeup_descriptor_is_left_alone(tmp_path: Path) -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    named = model()
    previous = signal.set_wakeup_fd(write)
    try:
        batches = flashckpt.loop([1, 2, 3], tmp_path / "run", options=OPTIONS, **named)
        for batch in batches:
            train(named)
            if batch == 2:
                signal.raise_signal(signal.SIGUSR2)
        assert batches.completed == 2
        # Others may be among them: torch's loaders, used before, have a handler for SIGCHLD.
        assert os.read(read, 99).count(signal.SIGUSR2) == 1, "each signal is written once"
    finally:
        assert signal.set_wakeup_fd(previous) == write
        os.close(read)
        os.close(write)


def test_an_exception_in_the_users_handler_is_the_loops(tmp_path: Path, handlers: Handlers) -> None:
    class Preempted(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Preempted

    handlers.install(handler)
    named, reached = model(), []

    def loop() -> None:
        for batch in flashckpt.loop([1, 2, 3], tmp_path / "run", **named):
            if batch == 2:
                signal.raise_signal(signal.SIGTERM)
            train(named)
            reached.append(batch)

    with pytest.raises(Preempted):
        loop()
    assert reached == [1, 2]
    assert flashckpt.steps(tmp_path / "run") == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"signals": "SIGTERM"},
        {"signals": (15,)},
        {"warning_signals": ("SIGSEGV",)},
        {"signals": ("SIGUSR1",), "warning_signals": ("SIGUSR1",)},
    ],
)
def test_signals_that_cannot_be_watched_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"signals.*SIG|15"):
        Options(**options)
