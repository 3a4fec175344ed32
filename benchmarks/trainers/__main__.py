"""Checkpoints inside HF Trainer and Lightning: their own, flashckpt's, and none, in one run.

    python -m benchmarks.trainers [--mib 512] [--turns 8] [--save-every 20] [--json FILE]

All variants of a framework live at once and train in turn, a block of steps each, in another order in each
round. The cost of the loop is that of a round's turn beside the plain one of the same round. Each variant is
killed at the same places between two checkpoints: the steps that are lost, and the seconds from the start of
the next process until its first step is done, imports included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.session import Session
from benchmarks.settings import MIB
from benchmarks.trainers import FRAMEWORKS, VARIANTS, table
from benchmarks.trainers.settings import TrainerJob
from benchmarks.trainers.turns import Plan, measure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--mib", type=int, default=512, help="of state: parameters and AdamW's, fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints on disk")
    parser.add_argument("--turns", type=int, default=8, help="of each variant, beside a first one to warm up")
    parser.add_argument("--blocks", type=int, default=1, help="checkpoints on disk in a turn")
    parser.add_argument("--kills", type=int, default=5, help="of each variant")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go: the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="trainers-", dir=arguments.folder)).resolve()
    job = TrainerJob(
        framework="",
        variant="",
        folder="",
        state_bytes=arguments.mib * MIB,
        layers=arguments.layers,
        batch=arguments.batch,
        save_every=arguments.save_every,
        threads=torch.get_num_threads(),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    plan = Plan(turns=arguments.turns, steps=arguments.blocks * arguments.save_every, kills=arguments.kills)
    results: dict[str, Any] = {
        "machine": describe(work),
        "command": report.command(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": {
            **{
                key: value
                for key, value in asdict(job).items()
                if key not in ("framework", "variant", "folder")
            },
            **asdict(plan),
        },
        "frameworks": {},
    }
    try:
        for framework in arguments.frameworks:
            print(f"{framework} …", file=sys.stderr, flush=True)
            results["frameworks"][framework] = _measured(framework, job, arguments.variants, plan, work)
            if arguments.json:  # after each: a run that is stopped loses only the one in progress
                arguments.json.write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for line in table.lines(results):
        print(line)


def _measured(framework: str, job: TrainerJob, variants: list[str], plan: Plan, work: Path) -> dict[str, Any]:
    folder = work / framework
    folder.mkdir()
    session = Session(sys.executable, folder)
    fields = {**asdict(job), "framework": framework, "folder": str(folder)}
    try:
        found = measure(TrainerJob(**fields), variants, plan, session)
        return {"version": importlib.metadata.version(framework), **found}
    finally:
        session.clean()


if __name__ == "__main__":
    main()
