"""A trainer whose state grows in every step, and which goes on only once a snapshot that was begun is sealed.

`python -m tests.checkpointer.growing_step_by_step RUN LOG STEPS`

Each line of LOG is [what, step, checksum of the state]: "resumed" as a life begins, "done" at the end of an
iteration, before its boundary, "sealed" where that boundary has its snapshot. No boundary waits for memory,
so the trainer does.
"""

from __future__ import annotations

import json
import sys
import zlib

import torch
from torch import nn

import flashckpt
from tests.checkpointer.growing import Replay
from tests.waiting import until


def checksum(model: nn.Linear, seen: Replay) -> int:
    leaves = [model.weight.detach(), *(item[:4096] for item in seen.items)]
    return zlib.crc32(b"".join(each.numpy().tobytes() for each in leaves))


def train(run: str, log: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, seen = nn.Linear(16, 16, bias=False), Replay()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with (
        open(log, "a", buffering=1) as file,
        flashckpt.attach(
            run, every=1, persist_every=None, model=model, optimizer=optimizer, seen=seen
        ) as checkpointer,
    ):

        def say(what: str, step: int) -> None:
            file.write(json.dumps([what, step, checksum(model, seen)]) + "\n")

        say("resumed", checkpointer.completed)
        while checkpointer.completed < steps:
            optimizer.zero_grad()
            model(torch.rand(4, 16)).square().sum().backward()
            optimizer.step()
            seen.add()
            step = checkpointer.completed + 1
            say("done", step)
            skipped = checkpointer.report().get("snapshots_skipped", 0)
            checkpointer.step()
            report = checkpointer.report()
            if report:
                until(lambda: checkpointer._keeper_link.slots.asked is None, "an answer")
            if report and report["snapshots_skipped"] == skipped:
                until(lambda: checkpointer.report()["newest_sealed_step"] == checkpointer.completed, "a seal")
                say("sealed", step)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
