"""A trainer whose state grows in every step, in a process of its own.

`python -m tests.checkpointer.growing KIND RUN LOG EVERY STEPS HOLD_AT [CGROUP LIMIT_BYTES]`

Each step is one line of LOG: the steps completed, the loss's bits, and a checksum of what has grown. Once
HOLD_AT steps are completed it prints what `report` says, as JSON, and stands still: the parent kills it
there. With CGROUP, the run's keeper, which takes the memory of the slots, may take LIMIT_BYTES for them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashckpt
from tests.processes import keepers_of
from tests.waiting import until_slots

STEP_BYTES = 2 << 20


class Replay:
    """A list of what was seen, 2 MB more in every step."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []

    def add(self) -> None:
        self.items.append(torch.rand(STEP_BYTES // 4))

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = list(state["items"])

    def checksum(self) -> int:
        return zlib.crc32(b"".join(item.numpy().tobytes()[:64] for item in self.items))


def replay(steps: int, **attach: Any) -> None:
    model, seen = nn.Linear(16, 16), Replay()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> tuple[torch.Tensor, int]:
        optimizer.zero_grad()
        loss = model(torch.rand(4, 16)).square().sum()
        loss.backward()
        optimizer.step()
        seen.add()
        return loss.detach(), seen.checksum()

    go(train, steps, attach, model=model, optimizer=optimizer, seen=seen)


def lbfgs(steps: int, **attach: Any) -> None:
    """Two MB more in every step: a direction and a change of the gradient for its history."""
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=1, history_size=1000)

    def train() -> tuple[torch.Tensor, int]:
        batch = torch.rand(32, 512)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch) - batch.flip(1)).square().mean() + model.weight.square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        history = optimizer.state[model.weight].get("old_dirs", [])
        return loss.detach(), len(history)

    go(train, steps, attach, model=model, optimizer=optimizer)


def go(train: Any, steps: int, attach: dict[str, Any], **state: Any) -> None:
    path, every, hold_at, log = (attach[key] for key in ("path", "every", "hold_at", "log"))
    checkpointer = flashckpt.attach(path, every=every, persist_every=None, **state)
    limit_keeper(attach["limit"])
    while checkpointer.completed < steps:
        loss, grown = train()
        bits = int.from_bytes(loss.float().numpy().tobytes(), "little")
        print(json.dumps([checkpointer.completed + 1, bits, grown]), file=log, flush=True)
        checkpointer.step()
        if checkpointer.report()["boundaries"] == 1:
            until_slots(checkpointer)  # no boundary waits for the first ones: these would depend on load
        if checkpointer.completed == hold_at:
            print(json.dumps(checkpointer.report()), flush=True)
            signal.pause()
    print(json.dumps(checkpointer.report()), flush=True)
    checkpointer.close()


def limit_keeper(limit: list[str]) -> None:
    """Let the keeper, and with it the slots, have so much memory and no more."""
    if limit:
        cgroup, (pid,) = Path(limit[0]), keepers_of(Path(os.environ["FLASHCKPT_RUNTIME"]))
        (cgroup / "cgroup.procs").write_text(str(pid))


def main() -> None:
    kind, path, log_path, every, steps, hold_at = sys.argv[1:7]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    logging.getLogger("flashckpt").setLevel("INFO")
    with open(log_path, "a", buffering=1) as log:
        {"replay": replay, "lbfgs": lbfgs}[kind](
            int(steps),
            path=path,
            every=every if every == "auto" else int(every),
            hold_at=int(hold_at),
            log=log,
            limit=sys.argv[7:],
        )


if __name__ == "__main__":
    main()
