"""A load from disk by new processes, flashckpt and DCP in turn: `python -m benchmarks.load_pairs --pairs 8`,
`--ranks 2 --kind fsdp2`, `--kind ddp`.

Both load one state (`nn.Linear` layers and AdamW, `--gib` in all) into a live model of other values; the
files are not in the page cache. Seconds are those of the whole call on the slowest rank, after all modules
were imported; flashckpt's have the keeper and the claim in them. CPU seconds are the sum over ranks. Memory
is what the largest rank took beyond what it held before, at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import _fsspec_filesystem  # noqa: F401
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import flashckpt
import flashckpt.checkpointer.resume
import flashckpt.ranks.agreement
import flashckpt.ranks.joint_coordination
from benchmarks import files
from benchmarks.session import Session

_WIDTH = 4096
_NAMES = ("flashckpt", "dcp")
_LIMIT_S = 300.0


class State:
    """Layers and what AdamW has of them, after one step. The seed decides the values."""

    def __init__(self, seed: int, gib: float, kind: str) -> None:
        torch.manual_seed(seed)
        layers = max(1, round(gib * (1 << 30) / (3 * 4 * _WIDTH * _WIDTH)))
        self.model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in self.model.children():
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(torch.randn(2, _WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def leaves(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found

    def sum_of_bits(self) -> int:
        tensors = (getattr(leaf, "_local_tensor", leaf) for leaf in self.leaves().values())
        return sum(int(tensor.view(torch.int32).sum()) for tensor in tensors)


def save_both(folder: Path, state: State) -> None:
    save(state.leaves(), storage_writer=FileSystemWriter(folder / "dcp", thread_count=4))
    path = folder / "flashckpt"
    with flashckpt.attach(path, every=None, model=state.model, optimizer=state.optimizer) as checkpointer:
        checkpointer.save()
        checkpointer.wait()
    (folder / f"sum-{_rank()}").write_text(str(state.sum_of_bits()))
    _barrier()
    files.sync_all(folder)


def load_one(name: str, folder: Path, state: State) -> dict[str, float]:
    """What it took on this rank. Raises where other bits were loaded than were saved."""
    files.forget(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    _barrier()
    before, began, used = _resident("VmRSS"), time.perf_counter(), _cpu_s()
    if name == "dcp":
        load(state.leaves(), checkpoint_id=folder / "dcp")
    else:
        flashckpt.attach(folder / "flashckpt", every=None, model=state.model, optimizer=state.optimizer)
    found = {
        "seconds": time.perf_counter() - began,
        "cpu_s": _cpu_s() - used,
        "mib": (_resident("VmHWM") - before) / (1 << 20),
    }
    if state.sum_of_bits() != int((folder / f"sum-{_rank()}").read_text()):
        raise RuntimeError(f"{name} did not load what was saved")
    return found


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kind", choices=("fsdp2", "ddp"), help="of several ranks")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("bench-output"), help="on the disk to measure")
    parser.add_argument("--do", choices=("save", *_NAMES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.ranks > 1) != (arguments.kind is not None):
        parser.error("--kind is for several ranks, and needed for them")
    if arguments.do:
        _do(arguments)
    else:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        _measure(arguments)


def _do(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.ranks))
    if arguments.ranks > 1:
        dist.init_process_group("gloo")
    state = State(1 if arguments.do == "save" else 2, arguments.gib, arguments.kind or "")
    if arguments.do == "save":
        save_both(arguments.folder, state)
    else:
        found = load_one(arguments.do, arguments.folder, state)
        (arguments.folder / f"found-{_rank()}.json").write_text(json.dumps(found))
    _barrier()
    # Not by the interpreter: what is measured has ended.
    os._exit(0)


def _measure(arguments: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _NAMES}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="load-") as made:
        folder = Path(made).resolve()
        _in_processes("save", folder, arguments)
        for index in range(arguments.pairs):
            for name in _NAMES[:: 1 if index % 2 == 0 else -1]:
                _in_processes(name, folder, arguments)
                ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]
                assert len(ranks) == arguments.ranks
                found[name].append(
                    {
                        "seconds": max(each["seconds"] for each in ranks),
                        "cpu_s": sum(each["cpu_s"] for each in ranks),
                        "mib": max(each["mib"] for each in ranks),
                    }
                )
    for name, rows in found.items():
        seconds = [row["seconds"] for row in rows]
        print(
            f"{name:<10} {statistics.median(seconds):.2f} s (median of {len(rows)}; {min(seconds):.2f} to "
            f"{max(seconds):.2f}), {statistics.median(row['cpu_s'] for row in rows):.2f} CPU s, "
            f"{statistics.median(row['mib'] for row in rows):.0f} MiB"
        )
    pairs = zip(found["flashckpt"], found["dcp"], strict=True)
    ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]
    shown = ", ".join(f"{each:.2f}" for each in ratios)
    print(f"flashckpt takes {statistics.median(ratios):.2f} × DCP's time (median of the pairs: {shown})")


def _in_processes(operation: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Run it on all ranks. All that they have started ends with them."""
    session, log = Session(sys.executable, folder), folder / "log.txt"
    for path in (log, *folder.glob("found-*.json")):
        path.unlink(missing_ok=True)
    launch = []
    if arguments.ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command = [sys.executable, *launch, "-m", "benchmarks.load_pairs", "--do", operation]
    command += ["--folder", str(folder), "--gib", str(arguments.gib), "--ranks", str(arguments.ranks)]
    command += ["--kind", arguments.kind] if arguments.kind else []
    try:
        code = session.call(command, log=log, timeout_s=_LIMIT_S)
    finally:
        session.clean()
    if code != 0:
        raise SystemExit(f"{operation} ended with {code}:\n{log.read_text()}")


if __name__ == "__main__":
    main()
