"""A trainer that changes its state wherever it may, and saves there: contents that follow one another under
one step number.

`python -m tests.crash.overtaken RUN LOG SEED EPOCHS`

Every element of the state is the number of the change that made it, and so is `own["tag"]`: content of two
boundaries in one snapshot is seen at once. LOG has lines [what, tag, steps completed]: "resumed" as the life
begins, and "safe" once `wait()` has come back after a `save()` outside of an iteration.
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import flashckpt
from tests.waiting import until_slots

BATCHES = 3


class Stream:
    """Nobody knows its length: its last batch is a boundary like any other, and only then the epoch ends."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2)] * BATCHES)


def made() -> dict[str, Any]:
    model = nn.Module()
    for name, size in (("a", 3), ("b", 70_000), ("c", 17)):
        model.register_parameter(name, nn.Parameter(torch.zeros(size)))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "own": {"tag": 0}}


def change(state: dict[str, Any], *, step: bool) -> None:
    """The next content: by a step of the optimizer, or past it."""
    tag = state["own"]["tag"] = state["own"]["tag"] + 1
    for parameter in state["model"].parameters():
        if step:
            parameter.grad = parameter.detach() - tag
        else:
            parameter.detach().fill_(tag)
    if step:
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def tag_of(state: dict[str, Any]) -> int:
    found = {int(value) for each in state["model"].parameters() for value in each.detach().unique()}
    assert found == {state["own"]["tag"]}, f"a mix of {found} and {state['own']}"
    return found.pop()


def train(run: str, log: str, seed: int, epochs: int) -> None:
    torch.set_num_threads(1)
    chance, state = random.Random(seed), made()
    loader: Any = Stream() if chance.random() < 0.5 else [torch.ones(2)] * BATCHES
    persist_every = chance.choice([None, 1, 3])
    with (
        open(log, "a", buffering=1) as file,
        flashckpt.attach(run, every=1, persist_every=persist_every, **state) as checkpointer,
    ):

        def say(what: str) -> None:
            file.write(json.dumps([what, tag_of(state), checkpointer.completed]) + "\n")

        def code() -> None:
            for what in chance.choices(["change", "train", "save", "safe"], k=chance.randint(0, 4)):
                if what in ("change", "train"):
                    change(state, step=what == "train")
                else:
                    checkpointer.save()
                if what == "safe":
                    checkpointer.wait()
                    found = flashckpt.load(run, only="model").values()
                    assert {int(value) for each in found for value in each.unique()} == {tag_of(state)}
                    say("safe")

        say("resumed")
        for _ in checkpointer.epochs(epochs):
            for _ in checkpointer.batches(loader):
                until_slots(checkpointer)
                change(state, step=True)
                if chance.random() < 0.2:
                    checkpointer.save()
            code()
        code()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
