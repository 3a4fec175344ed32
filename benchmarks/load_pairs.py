"""A load from disk by a new process, flashckpt and DCP in turn: `python -m benchmarks.load_pairs --pairs 8`.

Both load one state (five `nn.Linear` and AdamW, 0.94 GiB) into a live model of other values; the file is not
in the page cache. Seconds are those of the whole call; in flashckpt's are keeper, claim and imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks import files
from benchmarks.session import Session

_LAYERS, _WIDTH = 5, 4096
_NAMES = ("flashckpt", "dcp")
_LIMIT_S = 300.0


class State:
    """Five layers and what AdamW has of them, after one step. The seed decides the values."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(torch.randn(2, _WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def leaves(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found

    def sum_of_bits(self) -> int:
        return sum(int(leaf.view(torch.int32).sum()) for leaf in self.leaves().values())


def save_both(folder: Path) -> None:
    import flashckpt

    state = State(seed=1)
    save(state.leaves(), storage_writer=FileSystemWriter(folder / "dcp", thread_count=4), no_dist=True)
    path = folder / "flashckpt"
    with flashckpt.attach(path, every=None, model=state.model, optimizer=state.optimizer) as checkpointer:
        checkpointer.save()
        checkpointer.wait()
    (folder / "sum").write_text(str(state.sum_of_bits()))
    files.sync_all(folder)


def load_one(name: str, folder: Path) -> float:
    """Seconds. Raises where other bits were loaded than were saved."""
    state = State(seed=2)
    files.forget(folder)
    began = time.perf_counter()
    if name == "dcp":
        load(state.leaves(), checkpoint_id=folder / "dcp", no_dist=True)
    else:
        import flashckpt

        flashckpt.attach(folder / "flashckpt", every=None, model=state.model, optimizer=state.optimizer)
    seconds = time.perf_counter() - began
    if state.sum_of_bits() != int((folder / "sum").read_text()):
        raise RuntimeError(f"{name} did not load what was saved")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("bench-output"), help="on the disk to measure")
    parser.add_argument("--do", choices=("save", *_NAMES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do == "save":
        save_both(arguments.folder)
    elif arguments.do:
        print(json.dumps(load_one(arguments.do, arguments.folder)))
    else:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        _measure(arguments.pairs, arguments.folder)


def _measure(pairs: int, parent: Path) -> None:
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    with tempfile.TemporaryDirectory(dir=parent, prefix="load-") as made:
        folder = Path(made).resolve()
        _in_a_process("save", folder)
        for index in range(pairs):
            for name in _NAMES[:: 1 if index % 2 == 0 else -1]:
                found[name].append(json.loads(_in_a_process(name, folder)))
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{name:<10} {middle:.2f} s (median of {pairs}; {min(seconds):.2f} to {max(seconds):.2f})")
    ratios = [ours / theirs for ours, theirs in zip(found["flashckpt"], found["dcp"], strict=True)]
    print(f"flashckpt takes {statistics.median(ratios):.2f} × DCP's time (median of the pairs)")


def _in_a_process(operation: str, folder: Path) -> str:
    """The last line that it prints. All that it has started ends with it."""
    session, log = Session(sys.executable, folder), folder / "log.txt"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.load_pairs", "--do", operation, "--folder", str(folder)]
    try:
        code = session.call(command, log=log, timeout_s=_LIMIT_S)
    finally:
        session.clean()
    if code != 0:
        raise SystemExit(f"{operation} ended with {code}:\n{log.read_text()}")
    return (log.read_text().splitlines() or [""])[-1]


if __name__ == "__main__":
    main()
