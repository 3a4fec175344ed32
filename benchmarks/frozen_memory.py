"""What a run with a frozen base holds in shared memory, from its first slots on.

A base of `--mib` MiB without gradients beside a small trained layer. Prints a row whenever the bytes that the
keeper's regions have in this node's memory change: the step, GiB held, and whether snapshots share the base.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import flashckpt
from flashckpt.memory.region import is_region_name

_STEPS = 60
_STEP_S = 0.2  # time for the keeper to let go of what is outgrown between two rows
_LAYER_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None, help="of the run; a temporary one if not given")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as runtime,
        tempfile.TemporaryDirectory(dir=arguments.folder) as run,
    ):
        os.environ["FLASHCKPT_RUNTIME"] = runtime
        _train(Path(run) / "run", Path(runtime), arguments.mib << 20)


def _train(run: Path, runtime: Path, base_bytes: int) -> None:
    torch.manual_seed(0)
    count = max(1, base_bytes // _LAYER_BYTES)
    layers = [nn.Parameter(torch.randn(base_bytes // count // 4), requires_grad=False) for _ in range(count)]
    trained = nn.Linear(1024, 1024)
    model = nn.ModuleDict({"base": nn.ParameterList(layers), "trained": trained})
    optimizer = torch.optim.AdamW(trained.parameters())
    batch, before = torch.randn(8, 1024), (0.0, False)
    print("step  GiB held  shared")
    with flashckpt.attach(run, every=1, persist_every=None, model=model, optimizer=optimizer) as checkpointer:
        for step in range(1, _STEPS + 1):
            trained(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            held = sum(path.stat().st_blocks * 512 for path in _regions(runtime)) / 2**30
            row = round(held, 2), any(path.name.startswith("constants-") for path in _regions(runtime))
            if row != before:
                print(f"{step:4}  {row[0]:8.2f}  {'yes' if row[1] else 'no'}", flush=True)
                before = row
            time.sleep(_STEP_S)
        report = checkpointer.report()
    print(f"{report['snapshots']:.0f} snapshots, {report['snapshots_skipped']:.0f} skipped")


def _regions(runtime: Path) -> list[Path]:
    return [path for path in runtime.rglob("*-*") if is_region_name(path.name) and path.exists()]


if __name__ == "__main__":
    main()
