"""Small scripts for what recipes do not do. `python -m tests.signals.scripts NAME RUN GO`."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flashckpt
from flashckpt.memory.slot import SlotState
from tests.signals.conduct import expect_interrupts, say, stand_still
from tests.waiting import until_slots


class Slow(Dataset[Any]):
    """The items from the tenth on are loaded when the file `go` exists."""

    def __init__(self, go: Path) -> None:
        self.go = go

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 10:
            stand_still(self.go)
        return torch.full((4,), float(index))


class Model:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.5)

    def train(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.net(x).square().mean().backward()
        self.optimizer.step()

    @property
    def named(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}


def is_drawing() -> bool:
    """Whether the main thread waits for its loader."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != "_next_of":
        frame = frame.f_back
    return frame is not None


def drawing(run: str, go: Path) -> None:
    """Stands still while a batch is drawn: its workers are signalled along."""
    model = Model()
    loader = DataLoader(Slow(go), batch_size=2, num_workers=2, prefetch_factor=1)
    batches = flashckpt.loop(loader, run, every=1, persist_every=None, **model.named)

    def watch() -> None:
        while not (batches.completed == 5 and is_drawing()):
            time.sleep(0.002)
        say("draws")

    threading.Thread(target=watch, daemon=True).start()
    for x in batches:
        until_slots(batches.checkpointer)
        model.train(x)
        say(f"did {batches.completed} {float(x.sum())}")
    say("after")


def bereaved(run: str, go: Path) -> None:
    """One of its workers ends of the signal as late as when the run is let go."""
    model = Model()
    loader = DataLoader(torch.ones(40, 4), num_workers=2)
    batches = flashckpt.loop(loader, run, every=1, persist_every=None, **model.named)
    keeper = batches.checkpointer._session.keeper
    tell = keeper.closing

    def telling(**named: bool) -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGUSR1)
            os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)
        tell(**named)

    keeper.closing = telling  # type: ignore[method-assign]
    for x in batches:
        until_slots(batches.checkpointer)
        model.train(x)
        if batches.completed == 5:
            say("held")
            stand_still(go)
    say("after")


def forking(run: str, go: Path) -> None:
    """A child that is forked in an iteration, and says what its handlers are."""
    model = Model()
    batches = flashckpt.loop([torch.ones(2, 4)] * 8, run, every=1, **model.named)
    for x in batches:
        model.train(x)
        if batches.completed == 3:
            child = os.fork()
            if child == 0:
                say(f"child {os.getpid()}")
                stand_still(go)
                os._exit(9)
            say("held")
            _, status = os.waitpid(child, 0)
            say(f"status {os.waitstatus_to_exitcode(status)}")
    say(f"after {batches.completed}")


def by_hand(run: str, go: Path) -> None:
    """Marks its boundaries by hand. At the signal every slot is taken, by a storage that is slow, for much
    longer than the watchdog's limit, after which it would end the process."""
    model = Model()
    options = flashckpt.Options(watchdog="1h", watchdog_action="kill", grace="240s")
    checkpointer = flashckpt.attach(run, every=1, persist_every=None, options=options, **model.named)
    for _ in range(20):
        model.train(torch.ones(2, 4))
        checkpointer.step()
        until_slots(checkpointer)
        if checkpointer.completed == 5:
            checkpointer.wait()
            # Not before: until there are slots a busy machine takes longer.
            checkpointer._capture.heartbeat.timeout_s = 1.0
            threading.Thread(target=_release_later, args=(_taken(checkpointer),), daemon=True).start()
            say("held")
            stand_still(go)
    say("after")


def _taken(checkpointer: flashckpt.Checkpointer) -> list[Callable[[], object]]:
    """Take every slot. What is given back lets go of one each."""
    ring = checkpointer._keeper_link.slots.ring
    assert ring is not None
    back: list[Callable[[], object]] = []
    for slot in ring.slots:
        word = slot.state()
        if word.state is SlotState.FREE:
            generation = slot.begin(1)
            assert generation is not None
            back.append(functools.partial(slot.abandon, 1, generation))
        else:
            pinned = slot.pin(1, word)
            assert pinned is not None
            back.append(functools.partial(slot.unpin, pinned))
    return back


def _release_later(back: list[Callable[[], object]]) -> None:
    time.sleep(5)
    for let_go in back:
        let_go()


SCRIPTS: dict[str, Callable[[str, Path], None]] = {
    each.__name__: each for each in (drawing, bereaved, forking, by_hand)
}


if __name__ == "__main__":
    expect_interrupts()
    torch.set_num_threads(1)
    SCRIPTS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
