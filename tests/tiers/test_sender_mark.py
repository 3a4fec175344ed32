"""A sender that takes long for its part shows that it is at it, and nobody deletes the step under it; one
that is dead or stands still does not hold it for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.format.names import step_attempt_folder
from flashckpt.store.base import Written
from flashckpt.store.local import LocalStore
from flashckpt.tiers import sender_mark
from flashckpt.tiers.sender_mark import SenderMark, holds_s, is_mark
from flashckpt.tiers.step_copy import Outcome
from tests.tiers.test_node_parts import Clock, Nodes
from tests.tiers.test_node_parts import clock as clock
from tests.tiers.test_node_parts import nodes as nodes
from tests.waiting import until

HOUR = 60


@contextmanager
def slow_sender(nodes: Nodes, node: int, go: Path) -> Iterator[int]:
    """A keeper of this node in a process of its own, whose bytes trickle until `go` is there."""
    child = os.fork()
    if not child:
        sender_mark._FIRST_S = sender_mark._LONGEST_S = sender_mark._AGAIN_S = 0.01
        write = LocalStore.write_shard

        def trickle(store: LocalStore, *args: Any, progress: int, **how: Any) -> Written:
            while not go.exists():
                _native.fetch_add(progress, 1)
                time.sleep(0.001)
            return write(store, *args, **how)

        LocalStore.write_shard = trickle  # type: ignore[method-assign]
        nodes.restart()
        nodes.bring(node)
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def marks(nodes: Nodes) -> list[int]:
    """The lengths of those that stand in the remote."""
    return [path.stat().st_size for path in nodes.there.rglob(".sending.*")]


def watch(nodes: Nodes, clock: Clock, minutes: int) -> None:
    """Rank 0's node looks at the remote, again and again."""
    for _ in range(minutes):
        clock.pass_by(60.0)
        nodes.bring(0)


def is_gone(nodes: Nodes, step: int) -> bool:
    files = nodes.target.list(step_attempt_folder(step, nodes.attempt))
    return [each.name for each in files] == ["manifest.json"]


@pytest.mark.process
def test_a_sender_that_takes_hours_for_a_file_ends_it(nodes: Nodes, clock: Clock, tmp_path: Path) -> None:
    nodes.add(1)
    assert nodes.outcome(0) == (1, Outcome.PART)
    with slow_sender(nodes, 1, tmp_path / "go") as child:
        until(lambda: marks(nodes), "its mark")
        for step in (2, 3):
            nodes.add(step, on=(0,))
            clock.pass_by(2 * 3600.0)
            assert nodes.outcome(0) == (step, Outcome.PART), "rank 0's node goes on"
            [before] = marks(nodes)
            until(lambda before=before: marks(nodes) > [before], "it is renewed")
            watch(nodes, clock, HOUR - 1)
        watch(nodes, clock, 2)
        assert is_gone(nodes, 2), "nobody shows that it is at that"
        (tmp_path / "go").touch()
        until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the part")
    assert nodes.steps() == [1]
    assert not marks(nodes)


@pytest.mark.process
def test_a_sender_that_is_dead_holds_a_step_as_long_as_its_mark_says(
    nodes: Nodes, clock: Clock, tmp_path: Path
) -> None:
    nodes.add(1)
    assert nodes.outcome(0) == (1, Outcome.PART)
    with slow_sender(nodes, 1, tmp_path / "go"):
        until(lambda: marks(nodes), "its mark")
    nodes.add(2, on=(0,))
    clock.pass_by(2 * 3600.0)
    assert nodes.outcome(0) == (2, Outcome.PART)
    [path] = nodes.there.rglob(".sending.*")
    path.write_bytes(bytes(90))
    watch(nodes, clock, 90)
    assert not is_gone(nodes, 1)
    watch(nodes, clock, 2)
    assert is_gone(nodes, 1)
    assert nodes.steps() == []


def test_what_is_not_looked_at_does_not_grow_old(nodes: Nodes, clock: Clock) -> None:
    """No server answers for hours, or rank 0's node sends for hours: another may just have begun to send."""
    for step in (1, 2):
        nodes.add(step, on=(0,))
        clock.pass_by(2 * 3600.0)
        assert nodes.outcome(0) == (step, Outcome.PART)
    for _ in range(3):
        clock.pass_by(10 * 3600.0)
        nodes.bring(0)
    assert not is_gone(nodes, 1)
    watch(nodes, clock, HOUR)
    assert is_gone(nodes, 1)


class Ended:
    """An event that is set after so many hours of a clock that its waiting moves on."""

    def __init__(self, clock: Clock, hours: float) -> None:
        self._clock, self._end_s = clock, clock.monotonic() + hours * 3600.0

    def wait(self, seconds: float) -> bool:
        self._clock.pass_by(seconds)
        return self._clock.monotonic() >= self._end_s


@pytest.mark.parametrize(("hours", "most"), [(0.3, 0), (1, 2), (10, 5), (48, 12)])
def test_it_is_renewed_rarely_and_always_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float, most: int
) -> None:
    store, clock, written = LocalStore(str(tmp_path)), Clock(), list[tuple[float, float]]()
    replace = LocalStore.replace

    def counted(store: LocalStore, path: str, data: bytes, **how: Any) -> None:
        replace(store, path, data, **how)
        [entry] = filter(is_mark, store.list(path.rpartition("/")[0]))
        written.append((clock.monotonic(), holds_s([entry])))

    monkeypatch.setattr(sender_mark, "time", clock)
    monkeypatch.setattr(LocalStore, "replace", counted)
    store.create("steps/part", b"")
    began_s = clock.monotonic()
    SenderMark(store, "steps", 3, clock.monotonic)._renew(Ended(clock, hours))  # type: ignore[arg-type]
    assert len(written) <= most
    assert not written or written[0][0] - began_s < 0.5 * HOUR * 60
    for (at_s, held_s), (next_s, next_held_s) in zip(written, written[1:], strict=False):
        assert next_s - at_s < 0.75 * held_s
        assert next_held_s != held_s or held_s == 12 * 3600.0
    if written:
        assert clock.monotonic() - written[-1][0] <= written[-1][1], "it holds now"


def test_who_stands_still_does_not_renew_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a remote that did not take it, or has no such folder yet, is asked again."""
    monkeypatch.setattr(sender_mark, "_FIRST_S", 0.0)
    monkeypatch.setattr(sender_mark, "_AGAIN_S", 0.001)
    store, asked, moved = LocalStore(str(tmp_path)), list[int](), [0]

    def seen() -> int:
        asked.append(0)
        return moved[0]

    mark = SenderMark(store, "steps", 3, seen)
    there = lambda: [each.name for each in store.list("steps")]  # noqa: E731
    with suppress(ConnectionError), mark.shown():
        until(lambda: len(asked) > 20, "looks")
        assert not there()
        moved[0] = 1
        until(lambda: len(asked) > 40, "looks in vain")
        store.create("steps/shard", b"")
        until(lambda: len(there()) == 2, "its mark")
        raise ConnectionError
    assert len(there()) == 2, "it is tried again"
    with mark.shown():
        pass
    assert there() == ["shard"]
    assert not any(thread.name == "flashckpt-sender" for thread in threading.enumerate())
