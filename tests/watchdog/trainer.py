"""A small run that hangs in one of its steps, as runs do, until a byte comes over standard input.

`python -m tests.watchdog.trainer HANG RUN HANG_AT OPTIONS-JSON`: prints "hangs STEP" before it hangs,
"finished" at its end.
"""

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flashckpt
from tests.descriptors import readable
from tests.waiting import newest_sealed, until, until_slots

STEPS = 12


class Items(Dataset[torch.Tensor]):
    """One item of it may never come."""

    def __init__(self, hang_at: int, hang: Callable[[], None] | None) -> None:
        self.hang_at, self.hang = hang_at, hang

    def __len__(self) -> int:
        return max(STEPS, self.hang_at + 5)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.hang is not None and index == self.hang_at:
            self.hang()
        return torch.full((4,), float(index))


# A loader's worker closes its own standard input.
RELEASE = os.dup(0)


def until_sealed(checkpointer: flashckpt.Checkpointer) -> None:
    """Steps of a millisecond outrun the sealing: then boundaries are skipped, and which was saved varies."""
    if checkpointer._capture._writers.ring is not None:
        until(lambda: newest_sealed(checkpointer) == checkpointer.completed, "the snapshot of this step")


def told() -> bool:
    return bool(readable(RELEASE, timeout_s=0.01))


def spin_in_python() -> None:
    while not told():
        pass


def hold_the_gil() -> None:
    """A read in C that nothing interrupts, by a call that keeps the GIL."""
    byte = ctypes.create_string_buffer(1)
    ctypes.PyDLL(None).read(RELEASE, byte, 1)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()

    def free() -> None:
        os.read(RELEASE, 1)
        lock.release()

    threading.Thread(target=free, daemon=True).start()
    lock.acquire()


HANGS: dict[str, Callable[[], None]] = {
    "gil": hold_the_gil,
    "lock": wait_for_a_lock,
    "loader": spin_in_python,
    "worker": spin_in_python,
}


def main() -> None:
    hang, run, hang_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    arguments: dict[str, Any] = {"every": 1, "persist_every": None, **json.loads(sys.argv[4])}
    options = flashckpt.Options(**arguments.pop("options"))
    torch.set_num_threads(1)
    torch.manual_seed(1)

    def in_loader() -> None:
        print(f"hangs {hang_at}", flush=True)
        HANGS[hang]()

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loads = hang in ("loader", "worker")
    loader = DataLoader(Items(hang_at, in_loader if loads else None), num_workers=hang == "worker")
    loop = flashckpt.loop(loader, run, options=options, model=model, optimizer=optimizer, **arguments)
    for batch in loop:
        until_slots(loop.checkpointer)
        until_sealed(loop.checkpointer)
        if loop.completed == hang_at and not loads:
            print(f"hangs {hang_at}", flush=True)
            HANGS[hang]()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
