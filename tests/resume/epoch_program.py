"""A run of `.epochs` that does something to itself at one place of one epoch, in a process of its own.

`python -m tests.resume.epoch_program RUN LOG KIND EPOCH PLACE OPERATION`

Each line of LOG is [what, step, value], written before the next instruction; losses and weights to the bit.
The operation is done once: a start after it, which finds LOG + ".done", goes through.
"""

import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import flashckpt

EPOCHS = 3


class Stream:
    """Batches that know no length, from a file or a socket: gone through from their beginning each time."""

    on_end: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.data.split(3)
        self.on_end()


def loaders(kind: str) -> list[Any]:
    data = torch.randn(12, 5, generator=torch.Generator().manual_seed(7))
    shuffled = DataLoader(data, batch_size=3, shuffle=True)  # type: ignore[arg-type]
    return {"length": [shuffled], "stream": [Stream(data)], "none": []}[kind]


def bits(net: nn.Module) -> str:
    weights = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    return float(weights.sum()).hex() + float(weights.norm()).hex()


def term_after(calls: int) -> None:
    """SIGTERM at this call of a function of the library from now on, in the training thread."""
    folder = os.path.dirname(flashckpt.__file__)

    def counted(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event != "call" or not frame.f_code.co_filename.startswith(folder):
            return
        calls -= 1
        if calls == 0:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGTERM)

    sys.setprofile(counted)


class Program:
    def __init__(self, run: str, log: str, kind: str, at: tuple[int, str], operation: str) -> None:
        self.run, self.log, self.kind, self.at, self.operation = run, log, kind, at, operation
        self.batch: torch.Tensor | None = None
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 5))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.named = {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def write(self, what: str, value: object) -> None:
        with open(self.log, "a", buffering=1) as log:
            print(json.dumps([what, self.checkpointer.completed, value]), file=log, flush=True)

    def place(self, epoch: int, name: str) -> None:
        if (epoch, name) != self.at or os.path.exists(self.log + ".done"):
            return
        open(self.log + ".done", "x").close()
        operations: dict[str, Callable[[], object]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "stop": lambda: self.checkpointer.stop(),
            "on": lambda: None,
            "save": lambda: self.checkpointer.save(),
            "save and kill": lambda: (self.checkpointer.save(), os.kill(os.getpid(), signal.SIGKILL)),
            "save and wait": lambda: (self.checkpointer.save(), self.checkpointer.wait()),
        }
        operation, _, calls = self.operation.partition(" after ")
        if calls:
            term_after(int(calls))
        operations[operation]()

    def train(self, batch: torch.Tensor) -> None:
        self.batch = batch
        self.optimizer.zero_grad()
        loss = self.net(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.write("loss", [float(loss.detach()).hex(), bits(self.net)])

    def phase(self, epoch: int, loader: Any) -> None:
        batches = len(list(loader.data.split(3))) if isinstance(loader, Stream) else len(loader)
        if isinstance(loader, Stream):
            loader.on_end = lambda: self.place(epoch, "exhausted")  # type: ignore[method-assign]
        for batch in self.checkpointer.batches(loader):
            self.train(batch)
            is_last = self.checkpointer.completed % batches == batches - 1
            self.place(epoch, "last" if is_last else "before_last")

    def epoch(self, epoch: int) -> None:
        self.place(epoch, "top")
        self.batch = None
        for loader in self.loaders:
            self.phase(epoch, loader)
        if not self.loaders:
            self.train(torch.randn(4, 5))
        if self.checkpointer.stopping:
            return  # the rest of this epoch is for the next start, and so is the code after it
        if self.operation != "save and wait":
            # As most programs do. A start without a batch of this epoch would end here, and so would the next
            self.write("batch", float(self.batch.sum()).hex())
        self.place(epoch, "code")
        self.scheduler.step()
        self.place(epoch, "after_step")
        self.write("code", [epoch, float(torch.rand(())).hex(), self.scheduler.get_last_lr(), bits(self.net)])
        self.place(epoch, "end")

    def go(self) -> None:
        with flashckpt.attach(self.run, every=1, **self.named) as self.checkpointer:
            self.loaders = loaders(self.kind)
            for epoch in self.checkpointer.epochs(EPOCHS):
                self.epoch(epoch)
            if not self.checkpointer.stopping:
                self.write("end", [bits(self.net), self.scheduler.last_epoch])


def main() -> None:
    torch.set_num_threads(1)
    run, log, kind, epoch, place, operation = sys.argv[1:7]
    Program(run, log, kind, (int(epoch), place), operation).go()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
