"""What a snapshot costs the training thread on a CPU, beside torch's own copy of the same state.

Two states, measured in turn in one run: 500 tensors of at least 1 GiB together, and 10,000 small ones.
Prints one row each: seconds of `torch.Tensor.copy_` of every leaf (same threads), of the capture's call,
their ratio, and what the call takes beyond the copy. `--json` writes the same for machines.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.schedule import Pace
from flashckpt.memory.region import SlotHeader
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.options import Options
from flashckpt.state.tree import LiveLeaf, Walk


class Flat:
    """A state that is one dictionary of tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._walk = Walk()
        for name, tensor in tensors.items():
            self._walk.leaves.append(LiveLeaf(name, tensor, "other", None, tensors, name))
        self._walk.guard(tensors)

    @property
    def current(self) -> Walk:
        return self._walk

    def walk(self, used_up: Callable[[Any, Tensor], bool]) -> Walk:
        return self._walk


def slots(metadata_bytes: int, image_bytes: int, threads: int) -> SlotRing:
    made = []
    for index in range(2):
        descriptor = os.memfd_create(f"slot-{index}")
        os.ftruncate(descriptor, 4096 + metadata_bytes + image_bytes)
        header = SlotHeader(
            identity=bytes(16),
            rank=0,
            index=index,
            nonce=1,
            metadata_capacity=metadata_bytes,
            image_capacity=image_bytes,
        )
        Slot.format(descriptor, header)
        slot = Slot.open(descriptor, map_image=True)
        slot.populate()
        made.append(slot)
    return SlotRing(made)


def measure(name: str, shapes: list[int], rounds: int) -> dict[str, float | str]:
    """Both taken in turn, and the best of each: on a machine that others use, torch's `copy_` suffers most,
    since it waits for all its threads at every tensor, and a median would flatter us."""
    threads = torch.get_num_threads()
    state = Flat({f"leaf.{i}": torch.randn(count) for i, count in enumerate(shapes)})
    copies = [torch.zeros_like(tensor) for tensor in state.tensors.values()]
    sealer = _native.Sealer()
    capture = Capture(state, None, sealer, Options(), schedule=Pace(1))
    needed = capture.memory_needed()
    assert needed is not None
    ring = slots(*needed.with_slack(), threads)
    capture.set_slots(ring)
    copied, called = [], []
    for step in range(1, rounds + 3):
        began_s = time.perf_counter()
        for target, source in zip(copies, state.tensors.values(), strict=True):
            target.copy_(source)
        between_s = time.perf_counter()
        outcome = capture.boundary(step, lambda: b"{}")
        end_s = time.perf_counter()
        assert outcome.captured, outcome
        capture.wait()
        if step > 2:  # the first two make the plan and touch each slot for the first time
            copied.append(between_s - began_s)
            called.append(end_s - between_s)
    capture.close()
    sealer.close()
    for slot in ring.slots:
        slot.close()
    copy_s, call_s = min(copied), min(called)
    return {
        "state": name,
        "leaves": len(shapes),
        "gib": sum(shapes) * 4 / 2**30,
        "threads": threads,
        "copy_ms": 1e3 * copy_s,
        "call_ms": 1e3 * call_s,
        "ratio": call_s / copy_s,
        "beyond_copy_ms": 1e3 * (call_s - copy_s),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the large state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    large = int(options.gib * 2**30 / 4 / 500)
    rows = [
        measure("500 tensors", [large] * 500, options.rounds),
        measure("10,000 small tensors", [256 + i % 512 for i in range(10_000)], options.rounds),
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    load = os.getloadavg()[0]
    print(f"{options.threads} threads, load {load:.1f} on {os.cpu_count()} cores, best of {options.rounds}")
    for row in rows:
        print(
            f"{row['state']:>22}: copy_ {row['copy_ms']:8.2f} ms, call {row['call_ms']:8.2f} ms, "
            f"ratio {row['ratio']:.2f}, beyond the copy {row['beyond_copy_ms']:+.2f} ms"
        )


if __name__ == "__main__":
    main()
