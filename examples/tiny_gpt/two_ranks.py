"""The demo's second part: one of two ranks under torchrun gets SIGKILL in a backward pass, and torchrun
restarts both. Every loss is compared with those of an uninterrupted job.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from processes import HERE, Losses, TrainingFailed, read_losses
from safetensors.numpy import load_file

RANKS = 2
_LIMIT_S = 240.0
# Without the second variable, restarted ranks may find the addresses of their predecessors and hang.
_OVER_GLOO = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass
class TwoRanks:
    """The results. `reference`, `losses`: losses of each rank. `lines`: number of losses of each rank at the
    kill. `seconds`: time from the kill until both ranks resumed. Steps count from 1."""

    killed_in: int
    resumed_from: int
    tier: str
    seconds: float
    reference: list[Losses]
    losses: list[Losses]
    lines: list[int]
    weights_equal: bool

    @property
    def losses_equal(self) -> bool:
        return all(
            {step for step, _ in losses} == {step for step, _ in expected}
            and all(loss == dict(expected)[step] for step, loss in losses)
            for losses, expected in zip(self.losses, self.reference, strict=True)
        )


def run_two_ranks(
    reference: Path, killed: Path, *, steps: int, kill: int, follow: Callable[[int, Path], None]
) -> TwoRanks:
    """Run both jobs in order. Call `follow` with the newest step and the folder of its job."""
    _finish(_start(reference, "--plain", "--steps", str(steps)), reference, follow)
    killed.mkdir(parents=True, exist_ok=True)
    fifo = killed / "held"
    os.mkfifo(fifo)
    report_fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        job = _start(killed, "--steps", str(steps), "--hold", str(kill), "--report", str(fifo))
        try:
            os.kill(_held(job, killed, report_fd, lambda step: follow(step, killed)), signal.SIGKILL)
            killed_at_s = time.monotonic()
            lines = [len(each) for each in _losses(killed)]
            _finish(job, killed, follow)
        finally:
            job.terminate()
            job.wait()
    finally:
        os.close(report_fd)
        fifo.unlink()
    start = json.loads((killed / "starts.jsonl").read_text().splitlines()[-1])
    if start["resumed"] is None:
        raise TrainingFailed("The ranks started from scratch: they found no snapshot to resume from.")
    weights = [load_file(folder / "weights.safetensors") for folder in (reference, killed)]
    return TwoRanks(
        killed_in=kill,
        resumed_from=start["resumed"]["step"],
        tier=start["resumed"]["tier"],
        seconds=start["first_batch_monotonic_s"] - killed_at_s,
        reference=_losses(reference),
        losses=_losses(killed),
        lines=lines,
        weights_equal=all(weights[0][name].tobytes() == weights[1][name].tobytes() for name in weights[0]),
    )


def _held(job: subprocess.Popen[bytes], folder: Path, report_fd: int, follow: Callable[[int], None]) -> int:
    """Wait until a rank reports that it pauses. Return its process id."""
    report, end_s = b"", time.monotonic() + _LIMIT_S
    while report.count(b"\n") < 2:
        if job.poll() is not None or time.monotonic() > end_s:
            raise TrainingFailed(_last_words(folder))
        if select.select([report_fd], [], [], 0.2)[0]:
            report += (more := os.read(report_fd, 64))
            if not more:  # the rank has not opened the FIFO yet
                time.sleep(0.05)
        _report(folder, follow)
    return int(report.split()[0])


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        "--max-restarts=1", "--monitor-interval=0.1", str(HERE / "train_ranks.py"), str(folder), *arguments,
    ]  # fmt: skip
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**_OVER_GLOO, **os.environ, "OMP_NUM_THREADS": "1"},
        )


def _finish(job: subprocess.Popen[bytes], folder: Path, follow: Callable[[int, Path], None]) -> None:
    while job.poll() is None:
        time.sleep(0.1)
        _report(folder, lambda step: follow(step, folder))
    if job.returncode != 0:
        raise TrainingFailed(_last_words(folder))


def _losses(folder: Path) -> list[Losses]:
    return [read_losses(folder, f"losses-{rank}.csv") for rank in range(RANKS)]


def _report(folder: Path, follow: Callable[[int], None]) -> None:
    losses = _losses(folder)[0]
    if losses:
        follow(losses[-1][0])


def _last_words(folder: Path) -> str:
    tail = (folder / "output.log").read_text(errors="replace").splitlines()[-25:]
    return "\n".join(["the job of two ranks failed; its last lines:", *tail])
