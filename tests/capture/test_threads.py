"""State in host memory that a thread of the program writes at any time is detected; an unwritten state never
is."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashckpt import _native
from flashckpt.memory.slot import SlotRing

from .content import exact, newest
from .test_host import Run

# Blocks of 4 KiB in the large leaves; a capture reads 256 of them again.
BLOCKS, SAMPLED, CHECKED = 3 << 8, 256, 3
ELEMENTS = 4096 // 4


class Thread:
    """A thread that writes one element of a leaf in each capture, after the copy of the leaves and before the
    capture returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turn, self._done, self._ends = threading.Semaphore(0), threading.Semaphore(0), False
        self.place: tuple[torch.Tensor, int] | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        copy = _native.copy_digest

        def copied(*arguments: Any) -> None:
            copy(*arguments)
            self._turn.release()
            self._done.acquire()

        monkeypatch.setattr(_native, "copy_digest", copied)

    def _run(self) -> None:
        while self._turn.acquire() and not self._ends:
            if self.place is not None:
                leaf, index = self.place
                leaf[index] += 1
            self._done.release()

    def close(self) -> None:
        self._ends = True
        self._turn.release()
        self._thread.join()


@pytest.fixture
def run(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Run]:
    """A run after the captures in which every leaf is read again."""
    run = Run(ring, sealer)
    half = BLOCKS // 2 * ELEMENTS
    sizes = {"large": half, "uneven": half + 7, "small": 3, "medium": 1500}
    run.state.more |= {name: torch.zeros(size) for name, size in sizes.items()}
    for _ in range(CHECKED):
        assert run.iterate().captured
    yield run
    run.capture.close()


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Thread]:
    made = Thread(monkeypatch)
    yield made
    made.close()


def lost(run: Run) -> int:
    """Capture once more; return the captures that were refused until now."""
    assert run.iterate().captured
    run.landed()
    run.capture._in_flight.poll()
    return int(run.capture.report()["snapshots_lost"])


@pytest.mark.parametrize(
    ("leaf", "share"), [("small", 1.0), ("medium", 0.4), ("uneven", 0.0), ("uneven", 0.4), ("uneven", 1.0)]
)
def test_every_byte_is_read_again_within_some_captures(
    run: Run, ring: SlotRing, thread: Thread, caplog: pytest.LogCaptureFixture, leaf: str, share: float
) -> None:
    tensor = run.state.more[leaf]
    thread.place = tensor, int(share * (len(tensor) - 1))
    captures = 1
    while not lost(run):
        captures += 1
        assert captures <= -(-BLOCKS // SAMPLED) + 1
    assert [each.getMessage().split(",")[0] for each in caplog.records] == [f"more.{leaf}"]
    for refused in (2, 3):
        assert lost(run) == refused, "from then on the whole leaf is read again in every capture"
    thread.place = None
    assert lost(run) == 3
    assert newest(ring).leaves == exact(run.state)


def test_the_sample_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, read = _native.digest_many, []

    def counted(addresses: Any, sizes: Any, *others: Any) -> None:
        read.append(sum(memoryview(sizes).cast("B").cast("Q")))
        digest(addresses, sizes, *others)

    monkeypatch.setattr(_native, "digest_many", counted)
    for _ in range(2 * BLOCKS // SAMPLED):
        read.clear()
        assert lost(run) == 0
        assert 0 < sum(read) <= 2 << 20, "a MiB of the state, and of its copy"


def test_an_unwritten_state_is_never_refused(run: Run, ring: SlotRing, thread: Thread) -> None:
    for _ in range(2 * BLOCKS // SAMPLED):
        assert lost(run) == 0
        assert newest(ring).step == run.step
    assert newest(ring).leaves == exact(run.state)


def test_leaves_that_are_not_row_major_are_read_again_in_turn(
    ring: SlotRing, sealer: _native.Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = Run(ring, sealer), 0
    odd = run.state.more
    odd |= {name: torch.zeros(30, 50).t() for name in "abc"}
    for _ in range(CHECKED):
        assert run.iterate().captured
    digest = _native.digest

    def written(*arguments: Any) -> int:
        found = digest(*arguments)
        odd["b"].add_(1)
        return found

    monkeypatch.setattr(_native, "digest", written)
    while not lost(run):
        found += 1
        assert found < len(odd)
    run.capture.close()
