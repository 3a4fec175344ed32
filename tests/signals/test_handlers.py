"""Whose handler stands where, and that none of ours is left behind. In this process, with real signals."""

from __future__ import annotations

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

pytestmark = pytest.mark.usefixtures("runtime")

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
OPTIONS = Options(warning_signals=("SIGUSR2",))


@pytest.fixture(autouse=True)
def before() -> Iterator[dict[int, Any]]:
    """The handlers that stand here. Whatever a test did, they stand here after it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = {number: signal.getsignal(number) for number in (*WATCHED, signal.SIGCHLD)}
    yield found
    try:
        assert {number: signal.getsignal(number) for number in found} == found
    finally:
        for number, handler in found.items():
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
    named = model()
    with flashckpt.attach(tmp_path / "run", options=OPTIONS, **named) as checkpointer:
        assert ours() == []
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


@pytest.mark.parametrize("way", ["break", "raise", "close", "forget"])
def test_they_go_with_the_loop(way: str, tmp_path: Path) -> None:
    named = model()

    def loop() -> None:
        batches = flashckpt.loop([1, 2, 3, 4], tmp_path / "run", options=OPTIONS, **named)
        for _ in batches:
            assert ours() == list(WATCHED)
            train(named)
            if batches.completed == 1:
                if way == "raise":
                    raise ZeroDivisionError
                if way == "break":
                    break
                if way == "close":
                    batches.checkpointer.close()
                    assert ours() == []
                return

    if way == "raise":
        with pytest.raises(ZeroDivisionError):
            loop()
    else:
        loop()
    assert ours() == []


def test_a_later_handler_is_never_taken_off(tmp_path: Path, before: dict[int, Any]) -> None:
    named, heard = model(), []

    def later(number: int, frame: object) -> None:
        heard.append(number)

    for batch in flashckpt.loop([1, 2, 3], tmp_path / "run", options=OPTIONS, **named):
        train(named)
        if batch == 1:
            signal.signal(signal.SIGUSR2, later)
    assert signal.getsignal(signal.SIGUSR2) is later
    signal.raise_signal(signal.SIGUSR2)
    assert heard == [signal.SIGUSR2]
    signal.signal(signal.SIGUSR2, before[signal.SIGUSR2])


def test_one_that_somebody_has_kept_passes_on_for_ever(tmp_path: Path, before: dict[int, Any]) -> None:
    named, heard = model(), []

    def earlier(number: int, frame: object) -> None:
        heard.append("earlier")

    signal.signal(signal.SIGUSR2, earlier)
    for batch in flashckpt.loop([1, 2, 3], tmp_path / "run", options=OPTIONS, **named):
        train(named)
        if batch == 1:
            kept = signal.getsignal(signal.SIGUSR2)
            assert callable(kept)

            def later(number: int, frame: Any, kept: Any = kept) -> None:
                heard.append("later")
                kept(number, frame)

            signal.signal(signal.SIGUSR2, later)
    # A second loop puts a handler of its own over this one, and takes only that off.
    for batch in flashckpt.loop([1, 2, 3], tmp_path / "other", options=OPTIONS, **named):
        train(named)
        if batch == 1:
            signal.raise_signal(signal.SIGUSR2)
    assert heard == ["later", "earlier"]
    signal.raise_signal(signal.SIGUSR2)
    assert heard == ["later", "earlier"] * 2
    signal.signal(signal.SIGUSR2, before[signal.SIGUSR2])


def test_two_loops_in_one_another_end_from_within(tmp_path: Path, before: dict[int, Any]) -> None:
    """The inner one's signal takes its course into the handler of the outer one, which ends at its own."""
    outer_state, inner_state, heard = model(), model(), []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
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
    signal.signal(signal.SIGTERM, before[signal.SIGTERM])


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


def test_an_exception_in_the_users_handler_is_the_loops(tmp_path: Path, before: dict[int, Any]) -> None:
    class Preempted(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Preempted

    signal.signal(signal.SIGTERM, handler)
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
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, before[signal.SIGTERM])


@pytest.mark.parametrize(
    "options",
    [
        {"signals": "SIGTERM"},
        {"signals": ("SIGTREM",)},
        {"signals": ("SIGKILL",)},
        {"signals": (15,)},
        {"warning_signals": ("SIGSEGV",)},
        {"signals": ("SIGUSR1",), "warning_signals": ("SIGUSR1",)},
    ],
)
def test_signals_that_cannot_be_watched_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"signals.*SIG|15"):
        Options(**options)
